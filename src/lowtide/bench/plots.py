"""The head's plots: time against memory, the share of the limit by tokens, and the panels of the sweep."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lowtide.bench.config import AXES
from lowtide.bench.harness import OUT_OF_MEMORY
from lowtide.bench.loss_peers import LOWTIDE_AT_LIGERS
from lowtide.bench.results import Files, replace
from lowtide.bench.shapes import HEADS
from lowtide.bench.way import LOWTIDE
from lowtide.errors import UnsupportedError, message
from lowtide.measure.plots import Line, Panel, Point, draw_front, draw_panels, draw_shares

_LETTERS = {"N": "tokens N", "D": "hidden size D", "V": "vocabulary V"}


def draw(result: Mapping[str, Any], files: Files, machine: Mapping[str, Any]) -> list[Path]:
    """Draw what there is to draw and return the files."""
    drawn = []
    name, N, D, V = (result[key] for key in ("name", "N", "D", "V"))
    where = f"{machine['gpu'] or machine['cpu']}, torch {machine['torch']}, {result['dtype']}"
    sweep = [
        Point(f"{row['workspace_mib']:g}", row["peak_mib"], row["ms"]) for row in result.get("sweep", ()) if "ms" in row
    ]
    if sweep:
        peers = [
            Point(row["name"], row["peak_mib"], row["ms"], own=row["name"] == LOWTIDE)
            for row in result.get("table", ())
            if "ms" in row and row["name"] != LOWTIDE_AT_LIGERS  # it is on the line
        ]
        limit = next(limit["ms"] for limit in result["limits"] if limit["tokens"] == N)
        file = files.picture(name)
        title = f"Linear + cross entropy, forward and backward: N={N}, D={D}, V={V}\n{where}"
        replace(
            file,
            lambda at: draw_front(
                at, title, front=sweep, front_name=LOWTIDE, points=peers, limit=limit, least=result["gradients_mib"]
            ),
        )
        drawn.append(file)
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in result.get("tokens", ()):
        if "share" in row:
            lines.setdefault(row["name"], []).append((row["tokens"], row["share"]))
    if lines:
        file = files.picture(f"{name}-tokens")
        title = f"Share of the limit by number of tokens: D={D}, V={V}\n{where}"
        replace(file, lambda at: draw_shares(at, title, lines))
        drawn.append(file)
    return drawn


def draw_sweep(result: Mapping[str, Any], files: Files) -> Path:
    """Draw a result of `lowtide.bench.sweep`, finished or not, and return the file: a column for each line of shapes.

    The rows are the rate, the peak of memory above the inputs, and the errors: of the gradients (relative, the larger
    of the two) as lines, of the loss (absolute) as dots.
    """
    config, points = result["config"], result["points"]
    names = list(dict.fromkeys(row["name"] for point in points for row in point["rows"]))
    shape = HEADS.one(config["shape"])
    center = {"N": shape.N, "D": shape.D, "V": shape.V}
    columns = [letter for axis, letter in AXES.items() if "none" not in config[axis]]

    def along(letter: str) -> list[Mapping[str, Any]]:
        on_line = (p for p in points if all(p[other] == center[other] for other in "NDV" if other != letter))
        return sorted(on_line, key=lambda point: point[letter])

    def lines(letter: str, *keys: str, **style: Any) -> list[Line]:
        return [
            Line(name, _values(along(letter), letter, name, *keys), own=name.startswith(LOWTIDE), **style)
            for name in names
        ]

    def quiet(letter: str, name: str, key: str) -> Line:
        return Line(name, [(point[letter], point[key]) for point in along(letter)], quiet=True)

    rate, memory, errors = [], [], []
    for letter in columns:
        rate.append(Panel([*lines(letter, "tflops"), quiet(letter, "bare GEMMs", "limit_tflops")]))
        grads = quiet(letter, "gradients alone", "gradients_mib")
        memory.append(Panel([*lines(letter, "peak_mib"), grads], log=True))
        floors = _values(along(letter), letter, LOWTIDE, "dx_floor", "dw_floor")
        floor = Line("bfloat16's roundings alone", floors, quiet=True)
        grads_error = lines(letter, "dx_error", "dw_error")
        errors.append(Panel([*grads_error, *lines(letter, "loss_error", dotted=True), floor], log=True))
    rows = {"TFLOP/s: 6NDV / time": rate, "peak above the inputs, MiB": memory}
    if config["error"]:
        rows["error: gradients (lines), loss (dots)"] = errors
    machine = result["machine"]
    title = (
        "Linear + cross entropy, forward and backward, each size with the others held at "
        f"N={center['N']}, D={center['D']}, V={center['V']}\n"
        f"{machine['gpu'] or machine['cpu']}, torch {machine['torch']}, {result['dtype']}"
    )
    out = sorted({row["name"] for p in points for row in p["rows"] if row.get("failed") == OUT_OF_MEMORY})
    if out:
        title += f"; lines end where memory does ({', '.join(out)})"
    file = files.picture("lines")
    replace(file, lambda at: draw_panels(at, title, rows, columns=[_LETTERS[letter] for letter in columns]))
    return file


def require_matplotlib(what: str) -> None:
    """Raise `UnsupportedError` unless matplotlib is installed."""
    if importlib.util.find_spec("matplotlib") is None:
        hint = "pip install 'lowtide[plot]'"
        raise UnsupportedError(message(what, "matplotlib, for the plots", "none", hint))


def _values(points: list[Mapping[str, Any]], letter: str, name: str, *keys: str) -> list[tuple[float, float]]:
    """Return the size and a peer's value of each point: the largest under these keys, where it has one."""
    rows = [(point[letter], row) for point in points for row in point["rows"] if row["name"] == name]
    return [
        (size, max(row[key] for key in keys if key in row)) for size, row in rows if not row.keys().isdisjoint(keys)
    ]
