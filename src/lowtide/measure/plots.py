"""Plots of measurements; they need matplotlib, which is imported when one is drawn."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NO_PLOT = "pip install 'lowtide[plot]'"


@contextmanager
def new_figure(file: Path, width: float, height: float, *, dpi: int = 150) -> Iterator[Any]:
    """Yield a figure of so many inches, without a window, and write it as PNG when the block ends."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    yield figure
    figure.savefig(file, dpi=dpi, format="png")
