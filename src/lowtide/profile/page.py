"""A profile as one static page of HTML that needs nothing else: the plot, and the tables."""

from __future__ import annotations

import base64
from html import escape
from pathlib import Path
from typing import Any

from lowtide.profile.tables import Cells, largest, layers, peaks, times, title_of

_HEAD = """\
<!DOCTYPE html>
<meta charset="utf-8">
<title>lowtide profile</title>
<style>
body { font: 14px sans-serif; margin: 2em }
img { max-width: 100% }
table { margin: 2em 0; border-spacing: 1.5em 0.2em }
td, th { text-align: right; font-weight: normal }
tr :first-child { text-align: left }
</style>
"""


def write_page(file: Path, result: dict[str, Any], plot: Path | None) -> None:
    """Write the page of a profile, with the PNG of `lowtide.profile.plot`; None: without it."""
    parts = [_HEAD, f"<pre>{escape(title_of(result))}</pre>\n"]
    if plot is not None:
        data = base64.b64encode(plot.read_bytes()).decode()
        parts.append(f'<img alt="memory over the time of a step" src="data:image/png;base64,{data}">\n')
    blocks = [largest(row, most=8) for row in result["implementations"] if "peak" in row]
    parts += map(_table, (peaks(result), layers(result), times(result), *blocks))
    file.write_text("".join(parts), encoding="utf-8")


def _table(cells: Cells) -> str:
    rows = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in cells)
    return "<table>\n" + "".join(f"<tr>{row}</tr>\n" for row in rows) + "</table>\n"
