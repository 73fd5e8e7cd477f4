"""Any function of the final linear layer's logits, computed in chunks.

`engine` has the loop over chunks. The user's function gets a chunk's logits in pieces, whose gradient, its vjp, takes
their place. Where the vocabulary is sharded, ranks exchange a chunk's logits so that each gets whole rows of its share
of them, and only that rank calls the function on these; the gradient goes back the same way. N tokens, n of them
computed (masked ones are dropped), C rows of a chunk, c of a piece, D hidden size, V vocabulary.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.random import fork_rng

from lowtide.arguments import check_dense, check_device, check_flag, check_name, refuse_transforms
from lowtide.errors import ArgumentTypeError, ArgumentValueError, UnsupportedError, message
from lowtide.graph import keep_stored, node, pytree, run_in_eager, saved_plainly, take_stored, undisturbed, watched
from lowtide.head.call import Gradients, Head, Wanted, check_mask, checked_call
from lowtide.head.engine import Numbers, Terms, gradient_buffers, narrow_view, run
from lowtide.head.nodes import scaled
from lowtide.head.options import HeadOptions
from lowtide.head.plan import HeadPlan, chunk_of, plan_head
from lowtide.head.ranks import VocabShard
from lowtide.head.rows import Rows, slices, take_leading

NAIVE = "fn(torch.nn.functional.linear(input, linear_weight, linear_bias).float(), *token_args, *params)"
TWICE = (
    "lowtide.linear_apply: expected to be differentiated once, got a second derivative. For those"
    f" build the logits: {NAIVE}."
)
ROWS = 15  # of a comparison: an odd number, whose halves tear pairs apart
ROUNDING, NARROW_ROUNDING = 1e-5, 2e-2  # of a result's largest value; where fn multiplies in bfloat16, or returns it
NOISE, NOISE_MARGIN = 2.0**-20, 16  # of each logit: what shows how far rounding may carry a result
OF_TOKENS = (
    "results for a token that do not depend on the other tokens",
    "It sees one chunk of the tokens at a time: reduce over the vocabulary only, and over tokens afterwards, on what"
    " linear_apply returns.",
)
OF_SUMS = (
    'scalars that add up over tokens with out="sum"',
    "A mean does not add up, nor does a constant: return the sum and divide by the number of all tokens afterwards, or"
    ' take out="token". What one token gets must not depend on the others.',
)
REMEMBERED = 256
_TENSOR = object()  # the placeholder of a tensor
_compared: set[Any] = set()  # keys of calls whose function was compared

# Gives the function its logits in the chunk's own memory, as the result of an operator and not as a leaf: so
# ``logits /= temperature`` is allowed, as it is on the output of a linear layer. Nothing goes back beyond them.
_LOGITS = node("Logits", "linear_apply", lambda _, anchor, held: held[0].detach(), lambda *_: ([], None))  # noqa: ARG005


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
            parallelism, ``Shard`` of an axis of tokens, which is gathered first, the others whole. ``fn`` still gets
            whole rows of logits: the ranks exchange a chunk's, and each calls it on its share of the rows.

    Returns:
        Any: What ``fn`` returns, of its dtypes: with "token" [..., *] for [C, *], with "sum" the sums. Integers,
        booleans and what ``fn`` detaches are not differentiable. With a sharded vocabulary every rank gets all results
        and the whole gradients of ``input`` (of its part of the sequence), ``token_args`` and ``params``.

    Raises:
        ArgumentValueError: A shape, device or number that does not fit; results of ``fn`` with a wrong leading size;
            a result for some tokens that is seen to depend on others, among them a mean with ``out="sum"``; a tensor
            that ``fn`` closes over and that requires a gradient; an argument that it changes in place. Also a
            `ValueError`.
        ArgumentTypeError: A type or dtype that does not fit; also a `TypeError`.
        UnsupportedError: Double backward, forward-mode derivatives, torch.func transforms, options that an arbitrary
            function cannot have; also a `RuntimeError`.

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
    others = [t for t in (*token_args, *tensors) if isinstance(t, Tensor)]
    refuse_transforms("linear_apply", input, linear_weight, linear_bias, scale, *others, instead=NAIVE)
    of_head = input, linear_weight, linear_bias, logit_scale, softcap, options, vocab_shard
    head = checked_call("linear_apply", *of_head, gathered=True)
    ranks, leading = head.ranks, input.shape[:-1]
    _check_arguments(fn, input, token_args, mask, out, compile)
    if head.gradient == "forward" and out == "token":
        hint = "Each token's upstream gradient is known in backward only."
        raise UnsupportedError(message("gradient", "'auto' or 'recompute' with out='token'", "'forward'", hint))
    token_args, tensors, mask = tuple(map(ranks.whole, token_args)), list(map(ranks.whole, tensors)), ranks.whole(mask)
    device, weight, V = head.input.device, head.weight_VD, ranks.vocab
    index = None if mask is None else _places(mask, device)
    if not ranks.alone:  # the same plan on each, made for the largest shard: a shard's logits, sent, received
        V = max(V, 3 * ranks.most_rows)
    plan = plan_head(
        leading.numel() if index is None else index.numel(), weight.shape[1], V, head.dtype, device, options,
        weight_dtype=weight.dtype, reduction="sum", weight_frozen=head.frozen, function=True,
    )  # fmt: skip
    rest = pytree.tree_map_only(Tensor, lambda _: _TENSOR, params)

    def with_params(given: Sequence[Tensor]) -> Any:
        left = iter(given)
        return pytree.tree_map(lambda leaf: next(left) if leaf is _TENSOR else leaf, rest)

    call = Call(
        fn=fn, run=compiled(fn) if compile else fn, per_token=out == "token", graph=torch.is_grad_enabled(),
        autocast=_autocast_of(device), token_args=len(token_args), with_params=with_params, leading=leading,
        index=index, plan=plan, settings=head[3:],
    )  # fmt: skip
    *found, spec = _NODE.apply(*head[:3], *token_args, *tensors, call)  # type: ignore[no-untyped-call]
    axes = leading if call.per_token else torch.Size()
    return pytree.tree_unflatten([ranks.result(x.view(axes + x.shape[call.per_token :])) for x in found], spec)


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


def _autocast_of(device: torch.device) -> torch.dtype | None:
    on = device.type != "meta" and torch.is_autocast_enabled(device.type)
    return torch.get_autocast_dtype(device.type) if on else None


@lru_cache(maxsize=8)  # which keeps them alive
def compiled(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``fn`` compiled, the same object each time."""
    return torch.compile(fn)


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call, without the tensors that autograd watches."""

    fn: Callable[..., Any]
    run: Callable[..., Any]  # that, or the same compiled
    per_token: bool  # whether its results have a row for each row of logits; else they are scalars that add up
    graph: bool  # whether results are connected to their inputs
    autocast: torch.dtype | None  # in which fn runs, in backward too; None: off
    token_args: int  # how many
    with_params: Callable[[Sequence[Tensor]], Any]  # the last arguments, of the tensors among them
    leading: torch.Size  # axes of all tokens
    index: Tensor | None  # [n] places of those that are computed; None: all
    plan: HeadPlan
    settings: tuple[Any, ...]  # of the `Head`, after its tensors


def _forward(ctx: Any, *args: Any) -> Any:
    """One scalar to differentiate: store its gradients. Else backward runs the function once more."""
    *tensors, call = args
    needed = [call.graph and need for need in ctx.needs_input_grad[:-1]]
    ctx.call, ctx.state, device = call, None, tensors[0].device
    with isolated(device):
        terms = FunctionTerms(call, tensors, needed)
        terms.plan_comparison()
        before = random_state(device) if call.graph and has_numbers(tensors[0]) else None
        gradient = terms.head.gradient
        ctx.stores = terms.compute(store=any(needed) and not call.per_token and gradient != "recompute")
        if before is not None and not same_state(before, random_state(device)):
            ctx.state = before
        results = terms.whole_results()
        if ctx.stores:
            ctx.forms = [None if t is None else (t.dtype, t.shape) for t in tensors]
            keep_stored(ctx, terms.gradients(), tensors)
        elif any(needed):
            if gradient == "forward" and call.plan.rows:
                got = f"{sum(terms.differentiable)} that need a gradient"
                raise UnsupportedError(message("gradient", "'auto' or 'recompute' unless fn returns one scalar", got))
            ctx.save_for_backward(*tensors)
    flags = zip(results, terms.differentiable, strict=True)
    ctx.mark_non_differentiable(*(x for x, flag in flags if not flag))
    return *results, terms.form[0]


def _backward(ctx: Any, *upstream: Tensor | None) -> Any:
    call, needed = ctx.call, ctx.needs_input_grad[:-1]
    if not ctx.stores:
        tensors = ctx.saved_tensors
        device = tensors[0].device
        with isolated(device), fork_rng(_gpus(device), enabled=ctx.state is not None):
            if ctx.state is not None:
                set_random_state(ctx.state, device)
            terms = FunctionTerms(call, tensors, needed)
            terms.compute(upstream[:-1])
            pairs = zip(terms.gradients(), tensors, strict=True)
            return [None if g is None else g.to(t.dtype).view(t.shape) for g, t in pairs], tensors
    factor = next(u for u in upstream if u is not None)
    stored, sources, in_place = take_stored(ctx, "linear_apply")
    grads: list[Tensor | None] = [None] * len(stored)
    for i, (grad, form) in enumerate(zip(stored, ctx.forms, strict=True)):
        if grad is not None and needed[i]:
            if i < 2:  # as large as hidden states and weight
                product = scaled(grad, factor, in_place)
            else:  # what is 0 stays 0, as of tokens that are masked
                product = (grad * factor).masked_fill_(grad == 0, 0)
            grads[i] = product.to(form[0]).view(form[1])
    return grads, sources


_NODE = node("Applied", "linear_apply", _forward, _backward, TWICE)


class FunctionTerms(Terms):
    """One pass over the tokens, of forward or of backward, in which the ``needed`` tensors get a gradient.

    ``tensors`` are input, weight, bias, token arguments and params.
    """

    def __init__(self, call: Call, tensors: Sequence[Any], needed: Sequence[bool]) -> None:
        x, w, b, *rest = tensors
        self.call, self.plan, self.head = call, call.plan, Head(x, w, b, *call.settings).prepared()
        self.rows, self.wanted = Rows(tokens=call.leading.numel(), index=call.index), Wanted(*needed[:3])
        self.leaves = [t.detach().requires_grad_(need) for t, need in zip(rest, needed[3:], strict=True)]
        self.args, self.params = self.leaves[: call.token_args], self.leaves[call.token_args :]
        self.anchor = torch.zeros((), device=x.device, requires_grad=True) if any(self.wanted) else None
        self.narrowed = self.plan.backward_gemm == "narrow" and self.head.ranks.alone
        self.form: Any = None  # of the results: their structure, and of each its dtype and the shape of a row
        self.results: list[Tensor] = []  # [N, *], or what they add up to
        self.differentiable: list[bool] = []
        self.compares = False  # the function, on the first chunk
        self._upstream: Sequence[Tensor | None] | None = None  # of the results
        self._into: Gradients | None = None
        self._of_leaves: dict[int, Tensor] = {}  # gradients of those that are trained

    def compute(self, upstream: Sequence[Tensor | None] | None = None, *, store: bool = False) -> bool:
        """Compute the results, or the gradients for their ``upstream`` ones, [N, *] or scalars.

        With ``store`` and one derivative to take, return True: the gradients are there too, for an upstream one of 1.
        """
        self._upstream, axes = upstream, len(self.call.leading)
        if store or upstream is not None:
            self._into = gradient_buffers(self.head, self.rows, self.plan, self.wanted, stored=store)
            for i, t in enumerate(self.leaves):
                if t.requires_grad:
                    self._of_leaves[i] = self._total(
                        t.shape[axes:] if i < len(self.args) else t.shape, t, i < len(self.args)
                    )
        run(self.head, self.rows, self.plan, self, self._into, upstream=lambda *_: None)
        return self._into is not None

    def both_(self, z: Tensor, part: slice, upstream: Any) -> tuple[Numbers, None]:  # noqa: ARG002
        """See `numbers`."""
        return self.numbers(z, part), None

    def numbers(self, z: Tensor, part: slice) -> Numbers:
        """Call the function on a chunk's rows, and where gradients are computed leave that of ``x @ w.T`` in ``z``."""
        ranks = self.head.ranks
        own_cV, share = ranks.whole_rows(z[:, : ranks.rows]), ranks.share_of(part)
        if self.compares:
            self.compares = False
            self._compare(own_cV, share)
        c, target_cV = len(own_cV), narrow_view(own_cV, self.head.dtype) if self.narrowed else own_cV
        # what the function makes of no rows at all tells dtypes and shapes
        for piece in list(slices(c, chunk_of(c, self.plan.piece_rows, 1))) or [slice(0, 0)] * (self.form is None):
            self._run(own_cV[piece], target_cV[piece], slice(share.start + piece.start, share.start + piece.stop))
        if self._into is not None and self.anchor is not None and not ranks.alone:
            z[:, : ranks.rows] = ranks.own_classes(own_cV, len(z))
        return {}

    def _run(self, z_cV: Tensor, target_cV: Tensor, rows: slice) -> None:
        """Call the function on a piece, for its results or its gradients, or for both."""
        # the slope of a cap is computed from what it returned, and the function may change its logits
        capped = None if self.head.softcap is None or self._into is None else z_cV.clone()
        index, per_token, args = self.rows.index, self.call.per_token, self._args(self.rows.index, rows)
        at = rows if index is None else index[rows]
        results, edge = self._evaluate(z_cV, args)
        upstream: Sequence[Tensor | None] | None = self._upstream
        if upstream is None:
            upstream = self._collect(results, at)
        elif per_token:
            upstream = [None if u is None else u[at] for u in upstream]
        if upstream is None or not len(z_cV):
            return
        pairs = zip(results, upstream, strict=True)
        used = [(x, u.to(x.dtype)) for x, u in pairs if u is not None and x.requires_grad]
        leaves, found = [*args, *self.params], list[Any]()
        inputs: list[Any] = [leaves[i] for i in self._of_leaves] + [edge] * (edge is not None)
        if used and inputs:
            outputs, grads = zip(*used, strict=True)
            found = list(torch.autograd.grad(outputs, inputs, grads, allow_unused=True))
        for (i, total), grad in zip(self._of_leaves.items(), found, strict=False):
            if grad is not None:
                put_or_add(total, grad, at if i < len(self.args) else None)
        if edge is not None:
            self._put(found[-1] if found else None, z_cV, target_cV, capped)

    def _args(self, index: Tensor | None, rows: slice) -> list[Tensor]:
        """Return the token arguments of some rows, as leaves."""
        axes = len(self.call.leading)
        return [take_leading(a.detach(), axes, index, rows).requires_grad_(a.requires_grad) for a in self.args]

    def _evaluate(
        self, z_cV: Tensor, args: Sequence[Tensor], run: Callable[..., Any] | None = None
    ) -> tuple[list[Tensor], GradientEdge | None]:
        """Call the function on a piece of logits, which it sees in their own memory; check results and what they reach.

        Returns the results, and where their graph reaches the logits.
        """
        call, edge, leaves = self.call, None, (*args, *self.params)
        # dynamo compiles once more for a single row, and a result for one row is no work worth compiling
        run = run or (call.run if len(z_cV) > 1 else call.fn)
        given = [t for t in leaves if not t.is_inference()]
        before = [t._version for t in given]
        # without autocast's cache of casts, whose graphs are freed with the first piece's
        kind, dtype = z_cV.device.type, call.autocast
        autocast = torch.autocast(kind, dtype, cache_enabled=False) if dtype else nullcontext()
        with torch.set_grad_enabled(call.graph), autocast:
            z = z_cV.detach()  # autograd refuses a change in place of a view that was made without it
            if self.anchor is not None:
                z = _LOGITS.apply(self.anchor, [z_cV])  # type: ignore[no-untyped-call]
                edge = get_gradient_edge(z)
            if run is not call.fn:
                for tensor in (z, *args):
                    torch._dynamo.maybe_mark_dynamic(tensor, 0)
            try:
                returned = run(z, *args, *call.with_params(self.params))
            except Exception as error:
                error.add_note(f"fn, which must take any number of rows, was called with logits {list(z_cV.shape)}.")
                raise
        if [t._version for t in given] != before:
            raise ArgumentValueError(
                message("fn", "its arguments unchanged", "one changed in place", "Work on a copy: x.clone().")
            )
        found, spec = pytree.tree_flatten(returned)
        results = [_checked(x, z_cV, call.per_token) for x in found]
        form = spec, [(x.dtype, *x.shape[1:]) for x in results]
        if form != (self.form or form):
            expected = f"results of one structure, dtype and shape for all rows, {self.form}"
            raise ArgumentValueError(message("fn", expected, f"{form} for other rows"))
        self.form = form
        if call.graph:
            _refuse_strangers(results, {id(t) for t in leaves}, edge)
        return results, edge

    def _collect(self, results: list[Tensor], at: slice | Tensor) -> list[Tensor] | None:
        """Take the results of some rows; return upstream gradients, 1, where the only one's gradients are stored."""
        per_token, into = self.call.per_token, self._into
        if not self.differentiable:
            self.differentiable = [False] * len(results)
            self.results = [self._total(x.shape[per_token:], x, per_token) for x in results]
        for i, x in enumerate(results):
            self.differentiable[i] |= x.requires_grad
            put_or_add(self.results[i], x, at if per_token else None)
        if into is not None and sum(self.differentiable) != 1:  # left to backward
            into.input_ND = into.weight_VD = into.bias_V = self._into = None
        return None if self._into is None else [torch.ones_like(x) for x in results]

    def _total(self, shape: Sequence[int], like: Tensor, rowwise: bool) -> Tensor:
        """Return zeros for rows of this shape of all tokens, or for a sum: of narrow numbers in float32."""
        wide = not rowwise and like.dtype in (torch.float16, torch.bfloat16)
        return like.new_zeros([*[self.rows.tokens] * rowwise, *shape], dtype=torch.float32 if wide else like.dtype)

    def _put(self, dz: Tensor | None, z_cV: Tensor, target_cV: Tensor, capped: Tensor | None) -> None:
        """Leave the gradient of the product ``x @ w.T`` in ``target_cV``, from that of the logits."""
        scale, cap = self.head.scale, self.head.softcap
        assert not isinstance(cap, Tensor)
        if dz is None:
            target_cV.zero_()
            return
        if dz.layout != torch.strided:
            dz = dz.to_dense()  # of gather(sparse_grad=True)
        if capped is not None and cap is not None:
            dz = torch.addcmul(dz, capped * dz, capped, value=-(cap**-2))
        elif dz.untyped_storage().data_ptr() == z_cV.untyped_storage().data_ptr():
            dz = dz.clone()  # an autograd.Function that hands its input on: what is written would change what is read
        if scale is None:
            target_cV.copy_(dz)
        else:
            torch.mul(dz, scale, out=target_cV)

    def whole_results(self) -> list[Tensor]:
        """Return all results, [N, *] or scalars, in the function's own dtypes, the same on every rank."""
        results = [self._of_all(x, self.call.per_token) for x in self.results]
        return [x.to(form[0]) for x, form in zip(results, self.form[1], strict=True)]

    def gradients(self) -> list[Tensor | None]:
        """Return the gradients in the order of the tensors, the same of token arguments and params on every rank."""
        into, totals = self._into, self._of_leaves
        assert into is not None
        found = {i: self._of_all(total, i < len(self.args)) for i, total in totals.items()}
        return [into.input_ND, into.weight_VD, into.bias_V, *map(found.get, range(len(self.leaves)))]

    def _of_all(self, total: Tensor, rowwise: bool) -> Tensor:
        """Return what all ranks have added up, each its own rows or sums."""
        ranks = self.head.ranks
        return ranks.put_together_(total) if rowwise else ranks.add_up_(total)

    def plan_comparison(self) -> None:
        """Have the first chunk compared, the first time that a function's code gets arguments of these shapes.

        On a GPU the host waits for the comparison; a CUDA graph's capture, a call inside a dispatch mode (a selective
        checkpoint counts the operators, which a second run has to repeat), and tensors without numbers have none. Of
        ranks that share a vocabulary each compares its own rows.
        """
        x = self.head.input
        capturing = x.is_cuda and torch.cuda.is_current_stream_capturing()
        self.compares = not (capturing or watched((x,)) or self.plan.rows < 2 or self._key() in _compared)

    def _key(self) -> Any:
        """Return a key that differs between calls with other code, shapes or dtypes."""
        call, w = self.call, self.head.weight_VD
        fn = inspect.unwrap(getattr(call.fn, "func", call.fn))  # of a partial one
        shapes = tuple((a.shape[len(call.leading) :], a.dtype) for a in self.args)
        return getattr(fn, "__code__", type(fn)), call.per_token, w.shape, w.dtype, shapes

    def _compare(self, z_CV: Tensor, share: slice) -> None:
        """Raise where results for a few rows differ from those for their two halves by more than rounding."""
        with fork_rng(_gpus(z_CV.device)):
            difference = self._difference(z_CV, share)
        if difference is not None:
            raise ArgumentValueError(difference)
        if len(z_CV) > 1:
            if len(_compared) >= REMEMBERED:
                _compared.clear()
            _compared.add(self._key())

    def _difference(self, z_CV: Tensor, share: slice) -> str | None:
        """Return in words how they differ. Halves of rows draw other random numbers: what draws any is not compared."""
        count, device, per_token = min(len(z_CV), ROWS, max(2, self.plan.piece_rows)), z_CV.device, self.call.per_token
        if count < 2:
            return None
        count -= count > 2 and count % 2 == 0

        def results(start: int = 0, stop: int = count, noise: float = 0.0) -> list[Tensor]:
            args = self._args(self.rows.index, slice(share.start + start, share.start + stop))
            found, _ = self._evaluate(z_CV[start:stop] * (1 + noise), args, self.call.fn)
            return [torch.view_as_real(x.detach().to(torch.complex128).resolve_conj()) for x in found]

        before = random_state(device)
        whole = results()
        if not same_state(before, random_state(device)):
            return None
        pairs = zip(results(0, count // 2), results(count // 2), strict=True)
        halves = [torch.cat(pair) if per_token else pair[0] + pair[1] for pair in pairs]
        dtypes = [form[0] for form in self.form[1]]
        narrow = self.call.autocast or any(dtype.is_floating_point and dtype.itemsize < 4 for dtype in dtypes)

        def agree(one: Tensor, two: Tensor, more: float = 0.0) -> bool:
            bound = _largest(one) * (NARROW_ROUNDING if narrow else ROUNDING) + more
            return torch.allclose(one, two, rtol=0, atol=bound, equal_nan=True)

        for i, (one, two) in enumerate(zip(whole, halves, strict=True)):
            if not agree(one, two) and not agree(one, two, NOISE_MARGIN * _largest(results(noise=NOISE)[i] - one)):
                expected, hint = OF_TOKENS if per_token else OF_SUMS
                return message("fn", expected, f"result {i}, which differs when rows come in two parts", hint)
        return None


def _checked(x: object, z_cV: Tensor, per_token: bool) -> Tensor:
    """Return one result as a tensor of the right shape."""
    if not per_token and type(x) in (int, float):
        x = torch.full((), x, device=z_cV.device)  # type: ignore[call-overload]  # a copy from the host would wait
    if not isinstance(x, Tensor):
        kind = "tensors" if per_token else "scalar tensors or numbers"
        raise ArgumentTypeError(message("fn", f"to return {kind}, in any pytree", type(x).__name__))
    if per_token:
        fits, expected = x.dim() > 0 and len(x) == len(z_cV), f"results of shape [{len(z_cV)}, ...]"
        hint = 'Return one row for each row of logits, or scalars that add up, with out="sum".'
    else:
        fits, expected = x.dim() == 0 and x.dtype != torch.bool, 'numbers of shape [] with out="sum"'
        hint = 'Sum over the tokens, x.sum() to count, or keep them with out="token".'
    if not fits or x.device != z_cV.device:
        got = f"shape {list(x.shape)} of {x.dtype} on {x.device} for logits {list(z_cV.shape)} on {z_cV.device}"
        raise ArgumentValueError(message("fn", expected, got, hint))
    return x


def _refuse_strangers(results: Sequence[Tensor], known: set[int], logits: GradientEdge | None) -> None:
    """Raise where the results' graph reaches a leaf that is no ``known`` argument: its gradient would be lost."""
    todo: list[Any] = [get_gradient_edge(x).node for x in results if x.requires_grad]
    seen = {None, logits and logits.node}
    while todo:
        at = todo.pop()
        if at in seen:
            continue
        seen.add(at)
        todo += [node for node, _ in at.next_functions]
        if at.name().endswith("AccumulateGrad") and id(at.variable) not in known:
            got = f"one from outside, made from a leaf of shape {list(at.variable.shape)}, whose gradient would be lost"
            hint = (
                "Pass it in params=(...,), or in token_args if it has a row for each token; fn gets it as an argument."
                " Detach it if it needs no gradient."
            )
            raise ArgumentValueError(message("fn", "tensors that need a gradient to be passed as arguments", got, hint))


def put_or_add(total: Tensor, value: Tensor, at: slice | Tensor | None) -> None:
    """Write rows [c, ...] to their places ``at`` in the total [N, ...]; None: add to it."""
    if at is None:
        total += value.detach()
    else:
        total[at] = value.detach()


def has_numbers(x: Tensor) -> bool:
    """Return whether a tensor holds numbers, and not their shapes alone."""
    return type(x) in (Tensor, torch.nn.Parameter) and not x.is_meta


def random_state(device: torch.device) -> list[Tensor]:
    """Return the states of the generators that a function of tensors on ``device`` draws from, on the host."""
    return [torch.get_rng_state(), *map(torch.cuda.get_rng_state, _gpus(device))]


def set_random_state(state: list[Tensor], device: torch.device) -> None:
    """Put the generators there."""
    torch.set_rng_state(state[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state[1], device)


def same_state(a: list[Tensor], b: list[Tensor]) -> bool:
    """Return whether no random number was drawn between two states."""
    return all(map(torch.equal, a, b))


def _gpus(device: torch.device) -> list[torch.device]:
    return [device] if device.type == "cuda" else []


def _largest(x: Tensor) -> float:
    """Return the largest finite magnitude, 0 where there is none."""
    return x.abs().nan_to_num(0, 0, 0).max().item() if x.numel() else 0.0


@contextmanager
def isolated(device: torch.device) -> Iterator[None]:
    """Keep autocast away from the GEMMs, and outer hooks on saved tensors from the function's graphs.

    Each of these lives for one piece. torch.utils.checkpoint's hooks would drop what it saves and compute the whole
    checkpointed block again to get it back.
    """
    with saved_plainly(), undisturbed(device):
        yield
