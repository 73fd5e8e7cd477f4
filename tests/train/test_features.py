"""What a run can be asked for beyond plain training, each from the command line to what is on the disk."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lowtide.train.logs import append_line, forget_after
from lowtide.train.stopping import best_step, is_over
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from lowtide.train import checkpoints
from lowtide.train.run import run

Run = Callable[..., tuple[int, str, str]]


# which every step draws random numbers for
DROPOUT = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 128, "vocab_size": 512}


def log(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]


def losses(output: Path) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in log(output) if "loss" in line}


def weights(output: Path, file: str = "model.safetensors") -> dict[str, torch.Tensor]:
    return load_file(output / "model" / file)


def assert_same_weights(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory, chat_arguments: list[str]) -> Path:
    """A model that a short run on conversations saved, with its run."""
    from lowtide.cli import main

    output = tmp_path_factory.mktemp("pretrained") / "run"
    assert main([*chat_arguments, "--output", str(output)]) == 0
    return output


def test_a_run_on_conversations_says_what_it_trains(tmp_path: Path, chat_arguments: list[str], lowtide: Run) -> None:
    status, out, err = lowtide(*chat_arguments, "--output", tmp_path / "out", "--too-long", "drop")
    assert (status, err) == (0, "")
    assert re.search(r"chat +trained: \d+ of the \d+ tokens of one conversation, the last '<\|im_end\|>'", out)
    assert re.search(r"packing +separate: .*attention: sdpa", out)
    seen, cut, left_out = map(int, re.search(r"conversations +(\d+) read, (\d+) cut at 96 tokens, (\d+)", out).groups())  # type: ignore[union-attr]
    assert seen > left_out > 0
    assert cut == 0
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out" / "model")
    assert "<|im_start|>user" in tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False)


@pytest.mark.parametrize(
    "extra",
    [
        ["--policy", "attention", "--grad-accum", "2"],
        ["--lora-rank", "4", "--lora-targets", "q_proj", "down_proj", "--policy", "1 x input, 1 x all"],
        ["--weights", "bfloat16", "--packing", "none"],
        ["--model", "dropout.json", "--policy", "input", "--eval-every", "3"],
    ],
    ids=" ".join,
)
def test_chat_runs_resume_bit_for_bit(
    extra: list[str],
    tmp_path: Path,
    chat_arguments: list[str],
    pretrained: Path,
    lowtide: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = ["--model", pretrained / "model"] if "--lora-rank" in extra else []
    (tmp_path / "dropout.json").write_text(json.dumps(DROPOUT))
    monkeypatch.chdir(tmp_path)
    output, expected = tmp_path / "resumed", tmp_path / "whole"
    status, _, err = lowtide(*chat_arguments, *model, *extra, "--output", expected)
    assert (status, err) == (0, "")
    shutil.copytree(expected, output)
    for step in (4, 6):  # as if it had been killed in step 4
        shutil.rmtree(output / f"checkpoint-{step}")
    shutil.rmtree(output / "model")
    status, _, err = lowtide("train", "--resume", "--output", output)
    assert (status, err) == (0, "")
    assert losses(output) == losses(expected)
    assert sorted(losses(output)) == list(range(1, 7))
    assert [line["step"] for line in log(output)] == [line["step"] for line in log(expected)]
    file = "adapter_model.safetensors" if model else "model.safetensors"
    assert_same_weights(weights(output, file), weights(expected, file))
    for name in ("data_position_0.json",):
        told = [(folder / "checkpoint-6" / name).read_text() for folder in (output, expected)]
        assert told[0] == told[1]


def test_a_model_that_sees_documents_before_has_one_in_each_row(
    tmp_path: Path, chat_arguments: list[str], lowtide: Run
) -> None:
    settings = {"model_type": "mamba", "vocab_size": 512, "hidden_size": 16, "num_hidden_layers": 1, "state_size": 4}
    (tmp_path / "mamba.json").write_text(json.dumps(settings))
    arguments = [*chat_arguments, "--model", tmp_path / "mamba.json", "--max-steps", "2", "--output", tmp_path / "out"]
    status, _, err = lowtide(*arguments)
    assert (status, err.count("\n")) == (2, 1)
    assert "--packing none" in err
    status, _, err = lowtide(*arguments, "--packing", "none")
    assert (status, err) == (0, "")


def test_lora_trains_adapters_alone_and_merges(
    tmp_path: Path, chat_arguments: list[str], pretrained: Path, lowtide: Run
) -> None:
    output = tmp_path / "out"
    lora = ["--lora-rank", "3", "--lora-alpha", "12", "--lora-merge", "--lr", "0.02"]
    status, out, err = lowtide(*chat_arguments, "--model", pretrained / "model", *lora, "--output", output)
    assert (status, err) == (0, "")
    assert re.search(r"lora +rank 3, alpha 12, all-linear: 0\.0\d M parameters are trained", out)
    base = AutoModelForCausalLM.from_pretrained(pretrained / "model")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # between peft and transformers
        adapter = PeftModel.from_pretrained(base, str(output / "model"))
    merged = AutoModelForCausalLM.from_pretrained(output / "merged")
    ids = torch.arange(20)[None]
    stock = AutoModelForCausalLM.from_pretrained(pretrained / "model")(ids).logits
    assert torch.allclose(merged(ids).logits, adapter(ids).logits, atol=1e-5)
    assert not torch.allclose(merged(ids).logits, stock, atol=1e-3)
    assert AutoTokenizer.from_pretrained(output / "merged").chat_template


def test_lora_on_random_weights_of_bfloat16_has_float32_adapters(
    tmp_path: Path, chat_arguments: list[str], lowtide: Run
) -> None:
    output = tmp_path / "out"
    options = ["--lora-rank", "2", "--weights", "bfloat16", "--lora-merge", "--max-steps", "2"]
    status, out, err = lowtide(*chat_arguments, *options, "--output", output)
    assert (status, err) == (0, "")
    assert "rounded away" not in out
    assert {v.dtype for v in weights(output, "adapter_model.safetensors").values()} == {torch.float32}
    merged = AutoModelForCausalLM.from_pretrained(output / "merged")
    assert merged.dtype == torch.float32
    assert merged.config.eos_token_id == AutoTokenizer.from_pretrained(output / "model").eos_token_id
    embedding = merged.get_input_embeddings().weight
    assert torch.equal(embedding, embedding.bfloat16().float()), "the random weights that were trained beside"


def test_bfloat16_weights_are_bfloat16_and_warned_of(tmp_path: Path, chat_arguments: list[str], lowtide: Run) -> None:
    status, out, err = lowtide(*chat_arguments, "--weights", "bfloat16", "--max-steps", "2", "--output", tmp_path / "o")
    assert (status, err) == (0, "")
    assert "rounded away" in out
    assert {v.dtype for v in weights(tmp_path / "o").values()} == {torch.bfloat16}
    optimizer = torch.load(tmp_path / "o" / "checkpoint-2" / "optimizer.pt")
    assert {s["exp_avg"].dtype for s in optimizer["state"].values()} == {torch.bfloat16}


def test_early_stop_keeps_the_best_model(tmp_path: Path, chat_arguments: list[str], lowtide: Run) -> None:
    """A rate so high that it soon gets worse."""
    output = tmp_path / "out"
    options = ["--lr", "0.5", "--warmup", "0", "--max-steps", "60", "--eval-every", "2", "--early-stop", "3"]
    options += ["--save-every", "1", "--keep", "1", "--output", output]
    status, out, err = lowtide(*chat_arguments, *options)
    assert (status, err) == (0, "")
    held_out = {line["step"]: line["held_out_loss"] for line in log(output) if "held_out_loss" in line and line["step"]}
    best = min(held_out, key=lambda step: held_out[step])
    last = max(losses(output))
    assert last == best + 6 < 60, "three evaluations later"
    assert f"step {best}/60  held-out loss {held_out[best]:.3f}" in out
    assert f"best             step {best}: the run went on to step {last}" in out
    assert [p.name for p in checkpoints.checkpoints(output)] == [f"checkpoint-{best}", f"checkpoint-{last}"]
    assert_same_weights(weights(output), load_file(output / f"checkpoint-{best}" / "model.safetensors"))
    assert re.search(rf"held-out loss +[\d.]+ -> {held_out[best]:.3f}", out)
    shutil.rmtree(output / "model")
    status, out, err = lowtide("train", "--resume", "--output", output)
    assert (status, err) == (0, "")
    assert "nothing is left" in out
    assert_same_weights(weights(output), load_file(output / f"checkpoint-{best}" / "model.safetensors"))


def test_a_run_that_saves_nothing_leaves_its_folder_alone(
    tmp_path: Path, chat_arguments: list[str], lowtide: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the two of ``--compare``, which stop early too."""
    (tmp_path / "checkpoint-1000").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("lowtide.train.train", functools.partial(run, save=False))
    status, _, err = lowtide(*chat_arguments, "--max-steps", 3, "--eval-every", 1, "--early-stop", 2)
    assert (status, err) == (0, "")
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint-1000"]


def test_when_a_run_is_over() -> None:
    def history(*values: float) -> list[dict[str, float]]:
        return [{"step": step, "eval_loss": value} for step, value in enumerate(values)]

    assert best_step(history(1.0, 3.0, 2.0, 2.0)) == 2, "the first of equals; that before the first step is none"
    assert not is_over(history(1.0, 3.0, 2.0, 2.0), 2)
    assert is_over(history(1.0, 3.0, 2.0, 2.0, 2.5), 2)
    assert not is_over(history(1.0, 3.0, 2.0, 2.5, 1.9), 2)
    assert best_step([]) is None
    assert best_step(history(1.0, float("nan"), 2.0, 3.0)) == 2, "a model that is broken is not the best"


def test_the_log_has_a_line_for_each_step_and_evaluation(pretrained: Path) -> None:
    lines = log(pretrained)
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4, 5, 6, 6]
    assert {"time", "loss", "learning_rate", "grad_norm", "tokens_per_second", "peak_bytes"} <= lines[1].keys()
    assert "held_out_loss" in lines[0]
    assert "held_out_loss" in lines[-1]
    state = checkpoints.log_history(pretrained / "checkpoint-6")
    assert [e["loss"] for e in state if "loss" in e] == list(losses(pretrained).values())


def test_a_log_forgets_what_will_be_written_again_and_half_lines(tmp_path: Path) -> None:
    file = tmp_path / "log.jsonl"
    for step in range(5):
        append_line(file, {"step": step})
    with file.open("a") as handle:
        handle.write('{"step": 3, "lo')
    forget_after(file, 3)
    assert file.read_text() == "".join(f'{{"step": {step}}}\n' for step in range(4))


def test_a_disk_that_takes_no_more_lines_is_one_error(
    tmp_path: Path, chat_arguments: list[str], lowtide: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = os.write

    def full(handle: int, data: bytes) -> int:
        return original(handle, data[:5] if b'"step": 3' in data else data)

    monkeypatch.setattr("lowtide.train.logs.os.write", full)
    status, _, err = lowtide(*chat_arguments, "--output", tmp_path / "out")
    assert (status, err.count("\n")) == (2, 1), err
    assert "could not write" in err
    assert "log.jsonl" in err
    assert "No space left on device" in err
    assert "checkpoint-2 is whole: go on from it with --resume" in err
    forget_after(tmp_path / "out" / "log.jsonl", 2)
    assert [line["step"] for line in log(tmp_path / "out")] == [0, 1, 2]


def test_tensorboard_has_the_same_numbers(tmp_path: Path, chat_arguments: list[str], lowtide: Run) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    output = tmp_path / "out"
    assert lowtide(*chat_arguments, "--tensorboard", "--output", output)[::2] == (0, "")
    shutil.rmtree(output / "checkpoint-6")
    assert lowtide("train", "--resume", "--output", output)[::2] == (0, "")
    assert {p.name for p in output.iterdir()} >= {"tensorboard", "model"}
    assert not (output / "runs").exists()
    board = EventAccumulator(str(output / "tensorboard"))
    board.Reload()
    assert {e.step: pytest.approx(e.value) for e in board.Scalars("train/loss")} == losses(output)
    assert board.Scalars("eval/loss")[-1].step == 6


def test_a_budget_chooses_a_policy_and_says_what_it_does_here(
    tmp_path: Path, chat_arguments: list[str], lowtide: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    applied = []
    from lowtide.train import activations

    original = activations.apply_policy
    monkeypatch.setattr(activations, "apply_policy", lambda m, p, **k: (applied.append(p), original(m, p, **k))[1])
    status, out, err = lowtide(*chat_arguments, "--memory-budget", "1GiB", "--max-steps", 2, "--output", tmp_path / "o")
    assert (status, err) == (0, "")
    assert re.search(r"policy +\S.*expected peak 0\.\d+ of 1\.00 GiB", out)
    assert "no GPU here" in out
    assert "attention has a mask of" in out, "conversations are packed apart, under sdpa"
    assert "rates of the h100 from a table" in out
    assert len(applied[0]) == 2
    status, _, err = lowtide(*chat_arguments, "--memory-budget", "1MiB", "--output", tmp_path / "p")
    assert (status, err.count("\n")) == (2, 1)
    assert "memory_budget, in GiB: expected" in err
    assert not (tmp_path / "p").exists()


def test_a_budget_counts_the_adapters_that_peft_has_made(
    tmp_path: Path, chat_arguments: list[str], lowtide: Run
) -> None:
    lora = ["--lora-rank", 4, "--memory-budget", "1GiB", "--max-steps", 1, "--output"]
    targets = ["--lora-targets", "v_proj", "q_proj", "--packing", "none"]
    status, out, err = lowtide(*chat_arguments, *targets, *lora, tmp_path / "some")
    assert (status, err) == (0, "")
    numbers = 2 * 4 * ((32 + 32) + (32 + 16))
    assert f"{numbers} numbers of adapters are trained, rank 4 on q_proj v_proj: what they compute is" in out
    assert "mask" not in out
    status, out, err = lowtide(*chat_arguments, "--lora-targets", "q_proj", "lm_head", *lora, tmp_path / "head")
    assert (status, err) == (0, "")
    assert "adapters are trained: what they keep and compute is left out" in out


def test_a_relative_data_path_is_found_again_from_elsewhere(
    tmp_path: Path, chat_arguments: list[str], lowtide: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = Path(chat_arguments[chat_arguments.index("--data") + 1]).parent
    monkeypatch.chdir(where)
    relative = [argument.replace(f"{where}/", "") for argument in chat_arguments]
    assert relative != chat_arguments
    assert lowtide(*relative, "--output", tmp_path / "out")[0] == 0
    shutil.rmtree(tmp_path / "out" / "checkpoint-6")
    monkeypatch.chdir(tmp_path)
    status, _, err = lowtide("train", "--resume", "--output", "out")
    assert (status, err) == (0, "")
