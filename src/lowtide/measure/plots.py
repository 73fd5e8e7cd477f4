"""Plots of measurements; they need matplotlib, which is imported when one is drawn."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lowtide.errors import UnsupportedError, message

NO_PLOT = "pip install 'lowtide[plot]'"
_OWN, _OTHERS, _QUIET = "#0b5fa5", "#c4561c", "#777777"
_EACH = ("#e69f00", "#c4561c", "#009e73", "#cc79a7", "#8a5fbf", "#5b3a1e", "#56b4e9", "#999933", "#d4373e")  # others
_MARKS = "sD^vPX<>h"
_STEPS = tuple(s * 10.0**k for k in range(-3, 5) for s in (1, 2, 5))  # GiB between ticks
_TICKS = (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8)  # of every decade
_PLACES = ((6, 5), (6, -12), (12, 14), (12, -22), (-6, 5), (-6, -12), (0, 9), (0, -16), (-12, 14), (-12, -22))


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
class Named:
    """A point with a label, in a colour and a size."""

    name: str
    x: float
    y: float
    color: str
    size: int


@dataclass(frozen=True)
class Panel:
    """Lines over one axis of sizes, and whether their values are on a logarithmic scale."""

    lines: Sequence[Line]
    log: bool = False


def draw_panels(file: Path, title: str, rows: Mapping[str, Sequence[Panel]], *, columns: Sequence[str]) -> None:
    """Draw a grid of panels: a row for each kind of value, a column for each kind of size, to base 2."""
    with new_figure(file, 4.6 * len(columns) + 0.6, 3.3 * len(rows) + 0.9, dpi=130) as figure:
        figure.suptitle(title, fontsize=11)
        _draw_grid(figure, rows, columns)


def _draw_grid(figure: Any, rows: Mapping[str, Sequence[Panel]], columns: Sequence[str]) -> None:
    grid = figure.subplots(len(rows), len(columns), sharey="row", sharex="col", squeeze=False)
    everything = [line for panels in rows.values() for panel in panels for line in panel.lines]
    others = list(dict.fromkeys(line.name for line in everything if not (line.own or line.quiet)))
    shown: dict[str, Any] = {}
    for row, (label, panels) in zip(grid, rows.items(), strict=True):
        row[0].set_ylabel(label, fontsize=9)
        top = max((y for panel in panels for line in panel.lines for _, y in line.points), default=1)
        for axes, panel in zip(row, panels, strict=False):
            axes.grid(alpha=0.25)
            axes.set_xscale("log", base=2)
            if panel.log:
                axes.set_yscale("log")
                axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.6g}" if value >= 1e-3 else f"{value:.0e}")
            else:
                axes.set_ylim(0, 1.06 * top)
            for line in sorted(panel.lines, key=lambda line: (line.own, not line.quiet)):  # ours on top
                points = [(x, y) for x, y in line.points if y > 0 or not panel.log]
                if points:
                    (handle,) = axes.plot(*zip(*points, strict=True), label=line.name, **_style(line, others))
                    if not line.dotted:
                        shown.setdefault(line.name, handle)
            _set_ticks(axes.xaxis, sorted({x for line in panel.lines for x, _ in line.points}), _short)
            axes.tick_params(labelsize=8)
    for axes, label in zip(grid[-1], columns, strict=True):
        axes.set_xlabel(label)
    names = list(dict.fromkeys(line.name for line in everything if line.name in shown))
    figure.legend([shown[n] for n in names], names, loc="outside lower center", ncols=min(len(names), 9), fontsize=9)


def _style(line: Line, others: Sequence[str]) -> dict[str, Any]:
    """Return matplotlib's arguments for a line: ours thick, the reference dashed, each of the others with its own."""
    if line.quiet:
        style = {"color": _QUIET, "linestyle": "--", "lw": 1.3}
    elif line.own:
        style = {"color": _OWN, "marker": "o", "ms": 5, "lw": 2.4}
    else:
        index = others.index(line.name)
        style = {"color": _EACH[index % len(_EACH)], "marker": _MARKS[index % len(_MARKS)], "ms": 4, "lw": 1.3}
    return {**style, "linestyle": ":", "alpha": 0.75, "ms": 3, "lw": 1.3} if line.dotted else style


def _short(size: float) -> str:
    """Return a size in the usual short form: 16K for 16384, 1M for 1048576; others in full."""
    for unit, name in ((2**20, "M"), (2**10, "K")):
        if size >= unit and size % unit == 0:
            return f"{size / unit:g}{name}"
    return f"{size:,g}"


def draw_front(
    file: Path,
    title: str,
    *,
    front: Sequence[Point],
    front_name: str,
    points: Sequence[Point],
    limit: float,
    least: float,
) -> None:
    """Draw time against memory: one implementation with different settings as a line, others as points.

    The line has its settings as labels. ``limit`` is the lower bound of the time in ms, whose share is the axis at the
    right, ``least`` that of the memory in MiB. ``points`` are the others, and ours with its default setting.
    """
    x = "peak memory above the inputs, gradients included, MiB"
    with _new_axes(file, title, x, "time, ms") as axes:
        axes.set_xscale("log")
        axes.set_yscale("log")
        _plot_points(axes, sorted(front, key=lambda point: point.mib), "o-", _OWN, f"{front_name}, by MiB of workspace")
        _plot_points(axes, [p for p in points if p.own], "*", _OWN, f"{front_name}, default", ms=15)
        _plot_points(axes, [p for p in points if not p.own], "D", _OTHERS, "others", ms=6)
        axes.axhline(limit, color=_QUIET, linestyle="--", linewidth=1, label=f"bare GEMMs: {limit:.3g} ms")
        axes.axvline(least, color=_QUIET, linestyle=":", linewidth=1, label=f"gradients alone: {least:.3g} MiB")
        top = max(p.ms for p in [*front, *points])
        for axis, low, high in ((axes.xaxis, least, max(p.mib for p in [*front, *points])), (axes.yaxis, limit, top)):
            ticks = [step * 10.0**decade for decade in range(-6, 9) for step in _TICKS]
            inside = [tick for tick in ticks if low / 1.3 <= tick <= high * 1.3]
            _set_ticks(axis, inside[:: 1 + len(inside) // 14])
        axes.margins(0.09)
        share = axes.secondary_yaxis("right", functions=(_over(limit), _over(limit)))
        shares: list[float] = []
        for tick in (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05):
            far = not shares or math.log(shares[-1] / tick) > 0.05 * math.log(top / limit)
            if far and tick >= limit / top / 1.2:
                shares.append(tick)
        _set_ticks(share.yaxis, shares)
        share.set_ylabel("share of the limit")
        axes.figure.legend(loc="outside lower center", ncols=3, fontsize=8)
        every = [Named(p.name, p.mib, p.ms, _OWN if p.own else _OTHERS, 9) for p in points]
        name_points(axes, every + [Named(p.name, p.mib, p.ms, _OWN, 7) for p in front])


def draw_shares(file: Path, title: str, lines: Mapping[str, Sequence[tuple[float, float]]]) -> None:
    """Draw shares of a limit by size, the sizes' axis logarithmic to base 2; ``lines`` has size and share by name."""
    with _new_axes(file, title, "tokens", "share of the limit") as axes:
        axes.set_xscale("log", base=2)
        for name, line in lines.items():
            axes.plot(*zip(*line, strict=True), "o-", label=name)
        axes.axhline(1, color=_QUIET, linestyle="--", linewidth=1)
        _set_ticks(axes.xaxis, sorted({size for line in lines.values() for size, _ in line}))
        axes.set_ylim(bottom=0)
        axes.legend(loc="lower right", fontsize=8)


def draw_budget(file: Path, title: str, *, front: Sequence[Point], chosen: Point, budget: float) -> None:
    """Draw the time at each peak of memory, points with a name labelled, the choice, and the budget in MiB."""
    with _new_axes(file, title, "peak memory, GiB", "time of a step, s") as axes:
        line = sorted(front, key=lambda point: point.mib)
        _plot_points(axes, line, ".-", _OWN, "fastest at each peak")
        _plot_points(axes, [chosen], "*", _OTHERS, "the choice", ms=15)
        axes.axvline(budget, color=_QUIET, linestyle="--", linewidth=1, label=f"budget: {budget / 1024:.3g} GiB")
        least, most = (pick([budget, *(p.mib for p in line)]) / 1024 for pick in (min, max))
        step = next(s for s in _STEPS if (most - least) / s <= 10 or s == _STEPS[-1])
        ticks = [1024 * step * i for i in range(int(least / step), int(most / step) + 2)]
        _set_ticks(axes.xaxis, ticks, lambda mib: f"{mib / 1024:,.6g}")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value / 1000:,.4g}")
        axes.margins(0.12)
        axes.figure.legend(loc="outside lower center", ncols=3, fontsize=8)
        named = [Named(chosen.name, chosen.mib, chosen.ms, _OTHERS, 9)] if chosen.name else []
        named += [Named(p.name, p.mib, p.ms, _OWN, 7) for p in line if p.name]
        name_points(axes, named, beside=[(p.mib, p.ms) for p in line])


def _plot_points(
    axes: Any, points: Sequence[Point], style: str, color: str, label: str, ms: float | None = None
) -> None:
    if points:
        axes.plot([p.mib for p in points], [p.ms for p in points], style, ms=ms, color=color, label=label)


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
    """Yield the axes of a plot of its own, with their labels."""
    with new_figure(file, 8, 5.6) as figure:
        axes = figure.add_subplot()
        axes.set_title(title, fontsize=10)
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        axes.grid(alpha=0.25)
        yield axes


def _set_ticks(axis: Any, ticks: Sequence[float], text: Callable[[float], str] = "{:,.6g}".format) -> None:
    from matplotlib.ticker import FixedLocator

    axis.set_major_locator(FixedLocator(ticks))
    axis.set_minor_locator(FixedLocator([]))
    axis.set_major_formatter(lambda value, _: text(value))


def _over(limit: float) -> Callable[[Any], Any]:
    """Return time to share and back; matplotlib also asks for the share at 0."""
    import numpy as np

    return lambda value: limit / np.maximum(value, 1e-12)


def name_points(axes: Any, named: Sequence[Named], *, beside: Sequence[tuple[float, float]] = (), **style: Any) -> None:
    """Label each point, in the first place beside it where the label covers no point, other label or edge.

    The first ones choose first. ``beside`` are points without a label, ``style`` matplotlib's arguments of all texts.
    """
    figure = axes.figure
    figure.draw_without_rendering()  # fixes the layout, so that places in pixels are known
    renderer = figure.canvas.get_renderer()
    edges = axes.get_window_extent(renderer)
    taken = [(edges.x1, edges.y0, edges.x1 + edges.width, edges.y1)]  # what lies right of the axes
    for place in (*beside, *((point.x, point.y) for point in named)):
        x, y = axes.transData.transform(place)
        taken.append((x - 5, y - 5, x + 5, y + 5))
    for point in named:
        for i, (dx, dy) in enumerate(_PLACES):
            side = "left" if dx > 0 else "right" if dx < 0 else "center"
            text = axes.annotate(
                point.name, (point.x, point.y), xytext=(dx, dy), textcoords="offset points", ha=side,
                color=point.color, fontsize=point.size, **style,
            )  # fmt: skip
            box = text.get_window_extent(renderer).extents
            if i == len(_PLACES) - 1 or not any(_overlap(box, other) for other in taken):
                taken.append(tuple(box))
                break
            text.remove()


def _overlap(a: Sequence[float], b: Sequence[float]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
