"""The same run with lowtide and without, each in a process of its own, side by side."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import lowtide
from lowtide.errors import ArgumentValueError, LowtideError, message
from lowtide.measure import run_child
from lowtide.train.config import TrainConfig
from lowtide.train.progress import quiet_transformers
from lowtide.train.report import above_warm_mib, show_comparison
from lowtide.train.run import TrainResult, prepare, run
from lowtide.train.trainer import training_arguments

# The two add up in different orders, and training feeds each step's rounding back into the next, where it grows: about
# 1e-6 after 30 float32 steps of the small run. A wrong gradient shows in the second decimal within a few steps.
TOLERANCE = {"float32": 1e-3, "bfloat16": 5e-2, "float16": 5e-2}


class CompareError(LowtideError, RuntimeError):
    """One of the two runs failed."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two runs of the same model, seed and data.

    Attributes:
        stock: the model as transformers has it.
        patched: the same after `lowtide.patch`.
        max_difference: the largest difference between their training losses at any step.
        tolerance: up to which it is rounding.
    """

    stock: TrainResult
    patched: TrainResult
    max_difference: float
    tolerance: float

    @property
    def equal(self) -> bool:
        """Whether the loss curves agree to rounding; False where one holds a NaN."""
        return self.max_difference <= self.tolerance

    def to_json(self) -> dict[str, Any]:
        """Return the numbers, with the hardware and the versions they were taken on."""
        runs = {
            name: {**result.to_json(), "peak_above_warm_mib": above_warm_mib(result)}
            for name, result in (("stock", self.stock), ("patched", self.patched))
        }
        told = {"max_loss_difference": self.max_difference, "tolerance": self.tolerance, "equal": self.equal}
        return {"machine": machine(), **told, **runs}


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
    comparison = _compared(results[False], results[True], TOLERANCE[_dtype(config)])
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


def machine() -> dict[str, Any]:
    """Return the hardware and the versions that numbers were taken on."""
    import transformers

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "cpu": platform.processor() or platform.machine(),
        "cpu_threads": torch.get_num_threads(),
        "gpu": gpu,
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "lowtide": lowtide.__version__,
    }


def _shared_tokenizer(config: TrainConfig, folder: Path) -> TrainConfig:
    """Check everything once before two processes start, and let both use one tokenizer."""
    ready = prepare(config, training_arguments(config, folder, save=False, resuming=False), None)
    ready.tokenizer.save_pretrained(folder)
    return dataclasses.replace(config, tokenizer=str(folder))


def _in_child(config: TrainConfig, console: Console) -> TrainResult:
    """Run one of the two and return what it measured."""
    width = console.width if console.is_terminal else None
    ended = run_child(train_in_child, config.to_json(), width, capture=not config.progress)
    if ended.returncode != 0:
        which = "patched" if config.patch else "stock"
        last = (ended.stderr.strip().splitlines() or [f"exit status {ended.returncode}"])[-1]
        raise CompareError(f"the {which} run failed: {last}")
    value = {**ended.value, "losses": {int(step): loss for step, loss in ended.value["losses"].items()}}
    return TrainResult(**value)


def _compared(stock: TrainResult, patched: TrainResult, tolerance: float) -> Comparison:
    """Compare step by step; a step that only one of them has, or a NaN, counts as infinitely different."""
    differences = [
        abs(stock.losses.get(step, float("nan")) - patched.losses.get(step, float("nan")))
        for step in stock.losses | patched.losses
    ]
    largest = max((d if d == d else float("inf") for d in differences), default=float("inf"))
    return Comparison(stock=stock, patched=patched, max_difference=largest, tolerance=tolerance)


def _dtype(config: TrainConfig) -> str:
    """Return the dtype that the run's products have on this machine."""
    if config.dtype != "auto":
        return config.dtype
    return "bfloat16" if torch.cuda.is_available() and torch.cuda.is_bf16_supported() else "float32"
