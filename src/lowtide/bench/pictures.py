"""A shape's pictures: time against memory, and the share of the limit by number of tokens."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowtide.bench.peers import LOWTIDE, LOWTIDE_AT_LIGERS
from lowtide.bench.results import Files, replace
from lowtide.measure.plots import Point, draw_front, draw_shares

if TYPE_CHECKING:
    from lowtide.bench.head import ShapeResult


def draw(result: ShapeResult, files: Files, machine: dict[str, Any]) -> list[Path]:
    """Draw what there is to draw and return the files."""
    drawn = []
    shape = result.shape
    where = f"{machine['gpu'] or machine['cpu']}, torch {machine['torch']}, {result.dtype}"
    sweep = [
        Point(f"{row.workspace_mib:g}", row.peak_mib, row.ms)
        for row in result.sweep
        if row.ms is not None and row.peak_mib is not None
    ]
    if sweep:
        peers = [
            Point(row.name, row.peak_mib, row.ms, own=row.name == LOWTIDE)
            for row in result.table
            if row.ms is not None and row.peak_mib is not None and row.name != LOWTIDE_AT_LIGERS  # it is on the line
        ]
        limit = next(limit["ms"] for limit in result.limits if limit["tokens"] == shape.N)
        file = files.picture(shape.name)
        title = f"Linear + cross entropy, forward and backward: N={shape.N}, D={shape.D}, V={shape.V}\n{where}"
        replace(
            file,
            lambda at: draw_front(
                at, title, front=sweep, front_name=LOWTIDE, points=peers, limit=limit, least=result.gradients_mib
            ),
        )
        drawn.append(file)
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in result.tokens:
        if row.share is not None:
            lines.setdefault(row.name, []).append((row.tokens, row.share))
    if lines:
        file = files.picture(f"{shape.name}-tokens")
        title = f"Share of the limit by number of tokens: D={shape.D}, V={shape.V}\n{where}"
        replace(file, lambda at: draw_shares(at, title, lines))
        drawn.append(file)
    return drawn
