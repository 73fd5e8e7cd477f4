"""act(gate) * up and its derivatives, one pass over memory each, in float32 (float64 for float64) inside.

Both activations are ``a sigmoid(w(a))``: SiLU with ``w = a``, GELU's tanh approximation with
``w = 2 sqrt(2 / pi) (a + 0.044715 a^3)``, as 1 + tanh(z) is 2 sigmoid(2 z), which does not cancel. So with
``s = sigmoid(w)`` either derivative is ``s (1 + (1 - s) a w')``.
"""

import triton
import triton.language as tl
from torch import Tensor, float64

from lowtide.kernel_launch import Launcher, blocks_of

BLOCK = 4096
WARPS = 8

_TWO_ROOTS = tl.constexpr(1.5957691216057308)  # 2 sqrt(2 / pi)
_CUBIC = tl.constexpr(0.044715)


@triton.jit  # type: ignore[untyped-decorator]
def sigmoid(a, ACTIVATION: tl.constexpr):  # type: ignore[no-untyped-def]
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
def _gated(  # type: ignore[no-untyped-def]
    gate_ptr, up_ptr, out_ptr, n, ACTIVATION: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    a = tl.load(gate_ptr + at, mask=inside, other=0.0).to(WIDE)
    u = tl.load(up_ptr + at, mask=inside, other=0.0).to(WIDE)
    s, _ = sigmoid(a, ACTIVATION)
    tl.store(out_ptr + at, (a * s * u).to(out_ptr.dtype.element_ty), mask=inside)


@Launcher
@triton.jit  # type: ignore[untyped-decorator]
def _gated_backward(  # type: ignore[no-untyped-def]
    gate_ptr, up_ptr, dp_ptr, dgate_ptr, dup_ptr, p_ptr, n,
    ACTIVATION: tl.constexpr, WIDE: tl.constexpr, GATE: tl.constexpr, UP: tl.constexpr, PRODUCT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    a = tl.load(gate_ptr + at, mask=inside, other=0.0).to(WIDE)
    u = tl.load(up_ptr + at, mask=inside, other=0.0).to(WIDE)
    dp = tl.load(dp_ptr + at, mask=inside, other=0.0).to(WIDE)
    s, bend = sigmoid(a, ACTIVATION)
    act = a * s
    if GATE:
        dgate = dp * u * (s * (1.0 + (1.0 - s) * bend))
        tl.store(dgate_ptr + at, dgate.to(dgate_ptr.dtype.element_ty), mask=inside)
    if UP:
        tl.store(dup_ptr + at, (dp * act).to(dup_ptr.dtype.element_ty), mask=inside)
    if PRODUCT:
        tl.store(p_ptr + at, (act * u).to(p_ptr.dtype.element_ty), mask=inside)


def gated(gate: Tensor, up: Tensor, activation: str, out: Tensor) -> None:
    """As `lowtide.mlp.elementwise.gated`."""
    n = gate.numel()
    if n:
        _gated[(blocks_of(n, BLOCK),)](
            gate, up, out, n, ACTIVATION=activation, WIDE=wide(gate), BLOCK=BLOCK, num_warps=WARPS
        )


def gated_backward(gate: Tensor, up: Tensor, grad: Tensor, activation: str, *into: Tensor | None) -> None:
    """As `lowtide.mlp.elementwise.gated_backward`: an element's inputs are read before its results are written."""
    n = gate.numel()
    gate_grad, up_grad, product = into
    if n:
        _gated_backward[(blocks_of(n, BLOCK),)](
            gate, up, grad, gate if gate_grad is None else gate_grad, up if up_grad is None else up_grad,
            grad if product is None else product, n, ACTIVATION=activation, WIDE=wide(gate),
            GATE=gate_grad is not None, UP=up_grad is not None, PRODUCT=product is not None, BLOCK=BLOCK,
            num_warps=WARPS,
        )  # fmt: skip


def wide(tensor: Tensor) -> tl.dtype:
    """Return the dtype that a kernel computes in."""
    return tl.float64 if tensor.dtype == float64 else tl.float32
