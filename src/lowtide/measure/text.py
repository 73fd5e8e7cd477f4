"""Figures as text."""

from __future__ import annotations

from collections.abc import Sequence


def table(rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> str:
    """Return rows of cells with their columns aligned; those not in ``left`` end on the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(w) if i in left else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )
