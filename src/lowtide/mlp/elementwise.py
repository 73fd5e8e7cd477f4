"""What stands between the GEMMs: act(gate) * up and its derivatives, by kernels or in plain PyTorch.

Inside both compute in float32 (float64 for float64 operands) and round once: gate and up are what the GEMMs wrote,
and the products and gradients are what the next ones read.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from lowtide.head.backends import why_no_triton

PIECE = 2**18  # elements: temporaries of plain PyTorch stay in the CPU's caches
_TWO_ROOTS = 1.5957691216057308  # 2 sqrt(2 / pi)
_CUBIC = 0.044715


def gated(gate: Tensor, up: Tensor, activation: str, out: Tensor) -> None:
    """Write ``act(gate) * up`` into ``out``, which may be one of the two; all contiguous [C, F] of one dtype."""
    if why_no_triton(gate.device) is None:
        from lowtide.mlp.kernels import gated as kernels

        kernels.gated(gate, up, activation, out)
        return
    for part in _pieces(gate):
        a = gate[part].to(_wide(gate))
        s, _ = _sigmoid(a, activation)
        out[part] = s.mul_(a).mul_(up[part])


def gated_backward(
    gate: Tensor,
    up: Tensor,
    grad: Tensor,
    activation: str,
    gate_grad: Tensor | None,
    up_grad: Tensor | None,
    product: Tensor | None,
) -> None:
    """Write the gradients of gate and up, and ``act(gate) * up`` itself, from the product's gradient ``grad``.

    Each goes where it is told, None for nowhere, which may be over any one of the inputs. All contiguous [C, F].
    """
    if why_no_triton(gate.device) is None:
        from lowtide.mlp.kernels import gated as kernels

        kernels.gated_backward(gate, up, grad, activation, gate_grad, up_grad, product)
        return
    for part in _pieces(gate):
        a, u, dp = (t[part].to(_wide(gate)) for t in (gate, up, grad))
        s, bend = _sigmoid(a, activation)
        act = a * s
        of_gate = None if gate_grad is None else (1 - s).mul_(bend).add_(1).mul_(s).mul_(u).mul_(dp)
        of_up = None if up_grad is None else dp * act
        p = None if product is None else act.mul_(u)
        for into, value in ((gate_grad, of_gate), (up_grad, of_up), (product, p)):
            if into is not None and value is not None:
                into[part] = value


def _sigmoid(a: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """Return s and b, with which the activation is ``a s`` and its derivative ``s (1 + (1 - s) b)``."""
    if activation == "silu":
        return torch.sigmoid(a), a
    c = a.clamp(-64, 64)  # s is 0 or 1 outside, where a^3 would not stay finite
    square = c.square()
    bend = (3 * _TWO_ROOTS * _CUBIC * square).add_(_TWO_ROOTS).mul_(c)
    return square.mul_(_TWO_ROOTS * _CUBIC).add_(_TWO_ROOTS).mul_(c).sigmoid_(), bend


def _pieces(rows_CF: Tensor) -> Iterator[slice]:
    C, F = rows_CF.shape
    step = max(1, PIECE // max(1, F)) if rows_CF.device.type == "cpu" else max(1, C)
    for start in range(0, C, step):
        yield slice(start, min(start + step, C))


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32
