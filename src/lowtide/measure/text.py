"""Tables as text."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import TextWrapper


def folded(text: str, width: int | None) -> str:
    """Return lines of text, those that are wider than ``width`` folded between words; None: unmodified."""
    if width is None:
        return text
    fold = TextWrapper(width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    return "\n".join(line if len(line) <= width else fold.fill(line) for line in text.splitlines())


def table(rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> str:
    """Return rows of cells as text, columns in ``left`` aligned left, the others right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(w) if i in left else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )
