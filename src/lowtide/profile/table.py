"""A profile as lines of text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lowtide.measure.text import table
from lowtide.profile.looks import KIND_TEXTS, OWNER_TEXTS, loss_text, unit_of
from lowtide.profile.owners import OWNERS
from lowtide.profile.phases import KINDS


def line(row: dict[str, Any]) -> str:
    """Return an implementation's result as soon as it is known."""
    own = row["name"].endswith(f":{row['policy']}")  # which says both
    text = f"{row['name']:37} " if own else f"{row['name']:16} {row['policy']:20} "
    if "failed" in row:
        return f"{text}{row['failed']}\n"
    return f"{text}{_size(row['peak']['gib'])}, {row['seconds']:.4g} s a step, loss {loss_text(row['losses'][0])}\n"


def tables(told: dict[str, Any]) -> str:
    """Return the peak by owner, the time by phase, and the largest blocks at each peak."""
    rows = told["implementations"]
    drawn = [row for row in rows if "peak" in row]
    timed = [row for row in rows if "seconds" in row]
    parts = []
    if drawn:
        parts.append(_peaks(drawn))
    if timed:
        parts.append(_times(timed, told))
    parts += [_largest(row) for row in drawn]
    return "\n" + "\n\n".join(parts) + "\n\n" if parts else "\n"


def _peaks(rows: Sequence[dict[str, Any]]) -> str:
    unit, scale = unit_of(max(row["peak"]["gib"] for row in rows))
    cells = [[f"peak, {unit}", *(row["name"] for row in rows)]]
    cells += [
        [OWNER_TEXTS[owner], *(_number(row["peak"]["owners_gib"][owner] * scale) for row in rows)] for owner in OWNERS
    ]
    cells.append(["sum", *(_number(row["peak"]["gib"] * scale) for row in rows)])
    cells.append(["of the first", *(_share(row["peak"]["gib"], rows[0]["peak"]["gib"]) for row in rows)])
    cells.append(["reached in", *(row["peak"]["phase"] for row in rows)])
    if all("allocated_gib" in row for row in rows):
        cells.append(["by the allocator", *(_number(row["allocated_gib"] * scale) for row in rows)])
        cells.append(["held by it", *(_number(row["reserved_gib"] * scale) for row in rows)])
    if any("failed" in row for row in rows):
        cells.append(["", *("out of memory" if "failed" in row else "" for row in rows)])
    return table(cells)


def _times(rows: Sequence[dict[str, Any]], told: dict[str, Any]) -> str:
    cells = [["time, ms", *(row["name"] for row in rows)]]
    cells += [[KIND_TEXTS[kind], *(_number(row["time_by_kind_ms"][kind]) for row in rows)] for kind in KINDS]
    cells.append(["step", *(_number(row["seconds"] * 1e3) for row in rows)])
    cells.append(["of the first", *(_share(row["seconds"], rows[0]["seconds"]) for row in rows)])
    cells.append(["tokens/s", *(f"{row['tokens_per_s']:,.0f}" for row in rows)])
    if all("tflops" in row for row in rows):
        names = {
            "forward": "layers, forward",
            "head": "head, both ways",
            "backward": "layers, backward",
            "step": "step",
        }
        for name, text in names.items():
            cells.append([f"TFLOP/s: {text}", *(_number(row["tflops"].get(name, 0.0)) for row in rows)])
    if all("mfu" in row for row in rows):
        cells.append([f"of {told['peak_tflops']:.0f} TFLOP/s (MFU)", *(f"{row['mfu']:.1%}" for row in rows)])
    notes = [f"{row['name']}: {row['note']}" for row in rows if "note" in row]
    if told["flop_note"]:
        notes.append(f"no TFLOP/s: {told['flop_note']}")
    return "\n".join([table(cells), *notes])


def _largest(row: dict[str, Any]) -> str:
    unit, scale = unit_of(row["peak"]["largest"][0]["gib"] if row["peak"]["largest"] else 1)
    cells = [[f"{row['name']}: largest at the peak, {unit}", "", "made in", "counted as"]]
    cells += [
        [one["operation"][:48], _number(one["gib"] * scale), one["phase"], one["owner"]]
        for one in row["peak"]["largest"][:5]
    ]
    return table(cells, left=(0, 2, 3))


def _size(gib: float) -> str:
    unit, scale = unit_of(gib)
    return f"{gib * scale:.2f} {unit}"


def _share(value: float, first: float) -> str:
    return f"{value / first:.3f}" if first else ""


def _number(value: float) -> str:
    """Return a number with two digits behind the point, and more where it is small; nothing for 0."""
    if value == 0:
        return "0"
    return f"{value:,.2f}" if abs(value) >= 0.1 else f"{value:.2g}"
