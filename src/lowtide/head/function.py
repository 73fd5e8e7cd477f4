"""The user's function of the logits inside the engine's chunks: how it is called, what it may return, and reach.

It gets the logits in pieces, which its vjp then overwrites. N tokens, n of them computed (masked ones are dropped), C
rows of a chunk, c of a piece, D hidden size, V vocabulary, V_r classes of it on this rank. Where the vocabulary is
sharded, ranks exchange a chunk's logits so that each gets whole rows of its share of them, and only that rank calls the
function on these; the gradient goes back the same way.
"""

import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils import _pytree as pytree

from lowtide.errors import ArgumentTypeError, ArgumentValueError, UnsupportedError, message
from lowtide.graph import node, undisturbed, watched
from lowtide.head.backends import why_not_row
from lowtide.head.call import Head, Wanted
from lowtide.head.engine import Numbers, Terms, gradient_buffers, run
from lowtide.head.gradients import Gradients
from lowtide.head.matmul import narrow_view, slices
from lowtide.head.plan import HeadPlan, evenly
from lowtide.head.rows import Rows, take_leading

Autocast = tuple[tuple[str, bool, torch.dtype], ...]
Results = tuple[list[Tensor | None], pytree.TreeSpec, GradientEdge | None]  # flattened; the logits they depend on
RandomState = list[Tensor]  # the CPU's, and a GPU's, which is a tensor on the host too
Totals = list[Tensor | None]

ROWS = 15  # of a comparison, spread over a chunk: an odd number, whose halves tear pairs apart
ROUNDING, NARROW_ROUNDING = 1e-5, 2e-2  # of a result's largest value; where fn multiplies in bfloat16, or returns it
NOISE, NOISE_MARGIN = 2.0**-20, 16  # of each logit: what shows how far rounding may carry a result
REMEMBERED = 256
NOT_THE_SAME_TWICE = message(
    "fn",
    "the same results from the same logits and the same state of PyTorch's default generators",
    "others the second time",
    "Backward may run it once more. Draw random numbers from the default generators alone, and keep no state.",
)
_compared: OrderedDict[Any, None] = OrderedDict()  # keys of calls whose function was compared

# Gives the function its logits in the chunk's own memory, as the result of an operator and not as a leaf: so
# ``logits /= temperature`` is allowed, as it is on the output of a linear layer. Nothing goes back beyond them.
_LOGITS = node("Logits", "linear_apply", lambda _, anchor, held: held[0].detach(), lambda *_: ([], None))  # noqa: ARG005


@dataclass(frozen=True, kw_only=True)
class UserFunction:
    """A function of [c, V] logits as one call of `linear_apply` runs it; holds no tensor that autograd should watch."""

    plain: Callable[..., Any]  # the user's, unmodified
    run: Callable[..., Any]  # that, or the same compiled
    per_token: bool  # whether its results have a row for each row of logits; else they are scalars that add up
    graph: bool  # whether results are connected to their inputs
    autocast: Autocast  # in which it runs, in backward too
    token_args: int  # how many
    with_params: Callable[[Sequence[Tensor]], Any]  # its last arguments, of the tensors among them
    leading: torch.Size  # axes of all tokens
    plan: HeadPlan
    gradient: str  # HeadOptions.gradient
    settings: tuple[Any, ...]  # of the `Head`, after its tensors


def evaluate(
    function: UserFunction, z_cV: Tensor, args: Sequence[Tensor], params: Sequence[Tensor], anchor: Tensor | None, *,
    compiled: bool = True,
) -> Results:  # fmt: skip
    """Call the function on a piece of logits, which it sees in their own memory; check results, and what they reach.

    Token arguments [c, ...] and params are leaves where they get a gradient; the logits' graph begins at ``anchor``,
    None: they get none. To be used inside `isolated`.
    """
    edge, rows = None, z_cV.shape[0]
    with torch.set_grad_enabled(function.graph):
        z = z_cV.detach()  # autograd refuses a change in place of a view that was made without it
        if anchor is not None:
            z = _LOGITS.apply(anchor, [z_cV])  # type: ignore[no-untyped-call]
            edge = get_gradient_edge(z)
        # dynamo compiles once more for a single row, and a result for one row is no work worth compiling
        run = function.run if compiled and rows > 1 else function.plain
        if run is not function.plain:
            for tensor in (z, *args):
                torch._dynamo.maybe_mark_dynamic(tensor, 0)
        given = [t for t in (*params, *args) if not t.is_inference()]
        before = [t._version for t in given]
        states = (*function.autocast, *current_autocast(z_cV.device))
        try:
            with ExitStack() as stack:
                # without autocast's cache of casts, whose graphs are freed with the first piece's
                for kind, enabled, dtype in function.autocast if any(on for _, on, _ in states) else ():
                    stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False))
                returned = run(z, *args, *function.with_params(params))
        except Exception as error:
            if type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
                why = getattr(error, "inner_exception", error)
                got, hint = str(why).strip().partition("\n")[0], "Leave compile=True out, or change fn."
                raise UnsupportedError(message("compile", "an fn that torch.compile compiles", got, hint)) from error
            error.add_note(f"fn, which must take any number of rows, was called with logits {list(z_cV.shape)}.")
            raise
    if [t._version for t in given] != before:
        raise ArgumentValueError(
            message("fn", "its arguments unchanged", "one changed in place", "Work on a copy: x.clone().")
        )
    leaves, spec = pytree.tree_flatten(returned)
    leaves = [_checked(leaf, z_cV, function.per_token) for leaf in leaves]
    if function.graph:
        _refuse_strangers(leaves, {id(t) for t in (*params, *args)}, edge)
    return leaves, spec, edge


def _checked(leaf: object, z_cV: Tensor, per_token: bool) -> Tensor | None:
    """Return one result as a tensor of the right shape; None stays None."""
    if leaf is None:
        return None
    if not per_token and isinstance(leaf, int | float):
        leaf = torch.full((), leaf, device=z_cV.device)  # a fill, where a copy from the host would wait
    kind = "tensors" if per_token else "scalar tensors or numbers"
    if not isinstance(leaf, Tensor):
        raise ArgumentTypeError(message("fn", f"to return {kind}, in any pytree", type(leaf).__name__))
    if leaf.device != z_cV.device:
        raise ArgumentValueError(message("fn", f"results on {z_cV.device}, as input is", str(leaf.device)))
    got = f"shape {list(leaf.shape)} for logits {list(z_cV.shape)}"
    if per_token and (leaf.dim() == 0 or leaf.shape[0] != len(z_cV)):
        hint = 'Return one row for each row of logits, or scalars that add up, with out="sum".'
        raise ArgumentValueError(message("fn", f"results of shape [{len(z_cV)}, ...]", got, hint))
    if not per_token and leaf.dim() != 0:
        hint = 'Sum over the tokens, or keep them with out="token".'
        raise ArgumentValueError(message("fn", 'results of shape [] with out="sum"', got, hint))
    if not per_token and leaf.dtype == torch.bool:
        hint = "Count: x.sum() and not x.any() or x.all(), which do not add up."
        raise ArgumentTypeError(message("fn", 'numbers with out="sum"', "torch.bool", hint))
    return leaf


def _refuse_strangers(leaves: Sequence[Tensor | None], known: set[int], logits: GradientEdge | None) -> None:
    """Raise where the results' graph reaches a leaf that is no ``known`` argument: its gradient would be lost."""
    todo: list[Any] = [get_gradient_edge(leaf).node for leaf in leaves if leaf is not None and leaf.requires_grad]
    seen: set[Any] = set() if logits is None else {logits.node}
    while todo:
        at = todo.pop()
        if at in seen:
            continue
        seen.add(at)
        todo += [node for node, _ in at.next_functions if node is not None]
        if at.name().endswith("AccumulateGrad") and id(at.variable) not in known:
            got = f"one from outside, made from a leaf of shape {list(at.variable.shape)}, whose gradient would be lost"
            hint = (
                "Pass it in params=(...,), or in token_args if it has a row for each token; fn gets it as an argument."
                " Detach it if it needs no gradient."
            )
            raise ArgumentValueError(message("fn", "tensors that need a gradient to be passed as arguments", got, hint))


def vjp(
    results: Results, upstream: Sequence[Tensor | None], sources: Sequence[Tensor]
) -> tuple[Tensor | None, list[Tensor | None]]:
    """Return the gradients of the logits and of token arguments and params, None where there is none."""
    leaves, _, logits = results
    used = [
        (leaf, g.to(leaf.dtype))
        for leaf, g in zip(leaves, upstream, strict=True)
        if leaf is not None and g is not None and leaf.requires_grad
    ]
    where: list[Any] = [t for t in sources if t.requires_grad]
    if not used or (logits is None and not where):
        return None, [None] * len(sources)
    outputs, grads = zip(*used, strict=True)
    inputs = where if logits is None else [*where, logits]
    found = iter(torch.autograd.grad(outputs, inputs, grads, allow_unused=True))
    of_sources = [next(found) if t.requires_grad else None for t in sources]
    return next(found, None), of_sources


def current_autocast(device: torch.device) -> Autocast:
    """Return the state of autocast for ``device`` and for the CPU."""
    kinds = {"cpu", device.type} - {"meta"}
    return tuple((k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in sorted(kinds))


@contextmanager
def isolated(device: torch.device) -> Iterator[None]:
    """Keep autocast away from the GEMMs, and outer hooks on saved tensors from the function's graphs.

    Each of these lives for one piece. torch.utils.checkpoint's hooks would drop what it saves and compute the whole
    checkpointed block again to get it back.
    """
    hooks: Any = torch._C._autograd
    outer = []
    while (top := hooks._top_saved_tensors_default_hooks(True)) is not None:
        outer.append(top)
        hooks._pop_saved_tensors_default_hooks()
    try:
        with undisturbed(device):
            yield
    finally:
        for pack, unpack in reversed(outer):
            hooks._push_saved_tensors_default_hooks(pack, unpack)


@lru_cache(maxsize=8)  # which keeps them alive
def compiled(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``fn`` compiled, the same object each time."""
    return torch.compile(fn)


def random_state(device: torch.device) -> RandomState:
    """Return the states of the generators that a function of tensors on ``device`` draws from."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


def set_random_state(state: RandomState, device: torch.device) -> None:
    """Put the generators there."""
    torch.set_rng_state(state[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state[1], device)


def same_state(a: RandomState, b: RandomState) -> bool:
    """Return whether no random number was drawn between two states."""
    return all(map(torch.equal, a, b))


class FunctionTerms(Terms):
    """One pass over the tokens, of forward or of backward.

    ``tensors`` are input, weight, bias, index of rows, token arguments and params; the ``needed`` ones get a gradient.
    """

    def __init__(self, function: UserFunction, tensors: Sequence[Tensor | None], needed: Sequence[bool]) -> None:
        x, w, b, index, *rest = tensors
        assert x is not None
        assert w is not None
        self.device = x.device
        self.function, self.head = function, Head(x, w, b, *function.settings).prepared()
        self.wanted = Wanted(*needed[:3])
        leaves = [
            t.detach().requires_grad_(function.graph and need)
            for t, need in zip(rest, needed[4:], strict=True)
            if t is not None
        ]
        self.args, self.params = leaves[: function.token_args], leaves[function.token_args :]
        self._rowwise = [i < len(self.args) for i in range(len(leaves))]
        self.plan = function.plan
        self.rows = Rows(tokens=function.leading.numel(), index=index)
        watch = function.graph and any(self.wanted)
        self.anchor = torch.zeros((), device=x.device, requires_grad=True) if watch else None
        # what is autograd's to see, or has no numbers, must not go by address
        real = all(type(t) in (Tensor, torch.nn.Parameter) for t in (x, w)) and self.head.ranks.alone
        narrow = real and self.plan.backward_gemm == "narrow"
        self.narrowed = narrow and why_not_row(x.device, self.head.dtype, w.shape[0]) is None
        self.spec: Any = None  # the structure of the results
        self._leaves: list[Tensor | None] = []
        self._form: list[Any] = []  # their dtypes, and the shapes of a row
        self.differentiable: list[bool] = []
        self.compare: Callable[[Tensor, Tensor], None] | None = None  # gets the first chunk's logits and its tokens
        self.states: list[RandomState | None] = []  # before each piece that draws random numbers
        self._into: Gradients | None = None
        self._of_leaves: list[Tensor | None] = []
        self._bias_V: Tensor | None = None  # the bias's gradient, where the logits' is narrow before the loop sums it
        self._ones: list[Tensor | None] = []
        self._state: RandomState | None = None  # of the generators, where each piece's is recorded
        self._replayed: Iterator[RandomState | None] = iter(())

    def forward(self, *, store: bool) -> bool:
        """Compute the results; with ``store`` and one derivative to take, return True: the gradients are there too."""
        if self.function.graph and has_numbers(self.head.input):
            self._state = random_state(self.device)
        if store:
            self._begin(stored=True)
        run(self.head, self.rows, self.plan, self, self._into, upstream=(lambda *_: None) if store else None)
        return self._into is not None

    def backward(self, upstream: Sequence[Tensor | None], states: Sequence[RandomState | None]) -> None:
        """Compute every gradient from the results' upstream ones, [N, *] or scalars, and the states of `forward`."""
        self._begin(stored=False)
        found = random_state(self.device) if any(states) else None
        self._replayed = iter(states)
        run(self.head, self.rows, self.plan, self, self._into, upstream=lambda *_: upstream, known={})
        if found is not None:
            set_random_state(found, self.device)

    def _begin(self, *, stored: bool) -> None:
        """Make the memory that takes the gradients."""
        head = self.head
        into = gradient_buffers(head, self.rows, self.plan, self.wanted, stored=stored)
        if self.narrowed:
            into.bias_V, self._bias_V = None, into.bias_V
        self._into = into
        self._of_leaves = [
            t.new_zeros(t.shape, dtype=t.dtype if rowwise else summed_in(t.dtype)) if t.requires_grad else None
            for t, rowwise in zip((*self.args, *self.params), self._rowwise, strict=True)
        ]

    def numbers(self, z: Tensor, part: slice) -> Numbers:
        """Add a chunk's results, of any structure, to the pass; where gradients are stored, leave them in ``z``."""
        self._run(z, part, None)
        return {}

    def gradient_(self, z: Tensor, part: slice, known: Numbers, g: Any) -> None:  # noqa: ARG002
        """Leave the gradient for ``g``, the upstream ones of all results; None: `numbers` has, for the only one, 1."""
        if g is not None:
            self._run(z, part, g)

    def _run(self, z: Tensor, part: slice, given: Sequence[Tensor | None] | None) -> None:
        """Call the function on a chunk's rows, for its results or the gradient that ``given`` upstream ones make."""
        ranks, index = self.head.ranks, self.rows.index
        own_cV, start = ranks.whole_rows(z[:, : ranks.rows]), ranks.share_of(part).start
        if self.compare is not None:
            compare, self.compare = self.compare, None
            tokens = torch.arange(start, start + len(own_cV), device=z.device)
            compare(own_cV, tokens if index is None else index[tokens])
        pieces = list(slices(len(own_cV), evenly(len(own_cV), self.plan.piece_rows)))
        if not pieces and self.spec is None:
            pieces = [slice(0, 0)]  # what the function makes of no rows at all tells dtypes and shapes
        for piece in pieces:
            rows = slice(start + piece.start, start + piece.stop)
            if len(own_cV) and (state := next(self._replayed, None)) is not None:
                set_random_state(state, self.device)
            # the slope of a cap is computed from what it returned, and the function may change its logits
            capped = None if self.head.softcap is None or self.anchor is None else own_cV[piece].clone()
            args = self.args_of(index, rows)
            results = evaluate(self.function, own_cV[piece], args, self.params, self.anchor)
            if self._state is not None and len(own_cV):
                before, self._state = self._state, random_state(self.device)
                self.states.append(None if same_state(before, self._state) else before)
            g = self._collect(results, index, rows) if given is None else given
            if given is not None and self.function.per_token:
                g = [None if u is None else take_leading(u, 1, index, rows) for u in given]
            if g is not None and len(own_cV):
                dz, of_leaves = vjp(results, g, [*args, *self.params])
                put_or_add(self._of_leaves, of_leaves, self._rowwise, index, rows)
                if self.anchor is not None:
                    self._put(dz, own_cV, piece, capped)
                del dz, of_leaves
            del results
        if self._into is not None and self.anchor is not None and not ranks.alone:
            z[:, : ranks.rows] = ranks.own_classes(own_cV, len(z))

    def args_of(self, index: Tensor | None, rows: slice) -> list[Tensor]:
        """Return the token arguments of some rows, as leaves."""
        axes = len(self.function.leading)
        return [take_leading(a.detach(), axes, index, rows).requires_grad_(a.requires_grad) for a in self.args]

    def _put(self, dz: Tensor | None, z_CV: Tensor, piece: slice, capped: Tensor | None) -> None:
        """Leave the gradient of the product ``x @ w.T`` in a piece of ``z_CV``, from that of the logits."""
        target, scale = (narrow_view(z_CV, self.head.dtype) if self.narrowed else z_CV)[piece], self.head.scale
        if dz is None:
            target.zero_()
            return
        if dz.layout != torch.strided:
            dz = dz.to_dense()  # of gather(sparse_grad=True)
        if capped is not None:
            cap: Any = self.head.softcap
            dz = torch.addcmul(dz, capped * dz, capped, value=-(cap**-2))
        elif dz.untyped_storage().data_ptr() == z_CV.untyped_storage().data_ptr():
            dz = dz.clone()  # an autograd.Function that hands its input on: what is written would change what is read
        if self._bias_V is not None:
            self._bias_V += dz.sum(0) if scale is None else dz.sum(0) * scale
        if scale is None:
            target.copy_(dz)
        else:
            torch.mul(dz, scale, out=target)

    def _collect(self, results: Results, index: Tensor | None, rows: slice) -> Sequence[Tensor | None] | None:
        """Take the results of some rows, like those before; return upstream gradients, 1, if gradients are stored."""
        leaves, spec, _ = results
        form, first = [None if leaf is None else (leaf.dtype, *leaf.shape[1:]) for leaf in leaves], self.spec is None
        if first:
            self.spec, self._form, self.differentiable = spec, form, [False] * len(form)
            self._leaves = [None if leaf is None else self._total_of(leaf) for leaf in leaves]
        if spec != self.spec or form != self._form:
            expected = f"results of one structure, dtype and shape for all rows, {self.spec} of {self._form}"
            raise ArgumentValueError(message("fn", expected, f"{spec} of {form} for other rows"))
        for i, leaf in enumerate(leaves):
            self.differentiable[i] |= leaf is not None and leaf.requires_grad
        put_or_add(self._leaves, leaves, [self.function.per_token] * len(form), index, rows)
        one, into = sum(self.differentiable) == 1, self._into
        if into is None:
            return None
        if not first and not one:
            expected = "the same results to depend on its arguments for all rows"
            raise ArgumentValueError(message("fn", expected, "others for later rows"))
        if not one:  # left to backward
            into.input_ND = into.weight_VD = into.bias_V = self._into = None
            return None
        if first:
            self._ones = [None if leaf is None else torch.ones_like(leaf) for leaf in leaves]
        return self._ones

    def _total_of(self, leaf: Tensor) -> Tensor:
        if not self.function.per_token:
            return torch.zeros_like(leaf, dtype=summed_in(leaf.dtype))
        make = leaf.new_empty if self.head.ranks.alone and self.rows.index is None else leaf.new_zeros
        return make(self.rows.tokens, *leaf.shape[1:])

    def results(self) -> list[Tensor | None]:
        """Return all results, [N, *] or scalars, in the function's own dtypes."""
        rowwise = [self.function.per_token] * len(self._leaves)
        found = zip(self._of_all(self._leaves, rowwise), self._form, strict=True)
        return [None if x is None else x.to(form[0]) for x, form in found]

    def gradients(self) -> list[Tensor | None]:
        """Return the gradients in the order of the tensors, the same of token arguments and params on every rank."""
        into = self._into
        assert into is not None
        bias_V = into.bias_V if self._bias_V is None else self._bias_V
        return [into.input_ND, into.weight_VD, bias_V, None, *self._of_all(self._of_leaves, self._rowwise)]

    def _of_all(self, totals: Totals, rowwise: Sequence[bool]) -> Totals:
        """Return what all ranks have added up, each its own rows or sums."""
        ways = {True: self.head.ranks.put_together_, False: self.head.ranks.add_up_}
        return [None if x is None else ways[by_row](x) for x, by_row in zip(totals, rowwise, strict=True)]


def put_or_add(totals: Totals, values: Totals, rowwise: Sequence[bool], index: Tensor | None, part: slice) -> None:
    """Write the ``rowwise`` ones, rows [c, ...], to their places in totals [N, ...] or [..., *]; add the others."""
    for total, value, by_row in zip(totals, values, rowwise, strict=True):
        if total is None or value is None or not value.numel():  # a view of nothing has no one shape
            continue
        if not by_row:
            total += value.detach()
        elif index is None:
            total.view(-1, *value.shape[1:])[part].copy_(value.detach())
        else:
            total.view(-1, *value.shape[1:]).index_copy_(0, index[part], value.detach().to(total.dtype))


def summed_in(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which many values of ``dtype`` are summed."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def has_numbers(x: Tensor) -> bool:
    """Return whether a tensor holds numbers, and not their shapes alone."""
    return type(x) in (Tensor, torch.nn.Parameter) and x.device.type != "meta"


def plan_comparison(terms: FunctionTerms) -> None:
    """Have the first chunk of a pass compared, the first time that a function's code gets arguments of these shapes.

    On a GPU the host waits for the comparison; a CUDA graph's capture, a call inside a dispatch mode, and tensors
    without numbers have none. Of ranks that share a vocabulary each compares its own rows.
    """
    key, capturing = _key_of(terms), terms.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    followed = watched(())  # a selective checkpoint counts the operators, which a second run has to repeat
    if capturing or followed or not has_numbers(terms.head.input) or terms.plan.rows < 2 or key in _compared:
        return

    def compare(z_cV: Tensor, tokens: Tensor) -> None:
        difference = _difference(terms, z_cV, tokens)
        if difference is not None:
            raise ArgumentValueError(difference)
        if len(z_cV) > 1:
            _compared[key] = None
        if len(_compared) > REMEMBERED:
            _compared.popitem(last=False)

    terms.compare = compare


def _difference(terms: FunctionTerms, z_cV: Tensor, tokens: Tensor) -> str | None:
    """Return in words how results for some rows differ from those for their two halves; None: only by rounding.

    ``tokens`` are the rows' places among all. Halves of rows draw other random numbers: a function that draws any is
    not compared.
    """
    count = min(len(z_cV), ROWS, max(2, terms.plan.piece_rows))  # within the workspace
    if count < 2:
        return None
    count -= count > 2 and count % 2 == 0
    chosen = torch.arange(count, device=z_cV.device) * (len(z_cV) - 1) // (count - 1)
    z_cV, tokens, device, function = z_cV[chosen], tokens[chosen], terms.device, terms.function

    def results(rows: slice, z: Tensor = z_cV) -> list[Tensor]:
        args = terms.args_of(tokens, rows)
        leaves, *_ = evaluate(function, z[rows].clone(), args, terms.params, terms.anchor, compiled=False)
        found = [leaf.detach() for leaf in leaves if leaf is not None]
        return [torch.view_as_real(leaf.resolve_conj()) if leaf.is_complex() else leaf for leaf in found]

    before, every = random_state(device), slice(0, count)
    whole = results(every)
    if not same_state(before, random_state(device)):
        set_random_state(before, device)
        return None
    first, second = results(slice(0, count // 2)), results(slice(count // 2, count))
    forms = [[list(leaf.shape[1:]) for leaf in leaves] for leaves in (whole, first, second)]
    if forms[0] != forms[1] or forms[0] != forms[2]:
        return message("fn", "results of the same number and shapes for any rows", " and ".join(map(str, forms)))
    halves = [torch.cat(pair) if function.per_token else pair[0] + pair[1] for pair in zip(first, second, strict=True)]
    differ = [_beyond_rounding(function, *pair) for pair in zip(whole, halves, strict=True)]
    if not any(differ):
        return None
    if any(map(partial(_beyond_rounding, function), whole, results(every))):
        return NOT_THE_SAME_TWICE
    near = results(every, z_cV * (1 + NOISE))
    for i, (one, two, other) in enumerate(zip(whole, halves, near, strict=True)):
        if not _beyond_rounding(function, one, two, NOISE_MARGIN * _largest(other.double() - one.double())):
            continue
        if function.per_token:
            hint = "It sees one chunk of the tokens at a time: reduce over the vocabulary only, and over tokens"
            hint = f"{hint} afterwards, on what linear_apply returns."
            got = f"result {i}, which differs when rows come in two parts"
            return message("fn", "results for a token that do not depend on the other tokens", got, hint)
        hint = "A mean does not add up, nor does a constant: return the sum and divide by the number of all tokens"
        hint = f'{hint} afterwards, or take out="token". What one token gets must not depend on the others.'
        got = f"result {i}: sums {one.tolist()} and {two.tolist()} that should be one when rows come in two parts"
        return message("fn", 'scalars that add up over tokens with out="sum"', got, hint)
    return None


def _beyond_rounding(function: UserFunction, one: Tensor, two: Tensor, more: float = 0.0) -> bool:
    """Return whether two results differ by more than a share of the largest value, and ``more``."""
    if one.dtype.is_floating_point:
        narrow = one.dtype.itemsize < 4 or any(enabled for _, enabled, _ in function.autocast)
        more += _largest(one) * (NARROW_ROUNDING if narrow else ROUNDING)
    return not torch.allclose(one.double(), two.double(), rtol=0, atol=more, equal_nan=True)


def _largest(x: Tensor) -> float:
    """Return the largest finite magnitude, 0 where there is none."""
    return x.double().abs().nan_to_num(0, 0, 0).max().item() if x.numel() else 0.0


def _key_of(terms: FunctionTerms) -> Any:
    """Return a key that differs between calls with other code, shapes or dtypes."""
    function, weight_VD = terms.function, terms.head.weight_VD
    shapes = tuple((a.shape[len(function.leading) :], a.dtype) for a in terms.args)
    params = tuple((p.shape, p.dtype) for p in terms.params)
    return _code_of(function.plain), function.per_token, weight_VD.shape, weight_VD.dtype, shapes, params


def _code_of(fn: Any) -> object:
    """Return a function's code, and of another callable its class."""
    while isinstance(fn, partial):
        fn = fn.func
    fn = inspect.unwrap(fn)
    return getattr(fn, "__code__", type(fn))
