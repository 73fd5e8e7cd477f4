"""Any function of the final linear layer's logits, which are never built whole."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.utils import _pytree as pytree

from lowtide.errors import ArgumentTypeError, ArgumentValueError, UnsupportedError, message
from lowtide.head.arguments import (
    check_dense,
    check_device,
    check_options,
    check_per_token,
    check_tensor,
    refuse_transforms,
)
from lowtide.head.call import Head, HeadCall, checked_call
from lowtide.head.function import node
from lowtide.head.function.function import TENSOR, UserFunction, compiled, current_autocast
from lowtide.head.options import HeadOptions
from lowtide.head.plan import HeadPlan, plan_head
from lowtide.head.ranks.alone import Alone
from lowtide.head.ranks.parallel import Ranks
from lowtide.head.ranks.shard import VocabShard

OUT = ("token", "sum")


@_disable_dynamo  # torch.compiler.disable, without importing it: plan and loop are the host's, and in no graph
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
    """Return ``fn(logits, *token_args, *params)`` for the logits of a linear layer, some rows of them at a time.

    With logits ``z = cap((x @ W.T + b) * logit_scale)``, where ``cap(z) = softcap * tanh(z / softcap)``, ``fn`` gets
    [C, V] float32 logits of C tokens (float64 for float64 inputs), the C rows of each token argument, and ``params``
    whole. Derivatives are autograd's through ``fn``. The logits of a chunk exist at a time; ``fn`` gets them in pieces
    of fewer rows, and its graph lives for one piece. `HeadOptions.workspace_mib` bounds both, counting 8 tensors of a
    piece's logits for what ``fn`` holds.

    ``fn`` must treat each token by itself, for any number of rows. It is called several times, on a few rows first.

    Args:
        fn: The function. It may draw random numbers from PyTorch's default generators, and change its logits in place,
            but not its other arguments. Whether it couples tokens is found by comparing it with itself on a few rows.
        input: Hidden states [..., D], any floating dtype and strides, any number of leading axes.
        linear_weight: [V, D], the output embedding. Outside autocast of the same dtype as ``input``.
        token_args: Tensors [..., *], their first axes those of ``input``; ``fn`` gets them as [C, *]. Those that
            require a gradient get it.
        linear_bias: [V], or None.
        params: What ``fn`` gets after the token arguments, whole: tensors of any shape, which get gradients, and
            anything else; pytrees of these too.
        mask: bool [...], True where ``fn`` runs. Other tokens are dropped before the product, whatever they hold; their
            results and gradients are 0. On a GPU the host waits for their number.
        out: ``"token"``: fn returns tensors [C, *], in any pytree. ``"sum"``: scalars that add up over tokens.
        softcap: Cap of the logits, above 0, or None.
        logit_scale: Number or 0-d tensor by which the logits are multiplied, before the cap. A tensor that requires
            a gradient gets it, in float16 at the price of a float32 copy of ``input`` [..., D].
        compile: Compile ``fn`` (not the loop) for any number of rows, once for each ``fn``: define it once, not in each
            step.
        options: Memory, accumulation and when gradients are computed: see `HeadOptions`.
        vocab_shard: Where the vocabulary is sharded over ranks and ``linear_weight``, ``linear_bias`` are this rank's
            rows: which these are, see `VocabShard`. All else is the same on every rank. DTensors say so themselves:
            ``linear_weight`` and ``linear_bias`` with ``Shard(0)``, ``input`` with ``Replicate()`` or, for sequence
            parallelism, ``Shard`` of an axis of tokens, the others whole. ``fn`` gets whole rows of logits all the
            same: the ranks exchange a chunk's, and each calls it on its share of the rows.

    Returns:
        Any: What ``fn`` returns, of its dtypes: with "token" [..., *] for [C, *], with "sum" the sums. Integers,
        booleans and what ``fn`` detaches are not differentiable. With a sharded vocabulary every rank gets all results
        and the whole gradients of ``input`` (of its part of the sequence), ``token_args`` and ``params``.

    Raises:
        ArgumentValueError: A shape, device or number that does not fit; results of ``fn`` with a wrong leading size;
            a result for some tokens that depends on others, among them a mean with ``out="sum"``; results that are
            not the same twice; a tensor that ``fn`` closes over and that requires a gradient; an argument that it
            changes in place; ranks that share a vocabulary and got other arguments. Also a `ValueError`.
        ArgumentTypeError: A type or dtype that does not fit; also a `TypeError`.
        UnsupportedError: Double backward, forward-mode derivatives, torch.func transforms, or options that ask for what
            an arbitrary function does not allow; also a `RuntimeError`.

    Note:
        With "sum" and one differentiable scalar the gradients are computed in forward, and backward multiplies them
        with the upstream one; with several, with "token", and with ``HeadOptions(gradient="recompute")``, backward
        builds the logits and runs ``fn`` once more, with the same random numbers and under the same autocast. Ranks
        that share a vocabulary compare their arguments, for which the host waits, and draw each their own numbers.

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
    param_leaves, params_spec = pytree.tree_flatten(list(params))
    tensors = [leaf for leaf in param_leaves if isinstance(leaf, Tensor)]
    for tensor in tensors:
        if tensor.requires_grad:  # the others are handed to fn as they are, whatever they are
            check_dense("params", tensor)
    watched = [t for t in (*token_args, *tensors) if isinstance(t, Tensor)]
    refuse_transforms("linear_apply", input, linear_weight, linear_bias, scale, *watched, instead=node.NAIVE)
    options = check_options(options)
    call, ranks = checked_call(input, linear_weight, linear_bias, logit_scale, softcap, options, vocab_shard)
    leading = input.shape[:-1]
    if ranks.vocab == 0:
        raise ArgumentValueError(message("linear_weight", "at least one class", str(list(linear_weight.shape))))
    _check_arguments(fn, input, token_args, mask, out, compile)
    if options.gradient == "forward" and out == "token":
        hint = "Each token's upstream gradient is known in backward only."
        raise UnsupportedError(message("gradient", "'auto' or 'recompute' with out='token'", "'forward'", hint))
    token_args, tensors, mask = tuple(map(ranks.whole, token_args)), list(map(ranks.whole, tensors)), ranks.whole(mask)
    index = None if mask is None else mask.reshape(-1).nonzero()[:, 0]
    plan = _plan(leading.numel() if index is None else index.numel(), call, options, ranks)
    function = UserFunction(
        plain=fn,
        run=compiled(fn) if compile else fn,
        per_token=out == "token",
        graph=torch.is_grad_enabled(),
        autocast=current_autocast(call.input.device),
        token_args=len(token_args),
        params_spec=params_spec,
        params_rest=tuple(TENSOR if isinstance(leaf, Tensor) else leaf for leaf in param_leaves),
        leading=leading,
        plan=plan,
        gradient=options.gradient,
        head=_head_of(call, ranks if isinstance(ranks, Ranks) else None),
    )
    given = (*call.trained, index, *token_args, *tensors)
    found = node.apply(function, given)
    return found if ranks.alone else pytree.tree_map_only(Tensor, ranks.result, found)


def _head_of(call: HeadCall, ranks: Ranks | None) -> Callable[[Tensor, Tensor, Tensor | None], Head]:
    """Return what makes a head of tensors like those of a call, which it does not hold on to."""
    settings: Any = call._asdict().items()
    rest = {name: value for name, value in settings if name not in ("input", "linear_weight", "linear_bias")}

    def head(input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None) -> Head:
        return HeadCall(input=input, linear_weight=linear_weight, linear_bias=linear_bias, **rest).head(ranks)

    return head


def _plan(n: int, call: HeadCall, options: HeadOptions, ranks: Ranks | Alone) -> HeadPlan:
    """Return the plan for ``n`` rows; across ranks the same on each, made for the largest shard."""
    V, device_bytes, weight = ranks.vocab, None, call.linear_weight
    if isinstance(ranks, Ranks):
        V, device_bytes = max(V, 3 * ranks.most_rows), ranks.limits.gpu_bytes  # a shard's, sent, and received
        n = ranks.slots if ranks.spread else n
    return plan_head(
        n, weight.shape[1], V, call.dtype, weight.device, options, weight_dtype=weight.dtype, reduction="sum",
        weight_frozen=call.frozen, function=True, device_bytes=device_bytes,
    )  # fmt: skip


def _check_arguments(
    fn: object, input: Tensor, token_args: Sequence[object], mask: Tensor | None, out: object, compile: object
) -> None:
    if not callable(fn):
        raise ArgumentTypeError(message("fn", "a function of logits [C, V]", type(fn).__name__))
    if out not in OUT:
        raise ArgumentValueError(message("out", "'token' or 'sum'", f"{out!r}"))
    if not isinstance(compile, bool):
        raise ArgumentTypeError(message("compile", "True or False", f"{compile!r}"))
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
    if mask is not None:
        if check_tensor("mask", mask).dtype != torch.bool:
            raise ArgumentTypeError(message("mask", "a bool tensor, True where fn runs", str(mask.dtype)))
        check_per_token("mask", mask, input)
