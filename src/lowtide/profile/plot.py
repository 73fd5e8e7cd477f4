"""A profile as one plot: memory over time, the phases beneath it, and the peaks by owner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lowtide.measure.plots import new_figure
from lowtide.profile.memory import OWNERS
from lowtide.profile.phases import KINDS, Label
from lowtide.profile.report import label_of, line_colors, title_of, unit_of

_STRIP, _BAR = 0.3, 0.42  # inches per implementation's phases, and per bar
_LEGEND = {"ncols": 4, "fontsize": 8, "frameon": False, "loc": "upper center"}


@dataclass(frozen=True)
class _Drawing:
    """What the three parts share: the rows that have a peak, their colours, the unit of memory, the time axis."""

    rows: Sequence[dict[str, Any]]
    colors: Sequence[str]
    unit: str
    scale: float
    longest_ms: float

    def lines(self, axes: Any) -> None:
        """Draw memory over time, with the peaks marked."""
        for row, color in zip(self.rows, self.colors, strict=True):
            peak, failed = row["peak"], "failed" in row
            text = f"{label_of(row)}: {peak['gib'] * self.scale:.4g} {self.unit} in {peak['phase']}, "
            text += "out of memory" if failed else _time(row["seconds"] * 1e3)
            sizes = [size * self.scale for size in row["timeline"]["gib"]]
            axes.plot(row["timeline"]["ms"], sizes, drawstyle="steps-post", color=color, linewidth=1.2, label=text)
            mark, ms = ("X", 9) if failed else ("o", 5)
            axes.plot([peak["ms"]], [peak["gib"] * self.scale], mark, color=color, ms=ms)
        axes.set_ylim(bottom=0)
        axes.set_xlim(0, self.longest_ms)
        axes.grid(alpha=0.25)
        axes.set_ylabel(f"memory of tensors, {self.unit}")
        axes.tick_params(labelbottom=False)
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=2, fontsize=8, frameon=False)

    def strips(self, axes: Any) -> None:
        """Draw each implementation's phases, on the time axis of the lines above, labelled where wide enough."""
        for i, row in enumerate(self.rows):
            for part in row["segments"]:
                begin, length, kind = part["begin_ms"], part["end_ms"] - part["begin_ms"], KINDS[part["kind"]]
                text = str(part["layer"]) if part["layer"] is not None else kind.text
                fits = length > (0.004 + 0.008 * len(text)) * self.longest_ms
                _bar(axes, i, begin, length, kind, text if fits else "")
        axes.set_xlim(0, self.longest_ms)
        axes.set_xlabel("time of a step, ms (numbers: layers)")
        self._finish(axes)

    def bars(self, axes: Any) -> None:
        """Draw each peak's owners."""
        most = max(row["peak"]["gib"] for row in self.rows) * self.scale
        for i, row in enumerate(self.rows):
            left = 0.0
            for owner, label in OWNERS.items():
                size = row["peak"]["owners_gib"][owner] * self.scale
                if size:
                    _bar(axes, i, left, size, label, f"{size:.3g}" if size > 0.06 * most else "")
                left += size
            axes.text(left + 0.008 * most, i, f"{left:.4g}, {row['peak']['phase']}", va="center", fontsize=7)
        axes.set_xlim(0, 1.25 * most)
        axes.set_xlabel(f"the peak by owner, {self.unit}")
        self._finish(axes)

    def _finish(self, axes: Any) -> None:
        """Label a row per implementation, and add the legend below the axes, each kind once."""
        axes.set_ylim(len(self.rows) - 0.5, -0.5)
        axes.set_yticks(range(len(self.rows)), map(label_of, self.rows), fontsize=8)
        for tick, color in zip(axes.get_yticklabels(), self.colors, strict=True):
            tick.set_color(color)
        below = -0.42 / (axes.get_position().height * axes.figure.get_figheight())  # inches
        shown = {text: handle for handle, text in zip(*axes.get_legend_handles_labels(), strict=True)}
        order = [label.text for label in (*KINDS.values(), *OWNERS.values()) if label.text in shown]
        axes.legend([shown[text] for text in order], order, bbox_to_anchor=(0.5, below), **_LEGEND)


def _bar(axes: Any, row: int, left: float, length: float, label: Label, text: str) -> None:
    style = {"height": 0.72, "color": label.color, "linewidth": 0.4, "edgecolor": "white"}
    axes.barh(row, length, left=left, label=label.text, **style)
    center = {"ha": "center", "va": "center", "fontsize": 7, "color": "white" if label.dark else "black"}
    axes.text(left + length / 2, row, text, **center)


def draw_profile(file: Path, result: dict[str, Any]) -> None:
    """Draw the json of ``lowtide profile`` as PNG: memory over a step's time, the phases beneath it, and the peaks."""
    every = result["implementations"]
    shown = [(row, color) for row, color in zip(every, line_colors(every), strict=True) if "peak" in row]
    rows, colors = zip(*shown, strict=True)
    longest = max((row["segments"][-1]["end_ms"] for row in rows if row["segments"]), default=1.0)
    drawing = _Drawing(rows, colors, *unit_of(row["peak"]["gib"] for row in rows), longest)
    heights = [3.6, 0.1 + _STRIP * len(rows), 0.3 + _BAR * len(rows)]
    with new_figure(file, 10.5, sum(heights) + 2.6) as figure:
        figure.suptitle(title_of(result), fontsize=10)
        for draw, axes in zip(
            (drawing.lines, drawing.strips, drawing.bars), figure.subplots(3, height_ratios=heights), strict=True
        ):
            draw(axes)


def _time(ms: float) -> str:
    return f"{ms:.4g} ms" if ms < 1000 else f"{ms / 1e3:.4g} s"
