"""Gradients that forward stores: with what factor, in which dtype, and what backward makes of them.

A scalar loss's upstream gradient is one factor of all of them; with a value for each token and a frozen head, one
factor for each row of the input's.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowtide.graph import keep_stored, take_stored
from lowtide.head.call import Head, HeadCall, Wanted
from lowtide.head.gradients import Gradients
from lowtide.head.scaling import lift_of, lift_of_rows, scaled


class StoredGradients(NamedTuple):
    """What an operator that stores gradients returns of them; what was not asked for is empty."""

    input_grad: Tensor
    weight_grad: Tensor
    bias_grad: Tensor  # wide
    input_factor: Tensor  # scalar or [N]: what input_grad is still to be multiplied with
    weight_factor: Tensor  # scalar: the same for weight_grad
    kept_tokens: Tensor  # [N] bool: which of the hidden states here count; empty where nothing can be ignored
    kept_any: Tensor  # bool, scalar: whether any token counts, here or on another rank that holds classes; or empty


def lacks_denominator(*dtypes: torch.dtype) -> bool:
    """Return whether gradients are stored before the division by the denominator.

    Divided by N before GradScaler's factor is known, an fp16 gradient would sink below fp16's smallest numbers.
    """
    return torch.float16 in dtypes


def stored_gradients(
    head: Head,
    into: Gradients,
    *,
    denominator: Tensor | None,
    input_factor_N: Tensor | None,
    kept: tuple[Tensor, Tensor] | None,
) -> StoredGradients:
    """Bring summed gradients into the dtypes of what they belong to, with the factors that they still lack.

    Args:
        head: Whose they are.
        into: The gradients.
        denominator: What a mean is divided by, a scalar; None: nothing.
        input_factor_N: With a value for each token: each one's factor.
        kept: As in `StoredGradients`: other tokens' gradients are 0 whatever comes from upstream. None: all count.
    """
    input, weight, wide = head.input, head.weight_VD, head.wide
    input_factor, weight_factor = input_factor_N, None
    if input_factor_N is None and lacks_denominator(input.dtype, weight.dtype):
        one = torch.ones((), dtype=wide, device=input.device)
        # where there are no tokens, there is nothing to divide
        input_factor = inverse = one if denominator is None or not head.tokens else 1 / denominator
        if into.bias_V is not None:
            into.bias_V = into.bias_V * (inverse if kept is None else inverse.where(kept[1], 0))
        if into.weight_VD is not None:
            lift = _lift_of_all(into.weight_VD) if weight.dtype == torch.float16 else one
            weight_factor = inverse / lift
            into.weight_VD.mul_(lift)
    if into.input_ND is not None and input.dtype == torch.float16:
        if into.lift_N is None:  # the gradient is wide still
            into.lift_N = lift_of_rows(into.input_ND)
            into.input_ND = (into.input_ND * into.lift_N[:, None]).to(torch.float16)
        input_factor = 1 / into.lift_N if input_factor is None else input_factor / into.lift_N
    kept_tokens, kept_any = (input.new_empty(0, dtype=torch.bool) for _ in range(2)) if kept is None else kept
    return StoredGradients(
        *found_gradients(head, into),
        input_factor=input.new_empty(0, dtype=wide) if into.input_ND is None or input_factor is None else input_factor,
        weight_factor=input.new_empty(0, dtype=wide) if weight_factor is None else weight_factor,
        kept_tokens=kept_tokens,
        kept_any=kept_any,
    )


def found_gradients(head: Head, into: Gradients) -> tuple[Tensor, Tensor, Tensor]:
    """Return gradients in the shapes and dtypes of what they belong to, the bias's wide; empty where not wanted."""
    x, w = head.input, head.weight_VD
    return (
        x.new_empty(0) if into.input_ND is None else into.input_ND.view(x.shape),
        w.new_empty(0) if into.weight_VD is None else into.weight_VD.to(w.dtype),
        x.new_empty(0, dtype=head.wide) if into.bias_V is None else into.bias_V,
    )


def fake_gradients(call: HeadCall, wanted: Wanted) -> tuple[Tensor, Tensor, Tensor]:
    """Return the same without numbers."""
    x, w = call.input, call.linear_weight
    return (
        x.new_empty(x.shape if wanted.input else 0),
        w.new_empty(w.shape if wanted.weight else 0),
        x.new_empty(w.shape[0] if wanted.bias else 0, dtype=call.wide),
    )


def fake_stored_gradients(call: HeadCall, wanted: Wanted, *, per_token: bool, ignores: bool) -> StoredGradients:
    """Return what `stored_gradients` does, without numbers; ``ignores``: whether tokens can be ignored."""
    x, tokens, none = call.input, (call.tokens,), (0,)
    one = () if lacks_denominator(x.dtype, call.linear_weight.dtype) else none
    of_input: tuple[int, ...] = tokens if per_token or x.dtype == torch.float16 else one
    return StoredGradients(
        *fake_gradients(call, wanted),
        input_factor=x.new_empty(of_input if wanted.input else none, dtype=call.wide),
        weight_factor=x.new_empty(one if wanted.weight and not per_token else none, dtype=call.wide),
        kept_tokens=x.new_empty(tokens if ignores else none, dtype=torch.bool),
        kept_any=x.new_empty(() if ignores else none, dtype=torch.bool),
    )


def keep(ctx: Any, stored: StoredGradients, wanted: Wanted, call: HeadCall, *, per_token: bool) -> None:
    """Keep gradients on a node of autograd's graph until `multiplied` is called there."""
    keep_stored(ctx, stored, call.trained)
    ctx.wanted, ctx.per_token, ctx.no_tokens = wanted, per_token, not call.tokens
    ctx.factored = per_token or lacks_denominator(call.input.dtype, call.linear_weight.dtype)
    ctx.bias_dtype = None if call.linear_bias is None else call.linear_bias.dtype


def multiplied(ctx: Any, upstream: Tensor, function: str) -> tuple[list[Tensor | None], Sequence[Tensor | None]]:
    """Return the kept gradients times the upstream one, a scalar or [N], and what they depend on beside it."""
    stored, sources, in_place = take_stored(ctx, function)
    dx, dw, db, input_factor, weight_factor, kept_tokens, kept_any = stored
    ignores = kept_any.dim() == 0
    if ctx.no_tokens and not ignores:  # as a sum of no rows, 0 whatever comes from upstream
        upstream = torch.zeros_like(upstream)
    needed = [wanted and need for wanted, need in zip(ctx.wanted, ctx.needs_input_grad, strict=False)]
    grads: list[Tensor | None] = [None, None, None]
    if needed[0]:
        factor = upstream * input_factor if ctx.factored else upstream
        grads[0] = grad = scaled(dx, factor, in_place, kept_tokens if ignores else None)
        if ctx.per_token:  # nor does a NaN get out where nothing flows back
            grad.masked_fill_((factor == 0).view(*dx.shape[:-1], 1), 0)
    if needed[1]:
        factor = upstream * weight_factor if ctx.factored else upstream
        grads[1] = scaled(dw, factor.where(kept_any, 0) if ignores else factor, in_place)
    if needed[2]:
        grads[2] = (db * (upstream.where(kept_any, 0) if ignores else upstream)).to(ctx.bias_dtype)
    return grads, sources


def _lift_of_all(dw: Tensor) -> Tensor:
    """Return the power of two that brings the largest entry near the top of fp16's range."""
    return lift_of(torch.maximum(dw.amax(), -dw.amin())) if dw.numel() else dw.new_ones(())
