"""What is between the experts' GEMMs, one pass over memory each, in float32 (float64 for float64) inside.

A program takes one of the S rows, or a part of one of the T tokens. F intermediate size, D hidden size.
"""

import math

import triton
import triton.language as tl
from torch import Tensor

from lowtide.kernel_launch import Launcher, blocks_of, power_of_2
from lowtide.mlp.call import JOINED
from lowtide.mlp.groups import Inner, Pairs
from lowtide.mlp.kernels.gated import sigmoid, wide

BLOCK = 1024  # columns
WARPS = 4


@triton.jit  # type: ignore[untyped-decorator]
def _gate_and_up(  # type: ignore[no-untyped-def]
    gate_up_ptr, bias_ptr, expert, gate_at, up_at, inside, LIMIT: tl.constexpr, WIDE: tl.constexpr
):
    """Return g and u within their limits, and where each passes a gradient on."""
    g = tl.load(gate_up_ptr + gate_at, mask=inside, other=0.0).to(WIDE)
    u = tl.load(gate_up_ptr + up_at, mask=inside, other=0.0).to(WIDE)
    if bias_ptr is not None:
        g += tl.load(bias_ptr + expert + gate_at, mask=inside, other=0.0).to(WIDE)
        u += tl.load(bias_ptr + expert + up_at, mask=inside, other=0.0).to(WIDE)
    g_stops = inside
    u_stops = inside
    if LIMIT is not None:
        g_stops = g > LIMIT  # comparisons keep NaN
        u_stops = (u > LIMIT) | (u < -LIMIT)
        g = tl.where(g_stops, LIMIT, g)
        u = tl.where(u > LIMIT, LIMIT, tl.where(u < -LIMIT, -LIMIT, u))
    return g, u, g_stops, u_stops


@Launcher
@triton.jit  # type: ignore[untyped-decorator]
def _gated_rows(  # type: ignore[no-untyped-def]
    gate_up_ptr, bias_ptr, expert_ptr, out_ptr, E, F, gate_first, up_first, step,
    ACTIVATION: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr, SHIFT: tl.constexpr, WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    expert = tl.minimum(tl.load(expert_ptr + row), E - 1).to(tl.int64) * 2 * F
    for start in range(0, F, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < F
        g, u, _, _ = _gate_and_up(
            gate_up_ptr + row * 2 * F, bias_ptr, expert, gate_first + column * step, up_first + column * step, inside,
            LIMIT, WIDE,
        )  # fmt: skip
        s, _ = sigmoid(g * ALPHA, ACTIVATION)
        tl.store(out_ptr + row * F + column, (g * s * (u + SHIFT)).to(out_ptr.dtype.element_ty), mask=inside)


@Launcher
@triton.jit  # type: ignore[untyped-decorator]
def _gated_rows_backward(  # type: ignore[no-untyped-def]
    gate_up_ptr, bias_ptr, expert_ptr, grad_ptr, factor_ptr, of_inner_ptr, product_ptr, dots_ptr, E, F, gate_first,
    up_first, step, ACTIVATION: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr, SHIFT: tl.constexpr,
    WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    expert = tl.minimum(tl.load(expert_ptr + row), E - 1).to(tl.int64) * 2 * F
    w = tl.load(factor_ptr + row).to(WIDE)
    dots = tl.zeros((BLOCK,), WIDE)
    for start in range(0, F, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < F
        gate_at = gate_first + column * step
        up_at = up_first + column * step
        g, u, g_stops, u_stops = _gate_and_up(
            gate_up_ptr + row * 2 * F, bias_ptr, expert, gate_at, up_at, inside, LIMIT, WIDE
        )
        dh = tl.load(grad_ptr + row * F + column, mask=inside, other=0.0).to(WIDE)
        s, bend = sigmoid(g * ALPHA, ACTIVATION)
        act = g * s
        shifted = u + SHIFT
        if dots_ptr is not None:
            dots += tl.where(inside, act * shifted * dh, 0.0)
        dh = dh * w
        if product_ptr is not None:
            tl.store(product_ptr + row * F + column, (act * shifted * w).to(product_ptr.dtype.element_ty), mask=inside)
        if of_inner_ptr is not None:
            of_gate = dh * shifted * (s * (1.0 + (1.0 - s) * bend))
            of_up = dh * act
            if LIMIT is not None:
                of_gate = tl.where(g_stops, 0.0, of_gate)
                of_up = tl.where(u_stops, 0.0, of_up)
            into = of_inner_ptr + row * 2 * F
            tl.store(into + gate_at, of_gate.to(of_inner_ptr.dtype.element_ty), mask=inside)
            tl.store(into + up_at, of_up.to(of_inner_ptr.dtype.element_ty), mask=inside)
    if dots_ptr is not None:
        tl.store(dots_ptr + row, tl.sum(dots, 0))


@Launcher
@triton.jit  # type: ignore[untyped-decorator]
def _combine(  # type: ignore[no-untyped-def]
    rows_ptr, inverse_ptr, id_ptr, factor_ptr, bias_ptr, out_ptr, E, K, D, WIDE: tl.constexpr, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < D
    total = tl.zeros((BLOCK,), WIDE)
    for k in range(K):
        pair = token * K + k
        row = tl.load(inverse_ptr + pair).to(tl.int64)
        expert = tl.load(id_ptr + pair)
        here = inside & (expert + tl.zeros_like(column) < E)
        value = tl.load(rows_ptr + row * D + column, mask=here, other=0.0).to(WIDE)
        if bias_ptr is not None:
            value += tl.load(bias_ptr + expert * D + column, mask=here, other=0.0).to(WIDE)
        if factor_ptr is not None:
            value = tl.where(here, value * tl.load(factor_ptr + pair).to(WIDE), 0.0)
        total += value
    tl.store(out_ptr + token * D + column, total.to(out_ptr.dtype.element_ty), mask=inside)


def gated_rows(inner: Inner, out: Tensor) -> None:
    """As `lowtide.mlp.experts.gated_rows`."""
    S, F = out.shape
    if out.numel():
        _gated_rows[(S,)](
            inner.gate_up, inner.bias, inner.expert, out, inner.experts, F, *_places(inner, F), **_constants(inner, F)
        )


def gated_rows_backward(
    inner: Inner, grad: Tensor, factors: Tensor, into: tuple[Tensor | None, Tensor | None, Tensor | None]
) -> None:
    """As `lowtide.mlp.experts.gated_rows_backward`: an element's inputs are read before its results are written."""
    S, F = grad.shape
    if grad.numel():
        _gated_rows_backward[(S,)](
            inner.gate_up, inner.bias, inner.expert, grad, factors, *into, inner.experts, F, *_places(inner, F),
            **_constants(inner, F),
        )  # fmt: skip


def combine(rows: Tensor, pairs: Pairs, factors: Tensor | None, bias: Tensor | None, out: Tensor) -> None:
    """As `lowtide.mlp.experts.combined`, into ``out`` [T, D]."""
    (T, K), D = pairs.ids.shape, out.shape[1]
    if out.numel():
        block = min(BLOCK, power_of_2(D))
        _combine[(T, blocks_of(D, block))](
            rows, pairs.inverse, pairs.ids, factors, bias, out, pairs.experts, K, D, WIDE=wide(rows), BLOCK=block,
            num_warps=WARPS,
        )  # fmt: skip


def _places(inner: Inner, F: int) -> tuple[int, int, int]:
    """Return the columns of the first gate and the first up, and the step from each to the next."""
    gate, up = JOINED[inner.form.joined](F)
    return gate.start, up.start, gate.step or 1


def _constants(inner: Inner, F: int) -> dict[str, object]:
    form = inner.form
    return {
        "ACTIVATION": form.activation, "LIMIT": None if math.isinf(form.limit) else form.limit, "ALPHA": form.alpha,
        "SHIFT": form.shift, "WIDE": wide(inner.gate_up), "BLOCK": min(BLOCK, power_of_2(F)), "num_warps": WARPS,
    }  # fmt: skip
