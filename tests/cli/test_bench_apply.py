"""``lowtide bench apply`` from arguments to files, on a CPU and small."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lowtide.bench import apply as benchmark
from lowtide.bench.config import ApplyBenchConfig
from lowtide.bench.shapes import APPLY_SHAPES
from lowtide.cli import main
from lowtide.head.options import HeadOptions

QUICK = ["--warm", "0", "--reps", "1", "--device", "cpu"]


def bench(*arguments: object) -> int:
    return main(["bench", "apply", *map(str, arguments)])


def result(folder: Path) -> dict[str, Any]:
    (file,) = folder.glob("*-apply-cpu.json")
    return json.loads(file.read_text())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_memory_is_halved_and_gradients_are_right(
    dtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench("--shape", "256,32,4096", "--dtype", dtype, *QUICK, "--output", tmp_path) == 0
    told = result(tmp_path)
    assert told["command"].startswith("lowtide bench apply --shape 256,32,4096")
    assert told["machine"]["torch"]
    assert {"commit", "date", "warm", "reps"} <= set(told)
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


def test_a_way_that_fails_is_a_row_and_linear_applys_own_is_status_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> Any:
        raise RuntimeError("broken")

    monkeypatch.setattr(benchmark, "linear_cross_entropy", fail)
    run = ["--shape", "32,8,64", "--only", "cross-entropy", *QUICK, "--output"]
    assert bench(*run, tmp_path / "a") == 0
    assert result(tmp_path / "a")["shapes"][0]["rows"][-1]["failed"] == "RuntimeError: broken"
    monkeypatch.setattr(benchmark, "linear_apply", fail)
    assert bench(*run, tmp_path / "b") == 1


def test_what_is_known_is_written_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    peak_above, asked = benchmark.peak_above, []

    def interrupted(*args: Any) -> int:
        asked.append(args)
        if len(asked) == 2:
            raise KeyboardInterrupt
        return peak_above(*args)

    monkeypatch.setattr(benchmark, "peak_above", interrupted)
    run = ["--shape", "24,8,40", "--only", "focal", "--device", "cpu", "--warm", "0", "--reps", "1", "--output"]
    assert main(["bench", "apply", *run, str(tmp_path)]) == 130
    (file,) = tmp_path.glob("*.json")
    (shape,) = json.loads(file.read_text())["shapes"]
    assert len(shape["rows"]) == 1


@pytest.mark.parametrize("N", [2, 3, 100, 1000])
def test_two_chunks_are_two(N: int) -> None:
    shape = dataclasses.replace(APPLY_SHAPES["64x512"], N=N, D=8, V=300)
    inputs = benchmark.make_inputs(shape, torch.float32, torch.device("cpu"), 0)
    options = benchmark.in_two_chunks(inputs)
    assert inputs.plan(options).chunks == 2
    assert inputs.plan(HeadOptions(workspace_mib=0.99 * options.workspace_mib)).chunks >= 2


def test_all_is_both_shapes() -> None:
    assert [(s.N, s.D, s.V) for s in ApplyBenchConfig(shape=("all",)).shapes] == [
        (16384, 4096, 128256),
        (32768, 768, 32000),
    ]
    assert [shape.name for shape in ApplyBenchConfig().shapes] == ["4x4096"]
