"""The side by side: it agrees where it should, and says so loudly where not."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from lowtide.train.config import TrainConfig
from lowtide.train.result import EARLY_STEPS, FLOAT32, MOST_LATE, Comparison, Tolerance, TrainResult, measured_tolerance

Run = Callable[..., tuple[int, str, str]]

RESULT = TrainResult(
    losses={1: 6.0, 2: 5.0, 3: 4.0, EARLY_STEPS + 1: 3.0},
    held_out_before=6.0,
    held_out_after=4.0,
    tokens_per_second=10.0,
    step_seconds=1.0,
    peak_resident_bytes=2**30,
    peak_cuda_bytes=0,
    warm_bytes=2**29,
    peak_step_bytes=2**30,
    calls_fused=3,
    calls_materialised=0,
    seconds=3.0,
    saved=None,
)


def against(losses: dict[int, float]) -> Comparison:
    patched = dataclasses.replace(RESULT, losses=losses)
    return Comparison(stock=RESULT, patched=patched, tolerance=Tolerance(early=1e-3, late=1e-1))


@pytest.mark.usefixtures("forked_children")
def test_two_children_agree_and_the_patched_model_needs_less_memory(
    tmp_path: Path, tiny: list[str], lowtide: Run
) -> None:
    """The logits are 128 MiB here, everything else is small."""
    shape = json.loads((tmp_path / "tiny.json").read_text()) | {"vocab_size": 32_768}
    (tmp_path / "wide.json").write_text(json.dumps(shape))
    size = ["--batch-size", "16", "--seq-len", "64", "--max-steps", "4"]
    file = tmp_path / "c.json"
    wide = ["--model", tmp_path / "wide.json", "--workspace-mib", "8"]
    status, out, err = lowtide(*tiny, *wide, *size, "--compare", "--no-progress", "--json", file)
    assert (status, err) == (0, "")
    assert "equal to rounding" in out
    assert "loss, first step" in out
    told = json.loads(file.read_text())
    assert told["equal"]
    assert told["max_loss_difference"] < 1e-5
    assert told["config"]["seq_len"] == 64
    assert {"torch", "transformers", "cpu_threads", "system"} <= told["machine"].keys()
    assert len(told["stock"]["losses"]) == len(told["patched"]["losses"]) == 4
    assert (told["stock"]["calls_fused"], told["patched"]["calls_materialised"]) == (None, 0)
    assert told["patched"]["calls_fused"] > 0
    assert told["stock"]["peak_above_warm_mib"] > 2 * 128
    assert 0 <= told["patched"]["peak_above_warm_mib"] < 64


def test_other_losses_are_not_equal() -> None:
    assert against(dict(RESULT.losses)).equal
    assert against(RESULT.losses | {2: 5.0005}).equal
    assert not against(RESULT.losses | {2: 5.002}).equal
    assert not against(RESULT.losses | {3: float("nan")}).equal
    assert not against({1: 6.0, 2: 5.0}).equal
    assert against(RESULT.losses | {EARLY_STEPS + 1: 3.09}).equal, "later, rounding has grown"
    assert not against(RESULT.losses | {EARLY_STEPS + 1: 3.11}).equal
    assert against(RESULT.losses | {EARLY_STEPS + 1: 3.09}).early_difference == 0


def test_in_a_narrower_dtype_the_limit_is_what_the_stock_model_errs() -> None:
    reference = dataclasses.replace(RESULT, losses=RESULT.losses | {2: 5.01, EARLY_STEPS + 1: 3.9})
    limit = measured_tolerance(RESULT, reference)
    assert (limit.at(20), limit.at(21)) == (pytest.approx(0.04), MOST_LATE), "the first 20 steps tell"
    rough = measured_tolerance(RESULT, dataclasses.replace(RESULT, losses=RESULT.losses | {2: 5.1}))
    assert rough.at(20) == rough.at(21) == pytest.approx(0.4)
    none = measured_tolerance(RESULT, RESULT)
    assert (none.early, none.late) == (FLOAT32.early, pytest.approx(FLOAT32.late)), "never below float32's own"
    broken = dataclasses.replace(RESULT, losses=RESULT.losses | {3: float("nan")})
    assert measured_tolerance(RESULT, broken) == none, "a run that is no number allows nothing"


def test_a_third_run_in_float32_sets_the_limit(
    tmp_path: Path, tiny: list[str], lowtide: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = []

    def in_child(config: TrainConfig, console: object, label: str = "") -> TrainResult:
        runs.append((config.patch, config.dtype, config.weights, label))
        away = {"float32": {2: 5.1}, "": {2: 5.05} if config.patch else {}}[label]
        return dataclasses.replace(RESULT, losses=RESULT.losses | away)

    monkeypatch.setattr("lowtide.train.comparison._in_child", in_child)
    status, out, _ = lowtide(*tiny, "--compare", "--dtype", "bfloat16", "--json", tmp_path / "c.json")
    assert status == 0, out
    assert runs == [(False, "bfloat16", "float32", ""), (True, "bfloat16", "float32", ""),
                    (False, "float32", "float32", "float32")]  # fmt: skip
    assert "told by a run of it in float32" in out
    told = json.loads((tmp_path / "c.json").read_text())
    assert told["tolerance"]["early"] == pytest.approx(0.4)
    assert told["float32"]["losses"]["2"] == 5.1


def test_other_losses_end_with_status_1(tiny: list[str], lowtide: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    results = iter([RESULT, dataclasses.replace(RESULT, losses=RESULT.losses | {2: 4.0})])
    monkeypatch.setattr("lowtide.train.comparison._in_child", lambda config, console: next(results))
    status, out, _ = lowtide(*tiny, "--compare")
    assert status == 1
    assert "NOT EQUAL" in out


@pytest.mark.usefixtures("forked_children")
def test_a_run_that_fails_is_named(tiny: list[str], lowtide: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowtide.train.comparison.train_in_child", json.loads)  # is given no JSON, so it fails
    status, _, err = lowtide(*tiny, "--compare", "--no-progress")
    assert (status, err.count("\n")) == (2, 1)
    assert "the stock run failed: TypeError" in err
