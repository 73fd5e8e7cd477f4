"""Plots are drawn, also of little."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from lowtide.measure.plots import Line, Panel, Point, draw_budget, draw_front, draw_panels

FRONT = [Point(str(2**k), 576 + 1.2 * 2**k, 37 + 3000 / 2**k) for k in range(6, 13)]
POINTS = [Point("lowtide", 1116, 38.3, own=True), Point("naive", 25176, 71), Point("liger", 640, 70)]
LINES = [Line("lowtide", [(1024, 0.5), (1000, 2.0)], own=True), Line("naive", [(2**20, 0)], dotted=True)]
PLOTS: dict[str, Callable[[Path], None]] = {
    "front": lambda at: draw_front(at, "t", front=FRONT, front_name="lowtide", points=POINTS, limit=37, least=576),
    "one": lambda at: draw_front(at, "t", front=FRONT[:1], front_name="lowtide", points=[], limit=37, least=576),
    "budget": lambda at: draw_budget(at, "t", front=FRONT, chosen=Point("choice", 600, 40), budget=300),
    "panels": lambda at: draw_panels(at, "t", {"a": [Panel(LINES, log=True)], "b": [Panel(LINES)]}, columns=["N"]),
}


@pytest.mark.parametrize("name", PLOTS)
def test_a_plot_is_drawn(name: str, tmp_path: Path) -> None:
    PLOTS[name](tmp_path / "plot")  # no ending: it is PNG all the same
    data = (tmp_path / "plot").read_bytes()
    assert data.startswith(b"\x89PNG")
    assert struct.unpack(">II", data[16:24]) > (600, 400)
