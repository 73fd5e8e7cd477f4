"""A class of its own for one module: how an instance gets other behaviour and keeps everything else.

A child class, and not a replaced ``forward`` on the instance, because it goes wherever the module goes: copies,
pickles, replicas, adapters, engines that call ``module.forward``.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any

# The child's attribute that holds what it is equal to.
_EQUAL_TO = "_lowtide_equal_to"
# Code that keeps something for each class, such as FSDP2's classes or a compiler's, and must tell child and base apart.
_TELLS_APART = ("lowtide.", "torch.", "weakref", "_weakrefset", "functools", "abc")
_EXCEPT = "torch.ao."


class _EqualToBase(type):
    """The class of a child that is equal to its base, and is found where that is, in lists, sets and dictionaries.

    For code that asks for exact types, as quantisation does: ``type(m) == nn.Linear``, ``type(m) in mapping``.
    """

    def __eq__(cls, other: object) -> bool:
        return _stands_for(cls) is _stands_for(other)

    def __hash__(cls) -> int:
        asker = sys._getframe(1).f_globals.get("__name__", "")
        if asker.startswith(_TELLS_APART) and not asker.startswith(_EXCEPT):
            return type.__hash__(cls)
        return hash(_stands_for(cls))


def _stands_for(cls: Any) -> Any:
    while type(cls) is _EqualToBase and _EQUAL_TO in vars(cls):
        cls = vars(cls)[_EQUAL_TO]
    return cls


def child_class(base: Any, overrides: Callable[[Any], dict[str, Any]], marker: str) -> Any:
    """Return the child of ``base`` with the same name and ``overrides(base)``: the same one each time.

    An instance pickles and copies as one of ``base``, and gets the child again when it is read.

    Args:
        base: The class that the instance has.
        overrides: Returns the child's own attributes; a function that its module holds by name.
        marker: The name of the child's attribute that holds ``base``: who made the child, and the way back.
    """
    return _child_class(base, overrides, marker)  # asked for from here, the cache tells a child of ours from its base


@functools.cache
def _child_class(base: Any, overrides: Callable[[Any], dict[str, Any]], marker: str) -> Any:
    def reduce(self: Any, protocol: Any) -> Any:
        # Pickles by the stock class and makes the child again when read.
        rebuild, _, *state = base.__reduce_ex__(self, protocol)
        return (
            (_rebuilt, (base, overrides, marker), *state) if rebuild.__name__ == "__newobj__" else (rebuild, _, *state)
        )

    # The same names: transformers writes them to config.json and keys its registries by them.
    names = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    attributes = {**names, "__reduce_ex__": reduce, marker: base, _EQUAL_TO: base, **overrides(base)}
    # A class with a metaclass of its own keeps that.
    metaclass = _EqualToBase if type(base) in (type, _EqualToBase) else type(base)
    return metaclass(base.__name__, (base,), attributes)


def _rebuilt(base: Any, overrides: Callable[[Any], dict[str, Any]], marker: str) -> Any:
    return object.__new__(child_class(base, overrides, marker))
