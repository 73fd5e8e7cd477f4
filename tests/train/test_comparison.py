"""Two runs side by side: how far apart rounding may put them, whose turn it is, and what the table says."""

from __future__ import annotations

import io
import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from lowtide.errors import ArgumentValueError
from lowtide.train.arguments import parse
from lowtide.train.comparison import (
    CompareError,
    Comparison,
    Tolerance,
    Turns,
    compare,
    early_steps,
    end_turns,
    give_turn,
    measured_tolerance,
)
from lowtide.train.meter import RunResult
from promises import promise
from train.conftest import Files

pytestmark = promise("commands")
NAN = float("nan")


def result(losses: list[float], seconds: list[float] | None = None, **more: Any) -> RunResult:
    """Return a run with these losses in its steps."""
    times = seconds or [1.0] * len(losses)
    return RunResult(losses=dict(enumerate(losses, 1)), step_seconds=times, step_tokens=[8.0] * len(times), **more)


def test_early_and_late_differences_have_bounds_of_their_own() -> None:
    tolerance = Tolerance(1e-5, 1e-3, early_steps=2)
    stock = result([9.0, 8.0, 7.0])
    for losses, equal in (
        ([9.0, 8.0 + 9e-6, 7.0 + 9e-4], True),
        ([9.0, 8.0 + 2e-5, 7.0], False),
        ([9.0, 8.0, 7.0 + 2e-3], False),
        ([9.0, 8.0], False),
        ([9.0, 8.0, NAN], False),
    ):
        patched = result(losses)
        assert Comparison(stock=stock, patched=patched, tolerance=tolerance, block=1).equal == equal
    one = Comparison(stock=stock, patched=result([9.0, 8.0 + 4e-6, 7.5]), tolerance=tolerance, block=1)
    assert (one.early_difference, one.max_difference) == (pytest.approx(4e-6), 0.5)


def test_early_is_a_sum_of_learning_rates() -> None:
    """Those of the small run in which rounding was measured: 2e-3 after 50 steps of warm-up."""
    assert early_steps(50, 2e-3, 50) == 50
    assert early_steps(50, 2e-3, 0) == 25
    assert early_steps(50, 1e-5, 0) == 50
    assert early_steps(50, 1.0, 0) == 3


def test_a_narrower_dtype_is_allowed_four_times_what_the_stock_model_errs() -> None:
    stock, exact = result([9.0 + 1e-3, 8.0, 7.0]), result([9.0, 8.0, 6.0])
    found = measured_tolerance(stock, exact, 2)
    assert (found.early, found.late, found.early_steps) == (pytest.approx(4e-3), pytest.approx(0.1), 2)
    for reference in (result([9.0 + 1e-3, 8.0, 7.0]), result([NAN, 8.0, 7.0])):
        assert measured_tolerance(stock, reference, 2).early == Tolerance().early


def test_the_ratio_is_the_median_over_pairs_of_blocks_without_warm_up() -> None:
    stock = result([1.0] * 8, [99, 99, 1, 1, 2, 2, 1, 1])
    patched = result([1.0] * 8, [1, 1, 2, 2, 1, 1, 3, 3])
    assert Comparison(stock=stock, patched=patched, tolerance=Tolerance(), block=2).step_ratio == 2.0


@pytest.mark.slow
def test_turns_alternate_by_blocks_until_one_has_ended(tmp_path: Path) -> None:
    """Two threads in place of two processes."""
    file, order = tmp_path / "turn", list[str]()
    args, lock = SimpleNamespace(device=SimpleNamespace(type="cpu")), threading.Lock()

    def side(own: str, other: str, steps: int) -> None:
        turns = Turns(file, own, other, 2)
        for _ in range(steps):
            turns.on_step_begin(args, None, None)
            with lock:
                order.append(own)
        end_turns(file)

    give_turn(file, "a")
    threads = [threading.Thread(target=side, args=given) for given in (("a", "b", 4), ("b", "a", 7))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert "".join(order)[:8] == "aabbaabb"
    assert sorted(order) == ["a"] * 4 + ["b"] * 7


STOCK = {"losses": {"1": 9.0, "2": 8.5, "3": 8.0}, "step_seconds": [4.0, 2.0, 2.0], "step_tokens": [10.0] * 3}


@pytest.fixture
def sides(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The words of both sides' runs, which a function answers in place of two processes."""
    seen: list[list[str]] = []

    def run_child(function: Any, words: list[str], turn: Any, label: str, capture: bool) -> Any:
        del function, turn, capture
        seen.append([label, *words])
        if "--max_steps=13" in words and label == "lowtide":
            return SimpleNamespace(returncode=1, stderr="Traceback\nValueError: no\nmore\n")
        fused = {"calls_fused": 3, "calls_materialised": 0} if label == "lowtide" else {}
        dtype = "bfloat16" if "--bf16" in words and label != "float32" else "float32"
        return SimpleNamespace(returncode=0, value={**STOCK, "dtype": dtype, "peak_bytes": 2**20, **fused})

    monkeypatch.setattr("lowtide.train.comparison.run_child", run_child)
    return seen


def shown(files: Files, *more: str) -> tuple[Comparison, str]:
    console = Console(record=True, width=120, quiet=False, file=io.StringIO())
    given = [*files.scratch(tokenizer_name=files.pretrained), "--compare", *more]
    return compare(parse(given, fine_tunes=False), console), console.export_text()


def test_both_sides_get_the_run_and_one_is_stock(sides: list[list[str]], files: Files, tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    comparison, text = shown(files, "--json", str(file))
    (stock,) = (words for label, *words in sides if label == "stock")
    (patched,) = (words for label, *words in sides if label == "lowtide")
    assert [word for word in stock if word not in patched] == ["--patch=false"]
    assert [word for word in patched if word not in stock] == []
    assert {"--logging_steps=1", "--save_strategy=no"} <= set(patched)
    assert comparison.equal
    assert comparison.reference is None
    assert "equal to rounding" in text
    assert "losses without logits: 3, with: 0" in text
    written = json.loads(file.read_text())
    assert (written["equal"], written["patched"]["calls_fused"], written["stock"]["tokens_per_second"]) == (
        True,
        3,
        5.0,
    )
    assert written["machine"]["torch"]


def test_a_narrower_dtype_has_a_third_run(sides: list[list[str]], files: Files) -> None:
    comparison, text = shown(files, "--bf16")
    assert [label for label, *_ in sides].count("float32") == 1
    assert comparison.reference is not None
    assert "rounding measured by a float32 run" in text


def test_a_side_that_fails_is_the_error(sides: list[list[str]], files: Files) -> None:
    del sides
    with pytest.raises(CompareError, match="the lowtide run failed: ValueError: no more"):
        shown(files, "--max_steps=13")


@pytest.mark.parametrize("more", ["--no-patch", "--resume_from_checkpoint=auto"])
def test_what_a_comparison_has_no_use_for_is_refused(more: str, files: Files) -> None:
    with pytest.raises(ArgumentValueError, match="--compare: expected no --resume_from_checkpoint or --no-patch"):
        shown(files, more)


@pytest.mark.slow
def test_a_comparison_of_real_runs(files: Files) -> None:
    comparison, text = shown(files)
    assert comparison.equal, text
    assert comparison.patched.calls_materialised == 0
    assert comparison.stock.calls_fused is None
    assert set(comparison.stock.losses) == set(range(1, 7))
