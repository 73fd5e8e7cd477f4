"""Triton kernels of what is between the GEMMs, one pass over memory each. Imported where they run.

They compute in float32 (float64 for float64). Both activations are ``a sigmoid(w(a))``: SiLU with ``w = a``, GELU's
tanh approximation with ``w = 2 sqrt(2 / pi) (a + 0.044715 a^3)``, as 1 + tanh(z) is 2 sigmoid(2 z), which does not
cancel. So with ``s = sigmoid(w)`` either derivative is ``s (1 + (1 - s) a w')``. An element's inputs are read before
its results are written. F intermediate size, D hidden size.
"""

import triton
import triton.language as tl
from torch import Tensor, float64

from lowtide.kernel_launch import Launcher

_TWO_ROOTS = tl.constexpr(1.5957691216057308)  # 2 sqrt(2 / pi)
_CUBIC = tl.constexpr(0.044715)


@triton.jit  # type: ignore[untyped-decorator]
def _sigmoid(a, ACTIVATION: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return ``s = sigmoid(w(a))`` and ``a w'(a)``."""
    w = a
    bend = a
    if ACTIVATION == "gelu_tanh":
        # s is 0 or 1 outside, where a^3 would not stay finite; tl.clamp keeps NaN, but has no code for float64
        c = tl.where(a > 64.0, 64.0, tl.where(a < -64.0, -64.0, a))
        w = _TWO_ROOTS * c * (1.0 + _CUBIC * c * c)
        bend = _TWO_ROOTS * c * (1.0 + 3.0 * _CUBIC * c * c)
    return 1.0 / (1.0 + tl.exp(-w)), bend


@Launcher
@triton.jit  # type: ignore[untyped-decorator]
def gated(  # type: ignore[no-untyped-def]
    gate_ptr, up_ptr, out_ptr, n, ACTIVATION: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr
):
    """Write ``act(gate) * up``."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    a = tl.load(gate_ptr + at, mask=inside, other=0.0).to(WIDE)
    u = tl.load(up_ptr + at, mask=inside, other=0.0).to(WIDE)
    s, _ = _sigmoid(a, ACTIVATION)
    tl.store(out_ptr + at, (a * s * u).to(out_ptr.dtype.element_ty), mask=inside)


@Launcher
@triton.jit  # type: ignore[untyped-decorator]
def gated_backward(  # type: ignore[no-untyped-def]
    gate_ptr, up_ptr, dp_ptr, dgate_ptr, dup_ptr, p_ptr, n,
    ACTIVATION: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the gradients of gate and up, and ``act(gate) * up``: those whose pointer is not None."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    a = tl.load(gate_ptr + at, mask=inside, other=0.0).to(WIDE)
    u = tl.load(up_ptr + at, mask=inside, other=0.0).to(WIDE)
    dp = tl.load(dp_ptr + at, mask=inside, other=0.0).to(WIDE)
    s, bend = _sigmoid(a, ACTIVATION)
    act = a * s
    if dgate_ptr is not None:
        dgate = dp * u * (s * (1.0 + (1.0 - s) * bend))
        tl.store(dgate_ptr + at, dgate.to(dgate_ptr.dtype.element_ty), mask=inside)
    if dup_ptr is not None:
        tl.store(dup_ptr + at, (dp * act).to(dup_ptr.dtype.element_ty), mask=inside)
    if p_ptr is not None:
        tl.store(p_ptr + at, (act * u).to(p_ptr.dtype.element_ty), mask=inside)


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
def gated_rows(  # type: ignore[no-untyped-def]
    gate_up_ptr, bias_ptr, expert_ptr, out_ptr, E, F, gate_first, up_first, step,
    ACTIVATION: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr, SHIFT: tl.constexpr, WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write ``h = act(g) (u + SHIFT)`` of one of S rows."""
    row = tl.program_id(0).to(tl.int64)
    expert = tl.minimum(tl.load(expert_ptr + row), E - 1).to(tl.int64) * 2 * F
    for start in range(0, F, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < F
        g, u, _, _ = _gate_and_up(
            gate_up_ptr + row * 2 * F, bias_ptr, expert, gate_first + column * step, up_first + column * step, inside,
            LIMIT, WIDE,
        )  # fmt: skip
        s, _ = _sigmoid(g * ALPHA, ACTIVATION)
        tl.store(out_ptr + row * F + column, (g * s * (u + SHIFT)).to(out_ptr.dtype.element_ty), mask=inside)


@Launcher
@triton.jit  # type: ignore[untyped-decorator]
def gated_rows_backward(  # type: ignore[no-untyped-def]
    gate_up_ptr, bias_ptr, expert_ptr, grad_ptr, factor_ptr, of_inner_ptr, product_ptr, dots_ptr, E, F, gate_first,
    up_first, step, ACTIVATION: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr, SHIFT: tl.constexpr,
    WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write what backward needs of one of S rows: what is not None."""
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
        s, bend = _sigmoid(g * ALPHA, ACTIVATION)
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
def combine(  # type: ignore[no-untyped-def]
    rows_ptr, inverse_ptr, id_ptr, factor_ptr, bias_ptr, out_ptr, E, K, D, WIDE: tl.constexpr, BLOCK: tl.constexpr
):
    """Write a part of the sum of one token's experts."""
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


def wide(tensor: Tensor) -> tl.dtype:
    """Return the dtype that a kernel computes in."""
    return tl.float64 if tensor.dtype == float64 else tl.float32
