"""A class of its own for one module: how an instance gets other behaviour and keeps everything else.

A child class, and not a replaced ``forward`` on the instance, because it goes wherever the module goes: copies,
pickles, replicas, adapters, engines that call ``module.forward``.
"""

import functools
from collections.abc import Callable
from typing import Any


@functools.cache
def child_class(base: Any, overrides: Callable[[Any], dict[str, Any]], marker: str) -> Any:
    """Return the child of ``base`` with the same name and ``overrides(base)``: the same one each time.

    An instance pickles and copies as one of ``base``, and gets the child again when it is read.

    Args:
        base: The class that the instance has.
        overrides: Returns the child's own attributes; a function that its module holds by name.
        marker: The name of the child's attribute that holds ``base``: who made the child, and the way back.
    """

    def reduce(self: Any, protocol: Any) -> Any:
        # Pickles by the stock class and makes the child again when read.
        rebuild, _, *state = base.__reduce_ex__(self, protocol)
        return (
            (_rebuilt, (base, overrides, marker), *state) if rebuild.__name__ == "__newobj__" else (rebuild, _, *state)
        )

    # The same names: transformers writes them to config.json and keys its registries by them.
    names = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    return type(base.__name__, (base,), {**names, "__reduce_ex__": reduce, marker: base, **overrides(base)})


def _rebuilt(base: Any, overrides: Callable[[Any], dict[str, Any]], marker: str) -> Any:
    return object.__new__(child_class(base, overrides, marker))
