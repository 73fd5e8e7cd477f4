"""Measurements of this machine for later runs: a json file in the user's cache folder."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Generic, TypeVar

Entry = TypeVar("Entry")


class CachedTable(Generic[Entry]):
    """Entries of one dataclass by name, in ``$XDG_CACHE_HOME/lowtide`` (``~/.cache/lowtide`` without it).

    ``make`` makes an entry from its fields, and raises if they are not its own.
    """

    def __init__(self, name: str, make: Callable[[dict[str, Any]], Entry]) -> None:
        self._name, self._make = name, make

    @property
    def file(self) -> Path:
        """The path."""
        root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        return Path(root) / "lowtide" / self._name

    def read(self) -> dict[str, Entry]:
        """Return the entries; none if there is no such file or it is not a table.

        Entries that another version wrote, with other fields, are left out.
        """
        try:
            table = json.loads(self.file.read_text())
        except (OSError, ValueError):
            return {}
        entries: dict[str, Entry] = {}
        for name, fields in table.items() if isinstance(table, dict) else ():
            with contextlib.suppress(TypeError, ValueError, KeyError):
                entries[name] = self._make(fields)
        return entries

    def remember(self, name: str, entry: Entry) -> Path:
        """Add an entry to the file, atomically, and return its path."""
        file = self.file
        file.parent.mkdir(parents=True, exist_ok=True)
        entries: dict[str, Any] = {**self.read(), name: entry}
        part = file.with_suffix(f".{os.getpid()}.part")
        part.write_text(json.dumps({key: asdict(each) for key, each in entries.items()}, indent=1))
        part.replace(file)
        return file
