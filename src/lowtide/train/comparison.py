"""The same run with lowtide and without, interleaved block by block, each in a process of its own."""

from __future__ import annotations

import json
import re
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from lowtide.errors import ArgumentValueError, LowtideError, message
from lowtide.measure.child import run_child
from lowtide.measure.output_files import check_output_files
from lowtide.train.child import train_in_child
from lowtide.train.config import TrainConfig
from lowtide.train.files import find_data
from lowtide.train.parallel import launched_ranks
from lowtide.train.prepare import share_data
from lowtide.train.report import show_comparison
from lowtide.train.result import (
    EARLY_STEPS,
    FLOAT32,
    NARROW_EARLY_STEPS,
    Comparison,
    TrainResult,
    early_steps,
    measured_tolerance,
)
from lowtide.train.settings import Settings, trainer_settings
from lowtide.train.turns import end_turns, give_turn

_BLOCKS = 50  # of a run: enough for a median, and long enough that a turn costs nothing
_SHORTEST = 5  # steps of one
_STOCK, _PATCHED = "stock", "lowtide"


class CompareError(LowtideError, RuntimeError):
    """One of the two runs failed."""


def compare_runs(config: TrainConfig, *, console: Console | None, json_file: Path | None) -> Comparison:
    """Do what `lowtide.train.compare` documents."""
    console = console or Console()
    if launched_ranks() > 1:
        hint = "Start it without torchrun."
        raise ArgumentValueError(message("compare", "one process", "a distributed launch", hint))
    check_output_files(json=json_file)
    with tempfile.TemporaryDirectory(prefix="lowtide-compare-") as name:
        folder = Path(name)
        settings = trainer_settings(config, folder, save=False, text=find_data(config.data).is_text)
        if getattr(settings.model, "use_peft", False) and settings.model.lora_dropout:
            console.print("lora_dropout is 0 in both runs: fused MLPs draw other random numbers than stock ones")
            config = replace(config, options={**config.options, "lora_dropout": 0})
        shared = share_data(config, settings, folder / "run")
        block = max(_SHORTEST, max(settings.args.max_steps, 0) // _BLOCKS)
        stock, patched = _interleaved(shared, folder / "turn", block, console)
        steps = max(patched.losses, default=1)
        rates = settings.args.learning_rate, int(settings.args.get_warmup_steps(steps))
        reference, tolerance = None, replace(FLOAT32, early_steps=early_steps(EARLY_STEPS, *rates))
        if settings.product_dtype != "float32":
            options = {**shared.options, "bf16": False, "fp16": False, "dtype": "float32"}
            reference = _in_child(replace(shared, patch=False, options=options), None, console, "float32")
            tolerance = measured_tolerance(stock, reference, early_steps(NARROW_EARLY_STEPS, *rates))
    comparison = Comparison(
        stock=stock,
        patched=patched,
        tolerance=tolerance,
        block=block,
        reference=reference,
        stock_is=_stock_loss(config, settings),
    )
    show_comparison(console, comparison)
    if json_file is not None:
        content = {"config": config.to_json() | {"output": None}, **comparison.to_json()}
        try:
            json_file.write_text(json.dumps(content, indent=2) + "\n")
        except OSError as error:
            raise ArgumentValueError(message("json", "a file that can be written", f"{json_file} ({error})")) from error
    return comparison


def _interleaved(config: TrainConfig, turn: Path, block: int, console: Console) -> tuple[TrainResult, TrainResult]:
    """Run the stock and the patched model at the same time, block by block."""
    give_turn(turn, _STOCK)

    def one(name: str, other: str) -> TrainResult:
        try:
            own = replace(config, patch=name == _PATCHED)
            return _in_child(own, (str(turn), name, other, block), console, name)
        finally:
            end_turns(turn)

    with ThreadPoolExecutor() as pool:
        stock, patched = pool.submit(one, _STOCK, _PATCHED), pool.submit(one, _PATCHED, _STOCK)
    return stock.result(), patched.result()


def _in_child(config: TrainConfig, turn: tuple[str, str, str, int] | None, console: Console, label: str) -> TrainResult:
    """Run one of them and return what it measured."""
    ended = run_child(train_in_child, config.to_json(), turn, label, capture=console.quiet)
    if ended.returncode != 0:
        raise CompareError(f"the {label} run failed: {_last_error(ended.stderr) or f'status {ended.returncode}'}")
    value = {**ended.value, "losses": {int(step): loss for step, loss in ended.value["losses"].items()}}
    return TrainResult(**value)


def _stock_loss(config: TrainConfig, settings: Settings) -> str:
    if not config.fine_tunes:
        return "transformers' own loss"
    return "TRL's own head" + ("" if settings.args.loss_type == "nll" else f", {settings.args.loss_type}")


_RAISED = re.compile(r"[A-Za-z_][\w.]*(Error|Exception|OutOfMemory|Interrupt)\b")


def _last_error(text: str) -> str:
    """Return the error that a traceback ends with, all lines of it; the last line where there is none."""
    lines = text.strip().splitlines()
    starts = [number for number, line in enumerate(lines) if _RAISED.match(line)]
    return " ".join(lines[starts[-1] :] if starts else lines[-1:])
