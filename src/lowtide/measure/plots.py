"""Plots of measurements; they need matplotlib, which is imported when one is drawn."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lowtide.errors import UnsupportedError, message

NO_PLOT = "pip install 'lowtide[plot]'"


def require_matplotlib(argument: str) -> None:
    """Check that plots can be drawn, before what they show is measured.

    Raises:
        UnsupportedError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise UnsupportedError(message(argument, "matplotlib, for the plots", "none", NO_PLOT))


@contextmanager
def new_figure(file: Path, width: float, height: float) -> Iterator[Any]:
    """Yield a figure of so many inches, without a window, and write it as PNG when the block ends."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    yield figure
    figure.savefig(file, dpi=150, format="png")


@dataclass(frozen=True)
class Point:
    """A measurement: its name, its memory in MiB, its time in ms, and whether it is ours rather than another's."""

    name: str
    mib: float
    ms: float
    own: bool = False


@dataclass(frozen=True)
class Line:
    """One line of a panel; lines of one name have one colour, in all panels."""

    name: str
    points: Sequence[tuple[float, float]]  # size and value
    own: bool = False  # ours
    quiet: bool = False  # the reference of the others
    dotted: bool = False


@dataclass(frozen=True)
class Panel:
    """Lines over one axis of sizes, and whether their values are on a logarithmic scale."""

    lines: Sequence[Line]
    log: bool = False


def draw_panels(file: Path, title: str, rows: Mapping[str, Sequence[Panel]], *, columns: Sequence[str]) -> None:
    """Draw a grid of panels: a row for each kind of value, a column for each kind of size, to base 2."""
    names = list(dict.fromkeys(line.name for panels in rows.values() for panel in panels for line in panel.lines))
    handles: dict[str, Any] = {}
    with new_figure(file, 4.6 * len(columns) + 0.6, 3.3 * len(rows) + 0.9) as figure:
        figure.suptitle(title, fontsize=11)
        grid = figure.subplots(len(rows), len(columns), sharey="row", sharex="col", squeeze=False)
        for row, (label, panels) in zip(grid, rows.items(), strict=True):
            row[0].set_ylabel(label, fontsize=9)
            for axes, panel in zip(row, panels, strict=False):
                axes.set_xscale("log", base=2)
                axes.set_yscale("log" if panel.log else "linear")
                axes.grid(alpha=0.25)
                for line in panel.lines:
                    if points := [(x, y) for x, y in line.points if y > 0 or not panel.log]:
                        handles[line.name] = _draw_line(axes, line, points, names.index(line.name))
                if not panel.log:
                    axes.set_ylim(bottom=0)
        for axes, label in zip(grid[-1], columns, strict=True):
            axes.set_xlabel(label)
        figure.legend(handles.values(), handles, loc="outside lower center", ncols=6, fontsize=9)


def _draw_line(axes: Any, line: Line, points: Sequence[tuple[float, float]], index: int) -> Any:
    """Draw ours thick, the reference dashed, and return the handle."""
    if line.quiet:
        return axes.plot(*zip(*points, strict=True), color="gray", linestyle="--")[0]
    marker, width = "osD^"[index // 10 % 4], 2.5 if line.own else 1.2
    style = {"color": f"C{index}", "marker": marker, "linestyle": ":" if line.dotted else "-", "linewidth": width}
    return axes.plot(*zip(*points, strict=True), **style)[0]


def draw_front(
    file: Path, title: str, *, front: Sequence[Point], front_name: str, points: Sequence[Point], limit: float,
    least: float,
) -> None:  # fmt: skip
    """Draw time against memory: one implementation with different settings as a line, others as points.

    The line has its settings as labels. ``limit`` is the lower bound of the time in ms, ``least`` that of the memory in
    MiB. ``points`` are the others, and ours with its default setting.
    """
    with new_figure(file, 8, 5.6) as figure:
        axes = figure.add_subplot(xscale="log", yscale="log", ylabel="time, ms")
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("peak memory above the inputs, gradients included, MiB")
        axes.grid(alpha=0.25)
        axes.margins(0.1)
        for shown, style, label in (
            (front, "C0o-", f"{front_name}, by MiB of workspace"),
            ([p for p in points if p.own], "C0*", f"{front_name}, default"),
            ([p for p in points if not p.own], "C1D", "others"),
        ):
            axes.plot([p.mib for p in shown], [p.ms for p in shown], style, label=label)
            for point in shown:
                axes.annotate(point.name, (point.mib, point.ms), (5, 5), textcoords="offset points", fontsize=7)
        axes.axhline(limit, color="gray", linestyle="--", label=f"bare GEMMs: {limit:.3g} ms")
        axes.axvline(least, color="gray", linestyle=":", label=f"gradients alone: {least:.3g} MiB")
        figure.legend(loc="outside lower center", ncols=3, fontsize=8)
