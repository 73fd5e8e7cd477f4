"""What a run logs: a line of JSON for each step and evaluation, and TensorBoard's files."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import time
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from lowtide.errors import ArgumentValueError, message
from lowtide.train.checkpoints import save_error
from lowtide.train.metrics import StepMetrics

_RENAMED = {"eval_loss": "held_out_loss"}
_LEFT_OUT = ("epoch",)  # of streams without end


class JsonLog(TrainerCallback):  # type: ignore[misc]
    """Appends a line to a file for every log of the first rank: ``step``, ``time`` (seconds since 1970) and numbers.

    A line is written in one call, so that whoever reads the file meanwhile, or a run killed at any moment, has whole
    lines. A number that is not finite is null.

    Args:
        file: where to; it goes on where it exists.
        metrics: what a `Recorder` that runs before it has just filled.
    """

    def __init__(self, file: Path, metrics: StepMetrics) -> None:
        self._file, self._metrics = file, metrics

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
        """Write a line."""
        del args, control
        if not state.is_world_process_zero or "train_runtime" in logs:  # Trainer's own summary at the end
            return
        told: dict[str, Any] = {"step": state.global_step, "time": round(time.time(), 3)}
        for name, value in logs.items():
            if name not in _LEFT_OUT and isinstance(value, int | float):
                told[_RENAMED.get(name, name)] = value if math.isfinite(value) else None
        if "loss" in logs:
            told["tokens_per_second"] = round(self._metrics.tokens_per_step / self._metrics.step_seconds[-1], 1)
            told["peak_bytes"] = self._metrics.peak_bytes
        append_line(self._file, told)


def append_line(file: Path, told: dict[str, Any]) -> None:
    """Append a line of JSON in one call of the system.

    Raises:
        SaveError: it could not be written, or a part of it alone.
    """
    line = (json.dumps(told, allow_nan=False) + "\n").encode()
    try:
        handle = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            if os.write(handle, line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            os.close(handle)
    except OSError as error:
        raise save_error(file, error) from error


def forget_after(file: Path, step: int) -> None:
    """Take the lines of later steps, which a resumed run will write again, out of a log; and what is no whole line.

    Raises:
        SaveError: the shorter one could not be written; the log is as it was.
    """
    if not file.exists():
        return
    kept = []
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        with contextlib.suppress(ValueError, KeyError, TypeError):
            if json.loads(line)["step"] <= step:
                kept.append(line + "\n")
    aside = file.with_name(file.name + ".new")
    try:
        aside.write_text("".join(kept), encoding="utf-8")
        aside.replace(file)
    except OSError as error:
        raise save_error(file, error) from error


def check_tensorboard() -> None:
    """Raise where TensorBoard's files cannot be written.

    Raises:
        ArgumentValueError: the tensorboard package is not installed.
    """
    try:
        import torch.utils.tensorboard  # noqa: F401
    except ImportError as error:
        hint = "pip install tensorboard, or leave it out: DIR/log.jsonl has the same numbers."
        raise ArgumentValueError(message("tensorboard", "tensorboard to be installed", str(error), hint)) from error


def tensorboard(folder: Path, resumed_at: int | None) -> TrainerCallback:
    """Return transformers' callback, writing into a folder; what a killed run wrote after its checkpoint is purged."""
    from torch.utils.tensorboard import SummaryWriter
    from transformers.integrations import TensorBoardCallback

    class Board(TensorBoardCallback):  # type: ignore[misc]
        def on_train_end(self, *args: Any, **kwargs: Any) -> None:
            """Leave the file open: the last evaluation comes after training, and would go to another folder."""

        def close(self) -> None:
            """Write what is left."""
            self.tb_writer.close()

    purge = None if resumed_at is None else resumed_at + 1
    return Board(SummaryWriter(str(folder), purge_step=purge))
