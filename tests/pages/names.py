"""What is public: the names of each module's ``__all__``, each where it is first named."""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType

import lowtide


def public_names() -> dict[str, list[str]]:
    """Return the public names of `lowtide`, and of each module below it those that are not lowtide's already."""
    found = {"lowtide": [name for name in lowtide.__all__ if not name.startswith("__")]}
    found["lowtide"] = [name for name in found["lowtide"] if not isinstance(getattr(lowtide, name), ModuleType)]
    for info in pkgutil.iter_modules(lowtide.__path__):
        module = importlib.import_module(f"lowtide.{info.name}")
        names = [name for name in getattr(module, "__all__", ()) if name not in lowtide.__all__]
        if names:
            found[module.__name__] = names
    return found
