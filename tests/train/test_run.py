"""A run from end to end: what it prints, what it saves, what it is worth."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from lowtide.train.resuming import resumed_config
from lowtide.train.trainer import training_arguments
from transformers import AutoModelForCausalLM, AutoTokenizer

from lowtide.errors import ArgumentValueError
from lowtide.train import TrainConfig
from lowtide.train.config import fixed_settings

Run = Callable[..., tuple[int, str, str]]


def test_saved_models_load_in_plain_transformers(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "lowtide"]:
        monkeypatch.setitem(sys.modules, name, None)  # whatever imports it fails
    for folder in (finished / "model", finished / "checkpoint-12"):
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder)
        ids = tokenizer("the tide came in", return_tensors="pt")["input_ids"]
        assert tokenizer.decode(ids[0]) == "the tide came in"
        assert tokenizer.eos_token_id == model.config.eos_token_id
        out = model(input_ids=ids, labels=ids)
        assert out.logits.shape == (1, ids.shape[1], 512)
        model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=tokenizer.eos_token_id)
        assert out.loss.item() < 6.3  # less than ln 512: it learned something


def test_prints_what_a_person_wants(tmp_path: Path, tiny: list[str], lowtide: Run) -> None:
    status, out, err = lowtide(*tiny, "--output", tmp_path / "out")
    assert (status, err) == (0, "")
    assert re.search(r"step 6/6 +loss \d\.\d+ +[\d,]+ tokens/s +[\d,]+ MiB", out)
    assert re.search(r"training loss +\d\.\d+ -> \d\.\d+ \(mean of the last 6 steps\)", out), "there are no more"
    before, after = map(float, re.search(r"held-out loss +(\d\.\d+) -> (\d\.\d+)", out).groups())  # type: ignore[union-attr]
    assert after < before
    assert re.search(r"peak memory +[\d,]+ MiB", out)
    assert re.search(r"losses +\d+ without logits, 0 with", out)
    assert str(tmp_path / "out" / "model") in out
    lines = [line for line in out.splitlines() if re.match("peak memory |time |saved ", line)]
    values = {len(re.match(r"\w+( \w+)? {2,}", line)[0]) for line in lines}  # type: ignore[index]
    assert (len(lines), len(values)) == (3, 1), "in one column"


def test_says_what_it_assumes_before_it_trains(tmp_path: Path, tiny: list[str], lowtide: Run) -> None:
    _, out, _ = lowtide(*tiny, "--grad-accum", 2, "--max-steps", 1, "--output", tmp_path / "out")
    start = out[: out.index("step 1/")]
    sequences, tokens = (tiny[tiny.index(name) + 1] for name in ("--batch-size", "--seq-len"))
    assert re.search(rf"steps +1 of 2 x {sequences} sequences of {tokens} tokens, on 1 x (cpu|cuda)\n", start)
    assert re.search(r"weights float32, products (float32|bfloat16), learning rate up to [\d.e-]+\n", start)


@pytest.mark.parametrize(("rate", "better"), [([], "1e-5"), (["--lr", "1e-5"], ""), (["--lora-rank", "2"], "2e-4")])
def test_the_small_runs_rate_on_a_pretrained_model_is_pointed_out(
    rate: list[str], better: str, finished: Path, tmp_path: Path, tiny: list[str], lowtide: Run
) -> None:
    run = [*tiny, "--model", str(finished / "model"), *rate, "--max-steps", "1", "--output", tmp_path / "out"]
    status, out, _ = lowtide(*run)
    assert status == 0
    found = re.search(r": a pretrained model wants far less, such as --lr (\S+)\n", out)
    assert (found[1] if found else "") == better


def test_no_progress_prints_the_result_alone(tmp_path: Path, tiny: list[str], lowtide: Run) -> None:
    _, out, _ = lowtide(*tiny, "--no-progress", "--output", tmp_path / "out")
    assert "step 1/" not in out
    assert "held-out loss" in out


def test_patched_and_stock_runs_learn_the_same(tmp_path: Path, tiny: list[str], lowtide: Run) -> None:
    curves = []
    for name, extra in (("patched", []), ("stock", ["--no-patch"])):
        status, out, _ = lowtide(*tiny, *extra, "--output", tmp_path / name)
        assert status == 0
        assert ("without logits" in out) == (name == "patched")
        state = json.loads((tmp_path / name / "checkpoint-6" / "trainer_state.json").read_text())
        curves.append([entry["loss"] for entry in state["log_history"] if "loss" in entry])
    assert curves[0] == pytest.approx(curves[1], abs=1e-5)


@pytest.mark.parametrize(
    "extra",
    [
        ["--gradient-checkpointing"],
        ["--dtype", "bfloat16"],
        ["--grad-accum", "2", "--eval-every", "2"],
        ["--workspace-mib", "0.05"],
        ["--trainer-args", "weight_decay=0.1", "optim=adafactor"],
        ["--save-every", "0", "--keep", "1"],
    ],
    ids=" ".join,
)
def test_options_run_without_a_warning(extra: list[str], tmp_path: Path, tiny: list[str], lowtide: Run) -> None:
    status, _, err = lowtide(*tiny, *extra, "--output", tmp_path / "out")
    assert (status, err) == (0, "")


def test_a_pretrained_folder_goes_on_with_its_weights_and_tokenizer(
    finished: Path, tmp_path: Path, tiny: list[str], lowtide: Run
) -> None:
    status, _, err = lowtide(*tiny, "--model", finished / "model", "--output", tmp_path / "out")
    assert (status, err) == (0, "")
    told = json.loads((tmp_path / "out" / "checkpoint-6" / "trainer_state.json").read_text())["log_history"]
    assert told[0]["eval_loss"] < 6.1, "it began from trained weights"
    ours, theirs = (folder / "model" / "tokenizer.json" for folder in (tmp_path / "out", finished))
    assert ours.read_text() == theirs.read_text()


def test_jsonl_with_another_field(tmp_path: Path, tiny: list[str], lowtide: Run) -> None:
    data = tmp_path / "d.jsonl"
    data.write_text("".join(json.dumps({"body": f"the tide came in {i} times"}) + "\n" for i in range(2000)))
    status, _, err = lowtide(*tiny, "--data", data, "--text-field", "body", "--output", tmp_path / "out")
    assert (status, err) == (0, "")


def test_config_survives_json_and_resume_keeps_what_was_given(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = TrainConfig(data=("a", "b"), lr=0.5, trainer_args=("optim=sgd",))
    assert TrainConfig.from_json(json.loads(json.dumps(config.to_json()))) == config
    resumed = resumed_config({"resume": True, "output": str(finished), "lr": 0.25})
    assert (resumed.lr, resumed.max_steps, resumed.seq_len) == (0.25, 12, 32)
    assert {"seed", "data", "batch_size"} <= set(fixed_settings())
    checkpointed = {**json.loads((finished / "run.json").read_text())["config"], "gradient_checkpointing": True}
    monkeypatch.setattr("lowtide.train.checkpoints.read_run_file", lambda output: {"config": checkpointed, "data": ""})
    resumed = resumed_config({"resume": True, "output": str(finished), "policy": "input"})
    assert (resumed.policy, resumed.gradient_checkpointing) == ("input", False), "as advised where memory runs out"
    assert resumed_config({"resume": True, "output": str(finished)}).gradient_checkpointing


def test_trainer_arguments_follow_the_config(tmp_path: Path) -> None:
    config = TrainConfig(max_steps=40, warmup=0.25, dtype="bfloat16", trainer_args=("weight_decay=0.5",))
    args = training_arguments(config, tmp_path, save=True, resuming=False)
    assert (args.max_steps, args.warmup_steps, args.bf16, args.weight_decay) == (40, 10, True, 0.5)


def test_the_first_rank_speaks_and_no_other_machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = training_arguments(TrainConfig(), tmp_path, save=True, resuming=False)
    for rank, speaks in ((0, True), (8, False)):  # the first of its machine both times
        monkeypatch.setattr(type(args), "process_index", rank)
        monkeypatch.setattr(type(args), "local_process_index", 0)
        assert args.should_log == speaks


def test_float16_needs_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ArgumentValueError, match="float16 on a GPU only"):
        training_arguments(TrainConfig(dtype="float16"), tmp_path, save=False, resuming=False)
