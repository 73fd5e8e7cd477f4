"""A row has figures or says why not, and leaves nothing behind."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor

from lowtide.bench.head import TABLE, LossBench, ratio
from lowtide.bench.peers import PEERS, LossPeer
from lowtide.bench.problem import SETTINGS, make_problem
from lowtide.bench.shapes import parse_shape


def bench(dtype: torch.dtype = torch.float32, *, error: bool = True) -> LossBench:
    return LossBench(make_problem(parse_shape("48,16,200"), dtype, "cpu"), error=error, warm=0, reps=2)


def peer(loss: Any) -> LossPeer:
    return LossPeer("peer", "of a test", lambda _: loss)


def fails(error: Exception) -> Any:
    def loss(x: Tensor, w: Tensor, y: Tensor, reduction: str) -> Tensor:
        raise error

    return loss


def test_a_row_has_every_figure() -> None:
    measured = bench(torch.bfloat16)
    row = measured.measure(PEERS["lowtide"])
    assert "failed" not in row
    assert row["share"] == pytest.approx(row["limit_ms"] / row["ms"])
    assert row["peak_mib"] >= measured.gradients_mib == pytest.approx((48 + 200) * 16 * 2 / 2**20)
    for name in ("loss_error", "dx_error", "dw_error", "dx_floor", "dw_floor"):
        assert 0 < row[name] < 0.01
    assert row["plan"]["rows"] == 48
    assert measured.problem.w.grad is None
    json.dumps(row, allow_nan=False)


def test_naive_takes_more_than_its_logits() -> None:
    row = bench().measure(PEERS["naive"])
    assert row["peak_mib"] > 2 * 48 * 200 * 4 / 2**20
    assert not {"plan", "dx_floor"} & set(row)


def test_errors_are_left_out_where_not_wanted() -> None:
    row = bench(torch.bfloat16, error=False).measure(PEERS["lowtide"])
    assert "ms" in row
    assert not {"dx_error", "dx_floor", "loss_error"} & set(row)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ModuleNotFoundError("No module named 'x'"), "ModuleNotFoundError: No module named 'x'"),
        (torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate\nlots"), "out of memory"),
        (RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"), "out of memory"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"), "out of memory"),
        (AssertionError(), "AssertionError"),
        (RuntimeError("first\nsecond"), "RuntimeError: first"),
    ],
)
def test_a_peer_that_fails_says_why(error: Exception, reason: str) -> None:
    row = bench(error=False).measure(peer(fails(error)))
    assert row == {"name": "peer", "setting": "mean", "tokens": 48, "failed": reason}
    assert TABLE.line(row) == f"{'peer':24}{reason}\n"


def test_a_long_reason_is_cut() -> None:
    row = bench(error=False).measure(peer(fails(RuntimeError("long " * 1000))))
    assert len(row["failed"]) == 200


def test_a_gradient_that_is_not_a_number_is_a_failure() -> None:
    row = bench().measure(peer(lambda x, w, y, reduction: (x.sum() + w.sum()) * torch.nan))
    assert "not finite" in row["failed"]
    assert "dw_error" not in row


def test_a_missing_gradient_is_a_failure() -> None:
    row = bench().measure(peer(lambda x, w, y, reduction: x.square().mean()))
    assert "dw_error" in row["failed"]
    assert "ms" in row
    assert TABLE.line(row).endswith("dw_error: missing or not finite\n")


def test_a_wrong_loss_has_its_error() -> None:
    measured = bench()
    naive = PEERS["naive"].build(measured.problem)
    row = measured.measure(peer(lambda x, w, y, reduction: 1.5 * naive(x, w, y, reduction) + 1))
    assert row["dx_error"] == pytest.approx(0.5, rel=1e-3)
    assert measured.true is not None
    assert row["loss_error"] == pytest.approx(1 + 0.5 * measured.true.loss_N.mean().item(), rel=1e-3)


def test_the_floor_follows_the_plan() -> None:
    measured = bench(torch.bfloat16)
    row = measured.measure(PEERS["lowtide"])
    summed = measured.in_setting(SETTINGS[0]).measure(PEERS["lowtide"])
    assert summed["plan"]["accumulate"] == "float32"
    alone = {"plan": {**row["plan"], "accumulate": "input", "chunks": 6, "chunk_rows": 8}}
    measured.errors(measured.problem.step(PEERS["naive"].build(measured.problem)), alone)
    assert alone["dw_floor"] > summed["dw_floor"]  # six roundings of the sum instead of one


def test_lines_say_what_was_measured() -> None:
    assert "48,16,200 float32, mean: 3 bare GEMMs take 48 rows" in bench().title()
    row = {"name": "lowtide", "ms": 50.0, "share": 0.74, "peak_mib": 640.0, "dx_error": 2e-3, "dx_floor": 1.6e-3}
    assert TABLE.line(row).split() == [
        "lowtide", "50.00", "0.740", "640.0", "2.0e-03", "of", "the", "floor:", "dX", "1.250",
    ]  # fmt: skip
    assert TABLE.header == f"{'':24}{'ms':>9}{'share':>8}{'MiB':>9}{'loss err':>10}{'dX err':>10}{'dW err':>10}\n"
    assert TABLE.line(row).index("2.0e-03") + 7 == TABLE.header.index("dX err") + 6
    liger = {"name": "liger", "ms": 100.0, "peak_mib": 650.0}
    assert "50.00 ms of 100.00, 0.500" in ratio(row, liger)
    assert ratio(row, None) == ratio({"name": "", "failed": "no"}, liger) == ""
