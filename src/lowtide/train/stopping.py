"""Stopping early: which evaluation was the best one, and for how long none has been better."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from transformers import TrainerCallback


def held_out_losses(history: Iterable[Mapping[str, Any]]) -> dict[int, float]:
    """Return the held-out loss of each evaluation in a Trainer's log, by step; not that before the first step."""
    return {entry["step"]: entry["eval_loss"] for entry in history if "eval_loss" in entry and entry["step"] > 0}


def best_step(history: Iterable[Mapping[str, Any]]) -> int | None:
    """Return the step of the lowest held-out loss, the first of several; None before any evaluation."""
    losses = held_out_losses(history)
    # nothing is smaller than a NaN, or larger
    return min(losses, key=lambda step: (math.isnan(losses[step]), losses[step], step)) if losses else None


def is_over(history: Iterable[Mapping[str, Any]], patience: int) -> bool:
    """Return whether the last ``patience`` evaluations, or more, were no better than one before them."""
    losses = held_out_losses(history)
    best = best_step(history)
    return best is not None and sum(1 for step in losses if step > best) >= patience


class EarlyStop(TrainerCallback):  # type: ignore[misc]
    """Stops a run whose held-out loss no longer falls, and has a checkpoint written of every best one and of the last.

    What it knows is in Trainer's own log, which a checkpoint holds: a resumed run stops where it would have.

    Args:
        patience: evaluations without a better one.
        saves: whether the run writes checkpoints at all.
    """

    def __init__(self, patience: int, *, saves: bool) -> None:
        self._patience, self._saves = patience, saves

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Look at the evaluation that was just logged."""
        del args
        if state.global_step == 0:
            return
        stops = is_over(state.log_history, self._patience)
        # Trainer would obey this also where its save_strategy is "no"
        if self._saves and (stops or best_step(state.log_history) == state.global_step):
            control.should_save = True
        if stops:
            control.should_training_stop = True
