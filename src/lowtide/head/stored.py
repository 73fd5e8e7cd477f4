"""Gradients that forward stores: with what factor, in which dtype, and what backward makes of them.

A scalar loss's upstream gradient is one factor of all of them; with a value for each token and a frozen head, one
factor for each row of the input's.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowtide.errors import UnsupportedError
from lowtide.head.gradients import Gradients
from lowtide.head.graph import is_last_backward
from lowtide.head.scaling import lift_of, lift_of_rows, scaled


class Kept(NamedTuple):
    """Which tokens are valid. The gradient of the others is 0 for any upstream gradient, infinity and NaN too."""

    tokens_N: Tensor  # bool, of the hidden states that are here
    any: Tensor  # bool, scalar: whether any token counts, here or on another rank that holds classes

    @classmethod
    def of(cls, kept_N: Tensor) -> "Kept":
        """Return it for tokens that are all here."""
        return cls(kept_N, kept_N.any())


class StoredGradients(NamedTuple):
    """What an operator that stores gradients returns of them; what was not asked for is empty."""

    input_grad: Tensor
    weight_grad: Tensor
    bias_grad: Tensor  # wide
    input_factor: Tensor  # scalar or [N]: what input_grad is still to be multiplied with
    weight_factor: Tensor  # scalar: the same for weight_grad
    kept_tokens: Tensor  # as in `Kept`, and so is the next; empty where nothing can be ignored
    kept_any: Tensor


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
    kept: Kept | None,
) -> StoredGradients:
    """Bring gradients into the dtypes of what they belong to, with the factors that they still lack.

    Args:
        into: The gradients, summed.
        input: Hidden states [..., D].
        linear_weight: The head's weight.
        wide: dtype of the bias's gradient and of the factors.
        denominator: What a mean is divided by, a scalar; None: nothing.
        input_factor_N: With a value for each token: each one's factor.
        kept: Which tokens count; None: all.
    """
    dx, dw, db = into.input_ND, into.weight_VD, into.bias_V
    input_factor, weight_factor = input_factor_N, None
    if input_factor_N is None and lacks_denominator(input, linear_weight):
        one = torch.ones((), dtype=wide, device=input.device)
        no_tokens = input.shape[:-1].numel() == 0  # nor then is there anything to divide
        inverse = one if denominator is None or no_tokens else 1 / denominator
        db = None if db is None else db * (inverse if kept is None else inverse.where(kept.any, 0))
        input_factor = inverse
        if dw is not None:
            lift = _lift_of_all(dw) if linear_weight.dtype == torch.float16 else one
            dw, weight_factor = dw.mul_(lift), inverse / lift
    if dx is not None and input.dtype == torch.float16:
        dx, lift_N = _lifted(dx, into.lift_N)
        input_factor = 1 / lift_N if input_factor is None else input_factor / lift_N
    return StoredGradients(
        input_grad=input.new_empty(0) if dx is None else dx.view(input.shape),
        weight_grad=linear_weight.new_empty(0) if dw is None else dw.to(linear_weight.dtype),
        bias_grad=input.new_empty(0, dtype=wide) if db is None else db,
        input_factor=input.new_empty(0, dtype=wide) if dx is None or input_factor is None else input_factor,
        weight_factor=input.new_empty(0, dtype=wide) if weight_factor is None else weight_factor,
        kept_tokens=input.new_empty(0, dtype=torch.bool) if kept is None else kept.tokens_N,
        kept_any=input.new_empty(0, dtype=torch.bool) if kept is None else kept.any,
    )


def fake_stored_gradients(
    wanted: Sequence[bool],
    input: Tensor,
    linear_weight: Tensor,
    wide: torch.dtype,
    *,
    per_token: bool,
    ignores: bool,
) -> StoredGradients:
    """Return the same without numbers.

    Args:
        wanted: Which gradients are.
        input: Hidden states [..., D].
        linear_weight: The head's weight.
        wide: As in `stored_gradients`.
        per_token: Whether there is a value for each token.
        ignores: Whether tokens can be ignored.
    """
    wanted_input, wanted_weight, wanted_bias = wanted
    tokens = (math.prod(input.shape[:-1]),)
    one = () if lacks_denominator(input, linear_weight) else (0,)
    of_input: tuple[int, ...] = tokens if per_token or input.dtype == torch.float16 else one
    return StoredGradients(
        input_grad=input.new_empty(input.shape if wanted_input else 0),
        weight_grad=linear_weight.new_empty(linear_weight.shape if wanted_weight else 0),
        bias_grad=input.new_empty(linear_weight.shape[0] if wanted_bias else 0, dtype=wide),
        input_factor=input.new_empty(of_input if wanted_input else (0,), dtype=wide),
        weight_factor=input.new_empty(one if wanted_weight and not per_token else (0,), dtype=wide),
        kept_tokens=input.new_empty(tokens if ignores else (0,), dtype=torch.bool),
        kept_any=input.new_empty(() if ignores else (0,), dtype=torch.bool),
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
    ctx.no_tokens = trained[0].shape[:-1].numel() == 0
    ctx.factored = per_token or lacks_denominator(trained[0], trained[1])
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
    dx, dw, db, input_factor, weight_factor, kept_tokens, kept_any = ctx.stored
    ignores = kept_any.dim() == 0
    if ctx.no_tokens and not ignores:  # as a sum of no rows, 0 whatever comes from upstream
        upstream = torch.zeros_like(upstream)
    last = is_last_backward()
    in_place, sources = last and not ctx.shared, ctx.sources
    if last:
        ctx.stored, ctx.sources = None, ()
    grads: list[Tensor | None] = [None, None, None]
    with torch.no_grad():
        if ctx.wanted[0] and needs[0]:
            factor = upstream * input_factor if ctx.factored else upstream
            grads[0] = grad = scaled(dx, factor, in_place, kept_tokens if ignores else None)
            if ctx.per_token:  # nor does a NaN get out where nothing flows back
                grad.masked_fill_((factor == 0).view(*dx.shape[:-1], 1), 0)
        if ctx.wanted[1] and needs[1]:
            factor = upstream * weight_factor if ctx.factored else upstream
            grads[1] = scaled(dw, factor.where(kept_any, 0) if ignores else factor, in_place)
        if ctx.wanted[2] and needs[2]:
            grads[2] = (db * (upstream.where(kept_any, 0) if ignores else upstream)).to(ctx.bias_dtype)
    return grads, sources


def _lift_of_all(dw: Tensor) -> Tensor:
    """Return the power of two that brings the largest entry near the top of fp16's range."""
    return lift_of(torch.maximum(dw.amax(), -dw.amin())) if dw.numel() else dw.new_ones(())


def _lifted(dx_ND: Tensor, lift_N: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return an fp16 gradient, and what its rows were multiplied with: now, if they are wide still."""
    if lift_N is not None:
        return dx_ND, lift_N
    lift_N = lift_of_rows(dx_ND)
    return (dx_ND * lift_N[:, None]).to(torch.float16), lift_N
