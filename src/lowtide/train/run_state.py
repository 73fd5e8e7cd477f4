"""A run, as the files of this folder pass it to each other."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from lowtide.memory import ActivationPolicy
from lowtide.models import PatchReport
from lowtide.plan import MemoryPlan
from lowtide.train.config import TrainConfig
from lowtide.train.monitor import StepMetrics
from lowtide.trl import TrlReport

SEQ_LEN = 256  # of a run from random weights


class Batch(NamedTuple):
    """A batch as layers get it.

    Attributes:
        seq_len: tokens of a row.
        rows: how many.
        mask: transformers makes a mask [rows, 1, seq_len, seq_len] for sdpa and eager attention: rows have padding,
            or hold several documents.
    """

    seq_len: int
    rows: int
    mask: bool


@dataclass(frozen=True)
class Side:
    """What a run has as one side of a comparison, which saves nothing and prints its progress alone.

    The sides have one output folder, with the file of tokens.

    Attributes:
        label: printed in front of the progress.
        callbacks: of the trainer, before lowtide's.
    """

    label: str
    callbacks: tuple[Any, ...] = ()


@dataclass
class RunState:
    """A run as far as it is prepared, for the trainer and for an error in between.

    Attributes:
        config: its settings.
        output: its folder.
        checkpoint: to resume from; None at the start.
        side: of a comparison; None for a run by itself, which saves checkpoints and the model.
        settings: its trainer's.
        metrics: what its steps measure.
        callbacks: of its trainer.
        seq_len: the most tokens of a sequence.
        model: as it is trained.
        trainer: that trains it.
        patched: what `lowtide.patch` did; None for a stock model.
        patched_trl: what `lowtide.patch_trl` did, for a loss that TRL's own head computes; None for others.
        policies: what each layer saves for backward; None: what the stock model's do.
        plan: where the policies are from; None if the user named them.
        lines: about data, adapters and model, to print.
        padded: rows differ in length.
        began: the time of the process's clock, in seconds.
    """

    config: TrainConfig
    output: Path
    checkpoint: Path | None = None
    side: Side | None = None
    settings: Any = None
    metrics: StepMetrics = field(default_factory=StepMetrics)
    callbacks: list[Any] = field(default_factory=list)
    seq_len: int = SEQ_LEN
    model: Any = None
    trainer: Any = None
    patched: PatchReport | None = None
    patched_trl: TrlReport | None = None
    policies: Sequence[ActivationPolicy] | None = None
    plan: MemoryPlan | None = None
    lines: list[str] = field(default_factory=list)
    padded: bool = False
    began: float = field(default_factory=time.perf_counter)

    @property
    def saves(self) -> bool:
        """Whether the run writes checkpoints and the model."""
        return self.side is None

    @property
    def step(self) -> int | None:
        """The optimizer steps done; None before there is a trainer."""
        return None if self.trainer is None else int(self.trainer.state.global_step)

    @property
    def batch(self) -> Batch:
        """The largest batch that the layers run at once."""
        args = self.settings.args
        rows, packs = args.per_device_train_batch_size, getattr(args, "packing", False)
        if getattr(args, "padding_free", False) or (packs and args.packing_strategy != "wrapped"):
            return Batch(self.seq_len * rows, 1, mask=True)  # all rows joined
        return Batch(self.seq_len, rows, mask=self.padded and not packs and rows > 1)
