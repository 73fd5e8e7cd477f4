"""Pictures are drawn, also of little, and names do not cover each other."""

from __future__ import annotations

import struct
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")

from lowtide.measure.plots import Point, draw_budget, draw_front, draw_shares

FRONT = [Point(str(2**k), 576 + 1.2 * 2**k, 37 + 3000 / 2**k) for k in range(6, 13)]
POINTS = [
    Point("lowtide", 1116, 38.3, own=True),
    Point("naive", 25176, 71),
    Point("liger", 640, 70),
    Point("cce", 597, 160),
    Point("cce-exact", 600, 164),
]


def size(file: Path) -> tuple[int, int]:
    """Width and height in a PNG's header."""
    data = file.read_bytes()
    assert data.startswith(b"\x89PNG")
    return struct.unpack(">II", data[16:24])


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures that are written."""
    from matplotlib.figure import Figure

    figures: list[Any] = []
    write = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (figures.append(self), write(self, *a, **k)))
    return figures


@pytest.mark.parametrize("points", [POINTS, []], ids=["peers", "alone"])
@pytest.mark.parametrize("front", [FRONT, FRONT[:1]], ids=["front", "one"])
def test_the_front_is_drawn(tmp_path: Path, front: list[Point], points: list[Point]) -> None:
    file = tmp_path / "front"  # no ending: it is PNG all the same
    draw_front(file, "title", front=front, front_name="lowtide", points=points, limit=37, least=576)
    width, height = size(file)
    assert width > 1000
    assert height > 700


def test_names_cover_neither_points_nor_each_other(tmp_path: Path, written: list[Any]) -> None:
    draw_front(tmp_path / "a.png", "title", front=FRONT, front_name="lowtide", points=POINTS, limit=37, least=576)
    (figure,) = written
    axes = figure.axes[0]
    boxes = {text.get_text(): text.get_window_extent(figure.canvas.get_renderer()) for text in axes.texts}
    assert set(boxes) == {point.name for point in [*FRONT, *POINTS]}
    for (one, a), (other, b) in combinations(boxes.items(), 2):
        assert not a.overlaps(b), (one, other)


def test_the_share_axis_is_the_limit_over_the_time(tmp_path: Path, written: list[Any]) -> None:
    draw_front(tmp_path / "a.png", "title", front=FRONT, front_name="lowtide", points=POINTS, limit=37, least=576)
    axes = written[0].axes[0]
    share = axes.child_axes[0]
    assert share.get_ylabel() == "share of the limit"
    low, high = axes.get_ylim()
    assert sorted(share.get_ylim()) == pytest.approx(sorted([37 / low, 37 / high]))
    assert axes.get_xscale() == "log"


def test_shares_are_drawn(tmp_path: Path) -> None:
    draw_shares(tmp_path / "b.png", "title", {"lowtide": [(2**k, 0.1 * k) for k in range(1, 9)], "one": [(4, 0.5)]})
    assert size(tmp_path / "b.png")[0] > 1000


@pytest.mark.parametrize("front", [FRONT, FRONT[:1]], ids=["front", "one"])
@pytest.mark.parametrize("budget", [300, 40_000])
def test_a_budget_is_drawn(tmp_path: Path, front: list[Point], budget: float, written: list[Any]) -> None:
    draw_budget(tmp_path / "c.png", "title", front=front, chosen=front[0], budget=budget)
    assert size(tmp_path / "c.png")[0] > 1000
    axes = written[0].axes[0]
    ticks = [tick / 1024 for tick in axes.get_xticks()]  # GiB
    assert 1 <= len(ticks) <= 13
    assert all(float(f"{tick:.2g}") == pytest.approx(tick) for tick in ticks)
    assert {text.get_text() for text in axes.texts} == {point.name for point in front}
