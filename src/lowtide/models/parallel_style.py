"""Tensor parallelism: the hooks or the forward around a sharded head, and whether all its ranks run it fused.

PyTorch's `torch.distributed.tensor.parallel.ColwiseParallel` puts hooks before and after the module's forward; the
style of this name in transformers puts a forward on the instance. Both make a DTensor of the input. A head is fused
where they give the whole logits as a plain tensor (``output_layouts=Replicate()``, as in transformers' plans).

Fused and stock code exchange different tensors. A rank that alone ran the stock code, for a hook or a mode of its own
(a logger's on the first rank, say), would wait for ever, or take one tensor for another. So the ranks agree once, at a
head's first call.
"""

import functools
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from lowtide.arguments import is_dtensor
from lowtide.errors import UnsupportedError
from lowtide.head.ranks import exchange

_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_TRANSFORMERS = "transformers.distributed.tensor_parallel"
# The attribute of an instance that holds its style while that is bypassed, or `_STOCK` while the stock code runs.
_ASIDE = "_lowtide_style"
_STOCK = "stock"


class Style(NamedTuple):
    """What is around a head's forward: hooks, or a forward on the instance."""

    before: list[Callable[..., Any]]
    after: list[Callable[..., Any]]
    forward: Callable[..., Any] | None

    def enter(self, head: nn.Module, hidden: Any) -> Any:
        """Return the hidden states as the hooks before the forward make them."""
        for hook in self.before:
            changed = hook(head, (hidden,))
            hidden = changed[0] if isinstance(changed, tuple) else changed
        return hidden


def defining_module(function: Any) -> str:
    """Return the name of the module that a function is from, "" if it has none."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__module__", None) or ""


def style_of(head: nn.Module) -> Style | None:
    """Return what tensor parallelism has put around an output embedding, None if it has not."""
    before, after = ([hook for hook in getattr(head, kind).values() if is_parallel_hook(hook)] for kind in _HOOKS)
    forward = vars(head).get("forward")
    forward = forward if defining_module(forward) == _TRANSFORMERS else None
    return Style(before, after, forward) if before or after or forward else None


def has_foreign_forward(head: nn.Module) -> bool:
    """Whether the instance has a forward of its own that is not a tensor-parallel style's."""
    return "forward" in vars(head) and defining_module(vars(head)["forward"]) != _TRANSFORMERS


def is_parallel_hook(hook: Callable[..., Any]) -> bool:
    """Whether a hook is of PyTorch's tensor parallelism."""
    return defining_module(hook).startswith("torch.distributed.tensor.")


def style_aside(head: nn.Module) -> Style | None:
    """Return the style that calls of ``head`` bypass just now."""
    style = vars(head).get(_ASIDE)
    return style if isinstance(style, Style) else None


def is_stock_call(head: nn.Module) -> bool:
    """Whether this is inside `run_stock`, so that the class's own forward runs."""
    return vars(head).get(_ASIDE) is _STOCK


@contextmanager
def put_aside(head: nn.Module, style: Style) -> Iterator[None]:
    """Let calls of ``head`` bypass its style inside; all its other hooks see them as before."""
    state = vars(head)
    before = {name: state[name] for name in _HOOKS}
    for kind in _HOOKS:
        state[kind] = OrderedDict((key, hook) for key, hook in state[kind].items() if not is_parallel_hook(hook))
    if style.forward is not None:
        before["forward"] = state.pop("forward")
    state[_ASIDE] = style
    try:
        yield
    finally:
        del state[_ASIDE]
        state.update(before)


def run_stock(head: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return the result of the stock ``forward``, inside the style if that is bypassed."""
    style = style_aside(head)
    if style is None:
        return forward(head, *args, **kwargs)
    vars(head)[_ASIDE] = _STOCK
    try:
        if style.forward is not None:
            return style.forward(*args, **kwargs)
        args = (style.enter(head, args[0]), *args[1:])
        result = forward(head, *args, **kwargs)
        for hook in style.after:
            result = hook(head, args, result)
        return result
    finally:
        vars(head)[_ASIDE] = style


# For each head what its ranks agreed on at its first call: why all of them run the stock code; None: it is fused.
_AGREED: WeakKeyDictionary[nn.Module, str | None] = WeakKeyDictionary()


def why_not_fused(head: Any, hidden: Any, why_not: str | None) -> str | None:
    """Return why a head whose style is bypassed runs the stock code on every rank; None if it is fused on each.

    Every rank has to ask, at each call of the head. At the first one the host waits. ``why_not`` is why this rank
    cannot run it fused.

    Raises:
        UnsupportedError: The ranks have agreed to fuse it, and this one cannot any more.
    """
    if head not in _AGREED:
        _AGREED[head] = _why_not_sharded(head) or _why_not_agreed(head, hidden, why_not) or _why_not_whole(head, hidden)
    agreed = _AGREED[head]
    if agreed is None and why_not is not None:
        raise UnsupportedError(
            f"model: expected what the ranks that share {type(head).__name__} had at its first call, got a change "
            f"since: {why_not}. The others may not know of it. If it is so on every rank (a FlopCounterMode, which has "
            "hooks on all modules), call lowtide.patch(model) again on each."
        )
    return None if agreed is None else why_not or agreed


def _why_not_sharded(head: Any) -> str | None:
    """Return why a head's classes are not sharded over the one axis of a mesh."""
    from torch.distributed.tensor import Shard

    mesh = getattr(head.weight, "device_mesh", None)
    for name in ("weight", "bias"):
        parameter = getattr(head, name)
        if parameter is None:
            continue
        if not is_dtensor(parameter) or parameter.device_mesh != mesh or mesh.ndim != 1:
            return f"the output embedding's {name} is not sharded over a mesh of one axis"
        if parameter.placements != (Shard(0),):
            return f"the output embedding's {name} has placements {parameter.placements}, not Shard(0)"
        if type(parameter.to_local().detach()) is not Tensor:
            return f"the output embedding's {name} is quantised"
    return None


def _why_not_agreed(head: Any, hidden: Any, why_not: str | None) -> str | None:
    """Return which ranks cannot run a head fused."""
    group = head.weight.device_mesh.get_group()
    flags = exchange.numbers_of_all([int(why_not is not None)], group, hidden.device)
    unable = [rank for rank, (flag,) in enumerate(flags) if flag]
    return f"on ranks {unable} of its group something looks at the calls of this module" if unable else None


def _why_not_whole(head: Any, hidden: Any) -> str | None:
    """Return why the stock code does not give the whole logits as a plain tensor, by those of one token."""
    with torch.no_grad():
        token = torch.zeros(1, 1, head.weight.shape[1], dtype=hidden.dtype, device=hidden.device)
        logits = run_stock(head, nn.Linear.forward, token) + 0  # what is being gathered is waited for
    if type(logits) is Tensor and logits.shape[-1] == head.weight.shape[0]:
        return None
    return "the output embedding returns DTensors, or this rank's logits alone, not ColwiseParallel's Replicate()"


def forget(model: nn.Module) -> None:
    """Let the ranks agree anew at the next call of each head."""
    for module in model.modules():
        _AGREED.pop(module, None)
