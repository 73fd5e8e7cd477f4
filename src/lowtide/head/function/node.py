"""`linear_apply` in autograd's graph: gradients stored by forward and scaled in backward, or computed there."""

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lowtide.errors import UnsupportedError, message
from lowtide.graph import freed, is_last_backward, node, save_for_recompute, saved_for_recompute
from lowtide.head.function.checks import check_rows_are_independent
from lowtide.head.function.chunk import FunctionTerms, Tensors
from lowtide.head.function.function import UserFunction, isolated
from lowtide.head.scaling import scaled, times

NAIVE = "fn(torch.nn.functional.linear(input, linear_weight, linear_bias).float(), *token_args, *params)"
TWICE = (
    "lowtide.linear_apply: expected to be differentiated once, got a second derivative. Its gradients are computed"
    f" without a graph of their own; for second derivatives build the logits: {NAIVE}."
)


def apply(function: UserFunction, tensors: Tensors) -> Any:
    """Return the function's results in their pytree, connected to whichever of the tensors need a gradient."""
    if function.graph and any(t is not None and t.requires_grad for t in tensors):
        *leaves, spec = _NODE.apply(*tensors, function)  # type: ignore[no-untyped-call]
    else:
        with torch.no_grad():
            terms, _ = _computed(function, tensors, [False] * len(tensors), store=False)
        leaves, spec = terms.results(), terms.spec
    return pytree.tree_unflatten(leaves, spec)


def _computed(function: UserFunction, tensors: Any, needed: Any, *, store: bool) -> tuple[FunctionTerms, Any]:
    """Return a pass that has been made, and with ``store`` and one scalar to differentiate the gradients."""
    with isolated(tensors[0].device):
        terms = FunctionTerms(function, tensors, needed)
        check_rows_are_independent(terms)
        return terms, terms.gradients() if terms.forward(store=store) else None


def _forward(ctx: Any, *args: Any) -> Any:
    """One scalar to differentiate: store its gradients. Else backward runs the function once more.

    Stored gradients are attributes, not saved by save_for_backward: see `lowtide.head.stored.keep`.
    """
    *tensors, function = args
    store = not function.per_token and function.gradient != "recompute"
    terms, ctx.stored = _computed(function, tensors, ctx.needs_input_grad[:-1], store=store)
    if function.gradient == "forward" and ctx.stored is None and function.plan.rows:
        got = f"{sum(terms.differentiable)} that need a gradient"
        raise UnsupportedError(message("gradient", "'auto' or 'recompute' unless fn returns one scalar", got))
    ctx.function, ctx.states, ctx.free = function, terms.states, False
    # a dispatch mode, such as that of selective checkpointing, may have kept what forward made
    ctx.shared = torch._C._len_torch_dispatch_stack() > 0
    if ctx.stored is None:
        save_for_recompute(ctx, *tensors)
    else:
        ctx.forms = [None if t is None else (t.dtype, t.shape) for t in tensors]
        ctx.sources = tensors  # as in `lowtide.head.stored.keep`
    leaves = terms.results()
    flags = zip(leaves, terms.differentiable, strict=True)
    ctx.mark_non_differentiable(*(leaf for leaf, needed in flags if leaf is not None and not needed))
    return *leaves, terms.spec


def _backward(ctx: Any, *upstream: Tensor | None) -> Any:
    needed = ctx.needs_input_grad[:-1]
    if ctx.stored is not None or ctx.free:
        sources = ctx.sources
        return _scaled(ctx, next(u for u in upstream if u is not None), needed), sources
    tensors = saved_for_recompute(ctx, "linear_apply")
    with isolated(tensors[0].device):
        terms = FunctionTerms(ctx.function, tensors, needed)
        terms.backward(upstream[:-1], ctx.states)
        pairs = zip(terms.gradients(), tensors, strict=True)
        return [None if g is None else g.to(t.dtype).view(t.shape) for g, t in pairs], tensors


_NODE = node("Applied", "linear_apply", _forward, _backward, TWICE)


def _scaled(ctx: Any, upstream: Tensor, needed: list[bool]) -> list[Tensor | None]:
    """Return the stored gradients times the upstream one, in place where nobody will read them again.

    What is 0 stays 0 whatever comes from upstream: tokens that are masked, or that the function itself leaves out.
    """
    if ctx.stored is None:
        raise freed("linear_apply")
    stored, last = ctx.stored, is_last_backward()
    if last:
        ctx.stored, ctx.free, ctx.sources = None, True, ()
    grads: list[Tensor | None] = []
    for i, (grad, form) in enumerate(zip(stored, ctx.forms, strict=True)):
        if grad is None or not needed[i]:
            grads.append(None)
            continue
        of_head = i < 2  # as large as hidden states or weight
        product = scaled(grad, upstream, last and not ctx.shared, zeros_stay=True) if of_head else times(grad, upstream)
        grads.append(product.to(form[0]).view(form[1]))
    return grads
