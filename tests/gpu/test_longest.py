"""Long sequences on a GPU: parameters, gradients and optimizer on the host, what layers keep there too; small."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from lowtide.bench.longest_way import ON_GPU, measure
from lowtide.bench.train_config import LongestBenchConfig
from lowtide.measure.child import allocator_setting, run_child

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


def tried(way: str, train: str, tokens: int = 700, policies: str = "6xinput-mlp1-tile128-offload") -> dict[str, Any]:
    config = LongestBenchConfig(train=train, model="llama-3.2-1b", layers=6, dtype="bfloat16", device="cuda")
    ended = run_child(measure, way, vars(config), tokens, policies, 4.0, (1, 2), 300.0)
    assert ended.value is not None, ended.stderr
    row: dict[str, Any] = ended.value
    return row


@pytest.mark.parametrize("train", ["full", "lora"])
def test_a_step_is_the_same_by_each_way(train: str) -> None:
    ways = ("stock", "lowtide", "stock-offload", "liger", "liger-offload")
    with ThreadPoolExecutor(len(ways)) as pool:  # each is a process of its own, most of it its start
        rows = dict(zip(ways, pool.map(tried, ways, [train] * len(ways)), strict=True))
    stock = rows.pop("stock")
    assert "failed" not in stock, stock
    for way, row in rows.items():
        if way.startswith("liger") and "ModuleNotFoundError" in row.get("failed", ""):
            continue
        assert "failed" not in row, (way, row)
        assert row["losses"] == pytest.approx(stock["losses"], rel=5e-3), way
        assert row["reserved_gib"] >= row["peak_gib"]
        assert row["allocator"] == allocator_setting()
    if train == "full":  # one layer of parameters at a time, beside the vocabulary
        assert stock["peak_gib"] < 2 * 2 * 6 * 61e6 / 2**30 + 2.5


def test_memory_that_runs_out_is_a_row() -> None:
    row = tried("stock", "lora", tokens=200_000)  # logits of 200,000 tokens alone are 51 GB
    assert row["out_of"] == ON_GPU, row
