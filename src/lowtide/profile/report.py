"""A profile as text, as a plot and as a page."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from lowtide.bench.harness import Row, Table
from lowtide.measure.text import table
from lowtide.profile.memory import OWNERS
from lowtide.profile.phases import KINDS

Cells = list[list[str]]
_HEAD = """\
<!DOCTYPE html>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>lowtide profile</title>
<style>img { max-width: 100% } pre { overflow-x: auto }</style>
"""
ROWS = Table(
    {
        "name": "<30", "policy": "<20", "seconds": "9.4g", "tokens_per_s": "14,.0f", "peak_gib": "10.3f",
        "loss": "9.4f",
    },
    lambda row: [row.get("note", "")],
)  # fmt: skip


def title_of(result: Row) -> str:
    """Return a profile's two lines: what was measured, and on which machine."""
    settings, machine = result["settings"], result["machine"]
    adapters = f", LoRA of rank {settings['lora']}" if settings["lora"] else ""
    return (
        f"{result['model']['name']}, {settings['batch_size']} x {settings['seq_len']} tokens, {settings['dtype']}, "
        f"{settings['optimizer']}{adapters}\n"
        f"{machine['gpu'] if settings['device'] == 'cuda' else machine['cpu']},"
        f" torch {machine['torch']}, transformers {machine['transformers']}"
    )


def _unit_of(result: Row) -> tuple[str, float]:
    """Return the unit of memory, and how many of it are a GiB."""
    largest = max(row["peak"]["gib"] for row in result["implementations"] if "peak" in row)
    return ("GiB", 1.0) if largest >= 1 else ("MiB", 1024.0)


def _number(value: float) -> str:
    """Return a number with two decimals, and more digits if it is small."""
    return "0" if value == 0 else f"{value:,.2f}" if abs(value) >= 0.1 else f"{value:.2g}"


def _cells(head: str, rows: Sequence[Row], lines: Mapping[str, Sequence[Any]]) -> Cells:
    """Return a table with a column per implementation: numbers and texts, None: none; no line of zeros or nothing."""
    shown = {key: line for key, line in lines.items() if any(line)}
    texts = (("" if v is None else v if isinstance(v, str) else _number(v) for v in line) for line in shown.values())
    return [[head, *(row["name"] for row in rows)], *([key, *line] for key, line in zip(shown, texts, strict=True))]


def tables(result: Row) -> list[Cells]:
    """Return the peaks by owner and the times by phase; without rows, none."""
    drawn = [row for row in result["implementations"] if "peak" in row]
    if not drawn:
        return []
    peaks, (unit, scale) = [row["peak"] for row in drawn], _unit_of(result)

    def sizes(parts: Iterable[Row], key: str) -> list[float | None]:
        return [part[key] * scale if key in part else None for part in parts]

    memory: dict[str, list[Any]] = {
        **{text: sizes((peak["owners_gib"] for peak in peaks), owner) for owner, text in OWNERS.items()},
        "sum": sizes(peaks, "gib"),
        "of the first": [f"{peak['gib'] / peaks[0]['gib']:.3f}" for peak in peaks],
        "reached in": [peak["phase"] for peak in peaks],
        "by the allocator": sizes(drawn, "allocated_gib"),
        "held by it": sizes(drawn, "reserved_gib"),
        "": ["out of memory" if "failed" in row else None for row in drawn],
    }
    found = [_cells(f"peak, {unit}", drawn, memory)]
    if whole := [row for row in drawn if "seconds" in row]:
        times: dict[str, list[Any]] = {
            **{text: [row["time_by_kind_ms"][kind] for row in whole] for kind, text in KINDS.items()},
            "step": [row["seconds"] * 1e3 for row in whole],
            "of the first": [f"{row['seconds'] / whole[0]['seconds']:.3f}" for row in whole],
            "tokens/s": [f"{row['tokens_per_s']:,.0f}" for row in whole],
            "loss, first step": [f"{row['losses'][0]:.4f}" for row in whole],
            "loss, last step": [f"{row['losses'][-1]:.4f}" for row in whole],
        }
        found.append(_cells("time, ms", whole, times))
    return found


def draw_profile(file: Path, result: Row) -> None:
    """Draw the json of ``lowtide profile`` as PNG: of each implementation the memory over a step's time by owner, and
    the phases above it, all on the same axes.
    """
    rows = [row for row in result["implementations"] if "peak" in row]
    unit, scale = _unit_of(result)
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1.8 + 2.4 * len(rows)), layout="constrained")
    figure.suptitle(title_of(result), fontsize=10)
    grid = figure.subplots(len(rows), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    for axes, row in zip(grid, rows, strict=True):
        line, peak = row["timeline"], row["peak"]
        owners = [[size * scale for size in line["owners"][owner]] for owner in OWNERS]
        axes.stackplot(line["ms"], owners, step="post", labels=OWNERS.values())
        sums = [size * scale for size in line["gib"]]  # a peak too short to be seen as an area
        axes.plot(line["ms"], sums, drawstyle="steps-post", color="black", linewidth=0.5)
        axes.plot(peak["ms"], peak["gib"] * scale, "kx")
        for i, (kind, text) in enumerate(KINDS.items()):
            parts = [(s["begin_ms"], s["end_ms"] - s["begin_ms"]) for s in row["segments"] if s["kind"] == kind]
            style = {"facecolor": colormaps["Set3"](i), "edgecolor": "white", "linewidth": 0.5, "label": text}
            axes.broken_barh(parts, (1, 0.07), transform=axes.get_xaxis_transform(), clip_on=False, **style)
        axes.set_ylabel(unit)
        name = row["name"] if ":" in row["name"] else f"{row['name']}, {row['policy']}"
        how = "out of memory" if "failed" in row else f"{row['seconds'] * 1e3:,.4g} ms"
        axes.set_title(f"{name}: {peak['gib'] * scale:.4g} {unit} in {peak['phase']}, {how}", fontsize=9, y=1.07)
    axes.set_xlim(0, max(row["segments"][-1]["end_ms"] for row in rows))
    axes.set_xlabel("time of a step, ms")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8)
    figure.savefig(file, dpi=150)


def write_page(file: Path, result: Row, plot: Path | None) -> None:
    """Write a profile as one static page that needs nothing else, with `draw_profile`'s PNG if there is one."""
    image = ""
    if plot is not None:
        data = base64.b64encode(plot.read_bytes()).decode()
        image = f'<img alt="memory over the time of a step" src="data:image/png;base64,{data}">\n'
    title, *texts = (f"<pre>{escape(text)}</pre>\n" for text in (title_of(result), *map(table, tables(result))))
    file.write_text("".join((_HEAD, title, image, *texts)), encoding="utf-8")


def text_of(result: Row) -> str:
    """Return the peaks by owner and the times by phase."""
    return "\n" + "".join(f"{table(cells)}\n\n" for cells in tables(result))
