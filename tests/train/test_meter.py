"""The figures that a run prints, by a clock that the test sets."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from transformers import TrainerState

from lowtide.train.meter import WARM_STEPS, RunResult, StepMeter
from promises import promise

pytestmark = promise("commands")


def run(seconds: list[float], tokens: list[int], *, every: int = 1, began_at: int = 0) -> RunResult:
    """Return what a meter says of steps that take so many seconds, with an evaluation of 50 s after each log."""
    now, history = 100.0, list[dict[str, float]]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lowtide.train.meter.time", SimpleNamespace(perf_counter=lambda: now))
        meter = StepMeter()
        args, state = SimpleNamespace(device=SimpleNamespace(type="cpu")), TrainerState(global_step=began_at)
        meter.on_train_begin(args, state, None)
        for second, count in zip(seconds, tokens, strict=True):
            meter.on_step_begin(args, state, None)
            now += second
            state.num_input_tokens_seen += count
            state.global_step += 1
            if state.global_step % every == 0:
                history += [{"step": state.global_step, "loss": 1.0 / state.global_step}, {"eval_loss": 2.0}]
                meter.on_log(args, state, None, history[-2])
                meter.on_evaluate(args, state, None)
                now += 50
        meter.on_log(args, state, None, {"train_loss": 7.0})  # Trainer's own summary
        return meter.finish(history)


def test_no_warm_up_step_counts_in_what_is_printed() -> None:
    result = run([9.0, 8.0, 2.0, 1.0, 2.0], [100] * 5)
    assert WARM_STEPS == 2
    assert result.tokens_per_second == pytest.approx(300 / 5)
    assert result.median_step == 2.0
    assert any("60 tokens/s, 2,000 ms a step" in line for line in result.lines())
    assert result.losses == {step: 1 / step for step in range(1, 6)}
    assert result.held_out == [2.0] * 5
    assert result.warm_bytes is not None
    assert result.peak_bytes >= 0


def test_a_run_shorter_than_the_warm_up_counts_all_its_steps() -> None:
    assert run([4.0, 1.0], [100, 100]).tokens_per_second == pytest.approx(200 / 5)
    assert RunResult().tokens_per_second != RunResult().tokens_per_second  # NaN of no step


def test_steps_between_two_logs_share_their_time_and_tokens() -> None:
    result = run([1.0] * 6, [10, 20, 30, 40, 50, 60], every=3, began_at=3)
    assert result.step_seconds == [1.0] * 6
    assert result.step_tokens == [20] * 3 + [50] * 3
    assert result.tokens_per_second == pytest.approx((20 + 150) / 4)


def test_the_last_loss_is_a_mean() -> None:
    result = RunResult(losses={step: float(step) for step in range(1, 21)})
    assert (result.first_loss, result.last_loss) == (1.0, 15.5)
    assert next(result.lines()) == "loss     1.000 -> 15.500"
    assert list(RunResult().lines()) == []  # a resumed run that had done its steps
    assert RunResult(losses={2: 5.0, 4: 4.0, 6: 3.0}).last_loss == 3.0  # no mean with the first ones
