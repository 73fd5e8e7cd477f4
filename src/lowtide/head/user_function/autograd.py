"""`linear_apply` in autograd's graph: gradients stored by forward and scaled in backward, or computed there."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lowtide.errors import UnsupportedError, message
from lowtide.head.graph import (
    differentiable_once,
    is_last_backward,
    refuse_batched,
    save_for_recompute,
    saved_for_recompute,
    undisturbed,
)
from lowtide.head.scaling import scaled, times
from lowtide.head.user_function.call import ApplyCall, Needs, Tensors, Totals
from lowtide.head.user_function.checks import check_rows_are_independent
from lowtide.head.user_function.function import own_saved_tensors
from lowtide.head.user_function.passes import Collected, Pass, run_backward, run_forward

NAIVE = "fn(torch.nn.functional.linear(input, linear_weight, linear_bias).float(), *token_args, *params)"
TWICE = (
    "lowtide.linear_apply: expected to be differentiated once, got a second derivative. Its gradients are computed"
    f" without a graph of their own; for second derivatives build the logits: {NAIVE}."
)
FREED = (
    "lowtide.linear_apply: expected one backward through this graph, got a second after its gradients were freed."
    " Pass retain_graph=True to the first one."
)


def apply(call: ApplyCall, tensors: tuple[Tensor | None, ...]) -> Any:
    """Return the function's results in their pytree, connected to whichever of the tensors need a gradient.

    Args:
        call: What was asked.
        tensors: input, weight, bias, index of rows, token arguments and params, in this order.
    """
    outcome: list[Collected] = []
    needed = [t is not None and t.requires_grad for t in tensors]
    if call.function.graph and any(needed):
        found = iter(_Applied.apply(call, outcome, *tensors))  # type: ignore[no-untyped-call]
        leaves = [None if leaf is None else next(found) for leaf in outcome[0].leaves]
    else:
        with torch.no_grad(), _alone(_device(tensors)):
            run = Pass(call, Tensors.of(call, tensors), Needs.of(call, [False] * len(tensors)))
            check_rows_are_independent(run)
            outcome.append(run_forward(run, store=False)[0])
        leaves = outcome[0].finished()
    spec = outcome[0].spec
    assert spec is not None
    return pytree.tree_unflatten(leaves, spec)


class _Applied(torch.autograd.Function):
    """One scalar to differentiate: forward stores its gradients. Else backward runs the function once more.

    Stored gradients are attributes, not saved by save_for_backward: see `lowtide.head.stored.keep`.
    """

    @staticmethod
    def forward(ctx: Any, call: ApplyCall, outcome: list[Collected], *tensors: Tensor | None) -> Any:
        ctx.set_materialize_grads(False)
        needs = Needs.of(call, ctx.needs_input_grad[2:])
        with _alone(_device(tensors)):
            run = Pass(call, Tensors.of(call, tensors), needs)
            check_rows_are_independent(run)
            store = not call.function.per_token and call.gradient != "recompute"
            collected, ctx.stored, ctx.states = run_forward(run, store=store)
        if call.gradient == "forward" and ctx.stored is None and run.tensors.rows:
            got = f"{sum(collected.differentiable)} that need a gradient"
            raise UnsupportedError(message("gradient", "'auto' or 'recompute' unless fn returns one scalar", got))
        outcome.append(collected)
        ctx.call, ctx.free = call, False
        # a dispatch mode, such as that of selective checkpointing, may have kept what forward made
        ctx.shared = torch._C._len_torch_dispatch_stack() > 0
        if ctx.stored is None:
            save_for_recompute(ctx, *tensors)
        else:
            ctx.dtypes = [None if t is None else t.dtype for t in tensors]
            ctx.shapes = [None if t is None else t.shape for t in tensors]
            ctx.sources = tensors  # as in `lowtide.head.stored.keep`
        finished = collected.finished()
        flags = zip(finished, collected.differentiable, strict=True)
        ctx.mark_non_differentiable(*(leaf for leaf, needed in flags if leaf is not None and not needed))
        ctx.leaves = [leaf is not None for leaf in finished]
        return tuple(leaf for leaf in finished if leaf is not None)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> Any:
        refuse_batched("linear_apply", *upstream)
        call, needed = ctx.call, list(ctx.needs_input_grad[2:])
        if all(u is None for u in upstream):
            return (None,) * len(ctx.needs_input_grad)
        with torch.no_grad():
            if ctx.stored is not None or ctx.free:
                tensors = ctx.sources
                grads = _scaled(ctx, next(u for u in upstream if u is not None), needed)
            else:
                tensors = saved_for_recompute(ctx, "linear_apply")
                given = iter(upstream)
                above = [next(given) if present else None for present in ctx.leaves]
                with _alone(_device(tensors)):
                    run = Pass(call, Tensors.of(call, tensors), Needs.of(call, needed))
                    grads = _in_order(run_backward(run, above, ctx.states))
                grads = [
                    g.to(t.dtype).view(t.shape) if g is not None and t is not None else None
                    for g, t in zip(grads, tensors, strict=True)
                ]
        return None, None, *differentiable_once(grads, (*tensors, *upstream), TWICE)


def _scaled(ctx: Any, upstream: Tensor, needed: list[bool]) -> list[Tensor | None]:
    """Return the stored gradients times the upstream one, in place where nobody will read them again.

    What is 0 stays 0 whatever comes from upstream: tokens that are masked, or that the function itself leaves out.
    """
    if ctx.stored is None:
        raise UnsupportedError(FREED)
    stored = _in_order(ctx.stored)
    last = is_last_backward()
    if last:
        ctx.stored, ctx.free, ctx.sources = None, True, ()
    grads: list[Tensor | None] = []
    for i, (grad, dtype, shape) in enumerate(zip(stored, ctx.dtypes, ctx.shapes, strict=True)):
        if grad is None or not needed[i]:
            grads.append(None)
        elif i < 2:
            product = scaled(grad, upstream, last and not ctx.shared, zeros_stay=True)
            grads.append(product.to(dtype).view(shape))
        else:
            grads.append(times(grad, upstream).to(dtype).view(shape))
    return grads


def _in_order(totals: Totals) -> list[Tensor | None]:
    """Return gradients in the order in which autograd has the tensors."""
    bias = totals.bias_V
    bias_V = bias.sum(0) if bias is not None and bias.dim() == 2 else bias
    return [totals.input_ND, totals.weight_VD, bias_V, None, *totals.token_args, *totals.params]


@contextmanager
def _alone(device: torch.device) -> Iterator[None]:
    """Enter a context in which neither autocast nor hooks on saved tensors reach products and function."""
    with undisturbed(device), own_saved_tensors():
        yield


def _device(tensors: Any) -> torch.device:
    device: torch.device = tensors[0].device
    return device
