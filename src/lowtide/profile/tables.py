"""A profile as text: its title, a line per implementation, and the tables of memory and time, here and on the page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import cycle
from typing import Any, NamedTuple

from lowtide.bench.harness import Column, Table
from lowtide.bench.way import OURS
from lowtide.measure.text import table
from lowtide.profile.owners import OWNERS
from lowtide.profile.phases import KINDS

Row = dict[str, Any]
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


class Line(NamedTuple):
    """A line of a `Sheet`: its title, a text per implementation, the title's colour, and whether it is a total."""

    title: str
    texts: Sequence[str]
    color: str | None = None
    total: bool = False


class Sheet(NamedTuple):
    """A table with a column per implementation; ``head`` is the title of its titles."""

    head: str
    rows: Sequence[Row]
    lines: list[Line]

    def __str__(self) -> str:
        names = [self.head, *(row["name"] for row in self.rows)]
        return table([names, *([line.title, *line.texts] for line in self.lines)])


def peaks(result: Row) -> tuple[Sheet, Sheet]:
    """Return the peaks by owner, and the activations at them by layer."""
    rows = [row for row in result["implementations"] if "peak" in row]
    unit, scale = unit_of(rows)
    at_peak = [row["peak"] for row in rows]

    def sizes(parts: Iterable[Row], name: str) -> list[str]:
        return [_number(each[name] * scale) if name in each else "" for each in parts]

    owners = [each["owners_gib"] for each in at_peak]
    lines = [
        *(Line(label.text, sizes(owners, owner), label.color) for owner, label in OWNERS.items()),
        Line("sum", sizes(at_peak, "gib"), total=True),
        Line("of the first", [f"{each['gib'] / at_peak[0]['gib']:.3f}" for each in at_peak]),
        Line("reached in", [each["phase"] for each in at_peak]),
        Line("by the allocator", sizes(rows, "allocated_gib")),
        Line("held by it", sizes(rows, "reserved_gib")),
        Line("", ["out of memory" if "failed" in row else "" for row in rows]),
    ]
    names = dict.fromkeys(name for each in at_peak for name in each["activations_gib"])
    layers = [dict.fromkeys(names, 0.0) | each["activations_gib"] for each in at_peak]
    by_layer = Sheet(f"activations, {unit}", rows, [Line(name, sizes(layers, name)) for name in names])
    return Sheet(f"peak, {unit}", rows, _filled(lines)), by_layer


def times(result: Row) -> Sheet:
    """Return the times by phase, and the FLOP/s."""
    rows = [row for row in result["implementations"] if "seconds" in row]

    def numbers(group: str, name: str) -> list[str]:
        return [_number(row[group].get(name, 0.0)) if group in row else "" for row in rows]

    lines = [
        *(Line(label.text, numbers("time_by_kind_ms", kind), label.color) for kind, label in KINDS.items()),
        Line("step", [_number(row["seconds"] * 1e3) for row in rows], total=True),
        Line("of the first", [f"{row['seconds'] / rows[0]['seconds']:.3f}" for row in rows]),
        Line("tokens/s", [f"{row['tokens_per_s']:,.0f}" for row in rows]),
        *(Line(f"TFLOP/s: {text}", numbers("tflops", name)) for name, text in _RATES.items()),
        Line(
            f"of {result['peak_tflops'] or 0:.0f} TFLOP/s (MFU)",
            [f"{row['mfu']:.1%}" if "mfu" in row else "" for row in rows],
        ),
    ]
    return Sheet("time, ms", rows, _filled(lines))


def _filled(lines: Iterable[Line]) -> list[Line]:
    """Return the lines with a text."""
    return [line for line in lines if any(line.texts)]


def largest(row: Row) -> list[list[str]]:
    """Return the largest blocks at an implementation's peak, after the titles of the columns."""
    blocks = row["peak"]["largest"]
    unit, scale = _unit(blocks[0]["gib"] if blocks else 1.0)
    return [
        [f"largest at the peak, {unit}", "", "allocated in", "counted as"],
        *([one["operation"], _number(one["gib"] * scale), one["phase"], OWNERS[one["owner"]].text] for one in blocks),
    ]


def tables(result: Row) -> str:
    """Return the peak by owner, the time by phase, and the five largest blocks at each peak."""
    (peak, _), time = peaks(result), times(result)
    parts = [str(peak)] if peak.rows else []
    if time.rows:
        parts.append(f"{time}\nno TFLOP/s: {result['flop_note']}" if result["flop_note"] else str(time))
    for row in peak.rows:
        (title, *head), *blocks = largest(row)
        cells = [[f"{row['name']}: {title}", *head], *([one[:48], *rest] for one, *rest in blocks[:5])]
        parts.append(table(cells, left=(0, 2, 3)))
    return "\n" + "\n\n".join(parts) + "\n\n" if parts else "\n"


def _number(value: float) -> str:
    """Return a number with two decimals, and more digits if it is small."""
    if value == 0:
        return "0"
    return f"{value:,.2f}" if abs(value) >= 0.1 else f"{value:.2g}"
