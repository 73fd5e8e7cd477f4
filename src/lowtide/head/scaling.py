"""Stored gradients times the upstream gradient, which is read where it lies and costs nothing where it is 1."""

from typing import Any

import torch
from torch import Tensor

CPU_BLOCK = 2**20  # elements: what a mixed-dtype product on the CPU may hold in its wide dtype


def scaled(grad: Tensor, factor: Tensor, in_place: bool) -> Tensor:
    """Return ``grad * factor`` in the dtype of ``grad``, the product itself taken in the factor's.

    Args:
        grad: A stored gradient, contiguous.
        factor: Scalar, or one value for each row [...] of ``grad`` [..., D], flattened.
        in_place: Whether ``grad`` may be overwritten; else the result shares no memory with it.
    """
    if torch.compiler.is_compiling():
        shape = (*grad.shape[:-1], 1) if factor.dim() else (1,) * grad.dim()
        return (grad * factor.view(shape)).to(grad.dtype)
    out = grad if in_place else torch.empty_like(grad)
    if factor.dim() == 0:
        _scale_all(grad, factor, out)
    else:
        shape = (factor.numel(), grad.shape[-1])
        _scale_rows(grad.view(shape), factor, out.view(shape))
    return out


def _scale_all(grad: Tensor, factor: Tensor, out: Tensor) -> None:
    if grad.device.type == "cpu" and type(grad) is Tensor:  # a FakeTensor holds no number
        value = factor.item()  # a number keeps its own precision, a 0-d tensor would be rounded to grad's
        if value != 1:
            torch.mul(grad, value, out=out)
        elif out is not grad:
            out.copy_(grad)
        return
    if out is grad and grad.is_cuda:
        from lowtide.head.kernels import scale

        scale.scale_(grad, factor)
        return
    torch.mul(grad, factor.view((1,) * grad.dim()), out=out)


def _scale_rows(grad_ND: Tensor, factor_N: Tensor, out_ND: Tensor) -> None:
    N, D = grad_ND.shape
    step = max(1, CPU_BLOCK // max(1, D)) if grad_ND.device.type == "cpu" else max(1, N)
    for start in range(0, N, step):
        part = slice(start, start + step)
        torch.mul(grad_ND[part], factor_N[part, None], out=out_ND[part])


def scaled_rows(x: Tensor, scale: Tensor) -> Tensor:
    """Return ``x * scale`` for a 0-d ``scale`` that is trained: what has no gradient does not reach the scale's.

    A hidden state that counts for nothing may be NaN, and NaN times 0 is not 0.
    """
    product: Tensor = _ScaledRows.apply(x, scale)  # type: ignore[no-untyped-call]
    return product


class _ScaledRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, scale)
        return x * scale

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, Tensor]:
        x, scale = ctx.saved_tensors
        product = upstream.to(scale.dtype) * x
        return upstream * scale, product.where(upstream != 0, 0).sum()
