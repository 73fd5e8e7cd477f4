"""Any function of the final linear layer's logits, computed in chunks.

The user's function gets a chunk's logits in pieces, whose gradient, its vjp, takes their place. Where the vocabulary is
sharded, a chunk's logits are gathered, and every rank calls the function on whole rows and keeps the gradient of its
own classes. N tokens, n of them computed (masked ones are dropped), C rows of a chunk, c of a piece, D hidden size, V
vocabulary.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.random import fork_rng

from lowtide.arguments import check_dense, check_device, check_flag, check_name, is_autocast_on, refuse_transforms
from lowtide.errors import ArgumentTypeError, ArgumentValueError, UnsupportedError, message
from lowtide.graph import keep_stored, node, pytree, run_in_eager, saved_plainly, take_stored, undisturbed, watched
from lowtide.head.call import Gradients, Head, Wanted, check_mask, checked_call, gradient_buffers
from lowtide.head.engine import Chunks, Terms, narrow_view
from lowtide.head.nodes import scaled
from lowtide.head.options import HeadOptions
from lowtide.head.plan import HeadPlan, choose_gradient, chunk_of, plan_head
from lowtide.head.ranks import VocabShard
from lowtide.head.rows import Rows, slices, take_leading

NAIVE = "fn(torch.nn.functional.linear(input, linear_weight, linear_bias).float(), *token_args, *params)"
ROWS = 15  # of a comparison: an odd number, whose halves tear pairs apart
# Halves may differ as rounding lets them: by a share of the results, and by what noise on the logits, as large as
# bfloat16's rounding, makes of them, some times over.
ROUNDING, NOISE, NOISE_MARGIN = 1e-5, 2.0**-10, 4
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
_compared: set[Any] = set()  # code of functions, and shapes, whose halves were compared

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
            results and gradients are 0. Their number has to be known on the host, which waits for a mask on a GPU.
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
            whole rows of logits: a chunk's are gathered, and every rank calls it on all of them.

    Returns:
        Any: What ``fn`` returns, of its dtypes: with "token" [..., *] for [C, *], with "sum" the sums. Integers,
        booleans and what ``fn`` detaches are not differentiable. With a sharded vocabulary every rank gets all results
        and the whole gradients of ``input`` (of its part of the sequence), ``token_args`` and ``params``.

    Raises:
        ArgumentValueError: A shape, device or number that does not fit; results of ``fn`` with a wrong leading size;
            a result for some tokens that is seen to depend on others, among them a mean with ``out="sum"``; a tensor
            that ``fn`` closes over and that requires a gradient. Also a `ValueError`.
        ArgumentTypeError: A type or dtype that does not fit; also a `TypeError`.
        UnsupportedError: Double backward, forward-mode derivatives, torch.func transforms, options that an arbitrary
            function cannot have; also a `RuntimeError`.

    Note:
        With "sum" and one differentiable scalar the gradients are computed in forward, and backward multiplies them
        by the upstream one; with several, with "token", and with ``HeadOptions(gradient="recompute")``, backward
        recomputes the logits and ``fn``, with the same random numbers and under the same autocast. Ranks
        that share a vocabulary exchange how many classes each holds, for which the host waits. Seed them alike where
        ``fn`` draws random numbers.

    Example:
        >>> def entropy(logits):
        ...     logp = logits.log_softmax(-1)
        ...     return -(logp.exp() * logp).sum(-1)
        >>> hidden = torch.randn(2, 5, 16, requires_grad=True)
        >>> weight = torch.randn(1000, 16, requires_grad=True)
        >>> linear_apply(entropy, hidden, weight).shape
        torch.Size([2, 5])
    """
    if not isinstance(params, tuple | list):
        got = type(params).__name__
        raise ArgumentTypeError(message("params", "a tuple of what fn gets last", got, "Write params=(x,)."))
    params = list(params)
    tensors = [leaf for leaf in pytree.tree_leaves(params) if isinstance(leaf, Tensor)]
    for tensor in tensors:
        if tensor.requires_grad:  # the others are passed to fn unmodified
            check_dense("params", tensor)
    of_head = input, linear_weight, linear_bias, logit_scale
    refuse_transforms("linear_apply", *of_head, *token_args, *tensors, instead=NAIVE)
    head = checked_call("linear_apply", *of_head, softcap, options, vocab_shard, gathered=True)
    ranks, leading, device = head.ranks, input.shape[:-1], head.input.device
    _check_arguments(fn, input, token_args, mask, out, compile)
    choose_gradient(head.gradient, "none" if out == "token" else "sum")
    index = None if mask is None else ranks.whole(mask).reshape(-1).nonzero()[:, 0]
    rows = Rows(tokens=leading.numel(), index=index)
    weight, V = head.weight_VD, ranks.vocab
    if not ranks.alone:  # the largest shard's logits, these sent, and those of all classes received, and in order
        V = 2 * (V + ranks.most_rows)
    plan = plan_head(
        rows.n, weight.shape[1], V, head.dtype, device, options, weight_dtype=weight.dtype, reduction="sum",
        weight_frozen=head.frozen, function=True,
    )  # fmt: skip
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
    if is_autocast_on(device.type):  # without its cache of casts, whose graphs are freed with the first piece's
        dtype = torch.get_autocast_dtype(device.type)
        autocast = partial(torch.autocast, device.type, dtype, cache_enabled=False)
    code = getattr(fn, "func", fn)  # of a partial one
    call = Call(
        _compiled(fn) if compile else fn, compile, getattr(code, "__code__", type(code)), out == "token",
        out == "sum" and head.gradient != "recompute", torch.is_grad_enabled(), autocast, len(token_args),
        params, rows, plan, head[3:],
    )  # fmt: skip
    given = map(ranks.whole, (*token_args, *tensors))
    *found, spec = _NODE.apply(*head[:3], *given, call)  # type: ignore[no-untyped-call]
    results = [x.view(leading * call.per_token + x.shape[call.per_token :]) for x in found]
    return pytree.tree_unflatten(map(ranks.result, results), spec)


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
    check_mask(mask, input, "a bool tensor, True where fn runs")


@lru_cache(maxsize=8)  # which keeps them alive
def _compiled(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``fn`` compiled, the same object each time."""
    return torch.compile(fn)


class Call(NamedTuple):
    """One call, without the tensors that autograd watches."""

    fn: Callable[..., Any]
    compiled: bool
    code: Any  # of the function; of a module its class
    per_token: bool  # whether its results have a row for each row of logits; else they are scalars that add up
    stores: bool  # whether forward computes the gradients of a scalar
    graph: bool  # whether results are connected to their inputs
    autocast: Callable[[], AbstractContextManager[Any]]  # in which the function runs, in backward too
    token_args: int  # how many
    params: list[Any]  # of whose tensors a pass has its own
    rows: Rows  # that are computed
    plan: HeadPlan
    settings: tuple[Any, ...]  # of the `Head`, after its tensors


def _forward(ctx: Any, *args: Any) -> Any:
    """One scalar to differentiate: store its gradients. Else backward runs the function once more."""
    *tensors, call = args
    x, needed = tensors[0], [call.graph and need for need in ctx.needs_input_grad[:-1]]
    with saved_plainly(), undisturbed(x.device):
        before, whole = _random_states(x), FunctionPass(call, tensors, needed, stored=call.stores)
        results = whole.run()
        drawn = not all(map(torch.equal, before, _random_states(x)))
        ctx.call, ctx.stores, ctx.states = call, whole.into is not None, before if drawn else []
        if ctx.stores:
            pairs = zip(whole.gradients(tensors), tensors, strict=True)
            keep_stored(ctx, [None if g is None else (g, t.dtype) for g, t in pairs], tensors)
        elif any(needed):
            if whole.head.gradient == "forward":
                got = f"{sum(whole.differentiable)} that need a gradient"
                raise UnsupportedError(message("gradient", "'auto' or 'recompute' unless fn returns one scalar", got))
            ctx.save_for_backward(*tensors)
    ctx.mark_non_differentiable(*(x for x, flag in zip(results, whole.differentiable, strict=True) if not flag))
    return *results, whole.form[0]


def _backward(ctx: Any, *upstream: Tensor | None) -> Any:
    call, needed = ctx.call, ctx.needs_input_grad[:-1]
    if not ctx.stores:
        tensors = ctx.saved_tensors
        x = tensors[0]
        with saved_plainly(), undisturbed(x.device), fork_rng([x.device] * x.is_cuda, enabled=bool(ctx.states)):
            for generator, state in zip(_generators(x), ctx.states, strict=False):
                generator.set_state(state)
            whole = FunctionPass(call, tensors, needed, upstream[:-1])
            whole.run()
            pairs = zip(whole.gradients(tensors), tensors, strict=True)
            return [None if g is None else g.to(t.dtype) for g, t in pairs], tensors
    factor = next(u for u in upstream if u is not None)
    stored, sources, in_place = take_stored(ctx, "linear_apply")
    wanted = [pair if need else None for pair, need in zip(stored, needed, strict=True)]
    return [None if pair is None else scaled(pair[0], factor, in_place).to(pair[1]) for pair in wanted], sources


_NODE = node("Applied", "linear_apply", _forward, _backward)


class FunctionPass(Terms):
    """One pass over the tokens, of forward or of backward, in which the ``needed`` tensors get a gradient.

    ``tensors`` are input, weight, bias, token arguments and params; ``upstream`` are, in backward, the results'
    gradients.
    """

    def __init__(
        self, call: Call, tensors: Sequence[Any], needed: Sequence[bool],
        upstream: Sequence[Tensor | None] | None = None, *, stored: bool = False,
    ) -> None:  # fmt: skip
        x, w, b, *rest = tensors
        self.call, self.plan, self.upstream = call, call.plan, upstream
        head: Any = Head(x, w, b, *call.settings).prepared()
        self.cap, scale = head.softcap, head.scale
        if self.cap is not None:  # the function's graph has cap * tanh(z)
            scale = (1 if scale is None else scale) / self.cap
        self.head: Head = head._replace(scale=scale, softcap=None)
        self.rows, wanted = call.rows, Wanted(*needed[:3])
        self.leaves = [t.detach().requires_grad_(need) for t, need in zip(rest, needed[3:], strict=True)]
        self.args, self.params = self.leaves[: call.token_args], self.leaves[call.token_args :]
        self.anchor = torch.zeros((), device=x.device, requires_grad=True) if any(wanted) else None
        self.narrowed = self.plan.backward_gemm == "narrow" and self.head.ranks.alone
        self.form: Any = None  # of the results: their structure, and of each its dtype and the shape of a row
        self.results: list[Tensor] = []  # [N, *], or what they add up to
        self.differentiable: list[bool] = []
        self.into: Gradients | None = None
        self.totals: dict[int, Tensor] = {}  # gradients of the leaves that are trained
        if stored or upstream is not None:
            self.into = gradient_buffers(self.head, self.rows, self.plan, wanted, stored=stored)
            for i, t in enumerate(self.leaves):
                if t.requires_grad:
                    self.totals[i] = self._zeros(t, x.dim() - 1 if i < call.token_args else None)

    def _zeros(self, like: Tensor, axes: int | None) -> Tensor:
        """Return zeros for all tokens, of which ``like`` has ``axes``; None: for a sum, narrow numbers' in float32."""
        if axes is not None:
            return like.new_zeros(self.rows.tokens, *like.shape[axes:])
        narrow = like.dtype in (torch.float16, torch.bfloat16)
        return like.new_zeros(like.shape, dtype=torch.float32 if narrow else like.dtype)

    def run(self) -> list[Tensor]:
        """Compute results, gradients or both; return all results, [N, *] or scalars, in the function's own dtypes."""
        head, ranks = self.head, self.head.ranks
        chunks = Chunks(head, self.rows, self.plan, self)
        for part in chunks.parts or [slice(0, 0)]:
            x_CD = chunks.hidden(part)
            C, own_CV = len(x_CD), chunks.logits(x_CD, part)[:, : ranks.rows]
            z_CV = ranks.whole_rows(own_CV)
            if self.upstream is None and self.form is None:
                self._compare(z_CV, part.start)
            target_CV = narrow_view(z_CV, head.dtype) if self.narrowed else z_CV
            # what the function makes of no rows at all tells dtypes and shapes
            for piece in list(slices(C, chunk_of(C, self.plan.piece_rows, 1))) or [slice(0, 0)]:
                self._piece(z_CV[piece], target_CV[piece], slice(part.start + piece.start, part.start + piece.stop))
            if self.into is not None and self.anchor is not None and C:
                if not ranks.alone:
                    own_CV.copy_(ranks.own_classes(z_CV.T).T)
                chunks.add_products(self, own_CV, None, x_CD, part, self.into)
        return [x.to(form[0]) for x, form in zip(self.results, self.form[1], strict=False)]

    def gradients(self, tensors: Sequence[Any]) -> list[Tensor | None]:
        """Return the gradients of the tensors."""
        into, of_leaves = self.into, map(self.totals.get, range(len(self.leaves)))
        assert into is not None
        grads = into.input_ND, into.weight_VD, into.bias_V, *of_leaves
        return [None if g is None else g.view(t.shape) for g, t in zip(grads, tensors, strict=True)]

    def _piece(self, z_cV: Tensor, target_cV: Tensor, rows: slice) -> None:
        """Call the function on a piece; where gradients are computed ``target_cV`` gets that of ``x @ w.T``."""
        index, per_token, args = self.rows.index, self.call.per_token, self._args(rows)
        at = rows if index is None else index[rows]
        results, edge = self._evaluate(z_cV, args)
        if self.upstream is None:
            self._collect(results, at)
        if self.into is None or not len(z_cV):
            return
        used: list[Any] = [(x, None) for x in results if x.requires_grad]  # a scalar, for an upstream gradient of 1
        if self.upstream is not None:
            pairs = zip(results, self.upstream, strict=True)
            used = [(x, u[at] if per_token else u) for x, u in pairs if u is not None and x.requires_grad]
        leaves = [*args, *self.params]
        inputs: list[Any] = [leaves[i] for i in self.totals] + [edge] * (edge is not None)
        found: list[Tensor | None] = [None] * len(inputs)
        if used:
            outputs, grads = zip(*used, strict=True)
            found = list(torch.autograd.grad(outputs, inputs, grads, allow_unused=True))
        for (i, total), grad in zip(self.totals.items(), found, strict=False):
            if grad is not None and i < len(args):
                total[at] = grad
            elif grad is not None:
                total.add_(grad)
        if edge is None:
            return
        dz, scale = found[-1], self.head.scale
        if dz is None:
            target_cV.zero_()
            return
        if dz.untyped_storage().data_ptr() == z_cV.untyped_storage().data_ptr():
            dz = dz.clone()  # an autograd.Function that hands its input on: what is written would change what is read
        if scale is None:
            target_cV.copy_(dz)
        else:
            torch.mul(dz, scale, out=target_cV)

    def _args(self, rows: slice) -> list[Tensor]:
        """Return the token arguments of some rows, as leaves."""
        axes, index = self.head.input.dim() - 1, self.rows.index
        return [take_leading(a.detach(), axes, index, rows).requires_grad_(a.requires_grad) for a in self.args]

    def _collect(self, results: list[Tensor], at: slice | Tensor) -> None:
        """Take the results of some rows; leave the gradients to backward where not exactly one result has any."""
        per_token = self.call.per_token
        if not self.differentiable:
            self.differentiable = [False] * len(results)
            self.results = [self._zeros(x, 1 if per_token else None) for x in results]
        for i, (total, x) in enumerate(zip(self.results, results, strict=True)):
            self.differentiable[i] |= x.requires_grad
            if per_token:
                total[at] = x
            else:
                total.add_(x)
        if sum(self.differentiable) != 1:
            self.into = None

    def _evaluate(self, z_cV: Tensor, args: Sequence[Tensor]) -> tuple[list[Tensor], GradientEdge | None]:
        """Call the function on a piece of logits, which it sees in their own memory; check results and what they reach.

        Returns the results, and where their graph reaches the logits.
        """
        call, edge, own = self.call, None, iter(self.params)
        with torch.set_grad_enabled(call.graph), call.autocast():
            z = z_cV.detach()  # autograd refuses a change in place of a view that was made without it
            if self.anchor is not None:
                z = _LOGITS.apply(self.anchor, [z_cV])  # type: ignore[no-untyped-call]
                edge = get_gradient_edge(z)
            z = z if self.cap is None else torch.tanh(z) * self.cap
            if call.compiled:
                for tensor in (z, *args):
                    torch._dynamo.maybe_mark_dynamic(tensor, 0)
            params = pytree.tree_map_only(Tensor, lambda _: next(own), call.params)
            try:
                returned = call.fn(z, *args, *params)
            except Exception as error:
                error.add_note(f"fn, which must take any number of rows, was called with logits {list(z_cV.shape)}.")
                raise
        found, spec = pytree.tree_flatten(returned)
        results = [_checked(x, z_cV, call.per_token) for x in found]
        form = spec, [(x.dtype, *x.shape[1:]) for x in results]
        if form != (self.form or form):
            expected = f"results of one structure, dtype and shape for all rows, {self.form}"
            raise ArgumentValueError(message("fn", expected, f"{form} for other rows"))
        self.form = form
        if call.graph:
            _refuse_strangers(results, {id(t) for t in (*args, *self.params)}, edge)
        return results, edge

    def _compare(self, z_CV: Tensor, first: int) -> None:
        """Raise where results for a few rows are not those for their two halves, the first time for code and shapes.

        On a GPU the host waits for it; a CUDA graph's capture, a call inside a dispatch mode (a selective checkpoint
        counts the operators, which a second run has to repeat), and tensors without numbers have none. Halves draw
        other random numbers: what draws any is not compared.
        """
        call, x, count = self.call, self.head.input, min(len(z_CV), ROWS, max(2, self.plan.piece_rows))
        key = call.code, self.head.weight_VD.shape, *(a.shape[x.dim() - 1 :] for a in self.args)
        capturing = x.is_cuda and torch.cuda.is_current_stream_capturing()
        if count < 2 or capturing or watched((x,)) or key in _compared:
            return

        def results(z: Tensor, start: int, stop: int) -> list[Tensor]:
            args = self._args(slice(first + start, first + stop))
            return [found.double() for found in self._evaluate(z[start:stop].clone(), args)[0]]

        rows, half, before = z_CV[:count], count // 2, _random_states(x)
        with fork_rng([x.device] * x.is_cuda):
            whole = results(rows, 0, count)
            if all(map(torch.equal, before, _random_states(x))):
                parts = zip(results(rows, 0, half), results(rows, half, count), strict=True)
                halves = [torch.cat(pair) if call.per_token else pair[0] + pair[1] for pair in parts]
                noisy = results(rows * (1 + NOISE * torch.randn_like(rows)), 0, count)
                for i, found in enumerate(zip(whole, halves, noisy, strict=True)):
                    one, two, other = (x.nan_to_num(0, 0, 0) for x in found)
                    if (two - one).norm() > ROUNDING * one.norm() + NOISE_MARGIN * (other - one).norm():
                        expected, hint = OF_TOKENS if call.per_token else OF_SUMS
                        got = f"result {i}, which differs when rows come in two parts"
                        raise ArgumentValueError(message("fn", expected, got, hint))
        _compared.add(key)


def _checked(x: object, z_cV: Tensor, per_token: bool) -> Tensor:
    """Return one result, a tensor of the right shape."""
    if not isinstance(x, Tensor):
        raise ArgumentTypeError(message("fn", "to return tensors, in any pytree", type(x).__name__))
    if per_token:
        fits, expected = x.shape[:1] == z_cV.shape[:1], f"results of shape [{len(z_cV)}, ...]"
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


def _generators(x: Tensor) -> list[torch.Generator]:
    """Return those that a function of ``x`` draws from; none if it holds a shape alone."""
    if type(x) not in (Tensor, torch.nn.Parameter):
        return []
    return [torch.default_generator, *([torch.cuda.default_generators[x.device.index]] if x.is_cuda else [])]


def _random_states(x: Tensor) -> list[Tensor]:
    return [generator.get_state() for generator in _generators(x)]
