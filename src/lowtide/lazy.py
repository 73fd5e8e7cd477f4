"""Packages that import what they offer when it is first used: torch alone takes seconds."""

import sys
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Any


def on_first_use(
    package: str, homes: Mapping[str, Iterable[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the ``__getattr__`` and ``__dir__`` of a package whose public names are imported on first use.

    Args:
        package: Its name.
        homes: The public names by the module that each stands in, in full; none of a module: the module itself.

    Returns:
        tuple: The two functions. ``__dir__`` lists the public names alone, those of ``__all__``.
    """
    home = {name: module for module, names in homes.items() for name in names}
    modules = {module.rpartition(".")[2]: module for module, names in homes.items() if not tuple(names)}

    def get(name: str) -> Any:
        if name in modules:
            return import_module(modules[name])
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(home[name]), name)
        setattr(
            sys.modules[package], name, value
        )  # found there from now on, also by what reads the module's dictionary
        return value

    return get, lambda: list(sys.modules[package].__all__)
