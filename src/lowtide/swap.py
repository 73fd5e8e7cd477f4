"""A subclass for one module: it changes an instance's behaviour and nothing else.

A subclass, not a ``forward`` on the instance, because copies, pickles, replicas, adapters and engines that call
``module.forward`` have it too.
"""

import functools
from collections.abc import Callable, Hashable
from typing import Any


@functools.cache
def child_class(base: Any, overrides: Callable[..., dict[str, Any]], marker: str, *args: Hashable) -> Any:
    """Return the child of ``base`` with the same name and ``overrides(base, *args)``: the same one each time.

    An instance pickles and copies as one of ``base``, and becomes one of the child when it is loaded: ``overrides`` is
    a function that can be imported. ``marker`` names the child's attribute with ``base``, and identifies its maker.
    """

    def reduce(self: Any, protocol: Any) -> Any:
        rebuild, made_from, *state = base.__reduce_ex__(self, protocol)
        if rebuild.__name__ == "__newobj__":
            rebuild, made_from = _rebuilt, (base, overrides, marker, *args)
        return (rebuild, made_from, *state)

    # The same names: transformers writes them to config.json and keys its registries by them.
    names = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    attributes = {**names, "__reduce_ex__": reduce, marker: base, **overrides(base, *args)}
    return type(base)(base.__name__, (base,), attributes)


def _rebuilt(*made_from: Any) -> Any:
    return object.__new__(child_class(*made_from))
