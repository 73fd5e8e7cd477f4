"""The same run with lowtide and without, each in a process of its own, side by side."""

from __future__ import annotations

import dataclasses
import json
import os
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
from lowtide.train.report import above_warm_mib, show_comparison
from lowtide.train.run import TrainResult, run
from lowtide.train.trainer import product_dtype, training_arguments

EARLY_STEPS = 50


@dataclass(frozen=True)
class Tolerance:
    """Up to which a difference of losses is rounding: in the first `EARLY_STEPS`, and later.

    The two runs add up in different orders, and training feeds each step's rounding back into the next, where it grows:
    float32 measured 2e-6 up to step 50 of the small run, 6e-5 at 300, 2e-4 at 500. A wrong gradient shows early.
    """

    early: float
    late: float

    def at(self, step: int) -> float:
        """Return the tolerance at one step."""
        return self.early if step <= EARLY_STEPS else self.late


# bfloat16's and float16's are a few of their own roundings of a loss of about 10, which the float32 sum of a loss keeps
# small at first; they are not measured yet.
TOLERANCE = {"float32": Tolerance(2e-5, 2e-3), "bfloat16": Tolerance(3e-2, 1e-1), "float16": Tolerance(1e-2, 5e-2)}


# OpenMP's threads wait for each other spinning. Where another process wants the core that is ten times slower than
# sleeping, and a comparison would measure it.
_OPENMP = {"OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE")}


class CompareError(LowtideError, RuntimeError):
    """One of the two runs failed."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two runs of the same model, seed and data.

    Attributes:
        stock: the model as transformers has it.
        patched: the same after `lowtide.patch`.
        tolerance: up to which a difference of their losses is rounding.
    """

    stock: TrainResult
    patched: TrainResult
    tolerance: Tolerance

    @property
    def differences(self) -> dict[int, float]:
        """Difference of the training losses at each step; infinite where one has no such step, or holds a NaN."""
        nan = float("nan")
        pairs = {s: (self.stock.losses.get(s, nan), self.patched.losses.get(s, nan)) for s in self._steps}
        return {step: abs(a - b) if a == a and b == b else float("inf") for step, (a, b) in pairs.items()}

    @property
    def early_difference(self) -> float:
        """The largest difference in the first `EARLY_STEPS`."""
        return max((d for step, d in self.differences.items() if step <= EARLY_STEPS), default=float("inf"))

    @property
    def max_difference(self) -> float:
        """The largest difference at any step."""
        return max(self.differences.values(), default=float("inf"))

    @property
    def equal(self) -> bool:
        """Whether the loss curves agree to rounding; False where one holds a NaN."""
        differences = self.differences
        return bool(differences) and all(d <= self.tolerance.at(step) for step, d in differences.items())

    @property
    def _steps(self) -> list[int]:
        return sorted(self.stock.losses.keys() | self.patched.losses.keys())

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
        return {"machine": {**describe_machine(), **_OPENMP}, **told, **runs}


def compare_runs(config: TrainConfig, *, console: Console | None, json_file: Path | None) -> Comparison:
    """Do what `lowtide.train.compare` says."""
    console = console or Console()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ArgumentValueError(
            message("compare", "one process", "a distributed launch", "Start it without torchrun.")
        )
    if json_file is not None and not json_file.absolute().parent.is_dir():
        raise ArgumentValueError(message("json", "a file in a folder that exists", json_file))
    with tempfile.TemporaryDirectory(prefix="lowtide-compare-") as folder:
        config = dataclasses.replace(config, output=None, resume=False)
        shared = _shared_tokenizer(config, Path(folder))
        results = {patch: _in_child(dataclasses.replace(shared, patch=patch), console) for patch in (False, True)}
    comparison = Comparison(stock=results[False], patched=results[True], tolerance=TOLERANCE[product_dtype(config)])
    show_comparison(console, comparison)
    if json_file is not None:
        told = {"config": config.to_json(), **comparison.to_json()}
        try:
            json_file.write_text(json.dumps(told, indent=2) + "\n")
        except OSError as error:
            raise ArgumentValueError(message("json", "a file that can be written", f"{json_file} ({error})")) from error
    return comparison


def train_in_child(settings: dict[str, Any], width: int | None) -> dict[str, Any]:
    """Train without saving and return the result as JSON knows it: the child's side."""
    quiet_transformers()
    config = TrainConfig.from_json(settings)
    console = Console(width=width, quiet=not config.progress)
    return run(config, console=console, save=False, label="lowtide" if config.patch else "stock").to_json()


def _shared_tokenizer(config: TrainConfig, folder: Path) -> TrainConfig:
    """Check everything once before two processes start, and let both use one tokenizer."""
    ready = prepare(config, training_arguments(config, folder, save=False, resuming=False), None)
    ready.tokenizer.save_pretrained(folder)
    return dataclasses.replace(config, tokenizer=str(folder))


def _in_child(config: TrainConfig, console: Console) -> TrainResult:
    """Run one of the two and return what it measured."""
    width = console.width if console.is_terminal else None
    ended = run_child(train_in_child, config.to_json(), width, capture=not config.progress, env=_OPENMP)
    if ended.returncode != 0:
        which = "patched" if config.patch else "stock"
        last = (ended.stderr.strip().splitlines() or [f"exit status {ended.returncode}"])[-1]
        raise CompareError(f"the {which} run failed: {last}")
    value = {**ended.value, "losses": {int(step): loss for step, loss in ended.value["losses"].items()}}
    return TrainResult(**value)
