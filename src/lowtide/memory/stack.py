"""Finding a model's decoder layers by structure: no model's name, no attribute's name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from lowtide.errors import ArgumentValueError, message

_KIND = "GradientCheckpointingLayer"  # transformers' base class of what runs one after the other on hidden states


class Stack:
    """Layers that run one after the other on hidden states.

    Attributes:
        name: The list's name inside the model.
        layers: The layers themselves, in order, by their names inside the model; a layer that ``torch.compile`` wraps
            is the layer inside.
        others: The names of further stacks of the model, which were not chosen.
    """

    def __init__(self, name: str, layers: dict[str, nn.Module], others: tuple[str, ...] = ()) -> None:
        self.name = name
        self.layers = layers
        self.others = others


def find_stack(model: nn.Module) -> Stack:
    """Return a model's decoder layers: the longest list of modules of one kind.

    A list is a ``ModuleList`` or a ``Sequential`` whose modules have modules of their own and are all of one class, or
    all of transformers' ``GradientCheckpointingLayer``; where any list is of that kind, the others do not count. A list
    inside a module of another list (a mixture's experts) does not count either.

    Raises:
        ArgumentValueError: There is no such list, or there are several of the greatest length.
    """
    found = list(_outermost(model, ""))
    kind = [stack for stack in found if all(_is_kind(layer) for layer in stack.layers.values())]
    stacks = sorted(kind or found, key=lambda stack: -len(stack.layers))
    if not stacks:
        expected = "a model with a ModuleList or a Sequential of layers of one class"
        hint = "Pass the part of the model that holds its decoder layers in such a list."
        raise ArgumentValueError(message("model", expected, f"{type(model).__name__} without one", hint))
    if len(stacks) > 1 and len(stacks[0].layers) == len(stacks[1].layers):
        names = " and ".join(f"{s.name!r}" for s in stacks if len(s.layers) == len(stacks[0].layers))
        hint = f"Pass the part that is meant, such as model.get_submodule({stacks[0].name!r})."
        got = f"{type(model).__name__} with {names} of {len(stacks[0].layers)} each"
        raise ArgumentValueError(message("model", "one longest list of decoder layers", got, hint))
    return Stack(stacks[0].name, stacks[0].layers, tuple(f"{s.name} ({len(s.layers)})" for s in stacks[1:]))


def _outermost(module: nn.Module, prefix: str) -> Iterator[Stack]:
    """Yield the lists of layers at and below a module that are inside no other."""
    layers = _as_layers(module, prefix)
    if layers is not None:
        yield Stack(prefix or type(module).__name__, layers)
        return
    for name, child in module.named_children():
        yield from _outermost(child, f"{prefix}.{name}" if prefix else name)


def _as_layers(module: nn.Module, prefix: str) -> dict[str, nn.Module] | None:
    """Return a list's layers by name, or None if the module is no list of layers."""
    if not isinstance(module, nn.ModuleList | nn.Sequential) or len(module) == 0:
        return None
    layers = {(f"{prefix}.{name}" if prefix else name): _unwrapped(child) for name, child in module.named_children()}
    if len(layers) != len(module):
        return None  # a module twice in the list: it would be asked to keep two things
    if not all(any(True for _ in layer.children()) for layer in layers.values()):
        return None
    one_class = len({stock_class(layer) for layer in layers.values()}) == 1
    return layers if one_class or all(_is_kind(layer) for layer in layers.values()) else None


def stock_class(layer: nn.Module) -> tuple[str, str]:
    """Return a module's class by name: children of it that patches and FSDP2 make are the same to us."""
    cls: type = type(layer)
    return cls.__module__, cls.__qualname__


def _is_kind(layer: nn.Module) -> bool:
    return any(cls.__name__ == _KIND for cls in type(layer).__mro__)


def _unwrapped(layer: nn.Module) -> nn.Module:
    inner: Any = getattr(layer, "_orig_mod", layer)  # torch.compile's wrapper
    return inner  # type: ignore[no-any-return]
