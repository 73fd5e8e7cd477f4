"""A profile as text and as a page: its title, a line per implementation, and the tables of memory and time."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Sequence
from html import escape
from itertools import cycle
from pathlib import Path
from typing import Any

from lowtide.bench.harness import Table
from lowtide.bench.variant import OURS
from lowtide.measure.text import table
from lowtide.profile.memory import OWNERS
from lowtide.profile.phases import KINDS

Row = dict[str, Any]
Cells = list[list[str]]
_RATES = {"forward": "layers, forward", "head": "head, both ways", "backward": "layers, backward", "step": "step"}
_OWN = ("#0b5fa5", "#12a5c4", "#5b3fa0", "#1b8f5a", "#1f2f66", "#6fa8d6")
_OTHERS = ("#c4561c", "#b58900", "#a32a6b", "#7a4a2b", "#e0849b", "#5d5d1a")
_HEAD = """\
<!DOCTYPE html>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>lowtide profile</title>
<style>
body { font: 14px sans-serif; margin: 1em; overflow-x: auto }
img { max-width: 100% }
table { margin: 2em 0; border-spacing: 1.5em 0.2em }
td { text-align: right }
tr :first-child { text-align: left }
</style>
"""
ROWS = Table(
    {"name": "<30", "policy": "<20"},
    {"seconds": "9.4g", "tokens_per_s": "14,.0f", "peak_gib": "10.3f", "loss": "9.4f"},
    lambda row: [row["note"]] if "note" in row else [],
)


def label_of(row: Row) -> str:
    """Return an implementation's name, with its policy unless the name has it."""
    return str(row["name"]) if ":" in row["name"] else f"{row['name']}, {row['policy']}"


def line_colors(rows: Sequence[Row]) -> list[str]:
    """Return a colour for each implementation's line: lowtide's from one family, the others' from another."""
    own, others = cycle(_OWN), cycle(_OTHERS)
    return [next(own if row["impl"] in OURS else others) for row in rows]


def unit_of(most_gib: Iterable[float]) -> tuple[str, float]:
    """Return the unit of sizes of which these are the largest, and how many of it are a GiB."""
    return ("GiB", 1.0) if max(most_gib, default=1.0) >= 1 else ("MiB", 1024.0)


def title_of(result: Row) -> str:
    """Return a profile's two lines: what was measured, and on which machine."""
    settings, model, machine = result["settings"], result["model"], result["machine"]
    how = [settings["dtype"], settings["optimizer"]]
    how += [f"LoRA of rank {settings['lora']}"] if settings["lora"] else []
    return (
        f"{model['name']}, {settings['batch_size']} x {settings['seq_len']} tokens, {', '.join(how)}\n"
        f"{machine['gpu'] if settings['device'] == 'cuda' else machine['cpu']},"
        f" torch {machine['torch']}, transformers {machine['transformers']}"
    )


def _number(value: float) -> str:
    """Return a number with two decimals, and more digits if it is small."""
    return "0" if value == 0 else f"{value:,.2f}" if abs(value) >= 0.1 else f"{value:.2g}"


def peaks(result: Row) -> tuple[Cells, Cells]:
    """Return the peaks by owner, and the activations at the peaks by layer."""
    rows = [row for row in result["implementations"] if "peak" in row]
    at_peak = [row["peak"] for row in rows]
    unit, scale = unit_of(peak["gib"] for peak in at_peak)

    def sizes(parts: Iterable[Row], key: str) -> list[str]:
        return [_number(part[key] * scale) if key in part else "" for part in parts]

    lines = [
        *([label.text, *sizes((peak["owners_gib"] for peak in at_peak), key)] for key, label in OWNERS.items()),
        ["sum", *sizes(at_peak, "gib")],
        ["of the first", *(f"{peak['gib'] / at_peak[0]['gib']:.3f}" for peak in at_peak)],
        ["reached in", *(peak["phase"] for peak in at_peak)],
        ["by the allocator", *sizes(rows, "allocated_gib")],
        ["held by it", *sizes(rows, "reserved_gib")],
        ["", *("out of memory" if "failed" in row else "" for row in rows)],
    ]
    layers = [peak["activations_gib"] for peak in at_peak]
    by_layer = [[name, *sizes(layers, name)] for name in dict.fromkeys(name for each in layers for name in each)]
    return _table(f"peak, {unit}", rows, lines), _table(f"activations, {unit}", rows, by_layer)


def times(result: Row) -> Cells:
    """Return the times by phase, and the FLOP/s."""
    rows = [row for row in result["implementations"] if "seconds" in row]

    def line(text: str, values: Iterable[Any], form: Callable[[Any], str] = _number) -> list[str]:
        return [text, *("" if value is None else form(value) for value in values)]

    def part(group: str, key: str) -> list[Any]:
        return [row.get(group, {}).get(key) for row in rows]

    lines = [
        *(line(label.text, part("time_by_kind_ms", kind)) for kind, label in KINDS.items()),
        line("step", [row["seconds"] * 1e3 for row in rows]),
        line("of the first", [row["seconds"] / rows[0]["seconds"] for row in rows], "{:.3f}".format),
        line("tokens/s", [row["tokens_per_s"] for row in rows], "{:,.0f}".format),
        *(line(f"TFLOP/s: {text}", part("tflops", name)) for name, text in _RATES.items()),
        line(f"of {result['peak_tflops'] or 0:.0f} TFLOP/s (MFU)", [row.get("mfu") for row in rows], "{:.1%}".format),
        *(
            [f"loss, {which} step", *("not finite" if (v := row["losses"][i]) is None else f"{v:.4f}" for row in rows)]
            for which, i in (("first", 0), ("last", -1))
        ),
    ]
    return _table("time, ms", rows, lines)


def largest(row: Row, most: int = 5) -> Cells:
    """Return the largest blocks at an implementation's peak."""
    blocks = row["peak"]["largest"][:most]
    unit, scale = unit_of(block["gib"] for block in blocks)
    cells = [[f"{row['name']}: largest at the peak, {unit}", "", "allocated in", "counted as"]]
    for block in blocks:
        size, owner = _number(block["gib"] * scale), OWNERS[block["owner"]].text
        cells.append([block["operation"][:48], size, block["phase"], owner])
    return cells


def _table(head: str, rows: Sequence[Row], lines: Iterable[list[str]]) -> Cells:
    """Return the cells of a table with a column per implementation, without lines that are empty; none without rows."""
    return [[head, *(row["name"] for row in rows)], *(line for line in lines if any(line[1:]))] if rows else []


def tables(result: Row) -> str:
    """Return the peak by owner, the time by phase, and the largest blocks at each peak."""
    parts = [table(cells) for cells in (peaks(result)[0], times(result)) if cells]
    if result["flop_note"] and parts:
        parts.append(f"no TFLOP/s: {result['flop_note']}")
    parts += [table(largest(row), left=(0, 2, 3)) for row in result["implementations"] if "peak" in row]
    return "\n" + "\n\n".join(parts) + "\n\n" if parts else "\n"


def write_page(file: Path, result: Row, plot: Path | None) -> None:
    """Write a profile as one static page that needs nothing else, with the PNG of `lowtide.profile.plot` if any."""
    parts = [_HEAD, f"<pre>{escape(title_of(result))}</pre>\n"]
    if plot is not None:
        data = base64.b64encode(plot.read_bytes()).decode()
        parts.append(f'<img alt="memory over the time of a step" src="data:image/png;base64,{data}">\n')
    for cells in (*peaks(result), times(result), *(largest(r, 8) for r in result["implementations"] if "peak" in r)):
        rows = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in cells)
        parts.append("<table>\n" + "".join(f"<tr>{row}</tr>\n" for row in rows) + "</table>\n")
    file.write_text("".join(parts), encoding="utf-8")
