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
_OWN, _OTHERS, _QUIET = "#0b5fa5", "#c4561c", "#777777"
_EACH = ("#e69f00", "#c4561c", "#009e73", "#cc79a7", "#8a5fbf", "#5b3a1e", "#56b4e9", "#999933", "#d4373e")  # others
_MARKS = "sD^vPX<>h"


def require_matplotlib(argument: str) -> None:
    """Check that plots can be drawn, before what they show is measured.

    Raises:
        UnsupportedError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise UnsupportedError(message(argument, "matplotlib, for the plots", "none", NO_PLOT))


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
    everything = [line for panels in rows.values() for panel in panels for line in panel.lines]
    others = list(dict.fromkeys(line.name for line in everything if not (line.own or line.quiet)))
    shown: dict[str, Any] = {}
    with new_figure(file, 4.6 * len(columns) + 0.6, 3.3 * len(rows) + 0.9, dpi=130) as figure:
        figure.suptitle(title, fontsize=11)
        grid = figure.subplots(len(rows), len(columns), sharey="row", sharex="col", squeeze=False)
        for row, (label, panels) in zip(grid, rows.items(), strict=True):
            row[0].set_ylabel(label, fontsize=9)
            for axes, panel in zip(row, panels, strict=False):
                _draw_panel(axes, panel, others, shown)
        for axes, label in zip(grid[-1], columns, strict=True):
            axes.set_xlabel(label)
        names = [name for name in dict.fromkeys(line.name for line in everything) if name in shown]
        handles = [shown[name] for name in names]
        figure.legend(handles, names, loc="outside lower center", ncols=min(len(names), 9), fontsize=9)


def _draw_panel(axes: Any, panel: Panel, others: Sequence[str], shown: dict[str, Any]) -> None:
    """Draw a panel, and add the first handle of each name to ``shown``."""
    from matplotlib.ticker import FixedLocator

    axes.grid(alpha=0.25)
    axes.set_xscale("log", base=2)
    if panel.log:
        axes.set_yscale("log")
    for line in sorted(panel.lines, key=lambda line: (line.own, not line.quiet)):  # ours on top
        if points := [(x, y) for x, y in line.points if y > 0 or not panel.log]:
            (handle,) = axes.plot(*zip(*points, strict=True), label=line.name, **_style(line, others))
            if not line.dotted:
                shown.setdefault(line.name, handle)
    if not panel.log:
        axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(FixedLocator(sorted({x for line in panel.lines for x, _ in line.points})))
    axes.xaxis.set_minor_locator(FixedLocator([]))
    axes.xaxis.set_major_formatter(_size_text)
    axes.tick_params(labelsize=8)


def _size_text(size: float, _: object) -> str:
    """Return 16K for 16384, 1M for 1048576, others in full."""
    for unit, name in ((2**20, "M"), (2**10, "K")):
        if size >= unit and size % unit == 0:
            return f"{size / unit:g}{name}"
    return f"{size:,g}"


def _style(line: Line, others: Sequence[str]) -> dict[str, Any]:
    """Return matplotlib's arguments for a line: ours thick, the reference dashed, each of the others with its own."""
    if line.quiet:
        return {"color": _QUIET, "linestyle": "--", "lw": 1.3}
    if line.own:
        style = {"color": _OWN, "marker": "o", "ms": 5, "lw": 2.4}
    else:
        index = others.index(line.name)
        style = {"color": _EACH[index % len(_EACH)], "marker": _MARKS[index % len(_MARKS)], "ms": 4, "lw": 1.3}
    return {**style, "linestyle": ":", "alpha": 0.75, "ms": 3, "lw": 1.3} if line.dotted else style


def draw_front(
    file: Path, title: str, *, front: Sequence[Point], front_name: str, points: Sequence[Point], limit: float,
    least: float,
) -> None:  # fmt: skip
    """Draw time against memory: one implementation with different settings as a line, others as points.

    The line has its settings as labels. ``limit`` is the lower bound of the time in ms, ``least`` that of the memory in
    MiB. ``points`` are the others, and ours with its default setting.
    """
    with _new_axes(file, title, "peak memory above the inputs, gradients included, MiB", "time, ms") as axes:
        axes.set_xscale("log")
        axes.set_yscale("log")
        _plot_points(axes, front, "o-", _OWN, f"{front_name}, by MiB of workspace")
        _plot_points(axes, [p for p in points if p.own], "*", _OWN, f"{front_name}, default", ms=15)
        _plot_points(axes, [p for p in points if not p.own], "D", _OTHERS, "others", ms=6)
        axes.axhline(limit, color=_QUIET, linestyle="--", linewidth=1, label=f"bare GEMMs: {limit:.3g} ms")
        axes.axvline(least, color=_QUIET, linestyle=":", linewidth=1, label=f"gradients alone: {least:.3g} MiB")


def _plot_points(
    axes: Any, points: Sequence[Point], style: str, color: str, label: str, ms: float | None = None
) -> None:
    """Plot points and their names, beside them in four places by turns, so that neighbours' names lie apart."""
    ordered = sorted(points, key=lambda point: point.mib)
    if ordered:
        axes.plot([p.mib for p in ordered], [p.ms for p in ordered], style, ms=ms, color=color, label=label)
    for i, point in enumerate(reversed(ordered)):
        x, y = ((6, 5), (-6, -12), (6, -12), (-6, 5))[i % 4]
        side = {"ha": "left" if x > 0 else "right", "color": color, "fontsize": 7}
        axes.annotate(point.name, (point.mib, point.ms), xytext=(x, y), textcoords="offset points", **side)


@contextmanager
def new_figure(file: Path, width: float, height: float, *, dpi: int = 150) -> Iterator[Any]:
    """Yield a figure of so many inches, without a window, and write it as PNG when the block ends."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    yield figure
    figure.savefig(file, dpi=dpi, format="png")


@contextmanager
def _new_axes(file: Path, title: str, x: str, y: str) -> Iterator[Any]:
    """Yield the axes of a plot of its own, with their labels, and add the legend when the block ends."""
    with new_figure(file, 8, 5.6) as figure:
        axes = figure.add_subplot()
        axes.set_title(title, fontsize=10)
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        axes.grid(alpha=0.25)
        axes.margins(0.1)
        yield axes
        figure.legend(loc="outside lower center", ncols=3, fontsize=8)
