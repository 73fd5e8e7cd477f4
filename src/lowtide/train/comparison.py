"""The same run with lowtide and without, each in a process of its own, side by side."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from lowtide.errors import ArgumentValueError, LowtideError, message
from lowtide.measure import describe_machine, run_child
from lowtide.train.config import TrainConfig
from lowtide.train.prepare import prepare
from lowtide.train.progress import quiet_transformers
from lowtide.train.ranks import launched_ranks
from lowtide.train.report import above_warm_mib, show_comparison
from lowtide.train.run import TrainResult, run
from lowtide.train.trainer import product_dtype, training_arguments

EARLY_STEPS = 50
NARROW_EARLY_STEPS = 20


@dataclass(frozen=True)
class Tolerance:
    """Up to which a difference of losses is rounding: in the first ``early_steps``, and later.

    The two runs add up in different orders, and training feeds each step's rounding back into the next, where it grows:
    float32 measured 2e-6 up to step 50 of the small run, 6e-5 at 300, 2e-4 at 500. A wrong gradient shows early.
    """

    early: float
    late: float
    early_steps: int = EARLY_STEPS

    def at(self, step: int) -> float:
        """Return the tolerance at one step."""
        return self.early if step <= self.early_steps else self.late


FLOAT32 = Tolerance(2e-5, 2e-3)
# In a narrower dtype, what rounding does depends on model and data, and is measured: a third run, of the stock model in
# float32, tells what the stock model errs. Two runs that err no more than that are at most twice as far apart, and a
# maximum over a few steps of one run is known to another factor of two. Only the first steps can tell it: bfloat16 runs
# of the small model that differed by 5e-4 in 20 steps met a step in the twenties that made it 4e-2, some by luck not.
# What follows is allowed the growth that float32 is, up to a loss that anybody would call another one.
APART = 4
MOST_LATE = 0.1


class CompareError(LowtideError, RuntimeError):
    """One of the two runs failed."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two runs of the same model, seed and data.

    Attributes:
        stock: the model as transformers has it.
        patched: the same after `lowtide.patch`.
        tolerance: up to which a difference of their losses is rounding.
        reference: the model as transformers has it, in float32; None where the two are.
    """

    stock: TrainResult
    patched: TrainResult
    tolerance: Tolerance
    reference: TrainResult | None = None

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
            name: {**result.to_json(), "peak_above_warm_mib": above_warm_mib(result)}
            for name, result in (("stock", self.stock), ("patched", self.patched))
        }
        told = {
            "equal": self.equal,
            "early_loss_difference": self.early_difference,
            "max_loss_difference": self.max_difference,
            "tolerance": dataclasses.asdict(self.tolerance),
        }
        if self.reference is not None:
            told["float32"] = self.reference.to_json()
        return {"machine": {**describe_machine(), "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY")}, **told, **runs}


def differences(a: TrainResult, b: TrainResult) -> dict[int, float]:
    """Return how far apart two runs' losses are at each step; infinite where one has no such step, or holds a NaN."""
    nan = float("nan")
    pairs = {s: (a.losses.get(s, nan), b.losses.get(s, nan)) for s in sorted(a.losses.keys() | b.losses.keys())}
    return {step: abs(x - y) if x == x and y == y else float("inf") for step, (x, y) in pairs.items()}


def measured_tolerance(stock: TrainResult, reference: TrainResult) -> Tolerance:
    """Return the tolerance that the stock model's own distance from its float32 run allows, never below float32's.

    A run that is not a number in its first steps allows nothing.
    """
    apart = max((d for step, d in differences(stock, reference).items() if step <= NARROW_EARLY_STEPS), default=0.0)
    early = max(APART * apart if apart < float("inf") else 0.0, FLOAT32.early)
    late = min(early * FLOAT32.late / FLOAT32.early, MOST_LATE)
    return Tolerance(early, max(early, late), NARROW_EARLY_STEPS)


def compare_runs(config: TrainConfig, *, console: Console | None, json_file: Path | None) -> Comparison:
    """Do what `lowtide.train.compare` says."""
    console = console or Console()
    if launched_ranks() > 1:
        raise ArgumentValueError(
            message("compare", "one process", "a distributed launch", "Start it without torchrun.")
        )
    if json_file is not None and not json_file.absolute().parent.is_dir():
        raise ArgumentValueError(message("json", "a file in a folder that exists", json_file))
    with tempfile.TemporaryDirectory(prefix="lowtide-compare-") as folder:
        config = dataclasses.replace(config, output=None, resume=False)
        shared = _shared_tokenizer(config, Path(folder))
        stock, patched = (_in_child(dataclasses.replace(shared, patch=patch), console) for patch in (False, True))
        reference, tolerance = None, FLOAT32
        if product_dtype(config) != "float32":
            exact = dataclasses.replace(shared, patch=False, dtype="float32", weights="float32")
            reference = _in_child(exact, console, label="float32")
            tolerance = measured_tolerance(stock, reference)
    comparison = Comparison(stock=stock, patched=patched, tolerance=tolerance, reference=reference)
    show_comparison(console, comparison)
    if json_file is not None:
        told = {"config": config.to_json(), **comparison.to_json()}
        try:
            json_file.write_text(json.dumps(told, indent=2) + "\n")
        except OSError as error:
            raise ArgumentValueError(message("json", "a file that can be written", f"{json_file} ({error})")) from error
    return comparison


def train_in_child(settings: dict[str, Any], width: int | None, label: str) -> dict[str, Any]:
    """Train without saving and return the result as JSON knows it: the child's side."""
    quiet_transformers()
    config = TrainConfig.from_json(settings)
    console = Console(width=width, quiet=not config.progress)
    return run(config, console=console, save=False, label=label).to_json()


def _shared_tokenizer(config: TrainConfig, folder: Path) -> TrainConfig:
    """Check everything once before two processes start, and let both use one tokenizer."""
    ready = prepare(config, training_arguments(config, folder, save=False, resuming=False), None)
    ready.tokenizer.save_pretrained(folder)
    return dataclasses.replace(config, tokenizer=str(folder))


def _in_child(config: TrainConfig, console: Console, label: str = "") -> TrainResult:
    """Run one of them and return what it measured."""
    width = console.width if console.is_terminal else None
    label = label or ("lowtide" if config.patch else "stock")
    ended = run_child(train_in_child, config.to_json(), width, label, capture=not config.progress)
    if ended.returncode != 0:
        which = "patched" if config.patch else label
        raise CompareError(f"the {which} run failed: {_last_error(ended.stderr) or f'status {ended.returncode}'}")
    value = {**ended.value, "losses": {int(step): loss for step, loss in ended.value["losses"].items()}}
    return TrainResult(**value)


_RAISED = re.compile(r"[A-Za-z_][\w.]*(Error|Exception|OutOfMemory|Interrupt)\b")


def _last_error(text: str) -> str:
    """Return the error that a traceback ends with, all lines of it; the last line where there is none."""
    lines = text.strip().splitlines()
    starts = [number for number, line in enumerate(lines) if _RAISED.match(line)]
    return " ".join(lines[starts[-1] :] if starts else lines[-1:])
