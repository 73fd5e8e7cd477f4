"""Any function of the final linear layer's logits, computed in chunks."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lowtide.arguments import check_dense, check_device, check_flag, check_name, refuse_transforms
from lowtide.errors import ArgumentTypeError, ArgumentValueError, UnsupportedError, message
from lowtide.graph import keep_stored, node, run_in_eager, take_stored
from lowtide.head.call import check_mask, checked_call
from lowtide.head.function import FunctionTerms, UserFunction, compiled, current_autocast, isolated, plan_comparison
from lowtide.head.gradients import scaled, times
from lowtide.head.options import HeadOptions
from lowtide.head.plan import plan_head
from lowtide.head.ranks.shard import VocabShard

NAIVE = "fn(torch.nn.functional.linear(input, linear_weight, linear_bias).float(), *token_args, *params)"
TWICE = (
    "lowtide.linear_apply: expected to be differentiated once, got a second derivative. For those"
    f" build the logits: {NAIVE}."
)
_TENSOR = object()  # the placeholder of a tensor


@run_in_eager  # plan and loop are the host's, and in no graph
def linear_apply(
    fn: Callable[..., Any],
    input: Tensor,
    linear_weight: Tensor,
    *token_args: Tensor,
    linear_bias: Tensor | None = None,
    params: Sequence[Any] = (),
    mask: Tensor | None = None,
    out: str = "token",
    softcap: float | None = None,
    logit_scale: float | Tensor = 1.0,
    compile: bool = False,
    options: HeadOptions | None = None,
    vocab_shard: VocabShard | None = None,
) -> Any:
    """Return ``fn(logits, *token_args, *params)`` for the logits of a linear layer, computed in chunks.

    With logits ``z = cap((x @ W.T + b) * logit_scale)``, where ``cap(z) = softcap * tanh(z / softcap)``, ``fn`` gets
    [C, V] float32 logits of C tokens (float64 for float64 inputs), the C rows of each token argument, and ``params``
    whole. Derivatives are autograd's through ``fn``, which may get a chunk in several pieces of fewer rows; its graph
    is freed after each piece. `HeadOptions.workspace_mib` bounds both, counting 8 tensors of a piece's logits for the
    intermediates of ``fn``.

    ``fn`` must treat each token by itself, for any number of rows: what it returns for a token may depend on the
    token's logits, its rows of ``token_args`` and ``params``, not on other tokens or on how many there are. The first
    time that its code (of a module: its class) gets arguments of these shapes, results for a few rows of the first
    chunk are compared with those for their two halves, unless it draws random numbers; on a GPU the host waits for
    that, once. There is no comparison in a CUDA graph's capture. Coupling that it does not show is undefined.

    Args:
        fn: The function. It may draw random numbers from PyTorch's default generators, and change its logits in place,
            but not its other arguments.
        input: Hidden states [..., D], any floating dtype and strides, any number of leading axes.
        linear_weight: [V, D], the output embedding. Outside autocast of the same dtype as ``input``.
        token_args: Tensors [..., *], their first axes those of ``input``; ``fn`` gets them as [C, *]. Those that
            require a gradient get it.
        linear_bias: [V], or None.
        params: The last arguments of ``fn``, whole: tensors of any shape, which get gradients, and anything else;
            pytrees of these too.
        mask: bool [...], True where ``fn`` runs. Other tokens are dropped before the GEMM, even NaN; their
            results and gradients are 0. Their number has to be known on the host: it waits for a mask on a GPU, and
            does not for one on the CPU, which may be given whatever the device of ``input``.
        out: ``"token"``: fn returns tensors [C, *], in any pytree. ``"sum"``: scalars that add up over tokens.
        softcap: Cap of the logits, above 0, or None.
        logit_scale: Number or 0-d tensor by which the logits are multiplied, before the cap. A tensor that requires
            a gradient gets it, in float16 at the cost of a float32 copy of ``input`` [..., D].
        compile: Compile ``fn`` (not the loop) for any number of rows, once for each ``fn``: define it once, not in each
            step.
        options: Memory, accumulation and when gradients are computed: see `HeadOptions`.
        vocab_shard: For a sharded vocabulary, whose rows ``linear_weight`` and ``linear_bias`` have on this rank: see
            `VocabShard`. All else is the same on every rank. DTensors need no `VocabShard`:
            ``linear_weight`` and ``linear_bias`` with ``Shard(0)``, ``input`` with ``Replicate()`` or, for sequence
            parallelism, ``Shard`` of an axis of tokens, the others whole. ``fn`` still gets whole rows of
            logits: the ranks exchange a chunk's, and each calls it on its share of the rows.

    Returns:
        Any: What ``fn`` returns, of its dtypes: with "token" [..., *] for [C, *], with "sum" the sums. Integers,
        booleans and what ``fn`` detaches are not differentiable. With a sharded vocabulary every rank gets all results
        and the whole gradients of ``input`` (of its part of the sequence), ``token_args`` and ``params``.

    Raises:
        ArgumentValueError: A shape, device or number that does not fit; results of ``fn`` with a wrong leading size;
            a result for some tokens that is seen to depend on others, among them a mean with ``out="sum"``; results
            that are not the same twice; a tensor that ``fn`` closes over and that requires a gradient; an argument that
            it changes in place. Also a `ValueError`.
        ArgumentTypeError: A type or dtype that does not fit; also a `TypeError`.
        UnsupportedError: Double backward, forward-mode derivatives, torch.func transforms, an ``fn`` that
            torch.compile cannot compile, options that an arbitrary function cannot have; also a `RuntimeError`.

    Note:
        With "sum" and one differentiable scalar the gradients are computed in forward, and backward multiplies them
        by the upstream one; with several, with "token", and with ``HeadOptions(gradient="recompute")``, backward
        recomputes the logits and ``fn``, with the same random numbers and under the same autocast. Ranks
        that share a vocabulary exchange how many classes each holds, for which the host waits, and draw each their own
        numbers.

    Example:
        >>> def entropy(logits):
        ...     logp = logits.log_softmax(-1)
        ...     return -(logp.exp() * logp).sum(-1)
        >>> hidden = torch.randn(2, 5, 16, requires_grad=True)
        >>> weight = torch.randn(1000, 16, requires_grad=True)
        >>> linear_apply(entropy, hidden, weight).shape
        torch.Size([2, 5])
    """
    scale = logit_scale if isinstance(logit_scale, Tensor) else None
    if not isinstance(params, tuple | list):
        got = type(params).__name__
        raise ArgumentTypeError(message("params", "a tuple of what fn gets last", got, "Write params=(x,)."))
    params = list(params)
    tensors = [leaf for leaf in pytree.tree_leaves(params) if isinstance(leaf, Tensor)]
    for tensor in tensors:
        if tensor.requires_grad:  # the others are passed to fn unmodified
            check_dense("params", tensor)
    watched = [t for t in (*token_args, *tensors) if isinstance(t, Tensor)]
    refuse_transforms("linear_apply", input, linear_weight, linear_bias, scale, *watched, instead=NAIVE)
    of_head = input, linear_weight, linear_bias, logit_scale, softcap, options, vocab_shard
    head = checked_call("linear_apply", *of_head, gathered=True)
    ranks, leading = head.ranks, input.shape[:-1]
    _check_arguments(fn, input, token_args, mask, out, compile)
    if head.gradient == "forward" and out == "token":
        hint = "Each token's upstream gradient is known in backward only."
        raise UnsupportedError(message("gradient", "'auto' or 'recompute' with out='token'", "'forward'", hint))
    token_args, tensors, mask = tuple(map(ranks.whole, token_args)), list(map(ranks.whole, tensors)), ranks.whole(mask)
    index = None if mask is None else _places(mask, head.input.device)
    n, V = leading.numel() if index is None else index.numel(), ranks.vocab
    if not ranks.alone:  # the same plan on each, made for the largest shard: a shard's logits, sent, received
        V = max(V, 3 * ranks.most_rows)
    weight = head.weight_VD
    plan = plan_head(
        n, weight.shape[1], V, head.dtype, weight.device, options, weight_dtype=weight.dtype, reduction="sum",
        weight_frozen=head.frozen, function=True,
    )  # fmt: skip
    rest = pytree.tree_map_only(Tensor, lambda _: _TENSOR, params)

    def with_params(given: Sequence[Tensor]) -> Any:
        left = iter(given)
        return pytree.tree_map(lambda leaf: next(left) if leaf is _TENSOR else leaf, rest)

    function = UserFunction(
        plain=fn, run=compiled(fn) if compile else fn, per_token=out == "token", graph=torch.is_grad_enabled(),
        autocast=current_autocast(head.input.device), token_args=len(token_args), with_params=with_params,
        leading=leading, plan=plan, gradient=head.gradient, settings=head[3:],
    )  # fmt: skip
    *found, spec = _NODE.apply(*head[:3], index, *token_args, *tensors, function)  # type: ignore[no-untyped-call]
    axes = leading if out == "token" else torch.Size()
    shaped = [None if x is None else x.view(axes + x.shape[1:]) for x in found]
    return pytree.tree_unflatten([None if x is None else ranks.result(x) for x in shaped], spec)


def _check_arguments(
    fn: object, input: Tensor, token_args: Sequence[object], mask: Tensor | None, out: object, compile: object
) -> None:
    if not callable(fn):
        raise ArgumentTypeError(message("fn", "a function of logits [C, V]", type(fn).__name__))
    check_name("out", out, ("token", "sum"))
    check_flag("compile", compile)
    leading = input.shape[:-1]
    for i, value in enumerate(token_args):
        name = f"token_args[{i}]"
        if not isinstance(value, Tensor):
            got, hint = type(value).__name__, "What is not one row for each token goes into params."
            raise ArgumentTypeError(message(name, "a torch.Tensor", got, hint))
        if check_dense(name, value).shape[: len(leading)] != leading:
            expected = f"first axes {list(leading)}, as input is {list(input.shape)}"
            raise ArgumentValueError(message(name, expected, str(list(value.shape)), "Whole tensors go into params."))
        check_device(name, value, input)
    check_mask(mask, input, "a bool tensor, True where fn runs", on_host=True)


def _places(mask: Tensor, device: torch.device) -> Tensor:
    """Return where a mask is True, on the device: if the mask is on the CPU, the host does not wait."""
    index = mask.reshape(-1).nonzero()[:, 0]
    pinned = index.pin_memory() if device.type == "cuda" != index.device.type else index
    return pinned.to(device, non_blocking=True)


def _forward(ctx: Any, *args: Any) -> Any:
    """One scalar to differentiate: store its gradients. Else backward runs the function once more."""
    *tensors, function = args
    needed = [function.graph and need for need in ctx.needs_input_grad[:-1]]
    store = any(needed) and not function.per_token and function.gradient != "recompute"
    with isolated(tensors[0].device):
        terms = FunctionTerms(function, tensors, needed)
        plan_comparison(terms)
        ctx.stores = terms.forward(store=store)
        stored = terms.gradients() if ctx.stores else []
    ctx.function, ctx.states = function, terms.states
    if ctx.stores:
        ctx.forms = [None if t is None else (t.dtype, t.shape) for t in tensors]
        keep_stored(ctx, stored, tensors)
    elif any(needed):
        if function.gradient == "forward" and function.plan.rows:
            got = f"{sum(terms.differentiable)} that need a gradient"
            raise UnsupportedError(message("gradient", "'auto' or 'recompute' unless fn returns one scalar", got))
        ctx.save_for_backward(*tensors)
    leaves = terms.results()
    flags = zip(leaves, terms.differentiable, strict=True)
    ctx.mark_non_differentiable(*(leaf for leaf, flag in flags if leaf is not None and not flag))
    return *leaves, terms.spec


def _backward(ctx: Any, *upstream: Tensor | None) -> Any:
    """Scale stored gradients: what is 0 stays 0, as of tokens that are masked, or that the function leaves out."""
    needed = ctx.needs_input_grad[:-1]
    if not ctx.stores:
        tensors = ctx.saved_tensors
        with isolated(tensors[0].device):
            terms = FunctionTerms(ctx.function, tensors, needed)
            terms.backward(upstream[:-1], ctx.states)
            pairs = zip(terms.gradients(), tensors, strict=True)
            return [None if g is None else g.to(t.dtype).view(t.shape) for g, t in pairs], tensors
    factor = next(u for u in upstream if u is not None)
    stored, sources, in_place = take_stored(ctx, "linear_apply")
    grads: list[Tensor | None] = [None] * len(stored)
    for i, (grad, form) in enumerate(zip(stored, ctx.forms, strict=True)):
        if grad is not None and needed[i]:  # the first two are as large as hidden states and weight
            product = times(grad, factor) if i > 1 else scaled(grad, factor, in_place, zeros_stay=True)
            grads[i] = product.to(form[0]).view(form[1])
    return grads, sources


_NODE = node("Applied", "linear_apply", _forward, _backward, TWICE)
