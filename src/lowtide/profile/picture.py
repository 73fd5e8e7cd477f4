"""A profile as one picture: memory over time, the phases beneath it, and the peaks by owner."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lowtide.measure.plots import Named, name_points
from lowtide.profile.looks import (
    KIND_COLORS,
    KIND_TEXTS,
    OWNER_COLORS,
    OWNER_TEXTS,
    line_colors,
    title_of,
    unit_of,
)
from lowtide.profile.owners import ACTIVATIONS, OWNERS
from lowtide.profile.phases import BACKWARD, EMBEDDING, EMBEDDING_BACKWARD, FORWARD, HEAD_BACKWARD, RECOMPUTE

_WIDTH = 10.5
_STRIP = 0.3  # inches of an implementation's phases
_BAR = 0.42  # of its bar
_PALE = (EMBEDDING, HEAD_BACKWARD, RECOMPUTE, EMBEDDING_BACKWARD)  # phases of colours that black is read on


def draw_profile(file: Path, told: dict[str, Any]) -> None:
    """Draw memory over a step's time, all implementations in one plot with their phases beneath, and the peaks.

    Args:
        file: Where to, as PNG.
        told: What ``lowtide profile`` tells in json.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    every = told["implementations"]
    pairs = [
        (row, color) for row, color in zip(every, line_colors([r["impl"] for r in every]), strict=True) if "peak" in row
    ]
    rows, colors = [row for row, _ in pairs], [color for _, color in pairs]
    n = max(len(rows), 1)
    heights = [3.6, 0.1 + _STRIP * n, 0.3 + _BAR * n]
    figure = Figure(figsize=(_WIDTH, sum(heights) + 2.6), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title_of(told), fontsize=10)
    lines, strips, bars = figure.subplots(3, height_ratios=heights)
    unit, scale = unit_of(max((row["peak"]["gib"] for row in rows), default=1.0))
    longest = max((row["segments"][-1]["end_ms"] for row in rows if row["segments"]), default=1.0)
    _draw_lines(lines, rows, colors, unit, scale, longest)
    _draw_strips(strips, rows, colors, longest)
    _draw_bars(bars, rows, colors, unit, scale)
    peaks = [
        Named(f"{peak['gib'] * scale:.4g} in {peak['phase']}", peak["ms"], peak["gib"] * scale, color, 8)
        for peak, color in zip((row["peak"] for row in rows), colors, strict=True)
    ]
    name_points(figure, lines, sorted(peaks, key=lambda peak: -peak.y), path_effects=_halo())
    figure.savefig(file, dpi=150, format="png")


def _draw_lines(
    axes: Any, rows: Sequence[dict[str, Any]], colors: Sequence[str], unit: str, scale: float, longest: float
) -> None:
    for row, color in zip(rows, colors, strict=True):
        ms, sizes = row["timeline"]["ms"], [size * scale for size in row["timeline"]["gib"]]
        peak = row["peak"]
        text = f"{name_of(row)}: {peak['gib'] * scale:.4g} {unit}"
        text += ", out of memory" if "failed" in row else f", {_time(row['seconds'] * 1e3)}"
        axes.plot(ms, sizes, drawstyle="steps-post", color=color, linewidth=1.2, label=text)
        mark = "X" if "failed" in row else "o"
        axes.plot([peak["ms"]], [peak["gib"] * scale], mark, color=color, ms=9 if mark == "X" else 5)
    axes.set_ylim(0, 1.12 * max((row["peak"]["gib"] * scale for row in rows), default=1.0))
    axes.set_xlim(0, longest)
    axes.grid(alpha=0.25)
    axes.set_ylabel(f"memory of tensors, {unit}")
    axes.tick_params(labelbottom=False)
    if rows:
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=2, fontsize=8, frameon=False)


def _draw_strips(axes: Any, rows: Sequence[dict[str, Any]], colors: Sequence[str], longest: float) -> None:
    """Draw each implementation's phases as a strip, on the time axis of the lines above, and name what is wide enough.

    Layers that are too many for their numbers have one name together.
    """
    seen: dict[str, Any] = {}
    for i, row in enumerate(rows):
        for part in row["segments"]:
            length = part["end_ms"] - part["begin_ms"]
            bar = axes.barh(
                i,
                length,
                left=part["begin_ms"],
                height=0.72,
                color=KIND_COLORS[part["kind"]],
                linewidth=0.4,
                edgecolor="white",
            )
            seen.setdefault(part["kind"], bar)
            text = str(part["layer"]) if part["layer"] is not None else KIND_TEXTS[part["kind"]]
            if _has_room(text, length, longest):
                axes.text(
                    part["begin_ms"] + length / 2, i, text, ha="center", va="center", fontsize=7,
                    color="black" if part["kind"] in _PALE else "white",
                )  # fmt: skip
        for begin, end, text in _runs(row["segments"], longest):
            if _has_room(text, end - begin, longest):
                box = {"facecolor": "white", "alpha": 0.85, "edgecolor": "none", "pad": 1.2}
                axes.text((begin + end) / 2, i, text, ha="center", va="center", fontsize=7, bbox=box)
    axes.set_xlim(0, longest)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    _name_rows(axes, rows, colors)
    axes.set_xlabel("time of a step, ms (numbers: layers)")
    kinds = [kind for kind in KIND_TEXTS if kind in seen]
    if kinds:
        axes.legend(
            [seen[kind] for kind in kinds], [KIND_TEXTS[kind] for kind in kinds],
            loc="upper center", bbox_to_anchor=(0.5, _below(axes, 0.42)), ncols=4, fontsize=8, frameon=False,
        )  # fmt: skip


def _has_room(text: str, length_ms: float, longest_ms: float) -> bool:
    """Return whether a small text fits into so much of the time axis."""
    return length_ms > (0.004 + 0.008 * len(text)) * longest_ms


def _runs(parts: Sequence[dict[str, Any]], longest: float) -> list[tuple[float, float, str]]:
    """Return begin, end and name of neighbouring layers, all forward or all backward, that have no room for numbers."""
    found: list[tuple[float, float, str]] = []
    for ways, name in (((FORWARD,), "forward"), ((RECOMPUTE, BACKWARD), "backward")):
        run = [part for part in parts if part["kind"] in ways and part["layer"] is not None]
        if run and not any(_has_room(str(p["layer"]), p["end_ms"] - p["begin_ms"], longest) for p in run):
            text = f"{name} of layers {run[0]['layer']} to {run[-1]['layer']}"
            found.append((run[0]["begin_ms"], run[-1]["end_ms"], text))
    return found


def _draw_bars(axes: Any, rows: Sequence[dict[str, Any]], colors: Sequence[str], unit: str, scale: float) -> None:
    """Draw each peak's owners."""
    most = max((row["peak"]["gib"] for row in rows), default=1.0) * scale
    left = [0.0] * len(rows)
    for owner in OWNERS:
        sizes = [row["peak"]["owners_gib"][owner] * scale for row in rows]
        if not any(sizes):
            continue
        axes.barh(range(len(rows)), sizes, left=left, height=0.72, color=OWNER_COLORS[owner], label=OWNER_TEXTS[owner])
        for i, size in enumerate(sizes):
            if size > 0.06 * most:
                dark = owner in ("weights", "activations", "head")
                axes.text(
                    left[i] + size / 2, i, f"{size:.3g}",
                    ha="center", va="center", fontsize=7, color="white" if dark else "black",
                )  # fmt: skip
            if owner == ACTIVATIONS:
                layers = rows[i]["peak"]["activations_gib"].values()
                _draw_layers(axes, i, left[i], [gib * scale for gib in layers], most)
            left[i] += size
    for i, row in enumerate(rows):
        axes.text(left[i] + 0.008 * most, i, f"{left[i]:.4g}, {row['peak']['phase']}", va="center", fontsize=7)
    axes.set_xlim(0, 1.25 * most)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    _name_rows(axes, rows, colors)
    axes.set_xlabel(f"the peak by owner, {unit} (activations: by layer)")
    if rows:
        axes.legend(
            loc="upper center", bbox_to_anchor=(0.5, _below(axes, 0.42)), ncols=4, fontsize=8, frameon=False
        )  # fmt: skip


def _draw_layers(axes: Any, i: int, left: float, sizes: Sequence[float], most: float) -> None:
    """Part a bar's activations by layer, where the parts are wide enough to be told from each other."""
    if min(sizes, default=0.0) < 0.002 * most:
        return
    for size in sizes[:-1]:
        left += size
        axes.vlines(left, i - 0.36, i + 0.36, color="white", linewidth=0.4)


def _halo() -> list[Any]:
    """Return what keeps a text legible on a line that runs through it."""
    from matplotlib.patheffects import Normal, Stroke

    return [Stroke(linewidth=2.5, foreground="white"), Normal()]


def _below(axes: Any, inches: float) -> float:
    """Return the height of a place so far below the axes, as a share of theirs."""
    return float(-inches / (axes.get_position().height * axes.figure.get_figheight()))


def _name_rows(axes: Any, rows: Sequence[dict[str, Any]], colors: Sequence[str]) -> None:
    axes.set_yticks(range(len(rows)), [name_of(row) for row in rows], fontsize=8)
    for tick, color in zip(axes.get_yticklabels(), colors, strict=True):
        tick.set_color(color)


def name_of(row: dict[str, Any]) -> str:
    """Return an implementation's name, with its policy unless that is a part of it."""
    return str(row["name"]) if ":" in row["name"] else f"{row['name']}, {row['policy']}"


def _time(ms: float) -> str:
    return f"{ms:.4g} ms" if ms < 1000 else f"{ms / 1e3:.4g} s"
