"""The operations between the GEMMs: act(gate) * up and its derivatives, by kernels or in plain PyTorch.

Both compute in float32 (float64 for float64 operands) and round once, to the dtype of the GEMMs' operands.
"""

from collections.abc import Iterator, Sequence
from functools import cache

import torch
from torch import Tensor

from lowtide.kernel_launch import blocks_of, why_no_triton

BLOCK = 4096  # elements of a program of the kernels
PIECE = 2**16  # elements: plain PyTorch holds about seven such temporaries in float32, in the CPU's caches
_TWO_ROOTS = 1.5957691216057308  # 2 sqrt(2 / pi)
_CUBIC = 0.044715


def gated(gate: Tensor, up: Tensor, activation: str, out: Tensor) -> None:
    """Write ``act(gate) * up`` into ``out``, of any dtype, which may be one of the two; all contiguous [C, F]."""
    if has_kernels(gate.device):
        _launch("gated", gate, up, out, activation=activation)
        return
    for rows in pieces(gate.shape, gate):
        out[rows] = act(widened(gate[rows]), activation).mul_(up[rows])


def gated_backward(gate: Tensor, up: Tensor, grad: Tensor, activation: str, *into: Tensor | None) -> None:
    """Write the gradients of gate and up, and ``act(gate) * up`` itself, from the product's gradient ``grad``.

    Each is written to its tensor of ``into``, unless that is None; it may be any one of the inputs. All contiguous
    [C, F], of one dtype.
    """
    if has_kernels(gate.device):
        _launch("gated_backward", gate, up, grad, *into, activation=activation)
        return
    gate_grad, up_grad, product = into
    for rows in pieces(gate.shape, gate):
        a, u, dp = (widened(t[rows]) for t in (gate, up, grad))
        activated = act(a, activation)
        of_gate = None if gate_grad is None else act_backward(dp * u, a, activation)
        of_up = None if up_grad is None else dp * activated
        for place, value in ((gate_grad, of_gate), (up_grad, of_up), (product, activated.mul_(u))):  # may be inputs
            if place is not None and value is not None:
                place[rows] = value


def _launch(kernel: str, gate: Tensor, *others: Tensor | None, activation: str) -> None:
    from lowtide.mlp import kernels

    if n := gate.numel():
        getattr(kernels, kernel)[(blocks_of(n, BLOCK),)](
            gate, *others, n, ACTIVATION=activation, WIDE=kernels.wide(gate), BLOCK=BLOCK, num_warps=8
        )


@cache
def has_kernels(device: torch.device) -> bool:
    """Return whether kernels compute these operations on ``device``."""
    return why_no_triton(device) is None


def act(a: Tensor, activation: str) -> Tensor:
    """Return the activation of ``a``, a new tensor."""
    if activation == "silu":
        result: Tensor = torch.ops.aten.silu.default(a)  # not F.silu, which a user may have replaced since the forward
        return result
    s, _ = _gelu_sigmoid(a)
    return s.mul_(a)


def act_backward(grad: Tensor, a: Tensor, activation: str) -> Tensor:
    """Return ``grad`` times the activation's derivative at ``a``."""
    if activation == "silu":
        result: Tensor = torch.ops.aten.silu_backward.default(grad, a)
        return result
    s, bend = _gelu_sigmoid(a)
    return (1 - s).mul_(bend).add_(1).mul_(s).mul_(grad)


def _gelu_sigmoid(a: Tensor) -> tuple[Tensor, Tensor]:
    """Return s and b: GELU's tanh approximation is ``a s``, its derivative ``s (1 + (1 - s) b)``.

    PyTorch's own adds 1 to a tanh, which cancels, and its derivative is NaN where a^3 overflows.
    """
    c = a.clamp(-64, 64)  # s is 0 or 1 outside
    square = c.square()
    bend = (3 * _TWO_ROOTS * _CUBIC * square).add_(_TWO_ROOTS).mul_(c)
    return square.mul_(_TWO_ROOTS * _CUBIC).add_(_TWO_ROOTS).mul_(c).sigmoid_(), bend


def pieces(shape: Sequence[int], like: Tensor) -> Iterator[slice]:
    """Yield rows of a matrix of this ``shape``: where ``like`` is on a CPU, few enough for its caches."""
    rows, columns = shape
    step = max(1, PIECE // max(1, columns) if like.is_cpu else rows)
    return (slice(start, start + step) for start in range(0, rows, step))


def widened(tensor: Tensor) -> Tensor:
    """Return a tensor in the dtype that these operations compute in: itself, or a copy."""
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()
