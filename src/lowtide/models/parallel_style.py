"""Tensor parallelism: how a linear layer is wrapped, and whether all ranks that share a module run it fused.

`torch.distributed.tensor.parallel.ColwiseParallel` puts hooks before and after the module's forward; the style of this
name in transformers puts a forward on the instance. Both make a DTensor of the input, and give the output the layout
that the style has for it.

Fused and stock code exchange different tensors. A rank that alone ran the stock code, for a hook or a mode of its own
(a logger's on the first rank, say), would wait for ever, or take one tensor for another. So the ranks agree once, at a
module's first call.
"""

import functools
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from lowtide.errors import UnsupportedError
from lowtide.head.ranks import exchange

_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_TRANSFORMERS = "transformers.distributed.tensor_parallel"
# The attribute of an instance that holds its style while that is bypassed, or `_STOCK` while the stock code runs.
_ASIDE = "_lowtide_style"
_STOCK = "stock"
_ANOTHER = "is wrapped for tensor parallelism in another way than by ColwiseParallel"


@dataclass(frozen=True)
class Style:
    """The wrapping of a linear layer: hooks before and after its forward, or a forward on the instance."""

    mesh: Any
    input_placement: Any  # of inputs that are plain tensors
    output_placement: Any
    gives_local: bool  # the outputs are plain tensors, not DTensors
    before: Callable[..., Any] | None = None
    after: Callable[..., Any] | None = None
    forward: Callable[..., Any] | None = None


def defining_module(function: Any) -> str:
    """Return the name of the module that a function is from, "" if it has none."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__module__", None) or ""


def style_of(head: nn.Module) -> Style | str | None:
    """Return the style that wraps an output embedding, None where none does, or why its logits have to be built."""
    before, after = ([hook for hook in getattr(head, kind).values() if is_parallel_hook(hook)] for kind in _HOOKS)
    forward = vars(head).get("forward")
    if defining_module(forward) != _TRANSFORMERS:
        if not before and not after:
            return None
        style = _of_hooks(before, after)
    else:
        style = _ANOTHER if before or after else _of_forward(head, forward)
    if not isinstance(style, Style):
        return style
    if style.forward is not None and not style.input_placement.is_replicate():
        return _ANOTHER
    if style.gives_local and not style.output_placement.is_replicate():
        return "returns this rank's logits alone (ColwiseParallel with output_layouts=Shard(-1), use_local_output=True)"
    return style


def is_sharded_along(placement: Any, axis: int) -> bool:
    """Whether a DTensor's placement is exactly ``Shard(axis)``."""
    from torch.distributed.tensor import Shard

    return type(placement) is Shard and placement.dim == axis


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
    """Whether this is inside `stock_call`, so that the module runs its own code."""
    return vars(head).get(_ASIDE) is _STOCK


@contextmanager
def put_aside(head: nn.Module, style: Style) -> Iterator[None]:
    """Let calls of ``head`` bypass its style inside; all its other hooks see them as before."""
    state = vars(head)
    before = {name: state[name] for name in _HOOKS}
    for kind in _HOOKS:
        kept = ((key, hook) for key, hook in state[kind].items() if hook not in (style.before, style.after))
        state[kind] = OrderedDict(kept)
    if style.forward is not None:
        before["forward"] = state.pop("forward")
    try:
        with _marked(head, style):
            yield
    finally:
        state.update(before)


def stock_call(head: nn.Module) -> AbstractContextManager[None]:
    """Let the head run its class's own forward inside."""
    return _marked(head, _STOCK)


def run_stock(head: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return the result of the stock ``forward``, inside the style if that is bypassed."""
    style = style_aside(head)
    if style is None:
        return forward(head, *args, **kwargs)
    with stock_call(head):
        if style.forward is not None:
            return style.forward(*args, **kwargs)
        assert style.before is not None
        assert style.after is not None
        changed = style.before(head, args)
        args = changed if isinstance(changed, tuple) else (changed,)
        return style.after(head, args, forward(head, *args, **kwargs))


@contextmanager
def _marked(head: nn.Module, mark: Style | str) -> Iterator[None]:
    state = vars(head)
    before = state.get(_ASIDE)
    state[_ASIDE] = mark
    try:
        yield
    finally:
        if before is None:
            del state[_ASIDE]
        else:
            state[_ASIDE] = before


def _of_hooks(before: list[Callable[..., Any]], after: list[Callable[..., Any]]) -> Style | str:
    from torch.distributed.tensor.parallel import ColwiseParallel

    if len(before) == len(after) == 1:
        cells = _cells(before[0])
        layouts = _arguments(cells.get("input_fn"), ColwiseParallel._prepare_input_fn)
        outputs = _arguments(_cells(after[0]).get("output_fn"), ColwiseParallel._prepare_output_fn)
        if layouts is not None and outputs is not None and len(layouts[0]) == len(outputs[0]) == 1:
            mesh = cells.get("device_mesh")
            return Style(mesh, layouts[0][0], outputs[0][0], outputs[1], before=before[0], after=after[0])
    return _ANOTHER


def _of_forward(linear: nn.Module, forward: Any) -> Style | str:
    """Return the style of transformers' forward, a closure over the style, the module and the forward before."""
    cells = _cells(forward)
    style: Any = cells.get("self")
    module, before = cells.get("module"), cells.get("original_forward")
    if type(style) is not sys.modules[_TRANSFORMERS].ColwiseParallel:
        return _ANOTHER
    if module is not linear or getattr(before, "__self__", None) is not linear:
        return "is a copy, and the forward that transformers put on it is that of the original"
    if getattr(before, "__func__", None) not in [vars(base).get("forward", linear) for base in type(linear).__mro__]:
        return "had a forward of its own before it was wrapped for tensor parallelism"
    if getattr(linear, "_hf_quantized_needs_local_tp", False):
        return "is quantised"
    layouts = style.input_layouts, style.output_layouts
    return Style(cells.get("mesh"), *layouts, style.use_local_output, forward=forward)


def _arguments(function: Any, inner: Any) -> tuple[Any, Any] | None:
    """Return the two arguments bound to ``inner`` in the partial ``function``, None if it is something else."""
    if not isinstance(function, functools.partial) or function.func is not inner or function.keywords:
        return None
    return function.args if len(function.args) == 2 else None


def _cells(function: Any) -> dict[str, Any]:
    """Return what a function closes over, by name."""
    closure = getattr(function, "__closure__", None) or ()
    names = function.__code__.co_freevars if closure else ()
    return dict(zip(names, (cell.cell_contents for cell in closure), strict=True))


# For each module the ranks that could not run it fused at its first call.
_UNABLE: WeakKeyDictionary[nn.Module, tuple[int, ...]] = WeakKeyDictionary()


def why_not_agreed(module: nn.Module, mesh: Any, device: torch.device, why_not: str | None) -> str | None:
    """Return why ``module``, sharded over ``mesh``, runs the stock code on every rank; None if it is fused on each.

    Every rank has to call this, at each call of the module. At the first one the host waits. ``why_not`` is why this
    rank cannot run it fused.

    Raises:
        UnsupportedError: The ranks have agreed to fuse it, and this one cannot any more.
    """
    if module not in _UNABLE:
        flags = exchange.numbers_of_all([int(why_not is not None)], mesh.get_group(), device)
        _UNABLE[module] = tuple(rank for rank, (unable,) in enumerate(flags) if unable)
    unable = _UNABLE[module]
    if unable:
        return why_not or f"on ranks {list(unable)} of its group something looks at the calls of this module"
    if why_not is not None:
        raise UnsupportedError(
            f"model: expected what the ranks that share {type(module).__name__} had at its first call, got a change "
            f"since: {why_not}. The others may not know of it. If it is so on every rank (a FlopCounterMode, which has "
            "hooks on all modules), call lowtide.patch(model) again on each."
        )
    return None


def forget(model: nn.Module) -> None:
    """Let the ranks agree anew at the next call of each module."""
    for module in model.modules():
        _UNABLE.pop(module, None)
