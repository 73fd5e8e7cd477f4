"""Reads ``statements.txt``, what programs are made of."""

from __future__ import annotations

import re
from pathlib import Path


def read() -> dict[str, tuple[str, ...]]:
    """Return the entries of each section."""
    sections: dict[str, list[str]] = {}
    entries: list[str] = []
    for line in Path(__file__).with_name("statements.txt").read_text().splitlines():
        if section := re.match(r"\[([a-zA-Z ]+)\]", line):
            entries = sections.setdefault(section[1], [])
        elif line.startswith(("    ", "& ")):
            entries[-1] += "\n" + line.removeprefix("& ")
        elif line and not line.startswith("#"):
            entries.append(line)
    return {name: tuple(entries) for name, entries in sections.items()}


STATEMENTS = read()
FORMS = tuple(tuple(entry.split(" | ")) for entry in STATEMENTS["forms"])
