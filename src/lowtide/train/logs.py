"""``log.jsonl``: a line of JSON for each step and evaluation."""

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

from lowtide.train.checkpoints import save_error
from lowtide.train.metrics import StepMetrics


class JsonLog(TrainerCallback):  # type: ignore[misc]
    """Appends a line to a file for every log of the first rank: ``step``, ``time`` (seconds since 1970) and figures.

    A line is written in one call, so that the file always has whole lines. A number that is not finite is null.

    Args:
        file: where to; it is continued where it exists.
        metrics: what a `Recorder` that runs before it has just filled.
    """

    def __init__(self, file: Path, metrics: StepMetrics) -> None:
        self._file, self._metrics = file, metrics

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Remove the lines of later steps, which a resumed run will write again.

        Raises:
            SaveError: the shorter log could not be written; the log is unmodified then.
        """
        del args, control
        if not state.is_world_process_zero or not self._file.exists():
            return
        lines = []
        for line in self._file.read_text(encoding="utf-8", errors="replace").splitlines():
            with contextlib.suppress(ValueError, KeyError, TypeError):
                if json.loads(line)["step"] <= state.global_step and state.global_step:
                    lines.append(line + "\n")
        aside = self._file.with_name(self._file.name + ".new")
        try:
            aside.write_text("".join(lines), encoding="utf-8")
            aside.replace(self._file)
        except OSError as error:
            raise save_error(self._file, error) from error

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
        """Write a line.

        Raises:
            SaveError: it could not be written.
        """
        del args, control
        if not state.is_world_process_zero or "train_runtime" in logs:  # Trainer's own summary at the end
            return
        line: dict[str, Any] = {"step": state.global_step, "time": round(time.time(), 3)}
        for name, value in logs.items():
            if isinstance(value, int | float):
                line[name] = value if math.isfinite(value) else None
        if "loss" in logs:
            line["tokens_per_second"] = round(self._metrics.last_tokens_per_second, 1)
            line["peak_bytes"] = self._metrics.peak_bytes
        written = (json.dumps(line, allow_nan=False) + "\n").encode()
        try:
            handle = os.open(self._file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                if os.write(handle, written) < len(written):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            finally:
                os.close(handle)
        except OSError as error:
            raise save_error(self._file, error) from error
