"""Gradients that forward stores: with what factor, in which dtype, and what backward makes of them.

A scalar loss's upstream gradient is one factor of all of them; with a value for each token and a frozen head, one
factor for each row of the input's.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowtide.errors import UnsupportedError
from lowtide.head.graph import is_last_backward
from lowtide.head.scaling import scaled
from lowtide.head.schedules import Gradients

FP16_TOP = 2.0**14  # where an fp16 weight gradient's largest entry is put, a factor of four below the largest number


class StoredGradients(NamedTuple):
    """What an operator that stores gradients returns of them; what was not asked for is empty."""

    input_grad: Tensor
    weight_grad: Tensor
    bias_grad: Tensor  # wide
    input_factor: Tensor  # scalar, or [N] with a value for each token: what input_grad is still to be multiplied with
    weight_factor: Tensor  # scalar: the same for weight_grad


def lacks_denominator(input: Tensor, linear_weight: Tensor) -> bool:
    """Return whether gradients are stored before the division by the denominator.

    Divided by N before GradScaler's factor is known, an fp16 gradient would sink below fp16's smallest numbers.
    """
    return torch.float16 in (input.dtype, linear_weight.dtype)


def stored_gradients(
    into: Gradients,
    input: Tensor,
    linear_weight: Tensor,
    wide: torch.dtype,
    *,
    denominator: Tensor | None,
    input_factor_N: Tensor | None,
) -> StoredGradients:
    """Bring gradients into the dtypes of what they belong to, with the factors that they still lack.

    Args:
        into: The gradients, summed.
        input: Hidden states [..., D].
        linear_weight: The head's weight.
        wide: dtype of the bias's gradient and of the factors.
        denominator: What a mean is divided by, a scalar; None: nothing.
        input_factor_N: With a value for each token: each one's factor.
    """
    dx, dw, db = into.input_ND, into.weight_VD, into.bias_V
    input_factor, weight_factor = input_factor_N, None
    if input_factor_N is None and lacks_denominator(input, linear_weight):
        one = torch.ones((), dtype=wide, device=input.device)
        inverse = one if denominator is None else 1 / denominator
        inverse = inverse.where(inverse.isfinite(), 0)  # nothing is kept, the gradients are 0
        db = None if db is None else db * inverse
        input_factor = inverse
        if dw is not None:
            shift = _fp16_shift(dw) if linear_weight.dtype == torch.float16 else one
            dw, weight_factor = dw.mul_(shift), inverse / shift
    return StoredGradients(
        input_grad=input.new_empty(0) if dx is None else dx.view(input.shape),
        weight_grad=linear_weight.new_empty(0) if dw is None else dw.to(linear_weight.dtype),
        bias_grad=input.new_empty(0, dtype=wide) if db is None else db,
        input_factor=input.new_empty(0, dtype=wide) if dx is None or input_factor is None else input_factor,
        weight_factor=input.new_empty(0, dtype=wide) if weight_factor is None else weight_factor,
    )


def fake_stored_gradients(
    wanted: Sequence[bool], input: Tensor, linear_weight: Tensor, wide: torch.dtype, tokens: int | None
) -> StoredGradients:
    """Return the same without numbers; ``tokens``: N with a value for each token, else None."""
    wanted_input, wanted_weight, wanted_bias = wanted

    def factor_shape(wanted: bool) -> tuple[int, ...]:
        if not wanted:
            return (0,)
        if tokens is not None:
            return (tokens,)
        return () if lacks_denominator(input, linear_weight) else (0,)

    return StoredGradients(
        input_grad=input.new_empty(input.shape if wanted_input else 0),
        weight_grad=linear_weight.new_empty(linear_weight.shape if wanted_weight else 0),
        bias_grad=input.new_empty(linear_weight.shape[0] if wanted_bias else 0, dtype=wide),
        input_factor=input.new_empty(factor_shape(wanted_input), dtype=wide),
        weight_factor=input.new_empty(factor_shape(wanted_weight), dtype=wide),
    )


def keep(
    ctx: Any,
    stored: StoredGradients,
    wanted: Sequence[bool],
    trained: tuple[Tensor, Tensor, Tensor | None],
    *,
    per_token: bool,
) -> None:
    """Keep gradients on a graph's node until `multiplied` is called there.

    As attributes, not by save_for_backward: torch.utils.checkpoint would drop them there and compute everything a
    second time, and they are the smaller thing to keep.

    Args:
        ctx: The node's context.
        stored: The gradients.
        wanted: Which of them there are.
        trained: Input, weight and bias.
        per_token: Whether there is a value for each token.
    """
    ctx.wanted, ctx.per_token = wanted, per_token
    ctx.bias_dtype = None if trained[2] is None else trained[2].dtype
    ctx.stored = tuple(stored)
    # for graphs of the gradients: no second derivative may pass by. In memory until backward, as the gradients are
    ctx.sources = () if torch.compiler.is_compiling() else trained
    # a dispatch mode, such as that of selective checkpointing, may have kept what the operator returned
    ctx.shared = not torch.compiler.is_compiling() and torch._C._len_torch_dispatch_stack() > 0


def multiplied(
    ctx: Any, upstream: Tensor, needs: Sequence[bool], function: str
) -> tuple[list[Tensor | None], tuple[Tensor | None, ...]]:
    """Return the gradients that are needed, times the upstream one, and what they depend on beside it.

    Args:
        ctx: A context that `keep` has seen.
        upstream: The upstream gradient, a scalar or [N].
        needs: Which gradients are.
        function: Whose gradients they are, for the error.

    Raises:
        UnsupportedError: They were freed by an earlier backward.
    """
    if ctx.stored is None:
        raise UnsupportedError(
            f"lowtide.{function}: expected one backward through this graph, got a second after its gradients"
            " were freed. Pass retain_graph=True to the first one."
        )
    dx, dw, db, input_factor, weight_factor = ctx.stored
    last = is_last_backward()
    in_place, sources = last and not ctx.shared, ctx.sources
    if last:
        ctx.stored, ctx.sources = None, ()
    grads: list[Tensor | None] = [None, None, None]
    with torch.no_grad():
        if ctx.wanted[0] and needs[0]:
            factor = upstream
            if ctx.per_token:  # an ignored token stays 0 whatever comes from above
                factor = (upstream * input_factor).where(input_factor != 0, 0)
            elif input_factor.dim() == 0:
                factor = upstream * input_factor
            grads[0] = grad = scaled(dx, factor, in_place)
            if ctx.per_token:  # nor does a NaN get out where nothing flows back
                grad.masked_fill_((factor == 0).view(*dx.shape[:-1], 1), 0)
        if ctx.wanted[1] and needs[1]:
            grads[1] = scaled(dw, upstream * weight_factor if weight_factor.dim() == 0 else upstream, in_place)
        if ctx.wanted[2] and needs[2]:
            grads[2] = (db * upstream).to(ctx.bias_dtype)
    return grads, sources


def _fp16_shift(dw: Tensor) -> Tensor:
    """Return the power of two that brings the largest entry near the top of fp16's range."""
    highest = torch.maximum(dw.amax(), -dw.amin()) if dw.numel() else dw.new_zeros(())
    shift = torch.exp2(torch.floor(torch.log2(FP16_TOP / highest)))
    return shift.where((highest > 0) & highest.isfinite(), 1)
