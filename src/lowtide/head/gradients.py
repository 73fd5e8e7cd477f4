"""The gradients of a head: their memory, and stored ones times the upstream gradient.

The upstream gradient is read on its device, and costs nothing if it is 1.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lowtide.graph import node
from lowtide.head.rows import slices

CPU_BLOCK = 2**20  # elements: what a mixed-dtype product on the CPU may hold in its wide dtype


def stored_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which a gradient waits for its upstream factor."""
    return torch.float32 if dtype == torch.float16 else dtype


def weight_lift(factor: Tensor, *others: Tensor | None) -> Tensor:
    """Return what fp16 hidden states times these factors are lifted by, so that they neither overflow nor underflow.

    It brings the largest product of the factors to 2**-2 where kernels have left 2**-14 beside them.
    """
    largest = factor.abs().amax() if factor.numel() else factor.new_ones(())
    for other in others:
        if other is not None:
            largest = largest * other.abs().amax()
    return (2.0**12 / largest.clamp(min=2.0**-100)).where(largest.isfinite(), 1)


@dataclass(kw_only=True)
class Gradients:
    """The gradients that a pass sums, each None if it is not needed."""

    input_ND: Tensor | None = None
    weight_VD: Tensor | None = None
    bias_V: Tensor | None = None

    def put_input(self, rows: slice | Tensor, wide_CD: Tensor) -> None:
        """Write rows of the input's gradient."""
        assert self.input_ND is not None
        if isinstance(rows, slice):
            self.input_ND[rows].copy_(wide_CD)
        else:
            self.input_ND.index_copy_(0, rows, wide_CD.to(self.input_ND.dtype))


def scaled(grad: Tensor, factor: Tensor, in_place: bool, kept_N: Tensor | None = None) -> Tensor:
    """Return ``grad * factor`` in the dtype of ``grad``, contiguous, the product itself taken in the factor's.

    The factor is a scalar, or one value for each row [...] of ``grad`` [..., D], flattened. The result shares no memory
    with ``grad`` unless it is ``in_place``. Rows where ``kept_N`` is False are 0, and stay so even if the factor is
    infinite or NaN.
    """
    if torch.compiler.is_compiling():
        rows = (*grad.shape[:-1], 1)
        product = (grad * factor.view(rows if factor.dim() else (1,) * grad.dim())).to(grad.dtype)
        return product if kept_N is None else product.where(kept_N.view(rows), 0)
    out, on_cpu, number = grad if in_place else torch.empty_like(grad), grad.device.type == "cpu", None
    if factor.dim() == 0 and on_cpu and type(grad) is Tensor:  # a FakeTensor holds no number
        number = factor.item()  # which keeps its own precision, a 0-d tensor would be rounded to grad's
    if kept_N is not None and (number is None or not math.isfinite(number)):
        number, factor = None, factor.where(kept_N, 1)
    if number is not None:
        if number != 1:
            torch.mul(grad, number, out=out)
        elif not in_place:
            out.copy_(grad)
    elif in_place and grad.is_cuda:
        from lowtide.head.kernels.elementwise import scale_

        scale_(grad, factor.contiguous())
    else:
        N, D = shape = factor.numel(), grad.shape[-1] if factor.dim() else grad.numel()
        for part in slices(N, CPU_BLOCK // max(1, D) if on_cpu else N):
            torch.mul(grad.view(shape)[part], factor.view(N, 1)[part], out=out.view(shape)[part])
    return out


def with_trained_scale(
    input: Tensor, linear_bias: Tensor | None, of_input: Tensor, of_bias: Tensor
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return hidden states, bias and logit scale with which the scale gets its gradient.

    With m the scale and g the logits' gradient, ``dX = m g W`` and ``db = m sum g``: the scale's own gradient, ``sum_nv
    g_nv (x_n w_v + b_v)``, is ``(sum X dX + sum b db) / m``, and no number of the logits is needed for it. Half
    precision would lose it where a GradScaler's factor takes dX out of fp16's range, or with the few numbers of a bias:
    these are copied to float32. ``of_input`` and ``of_bias`` are the scale, which get the gradient of each part.
    """
    if input.dtype == torch.float16:
        input = input.float()
    if linear_bias is not None and linear_bias.dtype.itemsize < 4:
        linear_bias = linear_bias.float()
    carry: Any = _CARRIES_SCALE.apply
    linear_bias = None if linear_bias is None else carry(linear_bias, of_bias)
    return carry(input, of_input), linear_bias, _not_zero(of_input.detach())


def _not_zero(scale: Tensor) -> Tensor:
    """Return a scale to divide by: in place of 0 a number with which all logits are as good as 0."""
    scale = scale.to(torch.promote_types(scale.dtype, torch.float32))
    return scale.where(scale != 0, 2.0**-64)  # torch.compile(dynamic=True) would make a variable of a global number


def _pass_on(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
    """Pass on a tensor that is scaled later."""
    ctx.save_for_backward(x, scale)
    return x.view_as(x)


def _of_scale(ctx: Any, upstream: Tensor) -> Any:
    """Return the scale's gradient from the tensor's."""
    x, scale = ctx.saved_tensors
    # what counts for nothing may be NaN, or a bias -inf, and times 0 that is not 0
    product = (upstream.to(torch.promote_types(x.dtype, torch.float32)) * x).where(upstream != 0, 0).sum()
    divisor = _not_zero(scale)
    of_scale = (product.to(divisor.device) / divisor).to(scale.dtype)
    return (upstream if ctx.needs_input_grad[0] else None, of_scale), (x, scale)


_CARRIES_SCALE = node("CarriesScale", "a trained logit_scale", _pass_on, _of_scale)
