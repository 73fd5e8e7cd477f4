"""A profile as one page of HTML that needs nothing else: data, script and style are in it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path

from lowtide.profile.owners import OWNERS
from lowtide.profile.phases import KINDS, Label
from lowtide.profile.tables import Line, label_of, largest, line_colors, peaks, times, title_of, unit_of


def write_page(file: Path, profile_json: str) -> None:
    """Write the page of a profile; it holds the json file's text unmodified."""
    result = json.loads(profile_json)
    rows, time = result["implementations"], times(result)
    peak, layer = peaks(result)
    ends = [", ".join(map(_loss, (row["losses"][0], row["losses"][-1]))) for row in time.rows]
    time.lines.append(Line("loss, first and last step", ends))
    sheets = {"peak": peak, "layer": layer, "time": time}
    names = {
        "title": title_of(result),
        "owners": _labels(OWNERS),
        "kinds": _labels(KINDS),
        "colors": line_colors(rows),
        "labels": [label_of(row) for row in rows],
        "unit": unit_of(rows),
        "tables": {name: {"head": sheet.head, "lines": sheet.lines} for name, sheet in sheets.items()},
        "largest": [largest(row) for row in peak.rows],
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


def _loss(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4f}"


def _labels(labels: Mapping[str, Label]) -> list[dict[str, str]]:
    return [{"id": name, "text": label.text, "color": label.color} for name, label in labels.items()]


def _embedded(text: str) -> str:
    """Return json for a script element: nothing in it can end the element."""
    return text.replace("<", "\\u003c")
