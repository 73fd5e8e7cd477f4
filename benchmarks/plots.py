"""Plots of results: nine panels of `lowtide bench sweep`, and time against memory of `workspace.py`.

    python benchmarks/plots.py RESULT.json

It needs matplotlib and writes PNG files beside the result.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from lowtide.bench.harness import Row

OWN, OTHERS, QUIET = "#0b5fa5", "#c4561c", "#777777"
EACH = ("#e69f00", "#c4561c", "#009e73", "#cc79a7", "#8a5fbf", "#5b3a1e", "#56b4e9", "#999933", "#d4373e")
MARKS = "sD^vPX<>h"
AXES = {"N": "tokens N", "D": "hidden size D", "V": "vocabulary V"}
KINDS = {  # of a panel: the keys of a row, of which the largest is drawn, and the reference in a point
    "TFLOP/s: 6NDV / time": (("tflops",), "limit_tflops"),
    "peak above the inputs, MiB": (("peak_mib",), "gradients_mib"),
    "largest error of a gradient": (("dx_error", "dw_error"), ""),
}


def where(result: Row) -> str:
    machine = result["machine"]
    return f"{machine['gpu'] or machine['cpu']}, torch {machine['torch']}"


def draw_sweep(result: Row, file: Path) -> None:
    """Draw a column for each axis along which several sizes were measured, a row for each kind of value.

    Lines end where memory does.
    """
    points = result["tables"]
    center = points[0]
    others = {axis: [other for other in AXES if other != axis] for axis in AXES}
    lines = {axis: [p for p in points if all(p[o] == center[o] for o in others[axis])] for axis in AXES}
    columns = {axis: sorted(line, key=lambda p: p[axis]) for axis, line in lines.items() if len(line) > 1}
    names = list(dict.fromkeys(row["name"] for point in points for row in point["rows"]))
    figure = Figure(figsize=(4.6 * len(columns) + 0.6, 11), layout="constrained")
    around = ", ".join(f"{axis}={center[axis]}" for axis in AXES)
    figure.suptitle(f"Linear + cross entropy, forward and backward, around {around}\n{where(result)}", fontsize=11)
    grid = figure.subplots(len(KINDS), len(columns), sharey="row", sharex="col", squeeze=False)
    for row, (label, (keys, reference)) in zip(grid, KINDS.items(), strict=True):
        row[0].set_ylabel(label, fontsize=9)
        for axes, (axis, line) in zip(row, columns.items(), strict=True):
            draw_panel(axes, line, axis, names, keys, reference)
    for axes, axis in zip(grid[-1], columns, strict=True):
        axes.set_xlabel(AXES[axis])
    figure.legend(*grid[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=9, fontsize=9)
    figure.savefig(file, dpi=130)


def draw_panel(
    axes: Any, points: list[Row], axis: str, names: list[str], keys: tuple[str, ...], reference: str
) -> None:
    """Draw a line for each name, and the reference of all."""
    axes.set_xscale("log", base=2)
    if keys != ("tflops",):
        axes.set_yscale("log")
    if reference:
        known = [point[axis] for point in points], [point[reference] for point in points]
        axes.plot(*known, "--", color=QUIET, label="bare GEMMs, or gradients alone")
    for i, name in enumerate(names):
        rows = [(point[axis], row) for point in points for row in point["rows"] if row["name"] == name]
        found = [(size, max(row[key] for key in keys)) for size, row in rows if {*keys} <= {*row}]
        if found:
            style = {"color": EACH[i % len(EACH)], "marker": MARKS[i % len(MARKS)], "lw": 1.3, "ms": 4}
            own = {"color": OWN, "marker": "o", "lw": 2.4, "ms": 5, "zorder": 9}
            axes.plot(*zip(*found, strict=True), label=name, **(own if name == "lowtide" else style))
    axes.grid(alpha=0.25)


def draw_front(result: Row, table: Row, file: Path) -> None:
    """Draw time against memory: lowtide by workspace as a line, the peers of the table as points."""
    figure = Figure(figsize=(8, 5.6), layout="constrained")
    axes = figure.add_subplot()
    title = "Linear + cross entropy, forward and backward: N={N}, D={D}, V={V}\n".format(**table)
    axes.set(title=title + where(result), xscale="log", yscale="log", ylabel="time, ms")
    axes.set_xlabel("peak memory above the inputs, gradients included, MiB")
    axes.grid(alpha=0.25)
    axes.margins(0.1)
    measured = [row for row in table["rows"] if "ms" in row]
    others = [row for row in measured if "workspace_mib" not in row]
    for rows, style, color, label in (
        ([row for row in measured if "workspace_mib" in row], "o-", OWN, "lowtide, by MiB of workspace"),
        ([row for row in others if row["name"] == "lowtide"], "*", OWN, "lowtide, default"),
        ([row for row in others if row["name"] != "lowtide"], "D", OTHERS, "others"),
    ):
        ordered = sorted(rows, key=lambda row: row["peak_mib"])
        axes.plot([r["peak_mib"] for r in ordered], [r["ms"] for r in ordered], style, color=color, label=label)
        for i, row in enumerate(reversed(ordered)):  # names in four places by turns, so that neighbours' lie apart
            x, y = ((6, 5), (-6, -12), (6, -12), (-6, 5))[i % 4]
            place = {"xytext": (x, y), "textcoords": "offset points", "ha": "left" if x > 0 else "right"}
            name = f"{row['workspace_mib']:g}" if "workspace_mib" in row else row["name"]
            axes.annotate(name, (row["peak_mib"], row["ms"]), color=color, fontsize=7, **place)
    limit, least = table["limit_ms"], table["gradients_mib"]
    axes.axhline(limit, color=QUIET, linestyle="--", linewidth=1, label=f"bare GEMMs: {limit:.3g} ms")
    axes.axvline(least, color=QUIET, linestyle=":", linewidth=1, label=f"gradients alone: {least:.3g} MiB")
    figure.legend(loc="outside lower center", ncols=3, fontsize=8)
    figure.savefig(file, dpi=150)


def main(file: Path) -> None:
    result = json.loads(file.read_text())
    fronts = [table for table in result["tables"] if any("workspace_mib" in row for row in table["rows"])]
    for table in fronts:
        draw_front(result, table, file.with_name(f"{file.stem}-{table['name'].replace(',', '-')}.png"))
    if not fronts:
        draw_sweep(result, file.with_name(f"{file.stem}-lines.png"))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
