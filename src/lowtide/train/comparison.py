"""The same run with lowtide and without, each in a process of its own, side by side."""

from __future__ import annotations

import dataclasses
import json
import re
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console

from lowtide.errors import ArgumentValueError, LowtideError, message
from lowtide.measure.child import run_child
from lowtide.train.config import TrainConfig
from lowtide.train.prepare import prepare
from lowtide.train.progress import quiet_transformers
from lowtide.train.ranks import launched_ranks
from lowtide.train.report import show_comparison
from lowtide.train.result import FLOAT32, Comparison, TrainResult, measured_tolerance
from lowtide.train.run import run
from lowtide.train.trainer import product_dtype, training_arguments


class CompareError(LowtideError, RuntimeError):
    """One of the two runs failed."""


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
