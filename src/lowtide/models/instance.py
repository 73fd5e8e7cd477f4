"""What `lowtide.patch` does to a module: a class of its own, marked with the part of the model that it is for."""

import functools
import inspect
from collections.abc import Callable, Hashable
from types import CellType, FunctionType
from typing import Any

from torch import nn

from lowtide.swap import child_class

# The mark of a class that patch made: what it is a child of; and the part of the model that it was made for.
BASE = "_lowtide_base"
PART = "_lowtide_part"

# Makes the overrides of a child from its base and further arguments; a function that its module holds by name.
Overrides = Callable[..., dict[str, Any]]


def give_class(module: nn.Module, part: str, overrides: Overrides, *args: Hashable) -> None:
    """Give ``module`` a child of its stock class with ``overrides(base, *args)``, made once for each ``args``.

    ``part`` is what the change belongs to, as in `PatchReport`.
    """
    assign: Any = module
    assign.__class__ = child_class(stock_class(module), _attributes, BASE, part, overrides, *args)


def _attributes(base: Any, part: str, overrides: Overrides, *args: Hashable) -> dict[str, Any]:
    return {PART: part, **overrides(base, *args)}


def with_forward(base: Any, forward: Callable[..., Any]) -> dict[str, Any]:
    """Return a class's attributes with ``forward`` in place of that of ``base``, which documents it.

    Not by functools.wraps: its ``__wrapped__`` is an invitation to call past this function, and accelerate takes it.
    """
    forward.__signature__ = inspect.signature(base.forward)  # type: ignore[attr-defined]
    forward.__doc__ = base.forward.__doc__
    return {"forward": forward}


def with_fused(base: Any, inputs: int, run: Callable[..., Any]) -> dict[str, Any]:
    """Return a class's attributes with a forward of so many inputs that returns ``run(self, *inputs)``.

    Or what the stock forward returns: where ``run`` returns None, for other arguments, and where the class has got
    another forward since.
    """
    stock = base.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) != inputs or kwargs or base.forward is not stock:
            return base.forward(self, *args, **kwargs)
        result = run(self, *args)
        return base.forward(self, *args) if result is None else result

    return with_forward(base, forward)


def children_of(module: nn.Module) -> dict[str, Any]:
    """Return a module's children by name; to read one as an attribute is slow."""
    return module._modules


def children_beside(module: nn.Module, names: tuple[str, ...]) -> tuple[nn.Module, ...]:
    """Return a module's children of other names, such as an MLP's activation."""
    return tuple(child for name, child in module._modules.items() if name not in names and child is not None)


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return a module's own parameters by name, those that are None too; a parametrised one is not among them."""
    return module._parameters


def undecorated(forward: Any) -> FunctionType | None:
    """Return the function beneath decorators of transformers, such as ``deprecate_kwarg``, or None.

    None where a decorator of another package is around it: what that does to a call is unknown.
    """
    while isinstance(forward, FunctionType) and hasattr(forward, "__wrapped__"):
        holds = any(cell.cell_contents is forward.__wrapped__ for cell in forward.__closure__ or ())
        if not holds or not forward.__globals__.get("__name__", "").startswith("transformers."):
            return None
        forward = forward.__wrapped__
    return forward if isinstance(forward, FunctionType) else None


def redecorated(forward: Any, inner: Any, change: Callable[[Any], Any] = lambda function: function) -> Any:
    """Return ``inner`` beneath the decorators that `undecorated` finds around ``forward``, after ``change`` of each."""
    if hasattr(forward, "__wrapped__"):
        below = redecorated(forward.__wrapped__, inner, change)
        cells = (CellType(below) if cell.cell_contents is forward.__wrapped__ else cell for cell in forward.__closure__)
        inner = copied(forward, forward.__globals__, tuple(cells))
    return change(inner)


def copied(function: FunctionType, namespace: dict[str, Any], closure: Any) -> FunctionType:
    """Return a function of the same code and defaults, with these globals and this closure."""
    copy = FunctionType(function.__code__, namespace, function.__name__, function.__defaults__, closure)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


@functools.lru_cache
def is_code_of(forward: Any, *packages: str) -> bool:
    """Whether a function, beneath decorators of transformers, is of a module whose name starts so."""
    plain = undecorated(forward)
    return plain is not None and plain.__globals__.get("__name__", "").startswith(packages)


def take_class_back(module: nn.Module) -> None:
    """Give ``module`` the class that it had before `give_class`."""
    assign: Any = module
    assign.__class__ = vars(type(module))[BASE]


def part_of(module: nn.Module) -> str | None:
    """Return the part for which ``module`` has a class of ours, also beneath another's class; None if it has none."""
    return getattr(type(module), PART, None)


def stock_class(module: nn.Module) -> type:
    """Return the class of ``module``, or the one it had before `give_class`."""
    own: type = vars(type(module)).get(BASE, type(module))
    return own


def is_on_top(module: nn.Module) -> bool:
    """Return whether the class of ``module`` is the very one that `give_class` gave it."""
    return BASE in vars(type(module))
