"""Gradients that forward stores: with what factor, in which dtype, and what backward makes of them.

A scalar loss's upstream gradient is one factor of all of them; with a value for each token and a frozen head, one
factor for each row of the input's.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lowtide.graph import keep_stored, take_stored
from lowtide.head.call import Head, Wanted
from lowtide.head.gradients import Gradients, lift_of, lift_of_rows, scaled

Shape = tuple[tuple[int, ...], torch.dtype]
STORED = 7  # tensors: see `stored_shapes`
NOTHING = (0,)  # the shape of what was not requested


def gradient_shapes(head: Head, wanted: Wanted) -> dict[str, Shape]:
    """Return the gradients' shapes, those of what they belong to, and dtypes; the bias's is wide."""
    x, w = head.input, head.weight_VD
    return {
        "input_grad": (x.shape if wanted.input else NOTHING, x.dtype),
        "weight_grad": (w.shape if wanted.weight else NOTHING, w.dtype),
        "bias_grad": (w.shape[:1] if wanted.bias else NOTHING, head.wide),
    }


def stored_shapes(head: Head, wanted: Wanted, *, per_token: bool, ignores: bool) -> dict[str, Shape]:
    """Return what forward stores, in this order; ``ignores``: whether tokens can be left out."""
    N, one = (head.tokens,), () if head.lacks_denominator else NOTHING
    of_input = N if per_token or head.input.dtype == torch.float16 else one
    return gradient_shapes(head, wanted) | {
        # what the first two are still to be multiplied with, where there is such a factor
        "input_factor": (of_input if wanted.input else NOTHING, head.wide),
        "weight_factor": (one if wanted.weight and not per_token else NOTHING, head.wide),
        # which of the hidden states here count, and whether any token does, here or on another rank that holds classes
        "kept_tokens": (N if ignores else NOTHING, torch.bool),
        "kept_any": (() if ignores else NOTHING, torch.bool),
    }


def found_gradients(head: Head, into: Gradients) -> dict[str, Tensor]:
    """Return gradients in the shapes and dtypes of what they belong to."""
    shapes, found = gradient_shapes(head, Wanted(True, True, True)), (into.input_ND, into.weight_VD, into.bias_V)
    named = zip(shapes.items(), found, strict=True)
    # no view without need: one shares its memory, and autograd adds to another gradient's only where nothing does
    kept = {
        name: (x if x.shape == shape else x.view(shape), dtype) for (name, (shape, dtype)), x in named if x is not None
    }
    return {name: x.to(dtype) for name, (x, dtype) in kept.items()}


def stored_gradients(
    head: Head,
    into: Gradients,
    *,
    denominator: Tensor | None,  # what a mean is divided by, a scalar; None: nothing
    input_factor_N: Tensor | None,  # with a value for each token: each one's factor
    kept: tuple[Tensor, Tensor] | None,  # the last of `stored_shapes`: other tokens' gradients are 0 in any case
) -> dict[str, Tensor]:
    """Return summed gradients in the dtypes of what they belong to, with the factors that they still lack."""
    input, wide, input_factor = head.input, head.wide, input_factor_N
    found = {} if kept is None else {"kept_tokens": kept[0], "kept_any": kept[1]}
    if input_factor_N is None and head.lacks_denominator:
        one = torch.ones((), dtype=wide, device=input.device)
        # where there are no tokens, there is nothing to divide
        input_factor = inverse = one if denominator is None or not head.tokens else 1 / denominator
        if into.bias_V is not None:
            into.bias_V = into.bias_V * (inverse if kept is None else inverse.where(kept[1], 0))
        if (dw := into.weight_VD) is not None:
            lifted = head.weight_VD.dtype == torch.float16 and dw.numel()
            lift = lift_of(torch.maximum(dw.amax(), -dw.amin())) if lifted else one
            found["weight_factor"] = inverse / lift
            dw.mul_(lift)
    if into.input_ND is not None and input.dtype == torch.float16:
        if into.lift_N is None:  # the gradient is wide still
            into.lift_N = lift_of_rows(into.input_ND)
            into.input_ND = (into.input_ND * into.lift_N[:, None]).to(torch.float16)
        input_factor = 1 / into.lift_N if input_factor is None else input_factor / into.lift_N
    if into.input_ND is not None and input_factor is not None:
        found["input_factor"] = input_factor
    return found | found_gradients(head, into)


def keep(ctx: Any, stored: Sequence[Tensor], head: Head) -> None:
    """Keep what was stored on a node of autograd's graph until `multiplied` is called there."""
    keep_stored(ctx, stored, head[:3])
    ctx.no_tokens, ctx.bias_dtype = not head.tokens, None if head.bias_V is None else head.bias_V.dtype


def multiplied(ctx: Any, upstream: Tensor, function: str) -> tuple[list[Tensor | None], Sequence[Tensor | None]]:
    """Return the stored gradients times the upstream one, a scalar or [N], and what else they depend on."""
    stored, sources, in_place = take_stored(ctx, function)
    dx, dw, db, input_factor, weight_factor, kept_tokens, kept_any = stored
    per_token, ignores = upstream.dim() == 1, kept_any.dim() == 0
    if ctx.no_tokens and not ignores:  # as a sum of no rows, 0 whatever comes from upstream
        upstream = torch.zeros_like(upstream)
    grads: list[Tensor | None] = [None, None, None]
    if ctx.needs_input_grad[0]:
        factor = upstream * input_factor if input_factor.numel() else upstream
        grads[0] = grad = scaled(dx, factor, in_place, kept_tokens if ignores else None)
        if per_token:  # nor does a NaN get out where nothing flows back
            grad.masked_fill_((factor == 0).view(*dx.shape[:-1], 1), 0)
    if ctx.needs_input_grad[1]:
        factor = upstream * weight_factor if weight_factor.numel() else upstream
        grads[1] = scaled(dw, factor.where(kept_any, 0) if ignores else factor, in_place)
    if ctx.needs_input_grad[2]:
        grads[2] = (db * (upstream.where(kept_any, 0) if ignores else upstream)).to(ctx.bias_dtype)
    return grads, sources
