"""`lowtide train` on a GPU: packed rows, budgets that are applied, and memory that does not suffice."""

from __future__ import annotations

import gc
import json
import random
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)
pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytest.importorskip("trl")

from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import is_flash_attn_2_available

from chat_data import CHATML, byte_tokenizer
from lowtide.cli import main
from lowtide.memory import optimizer_blocks as blocks

SHAPE: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 1021, "hidden_size": 256, "intermediate_size": 640, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2**20,
}  # fmt: skip
WIDE = {**SHAPE, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 6, "num_attention_heads": 8}
FLASH = pytest.param(
    "flash_attention_2",
    marks=pytest.mark.skipif(not is_flash_attn_2_available(), reason="needs the flash-attn package"),
)


@pytest.fixture(autouse=True)
def no_cache_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that a run reads are stored in a cache: here in the test's own folder."""
    import datasets

    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()


def run_arguments(folder: Path, seq_len: int, shape: dict[str, Any] = SHAPE) -> list[str]:
    """Write a pretrained model, conversations and long texts, and return the arguments of a run on conversations."""
    torch.manual_seed(1)
    with warnings.catch_warnings(action="ignore"):
        model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(**shape))
    model.save_pretrained(folder / "model")
    (folder / "shape.json").write_text(json.dumps(shape))
    byte_tokenizer(CHATML).save_pretrained(folder / "model")
    rng = random.Random(0)
    with (folder / "chat.jsonl").open("w") as file:
        for _ in range(400):
            said = [" ".join(rng.choices(["tide", "sand", "gull"], k=rng.randint(1, 40))) for _ in range(2)]
            turns = [{"role": r, "content": c} for r, c in zip(("user", "assistant"), said, strict=True)]
            file.write(json.dumps({"messages": turns}) + "\n")
    (folder / "texts").mkdir()
    for i in range(48):
        (folder / "texts" / f"{i}.txt").write_text(" ".join(rng.choices(["tide", "sand", "gull"], k=20_000)))
    size = ["--max_length", str(seq_len), "--per_device_train_batch_size", "2", "--held-out", "2"]
    where = ["--model", str(folder / "model"), "--data", str(folder / "chat.jsonl"), "--output", str(folder / "out")]
    return ["train", *where, *size]


def logged(output: Path, name: str) -> dict[int, float]:
    lines = [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]
    return {line["step"]: line[name] for line in lines if name in line}


@pytest.mark.parametrize("attention", ["sdpa", FLASH])
def test_packed_rows_are_trained_as_by_the_stock_model(attention: str, tmp_path: Path) -> None:
    given = [*run_arguments(tmp_path, 512), "--packing", "--attn_implementation", attention, "--max-steps", "6"]
    losses = []
    for name, more in {"patched": [], "stock": ["--no-patch"]}.items():
        assert main([*given, *more, "--save_strategy", "no", "--output", str(tmp_path / name)]) == 0
        losses.append(list(logged(tmp_path / name, "loss").values()))
    assert len(losses[0]) == 6
    assert losses[0] == pytest.approx(losses[1], rel=5e-3)


@pytest.mark.parametrize(
    "extra",
    [["--memory-budget", "1GiB"], ["--use_peft", "--lora_r", "4", "--dtype", "bfloat16", "--policy", "input"],
     ["--policy", "1 x input/1, 2 x attention/0"]],
    ids=" ".join,
)  # fmt: skip
def test_runs_end_without_a_word_on_standard_error(
    extra: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = run_arguments(tmp_path, 512)
    capsys.readouterr()  # transformers' bar while it saves the model
    assert main([*given, *extra, "--max-steps", "4"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert re.search(r"[1-9]\d* without logits, 0 with\b", printed.out), printed.out
    assert ("expected peak" in printed.out) == ("--memory-budget" in extra)


def test_a_step_that_the_gpu_has_no_room_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = [*run_arguments(tmp_path, 16_384), "--data", str(tmp_path / "texts"), "--max-steps", "2"]
    gc.collect()  # what earlier tests left would have room in it
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 2**28) / total)
    try:
        status = main(given)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    error = capsys.readouterr().err
    assert status == 3, error
    assert "out of memory" in error
    assert "Traceback" not in error
    assert "lowtide plan" in error


def test_a_run_with_its_states_on_the_host_is_the_same_to_the_bit_and_resumes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "MIN_BYTES", 1024)
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 2**20)
    # flash attention's backward adds up in any order
    same = ["--attn_implementation", "eager", "--max-steps", "6", "--save_steps", "3"]
    stock, away = tmp_path / "stock", tmp_path / "away"
    given = [*run_arguments(tmp_path, 512), *same, "--gradient_accumulation_steps", "2"]
    assert main([*given, "--output", str(stock)]) == 0
    assert main([*given, "--offload-states", "--output", str(away)]) == 0
    assert "in host memory" in capsys.readouterr().out

    def assert_same() -> None:
        assert logged(away, "loss") == logged(stock, "loss")
        ours, theirs = (load_file(output / "model" / "model.safetensors") for output in (away, stock))
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
        a, b = (torch.load(o / "checkpoint-6" / "optimizer.pt", map_location="cpu")["state"] for o in (away, stock))
        assert all(torch.equal(a[i][key], b[i][key]) for i in b for key in b[i])

    assert_same()
    shutil.rmtree(away / "checkpoint-6")
    assert main(["train", "--resume_from_checkpoint", "true", "--output", str(away)]) == 0
    assert capsys.readouterr().err == ""
    assert_same()


LORA = ["--use_peft", "--lora_r", "16", "--lora_target_modules", "all-linear"]


ONE_ROW_A_FILE = ["--packing", "false"]  # and each is cut at the longest length
PACKED = ["--packing", "--packing_strategy", "bfd", "--max_length", "1024"]
PLANNED = {
    "full": ["--model", "shape.json", "--tokenizer", "model"],
    "LoRA, masked": [*LORA, "--dtype", "bfloat16", *PACKED],
    "LoRA on two": [*LORA, "--dtype", "bfloat16", "--lora_target_modules", "q_proj", "v_proj", *ONE_ROW_A_FILE],
    "LoRA, autocast": [*LORA, *ONE_ROW_A_FILE],
}


@pytest.mark.parametrize("kind", PLANNED)
def test_a_run_takes_what_its_budget_expects(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All is saved: adapters, frozen layers and masks as they are. Whether with less, tests of the planner compare."""
    gc.collect()
    torch.cuda.empty_cache()
    left = torch.cuda.memory_allocated()  # by the tests before, in this process
    given = run_arguments(tmp_path, 4096, WIDE)
    steps = ["--data", str(tmp_path / "texts"), "--max-steps", "5", "--attn_implementation", "sdpa"]
    steps += ["--per_device_train_batch_size", "4", "--memory-budget", "60GiB"]
    more = [str(tmp_path / word) if word in ("shape.json", "model") else word for word in PLANNED[kind]]
    assert main([*given, *steps, *more]) == 0
    printed = capsys.readouterr().out
    expected = re.search(r"policy +\d+ x all/0: expected peak ([\d.]+) of 60.00 GiB", printed)
    assert expected, printed
    assert ("attention has a mask" in printed) == ("masked" in kind)
    measured = max(peak for step, peak in logged(tmp_path / "out", "peak_bytes").items() if step > 2)
    assert float(expected[1]) == pytest.approx((measured - left) / 2**30, rel=0.05)
