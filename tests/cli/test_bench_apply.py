"""``lowtide bench apply`` from arguments to files, on a CPU and small."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from cli.results import result
from lowtide.bench import apply as benchmark
from lowtide.bench.shapes import APPLY_SHAPES
from lowtide.cli import main
from lowtide.head.options import HeadOptions

QUICK = ["--warm", "0", "--reps", "1", "--device", "cpu"]


def bench(*arguments: object) -> int:
    return main(["bench", "apply", *map(str, arguments)])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_memory_is_halved_and_gradients_are_right(
    dtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench("--shape", "256,32,4096", "--dtype", dtype, *QUICK, "--output", tmp_path) == 0
    told = result(tmp_path)
    (shape,) = told["shapes"]
    rows = {(row["function"], row["name"]): row for row in shape["rows"]}
    assert {name for name, _ in rows} == {"cross-entropy", "focal", "entropy", "top-k"}
    for (function, name), row in rows.items():
        naive = rows[function, "naive"]
        assert "failed" not in row
        if name == "two chunks":
            assert row["plan"]["chunks"] == 2
            assert row["of_naive"] <= 0.5
        if name != "naive":
            assert row["value_error"] < 1e-5
            for error in ("dx_error", "dw_error", "db_error"):
                assert row[error] <= 1.1 * naive[error] + 1e-6, (function, name, error)
    assert "cross-entropy" in capsys.readouterr().out


@pytest.mark.parametrize("objective", ["train", "grpo"])
def test_training_is_the_same_to_rounding(objective: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    sizes = ["--steps", 4, "--batch", 2, "--seq-len", 24]
    assert bench("--no-table", f"--{objective}", *sizes, *QUICK, "--output", tmp_path) == 0
    told = result(tmp_path)[objective]
    other = "stock" if objective == "train" else "naive"
    assert len(told["linear_apply"]["losses"]) == len(told[other]["losses"]) == 4
    assert len(set(told[other]["losses"])) == 4, "something is learned"
    assert told["largest_difference"] < 1e-5


@pytest.mark.parametrize("N", [2, 3, 100, 1000])
def test_two_chunks_are_two(N: int) -> None:
    shape = dataclasses.replace(APPLY_SHAPES["64x512"], N=N, D=8, V=300)
    inputs = benchmark.make_inputs(shape, torch.float32, torch.device("cpu"), 0)
    options = benchmark.in_two_chunks(inputs)
    assert benchmark.plan_of(inputs, options).chunks == 2
    assert benchmark.plan_of(inputs, HeadOptions(workspace_mib=0.99 * options.workspace_mib)).chunks >= 2
