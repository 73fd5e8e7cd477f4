"""The head's benchmark: peers compute the same loss, a row has every figure or the reason, options measure more."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from cli.results import result
from lowtide.bench import head as benchmark
from lowtide.bench.config import TOKEN_COUNTS, HeadBenchConfig
from lowtide.bench.harness import CannotError
from lowtide.bench.head import TABLE, LossBench, loss_task, plan_of, ratio
from lowtide.bench.loss_peers import LIGER, LOWTIDE_AT_LIGERS, PEERS, liger_mib, liger_rows
from lowtide.bench.problem import PLAIN, SETTINGS, make_problem
from lowtide.bench.shapes import HEADS, SHAPES
from lowtide.cli import main

PROBLEM = make_problem(HEADS.one("64,24,300"), torch.float32, "cpu")


def test_autocast_is_on_where_the_setting_says_so() -> None:
    problem = make_problem(HEADS.one("64,24,300"), torch.bfloat16, "cpu").in_setting(SETTINGS[1])
    task, seen = loss_task(problem), []
    naive = PEERS["naive"].build(task)
    task.step(lambda: seen.append((problem.x @ problem.w.T).dtype) or naive())
    assert seen == [torch.bfloat16]
    assert problem.w.grad is not None
    assert problem.w.grad.dtype == torch.float32


def test_a_steps_gradients_are_its_own() -> None:
    task = loss_task(PROBLEM.in_setting(PLAIN))
    loss = PEERS["naive"].build(task)
    grads = []
    for _ in range(2):
        task.step(loss)
        assert task.head.w.grad is not None
        grads.append(task.head.w.grad.clone())
    assert torch.equal(*grads)
    task.head.clear()
    assert task.head.w.grad is None


@pytest.mark.parametrize(
    ("shape", "rows"), [("llama-1b", 256), ("gemma-2b", 128), ("llama-8b", 512), ("100,50,10", 100), ("1,8,800", 1)]
)
def test_ligers_rule(shape: str, rows: int) -> None:
    assert liger_rows(HEADS.one(shape)) == rows


def test_lowtide_takes_ligers_memory() -> None:
    """Liger was measured at 640 MiB above the inputs of llama-1b, 576 of which are gradients."""
    shape = SHAPES["llama-1b"]
    assert liger_rows(shape) * shape.V * 2 / 2**20 == 64
    options = PEERS[LOWTIDE_AT_LIGERS].options
    assert options is not None
    assert options(PROBLEM).workspace_mib == liger_mib(PROBLEM) == 8 * 300 * 4 / 2**20


@pytest.mark.parametrize("name", [LIGER, "liger-large", "cce", "cce-exact", "quack"])
def test_peers_for_gpus_say_so(name: str) -> None:
    with pytest.raises(CannotError, match="GPU"):
        PEERS[name].build(loss_task(PROBLEM))
    assert not {"liger_kernel", "cut_cross_entropy", "quack"} & set(sys.modules), "none is imported before its turn"


def test_a_torch_without_the_function_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(F, "linear_cross_entropy", raising=False)
    with pytest.raises(CannotError, match="has no linear_cross_entropy"):
        PEERS["torch"].build(loss_task(PROBLEM))


def bench(dtype: torch.dtype = torch.float32, *, error: bool = True) -> LossBench:
    return LossBench(make_problem(HEADS.one("48,16,200"), dtype, "cpu"), error=error, warm=0, reps=2)


def test_a_row_has_every_figure() -> None:
    measured = bench(torch.bfloat16)
    row, naive = (measured.measure(PEERS[name]) for name in ("lowtide", "naive"))
    assert not {"plan", "dx_floor", "failed"} & set(naive)
    for name in ("loss_error", "dx_error", "dw_error", "dx_floor", "dw_floor"):
        assert 0 < row[name] < 0.01
    assert (row["plan"]["rows"], row["tokens"], row["setting"]) == (48, 48, "mean")
    json.dumps(row, allow_nan=False)
    bare = bench(torch.bfloat16, error=False).measure(PEERS["lowtide"])
    assert set(row) - set(bare) == {"loss_error", "dx_error", "dw_error", "dx_floor", "dw_floor"}


def test_the_floor_follows_the_plan() -> None:
    measured = bench(torch.bfloat16)
    summed = measured.in_setting(SETTINGS[0]).measure(PEERS["lowtide"])
    assert summed["plan"]["accumulate"] == "float32"
    plan = plan_of(PEERS["lowtide"], measured.problem)
    alone = measured.floor_of(replace(plan, accumulate="input", chunks=6, chunk_rows=8))
    assert alone["dw_floor"] > summed["dw_floor"]  # six roundings of the sum instead of one


def test_lines_say_what_was_measured() -> None:
    assert "48,16,200 float32, mean: 3 bare GEMMs take 48 rows" in bench().title()
    row = {"name": "lowtide", "ms": 50.0, "share": 0.74, "peak_mib": 640.0, "dx_error": 2e-3, "dx_floor": 1.6e-3}
    row |= {"busy_ms": 45.0, "busy_share": 0.822}
    assert TABLE.line(row).split() == [
        "lowtide", "50.00", "0.740", "45.00", "0.822", "640.0", "2.0e-03", "of", "the", "floor:", "dX", "1.250",
    ]  # fmt: skip
    readings = f"{'idle ms':>9}{'share':>7}{'busy ms':>9}{'share':>7}"
    assert TABLE.header == f"{'':24}{readings}{'MiB':>9}{'loss err':>10}{'dX err':>10}{'dW err':>10}\n"
    assert TABLE.line(row).index("2.0e-03") + 7 == TABLE.header.index("dX err") + 6
    liger = {"name": "liger", "ms": 100.0, "peak_mib": 650.0}
    assert "50.00 ms of 100.00, 0.500" in ratio(row, liger)
    assert ratio(row, None) == ratio({"name": "", "failed": "no"}, liger) == ""


def head(folder: Path, *arguments: object, status: int = 0) -> dict[str, Any]:
    quick = ["--warm", "0", "--reps", "1", "--device", "cpu", "--output", str(folder)]
    assert main(["bench", "head", *map(str, arguments), *quick]) == status
    return result(folder)


def test_everything_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    sweep = ["--sweep", "--workspace-mib", 0.05, 0.5, "--settings", "--tokens", 16, 32]
    only = ["--only", "lowtide", "naive", "liger", "--dtype", "bfloat16"]
    told = head(tmp_path, "--shape", "64,16,256", *only, *sweep, status=1)
    assert "liger-kernel" in told["machine"]
    assert {"commit", "date", "warm", "reps"} <= set(told)
    (shape,) = told["shapes"]
    assert (shape["N"], shape["D"], shape["V"], shape["dtype"]) == (64, 16, 256, "bfloat16")
    lowtide, naive, liger = shape["table"]
    for row in (lowtide, naive):
        assert {"ms", "share", "peak_mib", "loss_error", "dx_error", "dw_error"} <= set(row)
    assert {"dx_floor", "dw_floor", "plan"} <= set(lowtide)
    assert liger == {
        "name": "liger", "setting": "mean", "tokens": 64, "failed": "runs on GPUs only", "unsupported": True,
    }  # fmt: skip
    assert [row["workspace_mib"] for row in shape["sweep"]] == [0.05, 0.5]
    assert {row["setting"] for row in shape["settings"]} == {setting.name for setting in SETTINGS}
    assert [row["tokens"] for row in shape["tokens"]] == [16, 16, 16, 32, 32, 32]
    assert [limit["tokens"] for limit in shape["limits"]] == [64] * (1 + len(SETTINGS)) + [16, 32]
    stem = next(tmp_path.glob("*.json")).stem
    assert {file.name for file in tmp_path.glob("*.png")} == {f"{stem}-64-16-256.png", f"{stem}-64-16-256-tokens.png"}
    out = capsys.readouterr().out
    assert "requested explicitly, but cannot run here: liger: runs on GPUs only" in out
    assert "of the floor" in out


def test_settings_alone_have_no_table_without_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (shape,) = head(
        tmp_path, "--shape", "64,16,256", "--only", "lowtide", "--settings", "--no-table", "--no-error"
    )["shapes"]  # fmt: skip
    said = [limit["setting"] for limit in shape["limits"]]
    assert said == [row["setting"] for row in shape["settings"]] != []
    assert capsys.readouterr().out.count("bare GEMMs") == len(said)


def test_the_default_sweep_leaves_out_what_changes_nothing(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    run = ["--shape", "32,8,4096", "--only", "lowtide", "--sweep", "--no-table", "--no-error"]
    (shape,) = head(tmp_path, *run)["shapes"]
    rows = [row["plan"]["chunk_rows"] for row in shape["sweep"]]
    assert rows == sorted(set(rows))
    assert 2 <= len(rows) <= benchmark.SWEEP_POINTS
    assert "table" not in shape


def test_all_is_every_number_of_tokens() -> None:
    assert HeadBenchConfig(tokens=("all",)).token_counts == TOKEN_COUNTS
    assert (TOKEN_COUNTS[0], TOKEN_COUNTS[-1]) == (1024, 262144)
