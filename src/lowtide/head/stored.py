"""Gradients that forward stores: in which dtype, and what backward makes of them.

A scalar loss's upstream gradient is one factor of all of them; with a value for each token and a frozen head, one
factor for each row of the input's. Those of float16 are stored in float32: divided by N, before a GradScaler's factor
is known, they would sink below float16's smallest numbers.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lowtide.graph import keep_stored, take_stored
from lowtide.head.call import Head, Wanted
from lowtide.head.gradients import Gradients, scaled, stored_dtype

Shape = tuple[tuple[int, ...], torch.dtype]
STORED = 6  # tensors: see `stored_shapes`
NOTHING = (0,)  # the shape of what was not requested


def gradient_shapes(head: Head, wanted: Wanted, *, stored: bool = False) -> dict[str, Shape]:
    """Return the gradients' shapes, those of what they belong to, and dtypes; the bias's is wide."""
    x, w = head.input, head.weight_VD
    of_input, of_weight = (stored_dtype(t.dtype) if stored else t.dtype for t in (x, w))
    return {
        "input_grad": (x.shape if wanted.input else NOTHING, of_input),
        "weight_grad": (w.shape if wanted.weight else NOTHING, of_weight),
        "bias_grad": (w.shape[:1] if wanted.bias else NOTHING, head.wide),
    }


def stored_shapes(head: Head, wanted: Wanted, *, per_token: bool, ignores: bool) -> dict[str, Shape]:
    """Return what forward stores, in this order; ``ignores``: whether tokens can be left out."""
    N = (head.tokens,)
    return gradient_shapes(head, wanted, stored=True) | {
        # with a value for each token: what each row of the first is still to be multiplied with
        "input_factor": (N if per_token and wanted.input else NOTHING, head.wide),
        # which of the hidden states here count, and whether any token does, here or on another rank that holds classes
        "kept_tokens": (N if ignores else NOTHING, torch.bool),
        "kept_any": (() if ignores else NOTHING, torch.bool),
    }


def found_gradients(head: Head, into: Gradients, *, stored: bool = False) -> dict[str, Tensor]:
    """Return gradients in the shapes and dtypes of `gradient_shapes`."""
    shapes = gradient_shapes(head, Wanted(True, True, True), stored=stored)
    found = zip(shapes.items(), (into.input_ND, into.weight_VD, into.bias_V), strict=True)
    # no view without need: one shares its memory, and autograd adds to another gradient's only where nothing does
    kept = {
        name: (x if x.shape == shape else x.view(shape), dtype) for (name, (shape, dtype)), x in found if x is not None
    }
    return {name: x.to(dtype) for name, (x, dtype) in kept.items()}


def stored_gradients(
    head: Head,
    into: Gradients,
    *,
    input_factor_N: Tensor | None,  # with a value for each token: each one's factor
    kept: tuple[Tensor, Tensor] | None,  # the last of `stored_shapes`: other tokens' gradients are 0 in any case
) -> dict[str, Tensor]:
    """Return what `stored_shapes` names, as far as it is known."""
    stored = found_gradients(head, into, stored=True)
    if input_factor_N is not None and into.input_ND is not None:
        stored["input_factor"] = input_factor_N
    return stored if kept is None else stored | {"kept_tokens": kept[0], "kept_any": kept[1]}


def keep(ctx: Any, stored: Sequence[Tensor], head: Head) -> None:
    """Keep what was stored on a node of autograd's graph until `multiplied` is called there."""
    keep_stored(ctx, stored, head[:3])
    ctx.no_tokens, ctx.dtypes = not head.tokens, [None if x is None else x.dtype for x in head[:3]]


def multiplied(ctx: Any, upstream: Tensor, function: str) -> tuple[list[Tensor | None], Sequence[Tensor | None]]:
    """Return the stored gradients times the upstream one, a scalar or [N], and what else they depend on."""
    stored, sources, in_place = take_stored(ctx, function)
    dx, dw, db, input_factor, kept_tokens, kept_any = stored
    per_token, ignores = upstream.dim() == 1, kept_any.dim() == 0
    if ctx.no_tokens and not ignores:  # as a sum of no rows, 0 whatever comes from upstream
        upstream = torch.zeros_like(upstream)
    grads: list[Tensor | None] = [None, None, None]
    if ctx.needs_input_grad[0]:
        factor = upstream * input_factor if input_factor.numel() else upstream
        grad = scaled(dx, factor, in_place, kept_tokens if ignores else None)
        if per_token:  # nor does a NaN get out where nothing flows back
            grad.masked_fill_((factor == 0).view(*dx.shape[:-1], 1), 0)
        grads[0] = grad.to(ctx.dtypes[0])
    of_all = upstream.where(kept_any, 0) if ignores else upstream
    if ctx.needs_input_grad[1]:
        grads[1] = scaled(dw, of_all, in_place).to(ctx.dtypes[1])
    if ctx.needs_input_grad[2]:
        grads[2] = (db * of_all).to(ctx.dtypes[2])
    return grads, sources
