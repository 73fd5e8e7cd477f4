"""What a run measured, and two runs side by side: how far apart their losses are, and what rounding explains."""

from __future__ import annotations

import dataclasses
import os
import statistics
from dataclasses import asdict, dataclass
from typing import Any

from lowtide.measure.machine import describe_machine
from lowtide.measure.units import mib

WARM_STEPS = 2  # the first steps make the optimizer states and fill caches: left out of times and peaks
EARLY_STEPS = 50
NARROW_EARLY_STEPS = 20
_FEWEST_EARLY_STEPS = 3
_SMALL_RUN = (2e-3, 50)  # learning rate and warm-up steps of the run in which both were measured


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """What a run measured; bytes and seconds.

    Attributes:
        losses: training loss of each step, from the first, also of those before a resume.
        held_out_before: mean loss on text never trained on, before the first step.
        held_out_after: the same after the last step.
        tokens_per_second: of all ranks together, by the median step.
        step_seconds: the median step.
        peak_resident_bytes: of this process, over the whole run.
        peak_cuda_bytes: of this rank's tensors; 0 without CUDA.
        warm_bytes: memory in use between steps once the optimizer has its state; None in runs too short for it.
        peak_step_bytes: the highest while training after that, of the same memory.
        calls_fused: losses computed without logits; None where the model was not patched.
        calls_materialised: losses for which the logits were built.
        seconds: the whole run.
        saved: the folder of the model; None where nothing is saved.
        best: with ``--load_best_model_at_end``, the step whose model that is.
        dtype: that the GEMMs ran in.
        steps_seconds: each step this process ran, the warm-up included.
    """

    losses: dict[int, float]
    held_out_before: float | None
    held_out_after: float | None
    tokens_per_second: float
    step_seconds: float
    peak_resident_bytes: int
    peak_cuda_bytes: int
    warm_bytes: int | None
    peak_step_bytes: int
    calls_fused: int | None
    calls_materialised: int | None
    seconds: float
    saved: str | None
    best: int | None = None
    dtype: str = "float32"
    steps_seconds: list[float] = dataclasses.field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Return the result as JSON has it, without each step's time."""
        return {name: value for name, value in asdict(self).items() if name != "steps_seconds"}

    @property
    def above_warm_mib(self) -> float | None:
        """What training took above the loaded model with its optimizer's states, in MiB."""
        return None if self.warm_bytes is None else mib(self.peak_step_bytes - self.warm_bytes)


@dataclass(frozen=True)
class Tolerance:
    """Up to which a difference of losses is rounding: in the first ``early_steps``, and later.

    The two runs add up in different orders, and training feeds each step's rounding back into the next, where it grows:
    float32 measured 2e-6 up to step 50 of the small run, 6e-5 at 300, 2e-4 at 500. A wrong gradient shows early.
    Both rounding and a wrong gradient act on the loss by what the optimizer makes of them, so that "early" is a sum of
    learning rates: a run that warms up faster has fewer early steps (`early_steps`).
    """

    early: float
    late: float
    early_steps: int = EARLY_STEPS

    def at(self, step: int) -> float:
        """Return the tolerance at one step."""
        return self.early if step <= self.early_steps else self.late


def early_steps(most: int, learning_rate: float, warmup: int) -> int:
    """Return after how many steps, at most ``most``, the learning rates add up to those of so many of the small run.

    The peak ``learning_rate`` is reached linearly in ``warmup`` steps.
    """

    def added(step: int, peak: float, warm: int) -> float:
        return peak * (step * step / (2 * warm) if step < warm else step - warm / 2)

    limit = added(most, *_SMALL_RUN) * (1 + 1e-9)
    within = (step for step in range(most, 0, -1) if added(step, learning_rate, warmup) <= limit)
    return max(next(within, 0), _FEWEST_EARLY_STEPS)


FLOAT32 = Tolerance(2e-5, 2e-3)
# In a narrower dtype, what rounding does depends on model and data, and is measured: a third run, of the stock model in
# float32, measures what the stock model errs. Two runs that err no more than that are at most twice as far apart, and a
# maximum over a few steps of one run is known to another factor of two. Only the first steps show it: bfloat16 runs
# of the small model that differed by 5e-4 in 20 steps met a step in the twenties that made it 4e-2, some by luck not.
# What follows is allowed the growth that float32 is, up to a loss that anybody would call another one.
_APART = 4
MOST_LATE = 0.1


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two runs of the same model, seed and data, interleaved block by block.

    Attributes:
        stock: the stock model; fine-tuning with TRL's own head.
        patched: the same after `lowtide.patch`.
        tolerance: up to which a difference of their losses is rounding.
        block: steps of a block.
        reference: the stock model in float32; None where the two are.
        stock_is: what computes the stock run's loss.
    """

    stock: TrainResult
    patched: TrainResult
    tolerance: Tolerance
    block: int
    reference: TrainResult | None = None
    stock_is: str = "transformers"

    @property
    def step_ratio(self) -> float:
        """The median over paired blocks of the patched run's time over the stock run's; warm-up steps left out."""
        pairs = zip(self.stock.steps_seconds[WARM_STEPS:], self.patched.steps_seconds[WARM_STEPS:], strict=False)
        steps = list(pairs)
        blocks = [steps[i : i + self.block] for i in range(0, len(steps), self.block)]
        full = [one for one in blocks if len(one) == self.block] or blocks
        ratios = [sum(b for _, b in one) / sum(a for a, _ in one) for one in full]
        return statistics.median(ratios) if ratios else float("nan")

    @property
    def differences(self) -> dict[int, float]:
        """Difference of the training losses at each step; infinite where one has no such step, or holds a NaN."""
        return differences(self.stock, self.patched)

    @property
    def early_difference(self) -> float:
        """The largest difference in the first ``early_steps`` of the tolerance."""
        early = (d for step, d in self.differences.items() if step <= self.tolerance.early_steps)
        return max(early, default=float("inf"))

    @property
    def max_difference(self) -> float:
        """The largest difference at any step."""
        return max(self.differences.values(), default=float("inf"))

    @property
    def equal(self) -> bool:
        """Whether the loss curves agree to rounding; False where one holds a NaN."""
        differences = self.differences
        return bool(differences) and all(d <= self.tolerance.at(step) for step, d in differences.items())

    def to_json(self) -> dict[str, Any]:
        """Return the numbers, with the hardware and the versions they were taken on."""
        runs = {
            name: {**result.to_json(), "peak_above_warm_mib": result.above_warm_mib}
            for name, result in (("stock", self.stock), ("patched", self.patched))
        }
        figures = {
            "equal": self.equal,
            "early_loss_difference": self.early_difference,
            "max_loss_difference": self.max_difference,
            "tolerance": dataclasses.asdict(self.tolerance),
            "step_ratio": self.step_ratio,
            "steps_per_block": self.block,
            "stock_is": self.stock_is,
        }
        if self.reference is not None:
            figures["float32"] = self.reference.to_json()
        machine = {**describe_machine(), "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY")}
        return {"machine": machine, **figures, **runs}


def differences(a: TrainResult, b: TrainResult) -> dict[int, float]:
    """Return how far apart two runs' losses are at each step; infinite where one has no such step, or holds a NaN."""
    nan = float("nan")
    pairs = {s: (a.losses.get(s, nan), b.losses.get(s, nan)) for s in sorted(a.losses.keys() | b.losses.keys())}
    return {step: abs(x - y) if x == x and y == y else float("inf") for step, (x, y) in pairs.items()}


def measured_tolerance(stock: TrainResult, reference: TrainResult, steps: int = NARROW_EARLY_STEPS) -> Tolerance:
    """Return the tolerance that the stock model's own distance from its float32 run allows, never below float32's.

    The distance is taken over the first ``steps``; a run that is not a number in them allows nothing.
    """
    apart = max((d for step, d in differences(stock, reference).items() if step <= steps), default=0.0)
    early = max(_APART * apart if apart < float("inf") else 0.0, FLOAT32.early)
    late = min(early * FLOAT32.late / FLOAT32.early, MOST_LATE)
    return Tolerance(early, max(early, late), steps)
