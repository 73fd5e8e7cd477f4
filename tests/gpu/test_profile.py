"""``lowtide profile`` on a GPU: the recording beside the allocator's own count, files, and memory that runs out."""

from __future__ import annotations

import gzip
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)
pytest.importorskip("transformers")

from lowtide.cli import main

CONFIG = {
    "model_type": "llama", "vocab_size": 32_000, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 4,
    "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64, "tie_word_embeddings": False,
}  # fmt: skip


def profile(folder: Path, *arguments: object) -> dict[str, Any]:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    command = ["profile", "--model", folder / "config.json", "--output", folder, "--seq-len", 4096, *arguments]
    main(list(map(str, command)))
    (file,) = folder.glob("*-profile-*.json")
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def test_the_recording_is_the_allocators_count(tmp_path: Path) -> None:
    told = profile(
        tmp_path,
        "--impl",
        "stock",
        "lowtide:input",
        "lowtide:attention-offload",
        "lowtide:all",
        "--steps",
        2,
        "--snapshot",
    )
    losses = []
    for row in told["implementations"]:
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
    assert losses == pytest.approx([losses[0]] * len(losses), rel=2e-3)
    assert told["implementations"][0]["tflops"]["step"] > 1


@pytest.mark.parametrize("where", [(), ("--offload-params",)], ids=["", "offload"])
def test_memory_that_runs_out_is_a_row_and_the_others_run(where: tuple[str, ...], tmp_path: Path) -> None:
    ways = ["--impl", "stock:all", "lowtide:input", "--seq-len", 16384, "--memory-limit", "5GiB", "--no-trace"]
    stock, lowtide = profile(tmp_path, *ways, *where)["implementations"]
    assert stock["failed"].startswith("out of memory at ")
    assert ", in the " in stock["failed"]
    assert 1 < stock["peak"]["gib"] < 5
    assert "failed" not in lowtide


@pytest.mark.parametrize("arguments", [(), ("--lora", 8)], ids=["full", "lora"])
def test_parameters_and_optimizer_on_the_host(arguments: tuple[object, ...], tmp_path: Path) -> None:
    if "--lora" in arguments:
        pytest.importorskip("peft")
    impl = ["--impl", "stock", "checkpoint-8", "lowtide", "--policy", "input-offload"]
    ways = [*impl, "--offload-params", "--no-trace", "--steps", 2]
    for row in profile(tmp_path, *ways, *arguments)["implementations"]:
        assert "failed" not in row, row
        owners, weights = row["peak"]["owners_gib"], row["parameters"] * 2 / 2**30
        assert owners["optimizer"] == 0
        assert owners["weights"] < 0.9 * weights
        assert row["peak"]["gib"] == pytest.approx(row["allocated_gib"], rel=0.02)


def test_compiled_layers(tmp_path: Path) -> None:
    (row,) = profile(tmp_path, "--impl", "compile", "--no-trace", "--steps", 1)["implementations"]
    assert "failed" not in row, row
    assert row["time_by_kind_ms"]["recompute"] > 0
