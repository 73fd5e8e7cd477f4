"""What a run measures step by step, and what it prints at its end."""

from __future__ import annotations

import ctypes
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import TrainerCallback

from lowtide.measure.resident import peak_resident_bytes, reset_cuda_peak, reset_peak_resident, resident_bytes
from lowtide.measure.units import mib

WARM_STEPS = 2  # the first steps make the optimizer states and fill caches: left out of times and peaks
_LAST = 10  # single steps are noisy: the loss at the end is the mean of so many, and at most of the run's second half


@dataclass(kw_only=True)
class RunResult:
    """What a run measured; bytes and seconds.

    Attributes:
        losses: training loss of each logged step, from the first, also of those before a resume.
        held_out: mean loss on what is never trained on, before the first step and after the last.
        step_seconds: of each step this process ran, the warm-up included; between two logs their mean.
        step_tokens: of all ranks, padding included, in each of these.
        peak_bytes: the highest memory in use after the warm-up; of CUDA's allocator, or of this process.
        warm_bytes: memory in use between steps once the optimizer has its state; None in runs too short for it.
        on_gpu: whether the memory is CUDA's.
        calls_fused: losses computed without logits; None where the model was not patched.
        calls_materialised: losses for which the logits were built.
    """

    losses: dict[int, float] = field(default_factory=dict)
    held_out: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    step_tokens: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    warm_bytes: int | None = None
    on_gpu: bool = False
    calls_fused: int | None = None
    calls_materialised: int | None = None

    @property
    def _warm(self) -> slice:
        return slice(WARM_STEPS if len(self.step_seconds) > WARM_STEPS else 0, None)

    @property
    def median_step(self) -> float:
        """The median over the warm steps; over all where there are no others."""
        return statistics.median(self.step_seconds[self._warm] or [float("nan")])

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all ranks per second of the warm steps; of all where there are no others."""
        seconds = sum(self.step_seconds[self._warm])
        return sum(self.step_tokens[self._warm]) / seconds if seconds else float("nan")

    @property
    def first_loss(self) -> float:
        """The loss of the run's first logged step."""
        return self.losses[min(self.losses)]

    @property
    def last_loss(self) -> float:
        """The mean loss of the run's last logged steps."""
        last = sorted(self.losses)[-_LAST:][-max(1, len(self.losses) // 2) :]
        return statistics.fmean(self.losses[step] for step in last)

    def lines(self) -> Iterator[str]:
        """Yield the numbers as a person reads them."""
        if self.losses:
            yield f"loss     {self.first_loss:.3f} -> {self.last_loss:.3f}"
        if self.held_out:
            yield f"held out {self.held_out[0]:.3f} -> {self.held_out[-1]:.3f}"
        if self.step_seconds:
            yield f"speed    {self.tokens_per_second:,.0f} tokens/s, {self.median_step * 1e3:,.0f} ms a step (median)"
        if self.peak_bytes:  # none of a resumed run that had done its steps
            yield f"peak     {mib(self.peak_bytes):,.0f} MiB {'of the GPU' if self.on_gpu else 'resident'}"


class StepMeter(TrainerCallback):  # type: ignore[misc]
    """Fills a `RunResult` while a `lowtide.train.trainers.BaseTrainer` runs."""

    def __init__(self) -> None:
        self.result = RunResult()
        self._began: float | None = None
        self._at = self._tokens = 0  # step of the last log, and tokens until then

    def on_train_begin(self, args: Any, state: Any, _control: Any, **_: Any) -> None:
        """Take over the step of a resumed run."""
        self._at, self._tokens = state.global_step, state.num_input_tokens_seen
        self.result.on_gpu = args.device.type == "cuda"

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Start the clock."""
        if self._began is None:
            self._began = time.perf_counter()

    def on_log(self, _args: Any, state: Any, _control: Any, logs: dict[str, Any], **_: Any) -> None:
        """Stop the clock: Trainer has just read the loss, so the device is done with the step."""
        if "loss" not in logs:
            return
        result, steps = self.result, max(1, state.global_step - self._at)
        if self._began is not None:
            mean = (time.perf_counter() - self._began) / steps
            result.step_seconds += [mean] * steps
            result.step_tokens += [(state.num_input_tokens_seen - self._tokens) / steps] * steps
        self._began, self._at, self._tokens = None, state.global_step, state.num_input_tokens_seen
        if len(result.step_seconds) >= WARM_STEPS and result.warm_bytes is None:  # peaks count from here
            if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
                libc.malloc_trim(0)  # what is freed goes back to the system: resident is what is used
            reset_peak_resident()
            reset_cuda_peak()
            result.warm_bytes = torch.cuda.memory_allocated() if result.on_gpu else resident_bytes()
        result.peak_bytes = torch.cuda.max_memory_allocated() if result.on_gpu else peak_resident_bytes()

    def on_evaluate(self, *_: Any, **__: Any) -> None:
        """Stop the clock: an evaluation's time is none of a step."""
        self._began = None

    def finish(self, history: list[dict[str, Any]]) -> RunResult:
        """Return what was measured, with the losses of a trainer's ``state.log_history``."""
        self.result.losses = {entry["step"]: float(entry["loss"]) for entry in history if "loss" in entry}
        self.result.held_out = [float(entry["eval_loss"]) for entry in history if "eval_loss" in entry]
        return self.result
