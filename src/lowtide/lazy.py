"""Packages that import their public names on first use: torch alone takes seconds."""

import sys
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from lowtide.errors import UnsupportedError, message


def on_first_use(
    package: str, homes: Mapping[str, Iterable[str]], needs: Mapping[str, tuple[str, str]] | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the ``__getattr__`` and ``__dir__`` of a package whose public names are imported on first use.

    ``homes`` has the public names of each module, by its full name; without names the module itself is public.
    ``needs`` has names that need another package: its name, and what installs it. Without it they raise an
    `UnsupportedError`, and are not listed.
    """
    home = {name: module for module, names in homes.items() for name in names}
    modules = {module.rpartition(".")[2]: module for module, names in homes.items() if not tuple(names)}
    needs = needs or {}

    def lacks(name: str) -> bool:
        return name in needs and find_spec(needs[name][0]) is None

    def get(name: str) -> Any:
        if name in modules:
            return import_module(modules[name])
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if lacks(name):
            other, installed = needs[name]
            raise UnsupportedError(message(name, f"{other} to be installed", "none", f"pip install '{installed}'"))
        value = getattr(import_module(home[name]), name)
        setattr(sys.modules[package], name, value)  # from now on in the package's dictionary
        return value

    return get, lambda: [name for name in sys.modules[package].__all__ if not lacks(name)]
