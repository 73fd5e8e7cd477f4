"""A profile as one page of HTML that needs nothing but itself: data, script and style are in it."""

from __future__ import annotations

import json
import re
from importlib.resources import files
from pathlib import Path

from lowtide.profile import looks
from lowtide.profile.owners import OWNERS
from lowtide.profile.phases import KINDS


def write_page(file: Path, profile_json: str) -> None:
    """Write the page of a profile.

    Args:
        file: Where to.
        profile_json: The json file's text, which the page holds as it is.
    """
    told = json.loads(profile_json)
    impls = [row["impl"] for row in told["implementations"]]
    names = {
        "title": looks.title_of(told),
        "owners": [{"id": one, "text": looks.OWNER_TEXTS[one], "color": looks.OWNER_COLORS[one]} for one in OWNERS],
        "kinds": [{"id": one, "text": looks.KIND_TEXTS[one], "color": looks.KIND_COLORS[one]} for one in KINDS],
        "colors": looks.line_colors(impls),
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


def _embedded(text: str) -> str:
    """Return json that may stand inside a script element: nothing in it can end that."""
    return text.replace("<", "\\u003c")
