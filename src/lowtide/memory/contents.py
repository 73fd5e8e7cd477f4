"""What containers held at some moment, and giving it back to them."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Sequence
from itertools import filterfalse
from typing import Any

from torch import Tensor


class Contents:
    """What containers hold now: dictionaries, lists, sets and deques. Those that are empty are compared at once.

    Args:
        places: The containers.
        of_graphs: Those among them of whose tensors the values alone are held: a reference to an output that a layer
            has stored would hold the graph of the step before, which holds that of the one before it, and so on.
    """

    def __init__(self, places: list[Any], of_graphs: Sequence[Any] = ()) -> None:
        self._places, self._empty = list(filter(None, places)), list(filterfalse(None, places))
        # A copy of a set may be in another order.
        self._copies = [place.copy() if isinstance(place, dict) else list(place) for place in self._places]
        for own in of_graphs:
            at = next(i for i, place in enumerate(self._places) if place is own)
            self._copies[at] = _without_graphs(self._copies[at])

    def now(self) -> Contents:
        """Return what the same containers hold now: itself where nothing has changed."""
        return self if self._is_current() else Contents([*self._places, *self._empty])

    def restore(self) -> None:
        """Give the containers back what they held."""
        if self._is_current():
            return
        for place in self._empty:
            place.clear()
        for place, copy in zip(self._places, self._copies, strict=True):
            if not _same(place, copy):
                _put(place, copy)

    def _is_current(self) -> bool:
        return not any(self._empty) and all(map(_same, self._places, self._copies))


def has_graph(value: Any) -> bool:
    """Whether a value is a tensor that was computed, and not a leaf."""
    return isinstance(value, Tensor) and value.grad_fn is not None


def _same(place: Any, copy: Any) -> bool:
    """Whether a container holds the very objects of its copy, in the same order. Tensors are not compared by value."""
    if len(place) != len(copy):
        return False
    if isinstance(place, dict):
        return not place or all(map(operator.is_, place.values(), copy.values()))
    return all(map(operator.is_, place, copy))


def _without_graphs(content: Any) -> Any:
    """Return a dictionary's or a list's content with its tensors' values, which need a gradient as these do."""

    def value(one: Any) -> Any:
        return one.detach().requires_grad_() if has_graph(one) else one

    return {name: value(one) for name, one in content.items()} if isinstance(content, dict) else [*map(value, content)]


def _put(place: Any, content: Any) -> None:
    """Give a container its content back, but for sharded Parameters, which FSDP2 puts in place and removes itself."""
    if isinstance(place, dict):
        content = {
            name: place[name] if name in place and (_is_sharded(value) or _is_sharded(place[name])) else value
            for name, value in dict(content).items()
        }
    place.clear()
    if isinstance(place, list | deque):
        place.extend(content)
    else:
        place.update(content)


def _is_sharded(value: Any) -> bool:
    return isinstance(value, Tensor) and hasattr(value, "device_mesh")
