"""The user's function of the logits: how it is called, what it may return, and what its graph may reach.

c rows of a piece of a chunk, V vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils import _pytree as pytree

from lowtide.errors import ArgumentTypeError, ArgumentValueError, UnsupportedError, message
from lowtide.graph import node, undisturbed
from lowtide.head.plan import HeadPlan

Autocast = tuple[tuple[str, bool, torch.dtype], ...]
Results = tuple[list[Tensor | None], pytree.TreeSpec, GradientEdge | None]  # flattened; the logits they depend on
RandomState = list[Tensor]  # the CPU's, and a GPU's, which is a tensor on the host too

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
        watched = [t for t in (*params, *args) if not t.is_inference()]
        before = versions(watched)
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
    if versions(watched) != before:
        raise ArgumentValueError(
            message("fn", "its arguments unchanged", "one changed in place", "Work on a copy: x.clone().")
        )
    leaves, spec = pytree.tree_flatten(returned)
    leaves = [_checked(leaf, z_cV, function.per_token) for leaf in leaves]
    if function.graph:
        _refuse_strangers(leaves, {id(t) for t in (*params, *args)}, edge)
    return leaves, spec, edge


def versions(tensors: Sequence[Tensor]) -> list[int]:
    """Return how often each was written to."""
    return [t._version for t in tensors]


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
