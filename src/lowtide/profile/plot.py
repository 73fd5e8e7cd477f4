"""A profile as one plot: memory over time, the phases beneath it, and the peaks by owner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lowtide.measure.plots import new_figure
from lowtide.profile.owners import OWNERS
from lowtide.profile.phases import KINDS, Label
from lowtide.profile.tables import label_of, line_colors, title_of, unit_of

_WIDTH = 10.5
_STRIP = 0.3  # inches per implementation's phases
_BAR = 0.42  # per bar
_LEGEND = {"ncols": 4, "fontsize": 8, "frameon": False, "loc": "upper center"}
_CENTER = {"ha": "center", "va": "center", "fontsize": 7}


class _Drawing(NamedTuple):
    """What the three parts share: the rows that have a peak, their colours, the unit of memory, the time axis."""

    rows: Sequence[dict[str, Any]]
    colors: Sequence[str]
    unit: str
    scale: float
    longest_ms: float

    def has_room(self, text: str, length_ms: float) -> bool:
        """Return whether a small text fits into this much of the time axis."""
        return length_ms > (0.004 + 0.008 * len(text)) * self.longest_ms


def draw_profile(file: Path, result: dict[str, Any]) -> None:
    """Draw the json of ``lowtide profile`` as PNG: memory over a step's time, the phases beneath it, and the peaks."""
    every = result["implementations"]
    rows = [row for row in every if "peak" in row]
    colors = [color for row, color in zip(every, line_colors(every), strict=True) if "peak" in row]
    unit, scale = unit_of(rows)
    longest = max((row["segments"][-1]["end_ms"] for row in rows if row["segments"]), default=1.0)
    drawing = _Drawing(rows, colors, unit, scale, longest)
    heights = [3.6, 0.1 + _STRIP * max(len(rows), 1), 0.3 + _BAR * max(len(rows), 1)]
    with new_figure(file, _WIDTH, sum(heights) + 2.6) as figure:
        figure.suptitle(title_of(result), fontsize=10)
        lines, strips, bars = figure.subplots(3, height_ratios=heights)
        _draw_lines(lines, drawing)
        _draw_strips(strips, drawing)
        _draw_bars(bars, drawing)


def _draw_lines(axes: Any, drawing: _Drawing) -> None:
    rows, _, unit, scale, longest = drawing
    for row, color in zip(rows, drawing.colors, strict=True):
        peak, failed = row["peak"], "failed" in row
        text = f"{label_of(row)}: {peak['gib'] * scale:.4g} {unit} in {peak['phase']}"
        text += ", out of memory" if failed else f", {_time(row['seconds'] * 1e3)}"
        sizes = [size * scale for size in row["timeline"]["gib"]]
        axes.plot(row["timeline"]["ms"], sizes, drawstyle="steps-post", color=color, linewidth=1.2, label=text)
        axes.plot([peak["ms"]], [peak["gib"] * scale], "X" if failed else "o", color=color, ms=9 if failed else 5)
    axes.set_ylim(0, 1.12 * max((row["peak"]["gib"] * scale for row in rows), default=1.0))
    axes.set_xlim(0, longest)
    axes.grid(alpha=0.25)
    axes.set_ylabel(f"memory of tensors, {unit}")
    axes.tick_params(labelbottom=False)
    if rows:
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=2, fontsize=8, frameon=False)


def _draw_strips(axes: Any, drawing: _Drawing) -> None:
    """Draw each implementation's phases as a strip, on the time axis of the lines above, labelled where wide enough."""
    seen: dict[str, Any] = {}
    for i, row in enumerate(drawing.rows):
        for part in row["segments"]:
            length, kind = part["end_ms"] - part["begin_ms"], KINDS[part["kind"]]
            bar = axes.barh(
                i, length, left=part["begin_ms"], height=0.72, color=kind.color, linewidth=0.4, edgecolor="white"
            )
            seen.setdefault(part["kind"], bar)
            text = str(part["layer"]) if part["layer"] is not None else kind.text
            if drawing.has_room(text, length):
                axes.text(part["begin_ms"] + length / 2, i, text, color=_text_color(kind), **_CENTER)
    axes.set_xlim(0, drawing.longest_ms)
    axes.set_xlabel("time of a step, ms (numbers: layers)")
    _finish_bars(axes, drawing, {KINDS[kind].text: seen[kind] for kind in KINDS if kind in seen})


def _draw_bars(axes: Any, drawing: _Drawing) -> None:
    """Draw each peak's owners."""
    rows, _, unit, scale, _ = drawing
    most = max((row["peak"]["gib"] for row in rows), default=1.0) * scale
    left = [0.0] * len(rows)
    seen: dict[str, Any] = {}
    for owner, label in OWNERS.items():
        sizes = [row["peak"]["owners_gib"][owner] * scale for row in rows]
        if not any(sizes):
            continue
        seen[label.text] = axes.barh(range(len(rows)), sizes, left=left, height=0.72, color=label.color)
        for i, size in enumerate(sizes):
            if size > 0.06 * most:
                axes.text(left[i] + size / 2, i, f"{size:.3g}", color=_text_color(label), **_CENTER)
            left[i] += size
    for i, row in enumerate(rows):
        axes.text(left[i] + 0.008 * most, i, f"{left[i]:.4g}, {row['peak']['phase']}", va="center", fontsize=7)
    axes.set_xlim(0, 1.25 * most)
    axes.set_xlabel(f"the peak by owner, {unit}")
    _finish_bars(axes, drawing, seen)


def _finish_bars(axes: Any, drawing: _Drawing, seen: Mapping[str, Any]) -> None:
    """Label a row per implementation, and add the legend below the axes."""
    axes.set_ylim(len(drawing.rows) - 0.5, -0.5)
    axes.set_yticks(range(len(drawing.rows)), map(label_of, drawing.rows), fontsize=8)
    for tick, color in zip(axes.get_yticklabels(), drawing.colors, strict=True):
        tick.set_color(color)
    below = -0.42 / (axes.get_position().height * axes.figure.get_figheight())  # inches
    if seen:
        axes.legend(seen.values(), seen.keys(), bbox_to_anchor=(0.5, below), **_LEGEND)


def _text_color(label: Label) -> str:
    return "white" if label.dark else "black"


def _time(ms: float) -> str:
    return f"{ms:.4g} ms" if ms < 1000 else f"{ms / 1e3:.4g} s"
