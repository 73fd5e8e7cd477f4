"""A profile as text: its title, a line per implementation, and the tables of memory and time, here and on the page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import cycle
from typing import Any

from lowtide.bench.harness import Column, Table
from lowtide.bench.way import OURS
from lowtide.measure.text import table
from lowtide.profile.owners import OWNERS
from lowtide.profile.phases import KINDS

Row = dict[str, Any]
Cells = list[list[str]]
_RATES = {"forward": "layers, forward", "head": "head, both ways", "backward": "layers, backward", "step": "step"}
_OWN = ("#0b5fa5", "#12a5c4", "#5b3fa0", "#1b8f5a", "#1f2f66", "#6fa8d6")
_OTHERS = ("#c4561c", "#b58900", "#a32a6b", "#7a4a2b", "#e0849b", "#5d5d1a")


def label_of(row: Row) -> str:
    """Return an implementation's name, with its policy unless the name has it."""
    return str(row["name"]) if ":" in row["name"] else f"{row['name']}, {row['policy']}"


def line_colors(rows: Sequence[Row]) -> list[str]:
    """Return a colour for each implementation's line: lowtide's from one family, the others' from another."""
    own, others = cycle(_OWN), cycle(_OTHERS)
    return [next(own if row["impl"] in OURS else others) for row in rows]


ROWS = Table(
    heads=(Column("", label_of, "<38"),),
    figures=(
        Column("s", "seconds", "9.4g"),
        Column("tokens/s", "tokens_per_s", "11,.0f"),
        Column("GiB", lambda row: row["peak"]["gib"], "9.3f"),
        Column("loss", lambda row: row["losses"][0], "9.4f"),
    ),
    notes=lambda row: [row["note"]] if "note" in row else [],
)


def unit_of(rows: Sequence[Row]) -> tuple[str, float]:
    """Return the unit of the implementations' memory, and how many of it are a GiB."""
    return _unit(max((row["peak"]["gib"] for row in rows if "peak" in row), default=1.0))


def _unit(most_gib: float) -> tuple[str, float]:
    return ("GiB", 1.0) if most_gib >= 1 else ("MiB", 1024.0)


def title_of(result: Row) -> str:
    """Return a profile's two lines: what was measured, and on which machine."""
    settings, model, machine = result["settings"], result["model"], result["machine"]
    where = machine["gpu"] if settings["device"] == "cuda" else machine["cpu"]
    how = [settings["dtype"], settings["optimizer"]]
    how += [f"LoRA of rank {settings['lora']}"] if settings["lora"] else []
    how += ["parameters and optimizer on the host"] if settings["offload_params"] else []
    how += [f"FSDP2 {settings['sharding']} on {settings['gpus']}"] if settings["gpus"] > 1 else []
    return (
        f"{model['name']}, {settings['batch_size']} x {settings['seq_len']} tokens, {', '.join(how)}\n"
        f"{where}, torch {machine['torch']}, transformers {machine['transformers']}"
    )


def peaks(result: Row) -> Cells:
    """Return the peaks by owner."""
    rows = [row for row in result["implementations"] if "peak" in row]
    unit, scale = unit_of(rows)
    at_peak = [row["peak"] for row in rows]
    lines = [
        *([label.text, *_sizes((each["owners_gib"] for each in at_peak), key, scale)] for key, label in OWNERS.items()),
        ["sum", *_sizes(at_peak, "gib", scale)],
        ["of the first", *(f"{each['gib'] / at_peak[0]['gib']:.3f}" for each in at_peak)],
        ["reached in", *(each["phase"] for each in at_peak)],
        ["by the allocator", *_sizes(rows, "allocated_gib", scale)],
        ["held by it", *_sizes(rows, "reserved_gib", scale)],
        ["", *("out of memory" if "failed" in row else "" for row in rows)],
    ]
    return _table(f"peak, {unit}", rows, lines)


def layers(result: Row) -> Cells:
    """Return the activations at the peaks by layer."""
    rows = [row for row in result["implementations"] if "peak" in row]
    unit, scale = unit_of(rows)
    found = [row["peak"]["activations_gib"] for row in rows]
    names = dict.fromkeys(name for each in found for name in each)
    return _table(f"activations, {unit}", rows, [[name, *_sizes(found, name, scale)] for name in names])


def times(result: Row) -> Cells:
    """Return the times by phase, and the FLOP/s."""
    rows = [row for row in result["implementations"] if "seconds" in row]
    phases, rates = ([row.get(group, {}) for row in rows] for group in ("time_by_kind_ms", "tflops"))
    lines = [
        *([label.text, *_sizes(phases, kind)] for kind, label in KINDS.items()),
        ["step", *(_number(row["seconds"] * 1e3) for row in rows)],
        ["of the first", *(f"{row['seconds'] / rows[0]['seconds']:.3f}" for row in rows)],
        ["tokens/s", *(f"{row['tokens_per_s']:,.0f}" for row in rows)],
        *([f"TFLOP/s: {text}", *_sizes(rates, name)] for name, text in _RATES.items()),
        [
            f"of {result['peak_tflops'] or 0:.0f} TFLOP/s (MFU)",
            *(f"{row['mfu']:.1%}" if "mfu" in row else "" for row in rows),
        ],
        ["loss, first step", *(_loss(row["losses"][0]) for row in rows)],
        ["loss, last step", *(_loss(row["losses"][-1]) for row in rows)],
    ]
    return _table("time, ms", rows, lines)


def largest(row: Row, most: int = 5) -> Cells:
    """Return the largest blocks at an implementation's peak."""
    blocks = row["peak"]["largest"][:most]
    unit, scale = _unit(blocks[0]["gib"] if blocks else 1.0)
    return [
        [f"{row['name']}: largest at the peak, {unit}", "", "allocated in", "counted as"],
        *(
            [one["operation"][:48], _number(one["gib"] * scale), one["phase"], OWNERS[one["owner"]].text]
            for one in blocks
        ),
    ]


def _table(head: str, rows: Sequence[Row], lines: Iterable[list[str]]) -> Cells:
    """Return the cells of a table with a column per implementation, without lines that are empty; none without rows."""
    return [[head, *(row["name"] for row in rows)], *(line for line in lines if any(line[1:]))] if rows else []


def _sizes(parts: Iterable[Row], name: str, scale: float = 1.0) -> list[str]:
    return [_number(each[name] * scale) if name in each else "" for each in parts]


def _loss(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4f}"


def tables(result: Row) -> str:
    """Return the peak by owner, the time by phase, and the largest blocks at each peak."""
    parts = [table(cells) for cells in (peaks(result), times(result)) if cells]
    if result["flop_note"] and parts:
        parts.append(f"no TFLOP/s: {result['flop_note']}")
    parts += [table(largest(row), left=(0, 2, 3)) for row in result["implementations"] if "peak" in row]
    return "\n" + "\n\n".join(parts) + "\n\n" if parts else "\n"


def _number(value: float) -> str:
    """Return a number with two decimals, and more digits if it is small."""
    if value == 0:
        return "0"
    return f"{value:,.2f}" if abs(value) >= 0.1 else f"{value:.2g}"
