"""A run in a child process, for a comparison."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lowtide.train.config import TrainConfig
from lowtide.train.quiet import quiet_transformers


def train_in_child(
    settings: Mapping[str, Any], tokens: str | None, turn: tuple[str, str, str, int] | None, label: str
) -> dict[str, Any]:
    """Train without saving and return the result as JSON: the child's side of a comparison.

    Args:
        settings: of the run, as `TrainConfig.to_json` gives them.
        tokens: a file of tokens that both runs share.
        turn: of `Turns`: the file, the own and the other name, the steps of a block; None: it trains alone.
        label: printed in front of the progress.
    """
    quiet_transformers()  # before anything imports the libraries that it silences
    from lowtide.train.run import run
    from lowtide.train.turns import Turns

    callbacks = () if turn is None else (Turns(Path(turn[0]), turn[1], turn[2], turn[3]),)
    file = None if tokens is None else Path(tokens)
    config = TrainConfig.from_json(settings)
    result = run(config, save=False, label=label, tokens=file, callbacks=callbacks, reports=False)
    return {**result.to_json(), "steps_seconds": result.steps_seconds}
