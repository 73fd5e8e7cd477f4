"""`lowtide profile` and `lowtide train` on a GPU: what they measure, budgets, and memory that does not suffice."""

from __future__ import annotations

import gc
import gzip
import json
import pickle
import random
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytest.importorskip("trl")

from transformers import AutoConfig, AutoModelForCausalLM

from chat_data import CHATML, byte_tokenizer
from gpu.conftest import ON_GPU
from lowtide.cli import main
from lowtide.train import train
from lowtide.train.arguments import parse
from promises import promise

pytestmark = [
    *ON_GPU,
    promise("commands"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # other libraries' to each other
]
CONFIG = {
    "model_type": "llama", "vocab_size": 32_000, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 4,
    "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64, "tie_word_embeddings": False,
}  # fmt: skip
RECORDED = ["stock", "lowtide:input", "lowtide:attention-offload", "lowtide:all"]


def profile(folder: Path, *arguments: object) -> Any:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    command = ["profile", "--model", folder / "config.json", "--output", folder, "--seq-len", 4096, *arguments]
    main(list(map(str, command)))
    (file,) = folder.glob("*-profile-*.json")
    return json.loads(file.read_text())["implementations"]


def test_the_recording_is_the_allocators_count(tmp_path: Path) -> None:
    losses = []
    for row in profile(tmp_path, "--impl", *RECORDED, "--steps", 2):
        assert "failed" not in row, row
        # Steps that were not recorded took as much: every allocation was seen, and every one that was there before.
        assert row["peak"]["gib"] == pytest.approx(row["allocated_gib"], rel=0.005), row["name"]
        assert sum(row["peak"]["owners_gib"].values()) == pytest.approx(row["peak"]["gib"])
        weights = row["parameters"] * 2 / 2**30
        assert row["peak"]["owners_gib"]["weights"] == pytest.approx(weights, rel=0.01)
        assert row["peak"]["owners_gib"]["optimizer"] == pytest.approx(2 * weights, rel=0.01)
        assert sum(row["time_by_kind_ms"].values()) == pytest.approx(row["seconds"] * 1e3, rel=0.2)
        assert "note" not in row
        losses.append(row["losses"][0])
        with (tmp_path / row["files"]["snapshot"]).open("rb") as file:
            actions = {entry["action"] for trace in pickle.load(file)["device_traces"] for entry in trace}
        assert {"alloc", "free_completed"} <= actions
        with gzip.open(tmp_path / row["files"]["trace"], "rt") as file:
            kinds = {event.get("cat") for event in json.load(file)["traceEvents"]}
        assert "kernel" in kinds
    assert losses == pytest.approx([losses[0]] * len(RECORDED), rel=2e-3)


SHAPE: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 1021, "hidden_size": 256, "intermediate_size": 640, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2**20,
}  # fmt: skip
WIDE = {**SHAPE, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 6, "num_attention_heads": 8}


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
    where = ["--model_name_or_path", str(folder / "model"), "--dataset_name", str(folder / "chat.jsonl")]
    return [*where, "--output_dir", str(folder / "out"), *size]


@promise("trainers")
def test_a_step_that_the_gpu_has_no_room_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["train", *run_arguments(tmp_path, 16_384), "--dataset_name", str(tmp_path / "texts"), "--max_steps", "2"]
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
    assert "What would fit, by the planner" in error


LORA = ["--use_peft", "--lora_r", "16", "--lora_target_modules", "all-linear", "--dtype", "bfloat16"]
PACKED = ["--packing", "--packing_strategy", "bfd", "--max_length", "1024"]


@promise("plans")
@pytest.mark.parametrize("masked", [False, True])
def test_a_run_takes_what_its_budget_expects(masked: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All is saved: adapters, frozen layers and masks as they are. Whether with less, tests of the planner compare."""
    gc.collect()
    torch.cuda.empty_cache()
    left = torch.cuda.memory_allocated()  # by the tests before, in this process
    given = run_arguments(tmp_path, 4096, WIDE)
    steps = ["--dataset_name", str(tmp_path / "texts"), "--max_steps", "5", "--attn_implementation", "sdpa"]
    steps += ["--per_device_train_batch_size", "4", "--memory-budget", "60GiB"]
    steps += ["--logging_steps", "1"]
    shape = ["--model_name_or_path", str(tmp_path / "shape.json"), "--tokenizer_name", str(tmp_path / "model")]
    result = train(parse([*given, *steps, *([*LORA, *PACKED] if masked else shape)]))
    printed = capsys.readouterr().out
    expected = re.search(r"memory +\d+ x all/0: expected peak ([\d.]+) of 60.00 GiB", printed)
    assert expected, printed
    assert ("attention has a mask" in printed) == masked
    assert float(expected[1]) == pytest.approx((result.peak_bytes - left) / 2**30, rel=0.05)
