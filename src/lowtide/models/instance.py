"""What `lowtide.patch` does to a module: a class of its own, marked with the part of the model that it is for."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from torch import nn

from lowtide.errors import UnsupportedError, message
from lowtide.swap import child_class

# The mark of a class that patch made: what it is a child of; and the part of the model that it was made for.
BASE = "_lowtide_base"
PART = "_lowtide_part"
WATCH = "_lowtide_watch"  # of a part that was probed: the code that the probe has seen, a `Watch`

# Makes the overrides of a child from its base and further arguments; a function that its module holds by name.
Overrides = Callable[..., dict[str, Any]]


def give_class(module: nn.Module, part: str, overrides: Overrides, *args: Hashable) -> None:
    """Give ``module`` a child of its class with ``overrides(base, *args)``; one that has a child of ours gets another.

    Args:
        module: The module.
        part: What the change belongs to, as in `PatchReport`.
        overrides: Makes the new class's attributes.
        args: Passed to it; the class is made once for each set of them.
    """
    assign: Any = module
    assign.__class__ = child_class(stock_class(module), _Attributes(part, overrides, args), BASE)
    watch: Any = vars(type(module)).get(WATCH)
    if watch is not None:
        watch.look()


def take_class_back(module: nn.Module) -> None:
    """Give ``module`` the class that it had before `give_class`."""
    assign: Any = module
    assign.__class__ = vars(type(module))[BASE]


def part_of(module: nn.Module) -> str | None:
    """Return what ``module`` was given a class for; None where it was not, also beneath a class made on top."""
    return getattr(type(module), PART, None)


def stock_class(module: nn.Module) -> type:
    """Return the class of ``module``, or the one it had before `give_class`."""
    own: type = vars(type(module)).get(BASE, type(module))
    return own


def is_on_top(module: nn.Module) -> bool:
    """Return whether the class of ``module`` is the very one that `give_class` gave it."""
    return BASE in vars(type(module))


def check_nothing_on_top(module: nn.Module) -> None:
    """Check that a module with a class of ours has no other one on top of it.

    Raises:
        UnsupportedError: Something else changed its class since (``fully_shard``, a parametrization).
    """
    if part_of(module) is not None and not is_on_top(module):
        raise UnsupportedError(
            message(
                "model",
                f"{type(module).__name__} to have the class that patch gave it",
                f"one changed since, {type(module).__mro__}",
                "Undo what came after lowtide.patch first.",
            )
        )


@dataclass(frozen=True)
class _Attributes:
    """The attributes of a child class, made from its base: comparable and picklable, so that copies share one class."""

    part: str
    overrides: Overrides
    args: tuple[Hashable, ...]

    def __call__(self, base: Any) -> dict[str, Any]:
        return {PART: self.part, **self.overrides(base, *self.args)}
