"""A profile as one page of HTML that needs nothing else: data, script and style are in it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from itertools import cycle
from pathlib import Path
from typing import Any

from lowtide.bench.way import LOWTIDE
from lowtide.profile.owners import OWNERS
from lowtide.profile.phases import KINDS, Label
from lowtide.profile.tables import title_of

_OWN = ("#0b5fa5", "#12a5c4", "#5b3fa0", "#1b8f5a", "#1f2f66", "#6fa8d6")
_OTHERS = ("#c4561c", "#b58900", "#a32a6b", "#7a4a2b", "#e0849b", "#5d5d1a")


def line_colors(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a colour for each implementation's line: lowtide's from one family, the others' from another."""
    own, others = cycle(_OWN), cycle(_OTHERS)
    return [next(own if row["impl"] == LOWTIDE else others) for row in rows]


def write_page(file: Path, profile_json: str) -> None:
    """Write the page of a profile.

    Args:
        file: Where to.
        profile_json: The json file's text, which the page holds unmodified.
    """
    result = json.loads(profile_json)
    names = {
        "title": title_of(result),
        "owners": _labels(OWNERS),
        "kinds": _labels(KINDS),
        "colors": line_colors(result["implementations"]),
    }
    source = files("lowtide.profile")
    parts = {
        "STYLE": source.joinpath("page.css").read_text(encoding="utf-8"),
        "NAMES": _embedded(json.dumps(names)),
        "DATA": _embedded(profile_json),
        "SCRIPT": source.joinpath("page.js").read_text(encoding="utf-8"),
    }
    page = source.joinpath("page.html").read_text(encoding="utf-8")
    file.write_text(re.sub(r"/\*([A-Z]+)\*/", lambda mark: parts[mark[1]], page), encoding="utf-8")


def _labels(labels: Mapping[str, Label]) -> list[dict[str, str]]:
    return [{"id": name, "text": label.text, "color": label.color} for name, label in labels.items()]


def _embedded(text: str) -> str:
    """Return json for a script element: nothing in it can end the element."""
    return text.replace("<", "\\u003c")
