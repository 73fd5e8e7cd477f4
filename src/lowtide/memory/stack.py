"""Finding a model's decoder layers by structure: no model's name, no attribute's name, a mixture as any other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import nn

from lowtide.errors import ArgumentValueError, message

_KIND = "GradientCheckpointingLayer"  # transformers' base class of what runs one after the other on hidden states


class Stack(NamedTuple):
    """Layers that run one after the other on hidden states."""

    name: str  # the list's, inside the model
    layers: dict[str, nn.Module]  # in order, by their names inside the model; without ``torch.compile``'s wrappers
    others: tuple[str, ...] = ()  # the names of further stacks of the model, which were not chosen


def find_stack(model: nn.Module) -> Stack:
    """Return a model's decoder layers: the longest list of modules of one kind.

    A list is a ``ModuleList`` or a ``Sequential`` whose modules have modules of their own and are all of one class, or
    all of transformers' ``GradientCheckpointingLayer``; where any list is of that kind, the others do not count. A list
    inside a module of another list (a mixture's experts) does not count either.

    Raises:
        ArgumentValueError: There is no such list, or there are several of the greatest length.
    """
    found = list(_outermost(model, ""))
    kind = [stack for stack in found if all(map(_is_kind, stack.layers.values()))]
    stacks = sorted(kind or found, key=lambda stack: -len(stack.layers))
    if not stacks:
        expected = "a model with a ModuleList or a Sequential of layers of one class"
        hint = "Pass the part of the model that holds its decoder layers in such a list."
        raise ArgumentValueError(message("model", expected, f"{type(model).__name__} without one", hint))
    longest, *others = stacks
    equal = [stack for stack in stacks if len(stack.layers) == len(longest.layers)]
    if len(equal) > 1:
        hint = f"Pass one part alone, such as model.get_submodule({longest.name!r})."
        names = " and ".join(repr(stack.name) for stack in equal)
        got = f"{type(model).__name__} with {names} of {len(longest.layers)} each"
        raise ArgumentValueError(message("model", "one longest list of decoder layers", got, hint))
    return longest._replace(others=tuple(f"{stack.name} ({len(stack.layers)})" for stack in others))


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
    layers: dict[str, Any] = {f"{prefix}.{name}".lstrip("."): child for name, child in module.named_children()}
    layers = {name: getattr(child, "_orig_mod", child) for name, child in layers.items()}  # torch.compile's wrapper
    if len(layers) != len(module):
        return None  # a module twice in the list would have two policies
    if not all(any(True for _ in layer.children()) for layer in layers.values()):
        return None
    # By name, which children of a class that patches and FSDP2 make share.
    one_class = len({(type(layer).__module__, type(layer).__qualname__) for layer in layers.values()}) == 1
    return layers if one_class or all(map(_is_kind, layers.values())) else None


def _is_kind(layer: nn.Module) -> bool:
    return any(cls.__name__ == _KIND for cls in type(layer).__mro__)
