"""Ignored tokens on Hopper: the kernels end before them, nothing waits, and results are those of the others alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from gpu.conftest import HOPPER, ON_GPU, no_waits
from lowtide import HeadOptions, linear_cross_entropy, linear_logprobs
from lowtide.head import nodes
from lowtide.head.kernels import gradient_gemms_hopper as gemms
from lowtide.head.kernels.exp_logits import ExpRows
from lowtide.head.kernels.gemm import ALL, Used
from lowtide.head.kernels.hopper import exp_logits_hopper
from promises import promise
from support import every_pair, relative_error

pytestmark = [*ON_GPU, HOPPER, promise("ignored", "kernels")]
NARROW, NAN = torch.bfloat16, float("nan")
SIZES = [(1000, 2304, 5003), (5, 264, 40), (513, 896, 20000)]  # C, D, V
# rows that are valid, the chunk's first
COUNTS = [(None, 0), (0, 0), (77, 0), (128, 0), (1000, 800), (100, 500)]


def operands(C: int, D: int, V: int, number: int | None, first: int) -> tuple[Tensor, Tensor, Tensor, Used, int]:
    """Return E, whose rows of no token are NaN but for zeros up to a step of 64, W and S; and what is used."""
    torch.manual_seed(C)
    rows = C if number is None else max(0, min(C, number - first))
    e = torch.full((C, -(-V // 64) * 64), NAN, device="cuda", dtype=NARROW)[:, :V]
    e[: -(-rows // 64) * 64] = 0
    e[:rows] = (3 * torch.randn(rows, V, device="cuda")).exp() / 100
    w, s = (torch.randn(n, D, device="cuda").to(NARROW) for n in (V, C))
    used = None if number is None else torch.tensor([number], device="cuda", dtype=torch.int32)
    return e, w, s, Used(used, first), rows


@every_pair(count=COUNTS, size=SIZES, room=[0, None])
def test_input_gradient_of_the_rows_that_count(
    size: tuple[int, int, int], count: tuple[int | None, int], room: int | None
) -> None:
    (C, D, V), inf = size, float("inf")
    e, w, _, used, rows = operands(*size, *count)
    parts, order = gemms.room_for(e.device, room), torch.randperm(C, device="cuda")
    g, y = torch.rand(C, device="cuda"), torch.randint(0, V, (C,), device="cuda", dtype=torch.int32)
    g[::5] = 0
    rest = torch.randn(C, device="cuda")
    product = e[:rows].double() @ w.double()
    for out in (torch.full((C, D), NAN, device="cuda", dtype=dtype) for dtype in (torch.float32, NARROW)):
        plain = gemms.InputRows(out, D, order)
        want, ends = product, plain
        if out.dtype == NARROW:
            ends = plain._replace(s=g, y=y, rest=rest, w=w, w_stride=w.stride(0))
            want = g[:rows, None].double() * (product + rest[:rows, None] * w[y[:rows].long()].double())
        gemms.input_grad(e, w, ends, parts, used)
        assert out[order[rows:]].isnan().all()  # nothing is written there
        assert relative_error(out[order[:rows]], want) < (3e-3 if out.dtype == NARROW else 2e-4) or not rows
        again = torch.full_like(out, inf)
        gemms.input_grad(e, w, ends._replace(out=again), parts, used)
        assert torch.equal(again[order[:rows]], out[order[:rows]])
    total = torch.randn(C, D, device="cuda")
    want = total[:rows].double() + product
    gemms.input_grad(e, w, gemms.InputRows(total, D, before=total), parts, used)
    assert relative_error(total[:rows], want) < 2e-4 or not rows


@every_pair(count=COUNTS, size=SIZES, dtype=[NARROW, torch.float32], add=[False, True])
def test_weight_gradient_over_the_rows_that_count(
    size: tuple[int, int, int], count: tuple[int | None, int], dtype: torch.dtype, add: bool
) -> None:
    e, w, s, used, rows = operands(*size, *count)
    before = w.to(dtype)
    want = e[:rows].double().T @ s[:rows].double() + before.double() * add
    outs = [before.clone() if add else torch.full_like(before, NAN) for _ in range(2)]
    for out in outs:
        gemms.weight_grad(e, s, out, used, add=add)
    assert torch.equal(*outs)
    if rows:
        assert relative_error(outs[0], want) < (3e-3 if dtype == NARROW else 1e-4)
    else:
        assert torch.equal(outs[0], before * add)


@pytest.mark.parametrize(("number", "first", "rows"), [(100, 0, 128), (100, 128, 0), (300, 100, 256), (999, 0, 513)])
def test_exponentials_of_tiles_that_count(number: int, first: int, rows: int) -> None:
    torch.manual_seed(0)
    x, w = (torch.randn(n, 128, device="cuda").to(NARROW) for n in (513, 1024))
    y, reference = torch.randint(0, 1024, (513,), device="cuda", dtype=torch.int32), torch.rand(513, device="cuda")
    found = []
    for used in (ALL, Used(torch.tensor([number], device="cuda", dtype=torch.int32), first)):
        e, sums = torch.full((513, 1024), NAN, device="cuda", dtype=NARROW), torch.full((513, 4), NAN, device="cuda")
        exp_logits_hopper(x, w, e, ExpRows(reference, y, None, 0, sums, 4), used=used)
        found.append((e, sums))
    for whole, got in zip(*found, strict=True):
        assert torch.equal(got[:rows], whole[:rows])
        assert got[rows:].isnan().all()


CALLS: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "plain": (linear_cross_entropy, {}, {}),
    "chunks": (linear_cross_entropy, {}, {"workspace_mib": 60}),
    "float32": (linear_cross_entropy, {}, {"workspace_mib": 60, "accumulate": "float32"}),
    "options": (linear_cross_entropy, {"label_smoothing": 0.1, "z_loss": 0.01, "logit_scale": 0.7}, {}),
    "capped": (linear_cross_entropy, {"softcap": 20.0}, {}),
    "none": (linear_cross_entropy, {"reduction": "none"}, {}),
    "blocks": (linear_cross_entropy, {"label_smoothing": 0.1}, {"workspace_mib": 12}),
    "recompute": (linear_cross_entropy, {"reduction": "sum"}, {"gradient": "recompute"}),
    "shift": (linear_cross_entropy, {"shift": True}, {}),
    "logprobs": (linear_logprobs, {}, {}),
}


OF_FEW = [(name, share) for name in ("plain", "none", "blocks") for share in (1.0, 0.02, 0.0)]


@pytest.mark.parametrize(("name", "share"), [*((name, 0.4) for name in CALLS), *OF_FEW])
def test_results_are_those_of_computing_them(name: str, share: float) -> None:
    function, kwargs, options = CALLS[name]
    torch.manual_seed(0)
    x = torch.randn(3, 700, 256, device="cuda").to(NARROW)
    w = (torch.randn(12000, 256, device="cuda") / 10).to(NARROW).requires_grad_()
    b = torch.randn(12000, device="cuda").to(NARROW).requires_grad_()
    y = torch.randint(0, 12000, (3, 700), device="cuda")
    y[torch.rand(3, 700, device="cuda") >= share] = -100
    scored = torch.cat((y[:, 1:], torch.full_like(y[:, :1], -100)), 1) if name == "shift" else y
    x = x.masked_fill(scored[..., None] == -100, NAN).requires_grad_()

    def call(ignored_tokens: str) -> list[Tensor]:
        given = HeadOptions(ignored_tokens=ignored_tokens, **options)  # type: ignore[arg-type]
        out = function(x, w, y, linear_bias=b, options=given, **kwargs)
        upstream = torch.linspace(0.1, 1, out.numel(), device="cuda").view(out.shape)
        return [out, *torch.autograd.grad(out, (x, w, b), upstream)]

    call("skip")
    with no_waits():
        got = call("skip")
    computed, again = call("compute"), call("skip")
    for one, other, same in zip(got, computed, again, strict=True):
        assert torch.equal(one.isnan(), other.isnan())
        assert torch.equal(one.nan_to_num(), same.nan_to_num())
        assert relative_error(one.nan_to_num(), other.nan_to_num()) < 4e-3  # as two roundings to bfloat16
    assert not got[1][scored == -100].any()


@promise("host")
def test_by_default_nothing_waits_and_after_some_calls_ignored_tokens_are_skipped() -> None:
    x, w = (torch.randn(n, 128, device="cuda").to(NARROW).requires_grad_() for n in (1502, 999))
    y = torch.randint(0, 999, (1502,), device="cuda")
    y[torch.rand(1502, device="cuda") < 0.5] = -100

    def call(way: str = "auto") -> list[Tensor]:
        loss = linear_cross_entropy(x, w, y, options=HeadOptions(ignored_tokens=way))  # type: ignore[arg-type]
        return [loss, *torch.autograd.grad(loss, (x, w))]

    ways = [call(way) for way in ("skip", "compute")]
    call()
    for _ in range(20):
        with no_waits():
            found = call()
        assert any(all(map(torch.equal, found, want)) for want in ways)
    assert all(map(torch.equal, found, ways[0]))


def test_evaluation_before_training() -> None:
    """In inference mode: training writes to the same tensor of counts."""
    x, w = (torch.randn(n, 128, device="cuda").to(NARROW).requires_grad_() for n in (700, 1003))
    y = torch.randint(0, 1003, (700,), device="cuda")
    nodes._shares.clear()
    with torch.inference_mode():
        expected = linear_cross_entropy(x, w, y)
    for _ in range(8):
        loss = linear_cross_entropy(x, w, y)
        loss.backward()
        torch.testing.assert_close(loss.detach(), expected.clone())
