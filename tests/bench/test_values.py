"""Cases: the exact result is autograd's in float64, peers that run here agree, the limit is the case's GEMMs."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from lowtide.bench import case as cases
from lowtide.bench.case import TABLE, Case, Values, make_case, row_of
from lowtide.bench.config import WORKS
from lowtide.bench.harness import Peer, Row
from lowtide.bench.head import PEERS
from lowtide.bench.mlp import PEERS as MLP_PEERS
from lowtide.bench.mlp import make_mlp
from lowtide.bench.settings import Shape
from lowtide.bench.stats import PEERS as STATS_PEERS
from lowtide.bench.stats import stats_case
from lowtide.errors import UnsupportedError
from lowtide.measure.timing import time_side_by_side
from promises import promise
from support import oracle, relative_error, stats_oracle

pytestmark = promise("commands")
N, D, V = 75, 12, 130
SHAPE = Shape(name="small", N=N, D=D, V=V)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "ROWS", 32)


def case_of(work: str) -> Any:
    mean = make_case(SHAPE, torch.float32, "cpu")
    return mean if work == "mean" else stats_case(mean, work)


@pytest.fixture(params=["mean", *WORKS])
def reference(request: pytest.FixtureRequest) -> tuple[Any, Values, list[Tensor | None], dict[str, Peer]]:
    """A case, its values and the gradients of its leaves in float64, and its peers."""
    case = case_of(request.param)
    x, w = leaves = [leaf.detach().double().requires_grad_(bool(case.upstream)) for leaf in case.leaves]
    stats = stats_oracle(x, w, case.y) | {"loss": oracle(x, w, case.y.view(N, -1)[:, 0], reduction="none")}
    values = [stats[name] for name in case.names]
    if case.upstream:
        sum((up.double() * value).sum() for up, value in zip(case.upstream, values, strict=True)).backward()
    peers = PEERS if request.param == "mean" else STATS_PEERS
    return case, tuple(value.detach() for value in values), [leaf.grad for leaf in leaves], peers


def test_peers_that_run_here_and_the_exact_result_agree(reference: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)  # slow
    case, values, gradients, peers = reference
    exact, exact_gradients = case.exact()
    for value, true in zip(exact, values, strict=True):
        assert relative_error(value, true) < 2e-6
    for got, expected in zip(exact_gradients, gradients, strict=bool(case.upstream)):
        assert relative_error(got, expected) < 2e-6
    ran = set()
    for name, peer in peers.items():
        try:
            function = peer.build(case)
        except (UnsupportedError, ImportError):
            continue
        got = case.step(function)
        for value, true in zip(got, values, strict=True):
            mean = value.dim() == 0
            assert mean == (case.names == ("loss",)), name
            assert relative_error(value, true.mean() if mean else true) < 1e-5, name
        for leaf, expected in zip(case.leaves, gradients, strict=True):
            assert (leaf.grad is None) == (expected is None), name
            if expected is not None:
                assert relative_error(leaf.grad, expected) < 1e-5, name
        case.clear()
        ran.add(name)
    forward = {"forward-8"} if case.name == "mean" else set()
    trl = {"trl"} if find_spec("trl") and case.names == ("loss",) else set()
    assert {"lowtide", "naive", "checkpoint-8", *forward, *trl} <= ran


def test_the_limit_runs_the_gemms_that_the_case_needs_and_a_row_has_every_figure(reference: Any) -> None:
    case, _, gradients, peers = reference
    for rows in (N, 7):
        with FlopCounterMode(display=False) as counter:
            case.bare(rows)
        assert counter.get_total_flops() == case.flops == case.gemms * 2 * N * D * V
    row = row_of_case(peers["lowtide"], case)
    assert "failed" not in row
    assert row["share"] == pytest.approx(row["limit_ms"] / row["ms"])
    errors = {key.removesuffix("_error"): row[key] for key in row if key.endswith("_error")}
    assert set(errors) == {*case.names, *(("dx", "dw") if case.upstream else ())}
    assert max(errors.values()) < 1e-5
    assert row["peak_mib"] >= sum(g.numel() for g in gradients if g is not None) * 4 / 2**20
    assert case.w.grad is None
    json.dumps(row, allow_nan=False)
    assert f"{row['ms']:.2f}" in TABLE.line(row)


def row_of_case(peer: Peer, case: Case) -> Row:
    times = partial(time_side_by_side, device="cpu", warm=0, reps=1)
    return row_of(case, peer, N, case.exact(), times)


def measured(function: Callable[[], object], case: Case) -> Row:
    return row_of_case(Peer("peer", lambda _: lambda *_: function()), case)


def test_what_is_wrong_is_reported() -> None:
    case = case_of("logprob-entropy")
    naive = partial(case.call, STATS_PEERS["naive"].build(case))
    assert "shorter" in measured(lambda: naive()[:1], case)["failed"]
    broken = measured(lambda: (naive()[0], (case.x.sum(1) + case.w.sum()) * math.nan), case)
    assert broken["failed"] == "entropy, dx, dw: missing or not finite"
    wrong = measured(lambda: (naive()[0], 1.5 * naive()[1]), case)
    assert wrong["entropy_error"] > 0.1 < wrong["dw_error"]
    assert wrong["logprob_error"] < 1e-5
    mean = case_of("mean")
    naive = partial(mean.call, PEERS["naive"].build(mean))
    assert measured(naive, mean)["loss_error"] < 1e-5
    wrong = measured(lambda: N * naive()[0], mean)
    assert wrong["dw_error"] == pytest.approx(N - 1, rel=1e-3)


def test_mlps_compute_the_same_and_the_limit_runs_their_gemms() -> None:
    shape = Shape(name="small", batch=2, seq=8, D=16, F=24)
    case = make_mlp(shape, torch.float64, torch.device("cpu"))
    values = {}
    for name in ("lowtide-0", "lowtide-1", "naive"):
        layer = MLP_PEERS[name].build(case)
        values[name] = [*case.step(layer), *(leaf.grad for leaf in case.leaves)]
    for name in ("lowtide-0", "lowtide-1"):
        for got, expected in zip(values[name], values["naive"], strict=True):
            torch.testing.assert_close(got, expected)
    for gemms in case.sizes:
        with FlopCounterMode(display=False) as counter:
            case.bare(gemms)
        assert counter.get_total_flops() == gemms * 2 * 16 * 16 * 24
    assert case.flops == 9 * 2 * 16 * 16 * 24
