"""A subclass for one module: it changes an instance's behaviour and nothing else.

A subclass, not a ``forward`` on the instance, because copies, pickles, replicas, adapters and engines that call
``module.forward`` have it too.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any

# The child's attribute with the class that it equals.
_EQUAL_TO = "_lowtide_equal_to"
# Code with a registry of classes, such as FSDP2's or a compiler's, which must distinguish child and base.
_TELLS_APART = ("lowtide.", "torch.", "weakref", "_weakrefset", "functools", "abc")
_EXCEPT = "torch.ao."


class _EqualToBase(type):
    """The class of a child that equals its base, also as a member of lists, sets and dictionaries.

    For code that compares exact types, as quantisation does: ``type(m) == nn.Linear``, ``type(m) in mapping``.
    """

    def __eq__(cls, other: object) -> bool:
        return _stands_for(cls) is _stands_for(other)

    def __hash__(cls) -> int:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if caller.startswith(_TELLS_APART) and not caller.startswith(_EXCEPT):
            return type.__hash__(cls)
        return hash(_stands_for(cls))


def _stands_for(cls: Any) -> Any:
    while type(cls) is _EqualToBase and _EQUAL_TO in vars(cls):
        cls = vars(cls)[_EQUAL_TO]
    return cls


def child_class(base: Any, overrides: Callable[[Any], dict[str, Any]], marker: str) -> Any:
    """Return the child of ``base`` with the same name and ``overrides(base)``: the same one each time.

    An instance pickles and copies as one of ``base``, and becomes one of the child when it is loaded: ``overrides`` is
    a function that can be imported. ``marker`` names the child's attribute with ``base``, and identifies its maker.
    """
    return _child_class(base, overrides, marker)  # called from lowtide, the cache distinguishes a child from its base


@functools.cache
def _child_class(base: Any, overrides: Callable[[Any], dict[str, Any]], marker: str) -> Any:
    def reduce(self: Any, protocol: Any) -> Any:
        # Pickles as the stock class, and recreates the child when loaded.
        rebuild, _, *state = base.__reduce_ex__(self, protocol)
        return (
            (_rebuilt, (base, overrides, marker), *state) if rebuild.__name__ == "__newobj__" else (rebuild, _, *state)
        )

    # The same names: transformers writes them to config.json and keys its registries by them.
    names = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    attributes = {**names, "__reduce_ex__": reduce, marker: base, _EQUAL_TO: base, **overrides(base)}
    # A class with its own metaclass keeps it.
    metaclass = _EqualToBase if type(base) in (type, _EqualToBase) else type(base)
    return metaclass(base.__name__, (base,), attributes)


def _rebuilt(base: Any, overrides: Callable[[Any], dict[str, Any]], marker: str) -> Any:
    return object.__new__(child_class(base, overrides, marker))
