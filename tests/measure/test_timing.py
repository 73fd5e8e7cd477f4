"""Candidates take turns, warm rounds do not count, and a peak is what was held above the start."""

from __future__ import annotations

import time

import pytest
import torch

from lowtide.errors import ArgumentValueError
from lowtide.measure.timing import Timing, kept_above, peak_above, time_side_by_side


def test_candidates_take_turns_and_warm_rounds_do_not_count() -> None:
    calls: list[str] = []
    timings = time_side_by_side({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, "cpu", warm=2, reps=3)
    assert calls == ["a", "b"] * 5
    assert [len(timing.times_ms) for timing in timings.values()] == [3, 3]


def test_times_are_milliseconds_of_the_function_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    now, waits = [5.0], iter([0.2, 0.02, 0.03, 0.06])  # the first round is warm

    def wait() -> None:
        now[0] += next(waits)

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])  # a busy machine makes real waits of any length
    timings = time_side_by_side({"waits": wait, "nothing": lambda: None}, "cpu", warm=1, reps=3)
    assert timings["waits"].times_ms == pytest.approx((20, 30, 60))
    assert timings["waits"].median_ms == pytest.approx(30)
    assert timings["nothing"].times_ms == (0, 0, 0)


def test_median_and_spread() -> None:
    timing = Timing((2.0, 9.0, 3.0))
    assert timing.median_ms == 3
    assert timing.spread == 3.5


@pytest.mark.parametrize(("name", "value"), [("warm", -1), ("reps", 0)])
def test_no_rounds_is_an_error(name: str, value: int) -> None:
    with pytest.raises(ArgumentValueError, match=f"{name}: expected"):
        time_side_by_side({}, "cpu", **{name: value})


def test_peak_counts_what_is_left_behind_and_what_is_not() -> None:
    size = 1 << 20
    x = torch.ones(size // 4, requires_grad=True)

    def step() -> None:
        (x * torch.full_like(x, 2)).sum().backward()

    assert 2 * size <= peak_above(step, "cpu") < 3 * size  # the factor and, in the end, x's gradient
    x.grad = None
    assert peak_above(lambda: torch.empty(size, dtype=torch.uint8), "cpu") == size
    assert peak_above(lambda: None, "cpu") == 0


def test_what_is_kept_is_the_result_and_what_it_holds() -> None:
    size = 2**20
    x = torch.ones(size // 4, requires_grad=True)
    kept_above(lambda: x.exp().sin(), "cpu")
    assert kept_above(lambda: x.exp().sin(), "cpu") == 2 * size  # the result, and what sin read
    assert kept_above(lambda: x.exp().sin().detach(), "cpu") == size
    assert kept_above(lambda: None, "cpu") == 0
