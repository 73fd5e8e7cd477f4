"""Two runs side by side: how far apart rounding may put them, whose turn it is, and what the table says."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lowtide.errors import ArgumentValueError
from lowtide.train.arguments import parse
from lowtide.train.comparison import CompareError, Comparison, Turns, _interleaved, compare
from lowtide.train.meter import RunResult
from promises import promise
from train.conftest import Files

pytestmark = promise("commands")
NAN = float("nan")


def result(losses: list[float], seconds: list[float] | None = None, **more: Any) -> RunResult:
    """Return a run with these losses in its steps."""
    times = seconds or [1.0] * len(losses)
    return RunResult(losses=dict(enumerate(losses, 1)), step_seconds=times, step_tokens=[8.0] * len(times), **more)


@pytest.mark.parametrize(
    ("step", "apart", "equal"),
    [(20, 9e-6, True), (20, 2e-5, False), (21, 9e-4, True), (21, 2e-3, False), (9, NAN, False), (30, NAN, False)],
)
def test_early_and_late_differences_have_bounds_of_their_own(step: int, apart: float, equal: bool) -> None:
    stock, patched = result([9.0] * 30), result([9.0] * 30)
    patched.losses[step] += apart
    comparison = Comparison(stock=stock, patched=patched, block=1, bounds=(1e-5, 1e-3))
    assert comparison.equal == equal
    if apart == apart:
        assert comparison.differences[step > 20] == pytest.approx(apart)
        assert comparison.differences[step <= 20] == 0
    del patched.losses[step]
    assert not comparison.equal


def test_the_ratio_is_the_median_over_pairs_of_blocks_without_warm_up() -> None:
    stock = result([1.0] * 8, [99, 99, 1, 1, 2, 2, 1, 1])
    patched = result([1.0] * 8, [1, 1, 2, 2, 1, 1, 3, 3])
    assert Comparison(stock=stock, patched=patched, block=2).step_ratio == 2.0


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The words of both sides' runs, which are answered in place of two processes."""
    seen: list[str] = []

    def interleaved(words: list[str], block: int) -> list[RunResult]:
        assert block == 5
        seen.extend(words)
        both = [result([9.0, 8.5, 8.0], [4.0, 2.0, 2.0], peak_bytes=size * 2**20) for size in (2, 1)]
        both[1].calls_fused, both[1].calls_materialised = 3, 0
        return both

    monkeypatch.setattr("lowtide.train.comparison._interleaved", interleaved)
    return seen


def shown(files: Files, *more: str) -> tuple[Comparison, str]:
    given = [*files.scratch(tokenizer_name=files.pretrained), "--compare", *more]
    comparison = compare(parse(given))
    return comparison, str(comparison)


def test_the_figures_are_shown_and_written(seen: list[str], files: Files, tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    comparison, text = shown(files, "--json", str(file))
    assert {"--logging_steps=1", "--save_strategy=no"} <= set(seen)
    assert comparison.equal
    assert "equal to rounding" in text
    assert "losses without logits: 3, with: 0" in text
    assert re.search("peak resident MiB +2 +1 +0.50", text)
    written = json.loads(file.read_text())
    assert (written["equal"], written["calls_fused"], written["stock"]["tokens/s"]) == (True, 3, 4.0)
    assert written["machine"]["torch"]


def test_16_bits_err_more(seen: list[str], files: Files) -> None:
    del seen
    assert shown(files, "--bf16")[0].bounds == (2e-2, 1e-1)
    assert shown(files)[0].bounds == (2e-5, 2e-3)


@pytest.mark.parametrize("more", ["--no_patch", "--memory_budget=2GiB", "--resume_from_checkpoint=auto"])
def test_what_one_side_cannot_take_is_refused(more: str, files: Files) -> None:
    with pytest.raises(ArgumentValueError, match="--compare: expected no --no-patch, --memory-budget"):
        shown(files, more)


def takes_turns(pipe: Any, words: list[str], block: int, patched: bool) -> None:
    """A side that writes down its steps, of which the second one has more."""
    turns, args = Turns(pipe, block), SimpleNamespace(device=SimpleNamespace(type="cpu"))
    for step in range(7 if patched else 4):
        turns.on_step_begin(args, SimpleNamespace(global_step=step, max_steps=7, log_history=[{"loss": 2.0}]), None)
        with Path(words[0]).open("a") as file:
            file.write("ab"[patched])
    pipe.send(RunResult(peak_bytes=patched))


def ends_beside(pipe: Any, words: list[str], _block: int, patched: bool) -> None:
    """A side that fails, or is killed, while the other, the first one, has long to train."""
    if not patched:
        time.sleep(300)
        Path(words[0]).touch()
    elif words[1:] == ["killed"]:
        os._exit(9)
    pipe.send(ArgumentValueError("of one side"))


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[RunResult]]:
    """Run two sides of some code in forks, which import nothing anew."""

    def run(side: Callable[..., None], *words: str) -> list[RunResult]:
        monkeypatch.setattr("lowtide.train.comparison.get_context", lambda _: multiprocessing.get_context("fork"))
        monkeypatch.setattr("lowtide.train.comparison._train_side", side)
        return _interleaved([*words], 2)

    return run


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_turns_alternate_by_blocks_until_one_has_ended(forked: Callable[..., Any], tmp_path: Path) -> None:
    assert [side.peak_bytes for side in forked(takes_turns, str(tmp_path / "order"))] == [False, True]
    assert (tmp_path / "order").read_text() == "aabbaabbbbb"


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_the_first_error_of_either_side_is_shown_at_once(forked: Callable[..., Any], tmp_path: Path) -> None:
    with pytest.raises(ArgumentValueError, match="of one side"):
        forked(ends_beside, str(tmp_path / "trained"))
    with pytest.raises(CompareError, match="was killed"):
        forked(ends_beside, str(tmp_path / "trained"), "killed")
    assert not (tmp_path / "trained").exists()


@pytest.mark.slow
def test_a_comparison_of_real_runs(files: Files) -> None:
    comparison, text = shown(files)
    assert comparison.equal, text
    assert comparison.patched.calls_materialised == 0
    assert comparison.stock.calls_fused is None
    assert set(comparison.stock.losses) == set(range(1, 7))
