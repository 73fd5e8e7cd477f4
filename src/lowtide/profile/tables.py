"""A profile as text: its title, a line per implementation, and the tables of memory and time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lowtide.bench.harness import Column, Table
from lowtide.measure.text import table
from lowtide.profile.owners import OWNERS
from lowtide.profile.phases import KINDS

Row = dict[str, Any]
_RATES = {"forward": "layers, forward", "head": "head, both ways", "backward": "layers, backward", "step": "step"}


def label_of(row: Row) -> str:
    """Return an implementation's name, with its policy unless the name has it."""
    return str(row["name"]) if ":" in row["name"] else f"{row['name']}, {row['policy']}"


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


def unit_of(most_gib: float) -> tuple[str, float]:
    """Return the unit of sizes up to ``most_gib``, and how many of it are a GiB."""
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


def tables(result: Row) -> str:
    """Return the peak by owner, the time by phase, and the largest blocks at each peak."""
    rows = result["implementations"]
    measured, timed = [row for row in rows if "peak" in row], [row for row in rows if "seconds" in row]
    parts = [_peaks(measured)] if measured else []
    parts += [_times(timed, result)] if timed else []
    parts += [_largest(row) for row in measured]
    return "\n" + "\n\n".join(parts) + "\n\n" if parts else "\n"


def _peaks(rows: Sequence[Row]) -> str:
    unit, scale = unit_of(max(row["peak"]["gib"] for row in rows))
    first = rows[0]["peak"]["gib"]
    lines: list[tuple[str, Callable[[Row], str]]] = [
        (f"peak, {unit}", lambda row: row["name"]),
        *((label.text, _value(lambda row: row["peak"]["owners_gib"], owner, scale)) for owner, label in OWNERS.items()),
        ("sum", lambda row: _number(row["peak"]["gib"] * scale)),
        ("of the first", lambda row: f"{row['peak']['gib'] / first:.3f}"),
        ("reached in", lambda row: row["peak"]["phase"]),
    ]
    if all("allocated_gib" in row for row in rows):
        lines.append(("by the allocator", lambda row: _number(row["allocated_gib"] * scale)))
        lines.append(("held by it", lambda row: _number(row["reserved_gib"] * scale)))
    if any("failed" in row for row in rows):
        lines.append(("", lambda row: "out of memory" if "failed" in row else ""))
    return _transposed(lines, rows)


def _times(rows: Sequence[Row], result: Row) -> str:
    first = rows[0]["seconds"]
    lines: list[tuple[str, Callable[[Row], str]]] = [
        ("time, ms", lambda row: row["name"]),
        *((label.text, _value(lambda row: row["time_by_kind_ms"], kind)) for kind, label in KINDS.items()),
        ("step", lambda row: _number(row["seconds"] * 1e3)),
        ("of the first", lambda row: f"{row['seconds'] / first:.3f}"),
        ("tokens/s", lambda row: f"{row['tokens_per_s']:,.0f}"),
    ]
    if all("tflops" in row for row in rows):
        for name, text in _RATES.items():
            lines.append((f"TFLOP/s: {text}", _value(lambda row: row["tflops"], name)))
    if all("mfu" in row for row in rows):
        lines.append((f"of {result['peak_tflops']:.0f} TFLOP/s (MFU)", lambda row: f"{row['mfu']:.1%}"))
    why_not = [f"no TFLOP/s: {result['flop_note']}"] if result["flop_note"] else []
    return "\n".join([_transposed(lines, rows), *why_not])


def _value(group: Callable[[Row], Row], name: str, scale: float = 1.0) -> Callable[[Row], str]:
    return lambda row: _number(group(row).get(name, 0.0) * scale)


def _transposed(lines: Sequence[tuple[str, Callable[[Row], str]]], rows: Sequence[Row]) -> str:
    return table([[title, *map(text, rows)] for title, text in lines])


def _largest(row: Row) -> str:
    unit, scale = unit_of(row["peak"]["largest"][0]["gib"] if row["peak"]["largest"] else 1)
    cells = [[f"{row['name']}: largest at the peak, {unit}", "", "allocated in", "counted as"]]
    cells += [
        [one["operation"][:48], _number(one["gib"] * scale), one["phase"], OWNERS[one["owner"]].text]
        for one in row["peak"]["largest"][:5]
    ]
    return table(cells, left=(0, 2, 3))


def _number(value: float) -> str:
    """Return a number with two decimals, and more digits if it is small."""
    if value == 0:
        return "0"
    return f"{value:,.2f}" if abs(value) >= 0.1 else f"{value:.2g}"
