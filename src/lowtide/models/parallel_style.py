"""How PyTorch and transformers wrap linear layers for tensor parallelism, read from what they leave on them.

`torch.distributed.tensor.parallel.ColwiseParallel` and ``RowwiseParallel`` leave a hook before and one behind the
module; the styles of these names in transformers a forward on the instance. They make a DTensor of the input, and of
the output what was asked for.
"""

import functools
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_TRANSFORMERS = "transformers.distributed.tensor_parallel"
# The attribute of an instance that holds the style while that is put aside, or `_STOCK` while the stock code runs.
_ASIDE = "_lowtide_style"
_STOCK = "stock"
_KINDS = ("ColwiseParallel", "RowwiseParallel")
_ANOTHER = "is wrapped for tensor parallelism in another way than by ColwiseParallel"


@dataclass(frozen=True)
class Style:
    """What is wrapped around a linear layer.

    Args:
        kind: One of `_KINDS`.
        mesh: The ranks.
        input_placement: How inputs lie that are plain tensors.
        output_placement: How the outputs lie.
        gives_local: Whether the outputs are plain tensors, and not DTensors.
        before: The hook before the module's forward.
        after: The hook behind it.
        forward: What stands on the instance in the place of the class's forward.
    """

    kind: str
    mesh: Any
    input_placement: Any
    output_placement: Any
    gives_local: bool
    before: Callable[..., Any] | None = None
    after: Callable[..., Any] | None = None
    forward: Callable[..., Any] | None = None


def defining_module(function: Any) -> str:
    """Return the name of the module that a function is from, "" if it has none."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__module__", None) or ""


def linear_style(linear: nn.Module) -> Style | str | None:
    """Return the style that wraps ``linear``, None where none does, or why it is not one that is known."""
    before, after = (_found(getattr(linear, kind)) for kind in _HOOKS)
    forward = vars(linear).get("forward")
    if defining_module(forward) != _TRANSFORMERS:
        return _of_hooks(before, after) if before or after else None
    return _ANOTHER if before or after else _of_forward(linear, forward)


def style_of(head: nn.Module) -> Style | str | None:
    """Return the style that wraps an output embedding, None where none does, or why its logits have to be built."""
    style = linear_style(head)
    if not isinstance(style, Style):
        return style
    if style.kind != "ColwiseParallel" or (style.forward is not None and not style.input_placement.is_replicate()):
        return _ANOTHER
    if style.gives_local and not style.output_placement.is_replicate():
        return "returns this rank's logits alone (ColwiseParallel with output_layouts=Shard(-1), use_local_output=True)"
    return style


def has_foreign_forward(head: nn.Module) -> bool:
    """Whether somebody but a tensor-parallel style put a forward on the instance."""
    return "forward" in vars(head) and defining_module(vars(head)["forward"]) != _TRANSFORMERS


def is_parallel_hook(hook: Callable[..., Any]) -> bool:
    """Whether a hook is of PyTorch's tensor parallelism."""
    return defining_module(hook).startswith("torch.distributed.tensor.")


def style_aside(head: nn.Module) -> Style | None:
    """Return the style that is put aside just now."""
    style = vars(head).get(_ASIDE)
    return style if isinstance(style, Style) else None


def is_stock_call(head: nn.Module) -> bool:
    """Whether the module's own code is asked for just now, in a call that began as `stock_call`."""
    return vars(head).get(_ASIDE) is _STOCK


@contextmanager
def put_aside(head: nn.Module, style: Style) -> Iterator[None]:
    """Let calls of ``head`` go past the style inside; all its other hooks see them as before."""
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


@contextmanager
def stock_call(head: nn.Module) -> Iterator[None]:
    """Let the head's forward be its class's own inside, whoever calls it."""
    with _marked(head, _STOCK):
        yield


def run_stock(head: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return what ``forward``, the stock one, gives with the style around it, if one is put aside."""
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


def _found(hooks: dict[int, Callable[..., Any]]) -> list[Callable[..., Any]]:
    return [hook for hook in hooks.values() if is_parallel_hook(hook)]


def _of_hooks(before: list[Callable[..., Any]], after: list[Callable[..., Any]]) -> Style | str:
    from torch.distributed.tensor import parallel

    if len(before) != 1 or len(after) != 1:
        return _ANOTHER
    enter, leave = _cells(before[0]).get("input_fn"), _cells(after[0]).get("output_fn")
    for kind in _KINDS:
        known = getattr(parallel, kind)
        layouts = _arguments(enter, getattr(known, "_prepare_input_fn", None))
        outputs = _arguments(leave, getattr(known, "_prepare_output_fn", None))
        if layouts is not None and outputs is not None and len(layouts[0]) == len(outputs[0]) == 1:
            mesh = _cells(before[0]).get("device_mesh")
            return Style(kind, mesh, layouts[0][0], outputs[0][0], outputs[1], before=before[0], after=after[0])
    return _ANOTHER


def _of_forward(linear: nn.Module, forward: Any) -> Style | str:
    """Return the style of transformers' forward, a closure over the style, the module and the forward before."""
    cells = _cells(forward)
    style: Any = cells.get("self")
    module, before = cells.get("module"), cells.get("original_forward")
    kind = type(style).__name__
    if kind not in _KINDS or type(style) is not getattr(sys.modules[_TRANSFORMERS], kind, None):
        return _ANOTHER
    if module is not linear or getattr(before, "__self__", None) is not linear:
        return "is a copy, and the forward that transformers put on it is that of the original"
    if getattr(before, "__func__", None) not in [vars(base).get("forward", linear) for base in type(linear).__mro__]:
        return "had a forward of its own before it was wrapped for tensor parallelism"
    if getattr(linear, "_hf_quantized_needs_local_tp", False):
        return "is quantised"
    layouts = style.input_layouts, style.output_layouts
    return Style(kind, cells.get("mesh"), *layouts, style.use_local_output, forward=forward)


def _arguments(function: Any, wanted: Any) -> tuple[Any, Any] | None:
    """Return the two arguments that are bound to ``wanted``, None where ``function`` is something else."""
    if not isinstance(function, functools.partial) or function.func is not wanted or function.keywords:
        return None
    return function.args if len(function.args) == 2 else None


def _cells(function: Any) -> dict[str, Any]:
    code, closure = getattr(function, "__code__", None), getattr(function, "__closure__", None)
    return {} if code is None or closure is None else dict(
        zip(code.co_freevars, (cell.cell_contents for cell in closure), strict=True)
    )  # fmt: skip
