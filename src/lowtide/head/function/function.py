"""The user's function of the logits: how it is called, what it may return, and what its graph may reach.

c rows of a piece of a chunk, V vocabulary.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils import _pytree as pytree

from lowtide.errors import ArgumentTypeError, ArgumentValueError, message
from lowtide.head.call import Head
from lowtide.head.plan import HeadPlan

Autocast = tuple[tuple[str, bool, torch.dtype], ...]
TENSOR = object()  # stands in `UserFunction.params_rest` where a tensor goes


@dataclass(frozen=True, kw_only=True)
class UserFunction:
    """A function of [c, V] logits as one call of `linear_apply` runs it; holds no tensor that autograd should watch."""

    plain: Callable[..., Any]  # as it was given
    run: Callable[..., Any]  # that, or the same compiled
    per_token: bool  # whether its results have a row for each row of logits; else they are scalars that add up
    graph: bool  # whether results are connected to what they come from
    autocast: Autocast  # in which it runs, in backward too
    token_args: int  # how many
    params_spec: (
        pytree.TreeSpec
    )  # how its last arguments are made of ``params_rest``, with tensors in place of `TENSOR`
    params_rest: tuple[Any, ...]
    leading: torch.Size  # axes of all tokens
    plan: HeadPlan
    gradient: str  # HeadOptions.gradient
    head: Callable[[Tensor, Tensor, Tensor | None], Head]  # of hidden states, weight and bias

    def with_params(self, tensors: Sequence[Tensor]) -> list[Any]:
        """Return the arguments after the token arguments, with these tensors in their places."""
        left = iter(tensors)
        leaves = [next(left) if rest is TENSOR else rest for rest in self.params_rest]
        return list(pytree.tree_unflatten(leaves, self.params_spec))


class Results(NamedTuple):
    """What the function returned for one piece, flattened, and where its derivatives are asked for."""

    leaves: list[Tensor | None]
    spec: pytree.TreeSpec
    logits: GradientEdge | None
    args: list[Tensor]


class _Logits(torch.autograd.Function):
    """Gives the function its logits in the chunk's own memory, as the result of an operator and not as a leaf.

    So ``logits /= temperature`` is allowed, as it is on the output of a linear layer.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, held: list[Tensor]) -> Tensor:  # noqa: ARG004
        return held[0].detach()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Any:  # noqa: ARG004
        return None, None


def evaluate(
    function: UserFunction,
    z_cV: Tensor,
    args: Sequence[Tensor],
    params: Sequence[Tensor],
    anchor: Tensor | None,
    *,
    compiled: bool = True,
) -> Results:
    """Call the function on a piece of logits, which it sees in their own memory; check results, and what they reach.

    Token arguments [c, ...] and params are leaves where they get a gradient; the logits' graph begins at ``anchor``,
    None: they get none. To be used inside `own_saved_tensors`.
    """
    edge, z, rows = None, z_cV, z_cV.shape[0]
    with torch.set_grad_enabled(function.graph):
        if anchor is not None:
            z = _Logits.apply(anchor, [z_cV])  # type: ignore[no-untyped-call]
            edge = get_gradient_edge(z)
        # dynamo compiles once more for a single row, and a result for one row is no work worth compiling
        run = function.run if compiled and rows > 1 else function.plain
        if run is not function.plain:
            for tensor in (z, *args):
                torch._dynamo.maybe_mark_dynamic(tensor, 0)
        began = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
        watched = [t for t in (*params, *args, z_cV) if not t.is_inference()]
        versions = [t._version for t in watched]
        states = (*function.autocast, *current_autocast(z_cV.device))
        autocast = _in(function.autocast) if any(on for _, on, _ in states) else nullcontext()
        try:
            with autocast:
                returned = run(z, *args, *function.with_params(params))
        except Exception as error:
            error.add_note(
                f"Raised by fn, which lowtide.linear_apply called with logits {list(z_cV.shape)}: it must take any"
                " number of rows."
            )
            raise
    if any(t._version != v for t, v in zip(watched, versions, strict=True) if t is not z_cV):
        raise ArgumentValueError(
            message("fn", "its arguments left as they are", "one changed in place", "Work on a copy: x.clone().")
        )
    leaves, spec = pytree.tree_flatten(returned)
    leaves = [_checked(leaf, rows, z_cV, function.per_token) for leaf in leaves]
    if function.graph:
        _refuse_strangers(leaves, {id(t) for t in (*params, *args)}, edge, began)
    return Results(leaves, spec, edge, list(args))


def _checked(leaf: object, rows: int, z_cV: Tensor, per_token: bool) -> Tensor | None:
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
    if per_token and (leaf.dim() == 0 or leaf.shape[0] != rows):
        hint = 'Return one row for each row of logits, or scalars that add up, with out="sum".'
        raise ArgumentValueError(message("fn", f"results of shape [{rows}, ...]", got, hint))
    if not per_token and leaf.dim() != 0:
        hint = 'Sum over the tokens, or keep them with out="token".'
        raise ArgumentValueError(message("fn", 'results of shape [] with out="sum"', got, hint))
    if not per_token and leaf.dtype == torch.bool:
        hint = "Count: x.sum() and not x.any() or x.all(), which do not add up."
        raise ArgumentTypeError(message("fn", 'numbers with out="sum"', "torch.bool", hint))
    return leaf


def _refuse_strangers(
    leaves: Sequence[Tensor | None], known: set[int], logits: GradientEdge | None, began: int
) -> None:
    """Raise where the results' graph reaches a tensor that is no ``known`` argument: its gradient would be lost.

    The call made the nodes from number ``began`` on; numbers count up within a thread.
    """
    todo: list[Any] = [_edge(leaf) for leaf in leaves if leaf is not None and leaf.requires_grad]
    seen: set[Any] = set() if logits is None else {logits.node}
    while todo:
        node, output = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        before = node.next_functions
        if not before and node.name().endswith("AccumulateGrad"):
            if id(node.variable) not in known:
                raise ArgumentValueError(_stranger(node.variable.shape))
        elif node._sequence_nr() < began:
            raise ArgumentValueError(_stranger(node._input_metadata[output].shape))
        else:
            todo += [edge for edge in before if edge[0] is not None]


def _edge(tensor: Tensor) -> tuple[Any, int]:
    """Return where a tensor stands in the graph: the node and which of its outputs."""
    node = tensor.grad_fn
    return get_gradient_edge(tensor)[:2] if node is None else (node, tensor.output_nr)


def _stranger(shape: Any) -> str:
    return message(
        "fn",
        "tensors that need a gradient to come in as arguments",
        f"one of shape {list(shape)} from outside, whose gradient would be lost",
        "Pass it in params=(...,), or in token_args if it has a row for each token; fn gets it as an argument."
        " Detach it if it needs no gradient.",
    )


def vjp(
    results: Results, upstream: Sequence[Tensor | None], params: Sequence[Tensor]
) -> tuple[Tensor | None, list[Tensor | None], list[Tensor | None]]:
    """Return the gradients of logits, token arguments and params of `evaluate`, None where there is none."""
    used = [
        (leaf, g.to(leaf.dtype))
        for leaf, g in zip(results.leaves, upstream, strict=True)
        if leaf is not None and g is not None and leaf.requires_grad
    ]
    sources: list[Any] = [] if results.logits is None else [results.logits]
    where = [t for t in (*results.args, *params) if t.requires_grad]
    if not used or not (sources or where):
        return None, [None] * len(results.args), [None] * len(params)
    outputs, grads = zip(*used, strict=True)
    found = list(torch.autograd.grad(outputs, [*sources, *where], grads, allow_unused=True))
    dz = found.pop(0) if sources else None
    rest = iter(found)
    by_tensor = [next(rest) if t.requires_grad else None for t in (*results.args, *params)]
    return dz, by_tensor[: len(results.args)], by_tensor[len(results.args) :]


def current_autocast(device: torch.device) -> Autocast:
    """Return the state of autocast for ``device`` and for the CPU."""
    kinds = {"cpu", device.type} - {"meta"}
    return tuple((k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in sorted(kinds))


@contextmanager
def _in(autocast: Autocast) -> Iterator[None]:
    """Restore autocast; without its cache of casts, whose graphs are freed with the first piece's."""
    with ExitStack() as stack:
        for kind, enabled, dtype in autocast:
            stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False))
        yield


@contextmanager
def own_saved_tensors() -> Iterator[None]:
    """Keep outer hooks on saved tensors away from the function's graphs, each of which lives for one piece.

    torch.utils.checkpoint's would drop what it saves and compute the whole checkpointed block again to get it back.
    """
    hooks: Any = torch._C._autograd
    outer = []
    while (top := hooks._top_saved_tensors_default_hooks(True)) is not None:
        outer.append(top)
        hooks._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(outer):
            hooks._push_saved_tensors_default_hooks(pack, unpack)


_COMPILED: "WeakKeyDictionary[Callable[..., Any], Callable[..., Any]]" = WeakKeyDictionary()
_COMPILED_OBJECTS: deque[tuple[Callable[..., Any], Callable[..., Any]]] = deque(maxlen=8)  # few: it keeps them alive


def compiled(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``fn`` compiled, the same object each time."""
    if hasattr(fn, "_torchdynamo_orig_callable"):
        return fn
    if isinstance(fn, FunctionType):
        if fn not in _COMPILED:
            # a twin with the same cells: what is compiled must not keep alive what the cache is keyed by
            twin = FunctionType(fn.__code__, fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__)
            twin.__kwdefaults__ = fn.__kwdefaults__
            _COMPILED[fn] = torch.compile(twin)
        return _COMPILED[fn]
    for known, run in _COMPILED_OBJECTS:
        if known is fn or (isinstance(fn, MethodType) and known == fn):
            return run
    _COMPILED_OBJECTS.append((fn, torch.compile(fn)))
    return _COMPILED_OBJECTS[-1][1]
