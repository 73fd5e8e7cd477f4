"""What a run measures, step by step."""

from __future__ import annotations

import ctypes
import math
import statistics
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import TrainerCallback

from lowtide.errors import ArgumentValueError, message
from lowtide.measure.resident import (
    cuda_peak_bytes,
    peak_resident_bytes,
    reset_cuda_peak,
    reset_peak_resident,
    resident_bytes,
)
from lowtide.train.result import WARM_STEPS


@dataclass
class StepMetrics:
    """Loss, time and memory of the steps this process ran; sizes in bytes, times in seconds.

    Attributes:
        losses: training loss of each step, this process's and earlier ones' of the same run.
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

    @property
    def last_tokens_per_second(self) -> float:
        """The same of the last step."""
        return self.step_tokens[-1] / self.step_seconds[-1]


class Recorder(TrainerCallback):  # type: ignore[misc]
    """Fills `StepMetrics` while Trainer runs."""

    def __init__(self, metrics: StepMetrics) -> None:
        self.metrics = metrics
        self._began: float | None = None
        self._at = self._tokens = 0  # the step and the tokens of the last log

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Take over the losses of the steps before a resume."""
        del control
        self._at = state.global_step
        self.metrics.on_gpu = args.device.type == "cuda"
        self.metrics.losses |= {entry["step"]: entry["loss"] for entry in state.log_history if "loss" in entry}

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Start the clock."""
        del args, state, control
        if self._began is None:
            self._began = time.perf_counter()
        self.metrics.began = True

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        """Stop the clock: Trainer has just read the loss, so the device is done with the step.

        Raises:
            ArgumentValueError: the loss is not finite.
        """
        del args, control
        if "loss" not in logs:
            return
        if not math.isfinite(logs["loss"]):
            hint = "Lower --lr, or train in float32 (--bf16 false); a resume goes on from the last checkpoint."
            expected = "a training loss that stays finite"
            raise ArgumentValueError(message("lr", expected, f"{logs['loss']} at step {state.global_step}", hint))
        metrics, steps = self.metrics, state.global_step - self._at
        if self._began is not None and steps:
            metrics.step_seconds.append((time.perf_counter() - self._began) / steps)
            metrics.step_tokens.append((metrics.tokens - self._tokens) / steps)
        self._began, self._at, self._tokens = None, state.global_step, metrics.tokens
        metrics.losses[state.global_step] = logs["loss"]
        if len(metrics.step_seconds) == WARM_STEPS:
            _trim_heap()
            metrics.highest_bytes = peak_resident_bytes()
            reset_peak_resident()
            reset_cuda_peak()
            metrics.warm_bytes = torch.cuda.memory_allocated() if metrics.on_gpu else resident_bytes()
        metrics.peak_bytes = memory_peak(metrics.on_gpu)


def memory_peak(on_gpu: bool) -> int:
    """Return the high-water mark in bytes: the CUDA allocator's, or this process's resident memory."""
    return cuda_peak_bytes() if on_gpu else peak_resident_bytes()


def _trim_heap() -> None:
    """Hand freed memory back to the system, so that what is resident is what is used; glibc alone has the call."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)
