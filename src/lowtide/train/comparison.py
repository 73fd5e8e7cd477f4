"""The same run with lowtide and without, interleaved block by block, each in a process of its own.

How far apart the two losses may be is what rounding explains. In float32 that is known. In a narrower dtype it depends
on model and data, and a third run, the stock model in float32, measures what the stock model itself errs.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import TrainerCallback

from lowtide.errors import ArgumentValueError, LowtideError, message
from lowtide.measure.child import run_child
from lowtide.measure.machine import describe_machine
from lowtide.measure.output_files import check_output_files
from lowtide.measure.units import mib
from lowtide.train.arguments import Arguments, words_of
from lowtide.train.meter import WARM_STEPS, RunResult
from lowtide.train.ranks import launched_ranks

_BLOCKS = 50  # of a run: enough for a median, and long enough that a turn costs nothing
_SHORTEST = 5  # steps of one
_STOCK, _PATCHED = "stock", "lowtide"
_POLL_SECONDS = 0.002
_EARLY, _NARROW_EARLY, _FEWEST = 50, 20, 3
_SMALL_RUN = (2e-3, 50)  # learning rate and warm-up steps of the run in which both were measured
# In a narrower dtype two runs that err no more than the stock one are at most twice as far apart, and a maximum over
# few steps of one run is known to another factor of two. What follows is allowed the growth that float32 is.
_APART = 4
_MOST_LATE = 0.1  # a loss that anybody would call another one


class CompareError(LowtideError, RuntimeError):
    """One of the two runs failed."""


@dataclass(frozen=True)
class Tolerance:
    """Up to which a difference of losses is rounding: in the first ``early_steps``, and later.

    The two runs add up in different orders, and training feeds each step's rounding back into the next, where it grows:
    float32 measured 2e-6 up to step 50 of the small run, 6e-5 at 300, 2e-4 at 500. A wrong gradient shows early.
    Both act on the loss by what the optimizer makes of them, so that "early" is a sum of learning rates.
    """

    early: float = 2e-5
    late: float = 2e-3
    early_steps: int = _EARLY

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
    return max(next(within, 0), _FEWEST)


def differences(a: RunResult, b: RunResult) -> dict[int, float]:
    """Return how far apart two runs' losses are at each step; infinite where one has no such step, or holds a NaN."""
    nan = float("nan")
    pairs = {s: (a.losses.get(s, nan), b.losses.get(s, nan)) for s in sorted(a.losses.keys() | b.losses.keys())}
    return {step: abs(x - y) if x == x and y == y else float("inf") for step, (x, y) in pairs.items()}


def measured_tolerance(stock: RunResult, reference: RunResult, steps: int) -> Tolerance:
    """Return the tolerance that the stock model's own distance from its float32 run allows, never below float32's.

    The distance is taken over the first ``steps``; a run that is not a number in them allows nothing.
    """
    known = Tolerance()
    apart = max((d for step, d in differences(stock, reference).items() if step <= steps), default=0.0)
    early = max(_APART * apart if apart < float("inf") else 0.0, known.early)
    late = min(early * known.late / known.early, _MOST_LATE)
    return Tolerance(early, max(early, late), steps)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two runs of the same model, seed and data, interleaved block by block.

    Attributes:
        stock: the stock model; fine-tuning with TRL's own head.
        patched: the same after `lowtide.patch`.
        tolerance: up to which a difference of their losses is rounding.
        block: steps of a block.
        reference: the stock model in float32; None where the two are.
    """

    stock: RunResult
    patched: RunResult
    tolerance: Tolerance
    block: int
    reference: RunResult | None = None

    @property
    def step_ratio(self) -> float:
        """The median over paired blocks of the patched run's time over the stock run's; warm-up steps left out."""
        steps = list(zip(self.stock.step_seconds[WARM_STEPS:], self.patched.step_seconds[WARM_STEPS:], strict=False))
        blocks = [steps[i : i + self.block] for i in range(0, len(steps), self.block)]
        full = [block for block in blocks if len(block) == self.block] or blocks
        ratios = [sum(b for _, b in block) / sum(a for a, _ in block) for block in full]
        return statistics.median(ratios) if ratios else float("nan")

    @property
    def differences(self) -> dict[int, float]:
        """Difference of the training losses at each step."""
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
        found = self.differences
        return bool(found) and all(d <= self.tolerance.at(step) for step, d in found.items())

    def to_json(self) -> dict[str, Any]:
        """Return the numbers, with the hardware and the versions they were taken on."""
        runs = {_STOCK: self.stock, "patched": self.patched, "float32": self.reference}
        return {
            "machine": {**describe_machine(), "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY")},
            "equal": self.equal,
            "early_loss_difference": self.early_difference,
            "max_loss_difference": self.max_difference,
            "tolerance": asdict(self.tolerance),
            "step_ratio": self.step_ratio,
            "steps_per_block": self.block,
            **{
                name: {
                    **{key: value for key, value in asdict(run).items() if not key.startswith("step_")},
                    "peak_above_warm_mib": run.above_warm_mib,
                    "tokens_per_second": run.tokens_per_second,
                    "step_seconds": run.median_step,
                }
                for name, run in runs.items()
                if run is not None
            },
        }

    def show(self, console: Console) -> None:
        """Print the two runs side by side."""
        stock, patched, limit, ratio = self.stock, self.patched, self.tolerance, self.step_ratio
        table = Table("", _STOCK, "lowtide", "lowtide / stock", title="the same model, seed and data")
        for column in table.columns[1:]:
            column.justify = "right"

        def row(name: str, values: Sequence[float | None], form: str = ",.0f", ratio: float | None = None) -> None:
            table.add_row(
                name, *("-" if v is None else format(v, form) for v in values), f"{ratio:.2f}" if ratio else ""
            )

        def divided(values: Sequence[float | None]) -> float | None:
            stock, patched = values
            return patched / stock if stock and patched is not None else None

        both = (stock, patched)
        row("loss, first step", [run.first_loss for run in both], ".4f")
        row("loss, last steps", [run.last_loss for run in both], ".4f")
        if stock.held_out and patched.held_out:
            row("held-out loss", [run.held_out[-1] for run in both], ".4f")
        kind = "GPU" if stock.on_gpu else "resident"
        above, peaks = [run.above_warm_mib for run in both], [mib(run.peak_bytes) for run in both]
        row(f"peak {kind} MiB above warm model", above, ratio=divided(above))
        row(f"peak {kind} MiB", peaks, ratio=divided(peaks))
        row("step, ms (median)", [run.median_step * 1e3 for run in both], ratio=ratio)
        row("tokens/s", [run.tokens_per_second for run in both], ratio=1 / ratio if ratio else None)
        console.print()
        console.print(table, highlight=False)
        same = "equal to rounding" if self.equal else "NOT EQUAL"
        measured = "; rounding measured by a float32 run of the stock model" if self.reference else ""
        for line in (
            f"losses of {len(stock.losses)} steps: {same}; the largest difference is {self.early_difference:.0e} "
            f"in the first steps (rounding: up to {limit.early:.0e}) and {self.max_difference:.0e} in all "
            f"(up to {limit.late:.0e}){measured}",
            f"losses without logits: {patched.calls_fused}, with: {patched.calls_materialised}",
            f"times: the runs took turns every {self.block} steps; the ratio is the median over pairs of blocks",
        ):
            console.print(line, highlight=False, soft_wrap=True)


def compare(found: Arguments, console: Console) -> Comparison:
    """Train the same model on the same data with lowtide and without, in two interleaved processes, and compare.

    Args:
        found: the options of a run.
        console: where the table is printed.

    Returns:
        Comparison: both runs' losses, peaks and step times.

    Raises:
        ArgumentValueError: the options or the data cannot be used, or the figures' file not be written.
        CompareError: one of the runs failed.
    """
    if launched_ranks() > 1:
        raise ArgumentValueError(message("--compare", "one process", "a distributed launch", "Start it by itself."))
    if found.training.resume_from_checkpoint or not found.run.patch:
        expected = "no --resume_from_checkpoint or --no-patch beside it"
        raise ArgumentValueError(message("--compare", expected, "one of them"))
    check_output_files(json=found.run.json)
    with tempfile.TemporaryDirectory(prefix="lowtide-compare-") as name:
        folder = Path(name)
        shared = {"output_dir": str(folder / "run"), "save_strategy": "no", "logging_steps": 1, "disable_tqdm": True}
        if found.fine_tunes:
            shared["lora_dropout"] = 0.0  # fused MLPs draw other random numbers than stock ones
        elif found.model.tokenizer_name is None:
            from lowtide.train.run import save_tokenizer

            shared["tokenizer_name"] = save_tokenizer(found, folder / "tokenizer")
        words = [*found.words, *words_of(shared)]
        block = max(_SHORTEST, max(found.training.max_steps, 0) // _BLOCKS)
        stock, patched = _interleaved(words, folder / "turn", block, quiet=console.quiet)
        reference, tolerance = None, Tolerance(early_steps=early_steps(_EARLY, stock.learning_rate, stock.warmup))
        if stock.dtype != "float32":
            narrow = early_steps(_NARROW_EARLY, stock.learning_rate, stock.warmup)
            options = words_of({"patch": False, "bf16": "false", "fp16": "false", "dtype": "float32"})
            reference = _in_child([*words, *options], None, "float32", quiet=console.quiet)
            tolerance = measured_tolerance(stock, reference, narrow)
    comparison = Comparison(stock=stock, patched=patched, tolerance=tolerance, block=block, reference=reference)
    comparison.show(console)
    if found.run.json is not None:
        content = {"command": ["lowtide", "train", *found.words], **comparison.to_json()}
        try:
            Path(found.run.json).write_text(json.dumps(content, indent=2) + "\n")
        except OSError as error:
            got = f"{found.run.json} ({error})"
            raise ArgumentValueError(message("--json", "a file that can be written", got)) from error
    return comparison


def _interleaved(words: list[str], turn: Path, block: int, *, quiet: bool) -> tuple[RunResult, RunResult]:
    """Run the stock and the patched model at the same time, block by block."""
    give_turn(turn, _STOCK)

    def side(name: str, other: str) -> RunResult:
        try:
            own = [*words, *(["--patch=false"] if name == _STOCK else [])]
            return _in_child(own, (str(turn), name, other, block), name, quiet=quiet)
        finally:
            end_turns(turn)

    with ThreadPoolExecutor() as pool:
        stock, patched = pool.submit(side, _STOCK, _PATCHED), pool.submit(side, _PATCHED, _STOCK)
    return stock.result(), patched.result()


def _in_child(words: list[str], turn: tuple[str, str, str, int] | None, label: str, *, quiet: bool) -> RunResult:
    """Run a side of the comparison and return what it measured."""
    ended = run_child(train_in_child, words, turn, label, capture=quiet)
    if ended.returncode != 0:
        raise CompareError(f"the {label} run failed: {_last_error(ended.stderr) or f'status {ended.returncode}'}")
    return RunResult(**{**ended.value, "losses": {int(step): loss for step, loss in ended.value["losses"].items()}})


def train_in_child(words: list[str], turn: tuple[str, str, str, int] | None, label: str) -> dict[str, Any]:
    """Train as one side of a comparison, whose `RunResult` this returns as JSON has it."""
    from lowtide.train.run import train

    callbacks = [] if turn is None else [Turns(Path(turn[0]), *turn[1:])]
    return asdict(train(words, label=label, callbacks=callbacks))


_RAISED = re.compile(r"[A-Za-z_][\w.]*(Error|Exception|OutOfMemory|Interrupt)\b")


def _last_error(text: str) -> str:
    """Return the error that a traceback ends with, all lines of it; the last line where there is none."""
    lines = text.strip().splitlines()
    starts = [number for number, line in enumerate(lines) if _RAISED.match(line)]
    return " ".join(lines[starts[-1] :] if starts else lines[-1:])


class Turns(TrainerCallback):  # type: ignore[misc]
    """Lets one of two processes train for a ``block`` of steps while the other waits.

    The file has the name of the process whose turn it is, ``own`` or ``other``; after `end_turns` both may train.
    """

    def __init__(self, file: Path, own: str, other: str, block: int) -> None:
        self._file, self._own, self._other, self._block = file, own, other, block
        self._done = 0

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Hand over the turn after a block, and wait for the next."""
        del state, control
        if self._done % self._block == 0:
            if self._done and not _ended(self._file).exists():
                if args.device.type == "cuda":
                    torch.cuda.empty_cache()  # the other one needs the memory
                give_turn(self._file, self._other)
            while self._file.read_text() != self._own and not _ended(self._file).exists():
                time.sleep(_POLL_SECONDS)
        self._done += 1


def give_turn(file: Path, name: str) -> None:
    """Write whose turn it is, whole at any moment."""
    aside = file.with_name(f"{file.name}.{os.getpid()}.{threading.get_ident()}")
    aside.write_text(name)
    aside.replace(file)


def end_turns(file: Path) -> None:
    """Let the other process train on: one has ended. It is a file of its own, which no turn overwrites."""
    _ended(file).touch()


def _ended(file: Path) -> Path:
    return file.with_name(f"{file.name}.ended")
