"""What a run measures step by step, prints while it trains, and writes to ``log.jsonl``."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import math
import os
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from transformers import TrainerCallback

from lowtide.errors import ArgumentValueError, message
from lowtide.measure.resident import (
    cuda_peak_bytes,
    peak_resident_bytes,
    reset_cuda_peak,
    reset_peak_resident,
    resident_bytes,
)
from lowtide.measure.units import mib
from lowtide.train.checkpoints import save_error
from lowtide.train.parallel import in_group
from lowtide.train.result import WARM_STEPS

_LINE_EVERY_SECONDS = 10.0


@dataclass
class StepMetrics:
    """Loss, time and memory of the steps this process ran; sizes in bytes, times in seconds.

    Attributes:
        losses: training loss of each step, this process's and earlier ones' of the same run.
        own_loss: the sum of this rank's own losses since the last log; of all ranks there is the mean in ``losses``.
        step_seconds: of each step this process ran, from the batch to the updated weights; between two logs the mean.
        tokens: of all ranks, padding included, in the steps so far.
        step_tokens: tokens of the steps of ``step_seconds``.
        warm_bytes: memory in use after `WARM_STEPS`, between steps; None before.
        peak_bytes: its highest value after that.
        highest_bytes: resident memory's high-water mark before it was reset.
        began: a step has begun.
        on_gpu: the memory is the CUDA allocator's, else this process's resident memory.
    """

    losses: dict[int, float] = field(default_factory=dict)
    own_loss: torch.Tensor | float = 0.0
    step_seconds: list[float] = field(default_factory=list)
    tokens: int = 0
    step_tokens: list[float] = field(default_factory=list)
    warm_bytes: int | None = None
    peak_bytes: int = 0
    highest_bytes: int = 0
    began: bool = False
    on_gpu: bool = False

    @property
    def median_step_seconds(self) -> float:
        """The median over the warm steps; over all where there are no others."""
        return statistics.median(self.step_seconds[WARM_STEPS:] or self.step_seconds or [float("nan")])

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all ranks per second of the warm steps; of all where there are no others."""
        warm = slice(WARM_STEPS if len(self.step_seconds) > WARM_STEPS else 0, None)
        seconds = sum(self.step_seconds[warm])
        return sum(self.step_tokens[warm]) / seconds if seconds else float("nan")

    def read_memory(self) -> None:
        """Take the peak; after the warm-up, which makes the optimizer states, from a new mark."""
        if len(self.step_seconds) == WARM_STEPS and self.warm_bytes is None:
            if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
                libc.malloc_trim(0)  # what is freed goes back to the system: resident is what is used
            self.highest_bytes = peak_resident_bytes()
            reset_peak_resident()
            reset_cuda_peak()
            self.warm_bytes = torch.cuda.memory_allocated() if self.on_gpu else resident_bytes()
        self.peak_bytes = cuda_peak_bytes() if self.on_gpu else peak_resident_bytes()


class Monitor(TrainerCallback):  # type: ignore[misc]
    """Fills `StepMetrics` while a trainer runs; the first rank prints and writes each log.

    A line of the file is written in one call, so that the file always has whole lines: ``step``, ``time`` (seconds
    since 1970) and the figures, null where one is not finite. A log that exists is continued.
    """

    def __init__(
        self, metrics: StepMetrics, *, console: Console | None = None, label: str = "train", file: Path | None = None
    ) -> None:
        self.metrics = metrics
        self._console, self._label, self._file = console, label, file
        self._began: float | None = None
        self._at = self._tokens = 0  # the step and the tokens of the last log
        self._printed = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Take over the losses of the steps before a resume; those after it are trained, and logged, again."""
        del control
        self._at = state.global_step
        self.metrics.on_gpu = args.device.type == "cuda"
        self.metrics.losses |= {entry["step"]: entry["loss"] for entry in state.log_history if "loss" in entry}
        if self._file is None or not state.is_world_process_zero or not self._file.exists():
            return
        lines = []
        for line in self._file.read_text(encoding="utf-8", errors="replace").splitlines():
            with contextlib.suppress(ValueError, KeyError, TypeError):
                if 0 <= json.loads(line)["step"] <= state.global_step != 0:
                    lines.append(line + "\n")
        aside = self._file.with_name(self._file.name + ".new")
        try:
            aside.write_text("".join(lines), encoding="utf-8")
            aside.replace(self._file)
        except OSError as error:
            raise save_error(self._file, error) from error

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Start the clock."""
        del args, state, control
        if self._began is None:
            self._began = time.perf_counter()
        self.metrics.began = True

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Save and evaluate nothing again if a resumed run had done its steps."""
        del args, state
        if not self.metrics.began:
            control.should_save = control.should_evaluate = control.should_log = False

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
        """Stop the clock: Trainer has just read the loss, so the device is done with the step.

        Raises:
            ArgumentValueError: the loss or the gradients are not finite; on all ranks.
            SaveError: the log could not be written.
        """
        del control
        if "train_loss" in logs:  # Trainer's own summary at the end
            return
        line = {name: value for name, value in logs.items() if isinstance(value, int | float)}
        if "loss" in logs:
            self._check_finite("training loss", logs["loss"], state.global_step, shared=True)
            if not args.fp16:  # whose scaler leaves out the steps with gradients that overflow
                self._check_finite("gradient norm", logs.get("grad_norm", 0.0), state.global_step)
            self._measure(state.global_step, logs["loss"])
            line["tokens_per_second"] = round(self.metrics.step_tokens[-1] / self.metrics.step_seconds[-1], 1)
            line["peak_bytes"] = self.metrics.peak_bytes
        if state.is_world_process_zero:
            self._print(state, line)
            self._write({"step": state.global_step, "time": round(time.time(), 3), **line})

    def _check_finite(self, name: str, value: float, step: int, *, shared: bool = False) -> None:
        """Raise if a value is not finite, before a checkpoint has it; a ``shared`` one is the mean of all ranks."""
        if math.isfinite(value):
            return
        got = f"{value} at step {step}" if step == self._at + 1 else f"{value} in steps {self._at + 1} to {step}"
        if shared and in_group() and (ranks := _ranks_where(not math.isfinite(self.metrics.own_loss))):
            got += f" on rank {' and '.join(map(str, ranks))} of {dist.get_world_size()}"
        hint = "Start again with a lower --lr, or in float32 (--bf16 false). "
        hint += "A resume repeats the same step from the last checkpoint."
        raise ArgumentValueError(message("lr", f"a {name} that stays finite", got, hint))

    def _measure(self, step: int, loss: float) -> None:
        metrics, steps = self.metrics, max(1, step - self._at)
        began = time.perf_counter() if self._began is None else self._began
        metrics.step_seconds.append((time.perf_counter() - began) / steps)
        metrics.step_tokens.append((metrics.tokens - self._tokens) / steps)
        self._began, self._at, self._tokens = None, step, metrics.tokens
        metrics.losses[step], metrics.own_loss = loss, 0.0
        metrics.read_memory()

    def _print(self, state: Any, line: dict[str, Any]) -> None:
        """Print a step now and then, and every evaluation in between."""
        step, last = state.global_step, state.global_step == state.max_steps
        if self._console is None or not step:
            return
        if "loss" in line and (time.monotonic() - self._printed > _LINE_EVERY_SECONDS or last or not self._printed):
            self._printed = time.monotonic()
            memory = self.metrics.peak_bytes if self.metrics.on_gpu else resident_bytes()
            left = time.strftime("%H:%M:%S", time.gmtime((state.max_steps - step) * self.metrics.median_step_seconds))
            text = f"loss {line['loss']:.3f}  {line['tokens_per_second']:,.0f} tokens/s  {mib(memory):,.0f} MiB"
            text += "" if last else f"  {left} left"
        elif "eval_loss" in line and not last:
            text = f"held-out loss {line['eval_loss']:.3f}"
        else:
            return
        self._console.print(f"{self._label}: step {step}/{state.max_steps}  {text}", highlight=False)

    def _write(self, line: dict[str, Any]) -> None:
        if self._file is None:
            return
        finite = {name: value if math.isfinite(value) else None for name, value in line.items()}
        written = (json.dumps(finite, allow_nan=False) + "\n").encode()
        try:
            handle = os.open(self._file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                if os.write(handle, written) < len(written):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            finally:
                os.close(handle)
        except OSError as error:
            raise save_error(self._file, error) from error


def _ranks_where(condition: bool) -> list[int]:
    """Return the ranks on which something holds; each has to call it."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, condition)
    return [rank for rank, one in enumerate(found) if one]
