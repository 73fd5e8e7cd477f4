"""What a run measures step by step, and what it prints at its end."""

from __future__ import annotations

import ctypes
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import TrainerCallback

from lowtide.measure.resident import (
    cuda_peak_bytes,
    peak_resident_bytes,
    reset_cuda_peak,
    reset_peak_resident,
    resident_bytes,
)
from lowtide.measure.units import mib

WARM_STEPS = 2  # the first steps make the optimizer states and fill caches: left out of times and peaks
_LAST = 10  # single steps are noisy: the loss at the end is the mean of so many
_LINE_EVERY_SECONDS = 10.0


@dataclass(kw_only=True)
class RunResult:
    """What a run measured; bytes and seconds.

    Attributes:
        losses: training loss of each logged step, from the first, also of those before a resume.
        step_seconds: of each step this process ran, the warm-up included; between two logs their mean.
        step_tokens: of all ranks, padding included, in each of these.
        held_out: mean loss on what is never trained on, before the first step and after the last.
        peak_bytes: the highest memory in use after the warm-up; of CUDA's allocator, or of this process.
        warm_bytes: memory in use between steps once the optimizer has its state; None in runs too short for it.
        on_gpu: whether the memory is CUDA's.
        calls_fused: losses computed without logits; None where the model was not patched.
        calls_materialised: losses for which the logits were built.
        seconds: the whole run.
        dtype: that the GEMMs ran in.
        learning_rate: at its peak.
        warmup: steps until then.
    """

    losses: dict[int, float] = field(default_factory=dict)
    step_seconds: list[float] = field(default_factory=list)
    step_tokens: list[float] = field(default_factory=list)
    held_out: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    warm_bytes: int | None = None
    on_gpu: bool = False
    calls_fused: int | None = None
    calls_materialised: int | None = None
    seconds: float = 0.0
    dtype: str = "float32"
    learning_rate: float = 0.0
    warmup: int = 0

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
    def above_warm_mib(self) -> float | None:
        """What training took above the loaded model with its optimizer's states, in MiB."""
        return None if self.warm_bytes is None else mib(self.peak_bytes - self.warm_bytes)

    @property
    def first_loss(self) -> float:
        """The loss of the run's first logged step."""
        return self.losses[min(self.losses)]

    @property
    def last_loss(self) -> float:
        """The mean loss of the run's last logged steps."""
        return statistics.fmean(self.losses[step] for step in sorted(self.losses)[-_LAST:])

    def lines(self) -> Iterator[str]:
        """Yield the numbers as a person reads them."""
        if self.losses:
            yield f"loss     {self.first_loss:.3f} -> {self.last_loss:.3f}"
        if self.held_out:
            yield f"held out {self.held_out[0]:.3f} -> {self.held_out[-1]:.3f}"
        if self.step_seconds:
            yield f"speed    {self.tokens_per_second:,.0f} tokens/s, {self.median_step * 1e3:,.0f} ms a step (median)"
        yield f"peak     {mib(self.peak_bytes):,.0f} MiB {'of the GPU' if self.on_gpu else 'resident'}"
        yield f"time     {self.seconds:.0f} s"


class StepMeter(TrainerCallback):  # type: ignore[misc]
    """Fills a `RunResult` while a `lowtide.train.trainers.Corrected` trainer runs.

    Args:
        say: what is called with a line now and then; None: nothing.
        clock: seconds.
    """

    def __init__(
        self, *, say: Callable[[str], Any] | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.result = RunResult()
        self._say, self._clock = say, clock
        self._created = clock()
        self._began: float | None = None
        self._at = self._tokens = 0  # step of the last log, tokens since
        self._said = float("-inf")

    def add_batch(self, tokens: int, loss: Any) -> None:
        """Count a batch's tokens."""
        del loss
        self._tokens += tokens

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Take over the losses of the steps before a resume."""
        del control
        self._at = state.global_step
        self.result.on_gpu = args.device.type == "cuda"
        self.result.learning_rate = args.learning_rate
        self.result.warmup = int(args.get_warmup_steps(max(state.max_steps, 1)))
        self.result.losses |= {entry["step"]: entry["loss"] for entry in state.log_history if "loss" in entry}

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Start the clock."""
        del args, state, control
        if self._began is None:
            self._began = self._clock()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
        """Stop the clock: Trainer has just read the loss, so the device is done with the step."""
        del args, control
        if "loss" not in logs:
            return
        result, steps = self.result, max(1, state.global_step - self._at)
        if self._began is not None:
            mean = (self._clock() - self._began) / steps
            result.step_seconds += [mean] * steps
            result.step_tokens += [self._tokens / steps] * steps
        self._began, self._at, self._tokens = None, state.global_step, 0
        result.losses[state.global_step] = float(logs["loss"])
        self._read_memory()
        now, last = self._clock(), state.global_step == state.max_steps
        if self._say is not None and (last or now - self._said > _LINE_EVERY_SECONDS):
            self._said = now
            left = time.strftime("%H:%M:%S", time.gmtime((state.max_steps - state.global_step) * result.median_step))
            speed = f"{result.tokens_per_second:,.0f} tokens/s" + ("" if last else f"  {left} left")
            self._say(f"step {state.global_step}/{state.max_steps}  loss {float(logs['loss']):.3f}  {speed}")

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict[str, Any], **_: Any) -> None:
        """Take the loss of an evaluation, whose time is none of a step."""
        del args, control, state
        if "eval_loss" in metrics:
            self.result.held_out.append(float(metrics["eval_loss"]))
        self._began = None

    def finish(self, dtype: str) -> RunResult:
        """Return what was measured."""
        self.result.dtype = dtype
        self.result.seconds = self._clock() - self._created
        return self.result

    def _read_memory(self) -> None:
        """Take the peak; after the warm-up, which makes the optimizer states, from a new mark."""
        result = self.result
        if len(result.step_seconds) >= WARM_STEPS and result.warm_bytes is None:
            if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
                libc.malloc_trim(0)  # what is freed goes back to the system: resident is what is used
            reset_peak_resident()
            reset_cuda_peak()
            result.warm_bytes = torch.cuda.memory_allocated() if result.on_gpu else resident_bytes()
        result.peak_bytes = cuda_peak_bytes() if result.on_gpu else peak_resident_bytes()
