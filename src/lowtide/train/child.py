"""A run in a child process, for a comparison."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lowtide.train.config import TrainConfig
from lowtide.train.quiet import quiet_transformers


def train_in_child(settings: Mapping[str, Any], turn: tuple[str, str, str, int] | None, label: str) -> dict[str, Any]:
    """Train as one side of a comparison and return the `TrainResult` as JSON has it.

    ``settings`` are `TrainConfig.to_json`'s, ``turn`` has the arguments of `Turns`; None: it trains alone.
    """
    quiet_transformers()  # before anything imports the libraries that it silences
    from lowtide.train.run import run
    from lowtide.train.run_state import Side
    from lowtide.train.turns import Turns

    callbacks = () if turn is None else (Turns(Path(turn[0]), *turn[1:]),)
    return asdict(run(TrainConfig.from_json(settings), side=Side(label, callbacks)))
