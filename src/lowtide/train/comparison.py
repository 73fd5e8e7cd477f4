"""The same run with lowtide and without, interleaved block by block, each in a process of its own."""

from __future__ import annotations

import json
import logging
import os
import signal
import statistics
import tempfile
import traceback
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from lowtide.errors import ArgumentValueError, LowtideError, message
from lowtide.measure.machine import describe_machine
from lowtide.measure.output_file import check_output_file
from lowtide.measure.text import table
from lowtide.measure.units import mib
from lowtide.train.arguments import Arguments, parse
from lowtide.train.meter import WARM_STEPS, RunResult
from lowtide.train.ranks import launched_ranks, quiet
from lowtide.train.run import say, train

_BLOCKS = 50  # of a run: enough for a median, and long enough that a turn costs nothing
_SHORTEST = 5  # steps of one
_SAID_BLOCKS = 5  # between two lines about the progress
_EARLY_STEPS = 20
_STEP, _RATE = "step, ms (median)", "tokens/s"
# Up to which a difference of losses is rounding: in the first steps, and later, as training feeds each step's rounding
# back into the next. In float32 the small run measured 2e-6 up to step 50, 6e-5 at 300, 2e-4 at 500; a wrong gradient
# shows early. In 16 bits the stock model itself is up to 5e-3 away from float32.
_FLOAT32, _NARROW = (2e-5, 2e-3), (2e-2, 1e-1)


class CompareError(LowtideError, RuntimeError):
    """The process of one of the two runs was killed."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two runs of the same model, seed and data, interleaved block by block.

    Attributes:
        stock: the stock model; fine-tuning with TRL's own head.
        patched: the same after `lowtide.patch`.
        block: steps of a block.
        bounds: up to which a difference of their losses is rounding, in the first 20 steps and later.
    """

    stock: RunResult
    patched: RunResult
    block: int
    bounds: tuple[float, float] = _FLOAT32

    @property
    def step_ratio(self) -> float:
        """The median over paired blocks of the patched run's time over the stock run's; warm-up steps left out."""
        steps = list(zip(self.stock.step_seconds[WARM_STEPS:], self.patched.step_seconds[WARM_STEPS:], strict=False))
        blocks = [steps[i : i + self.block] for i in range(0, len(steps), self.block)]
        full = [block for block in blocks if len(block) == self.block] or blocks
        ratios = [sum(b for _, b in block) / sum(a for a, _ in block) for block in full]
        return statistics.median(ratios) if ratios else float("nan")

    @property
    def differences(self) -> tuple[float, float]:
        """The largest difference of the losses in the first 20 steps, and later.

        Infinite where one run lacks a step, or has a NaN.
        """
        a, b, nan, largest = self.stock.losses, self.patched.losses, float("nan"), [0.0, 0.0]
        for step in a.keys() | b.keys():
            apart = abs(a.get(step, nan) - b.get(step, nan))
            late = int(step > _EARLY_STEPS)
            largest[late] = max(largest[late], apart if apart == apart else float("inf"))
        return largest[0], largest[1]

    @property
    def equal(self) -> bool:
        """Whether the loss curves agree to rounding."""
        return bool(self.stock.losses) and all(d <= most for d, most in zip(self.differences, self.bounds, strict=True))

    def figures(self, run: RunResult) -> dict[str, float | None]:
        """Return what is shown of one of the runs, by name."""
        kind = "GPU" if run.on_gpu else "resident"
        above = None if run.warm_bytes is None else mib(run.peak_bytes - run.warm_bytes)
        return {
            "loss, first step": run.first_loss,
            "loss, last steps": run.last_loss,
            "held-out loss": run.held_out[-1] if run.held_out else None,
            f"peak {kind} MiB above warm model": above,
            f"peak {kind} MiB": mib(run.peak_bytes),
            _STEP: run.median_step * 1e3,
            _RATE: run.tokens_per_second,
        }

    def to_json(self) -> dict[str, Any]:
        """Return the numbers, with the hardware and the versions they were taken on."""
        return {
            "machine": {**describe_machine(), "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY")},
            "equal": self.equal,
            "loss_differences": self.differences,
            "bounds": self.bounds,
            "step_ratio": self.step_ratio,
            "steps_per_block": self.block,
            "calls_fused": self.patched.calls_fused,
            "calls_materialised": self.patched.calls_materialised,
            "stock": {**self.figures(self.stock), "losses": self.stock.losses},
            "lowtide": {**self.figures(self.patched), "losses": self.patched.losses},
        }

    def __str__(self) -> str:
        patched, ratios = self.figures(self.patched), {_STEP: self.step_ratio, _RATE: 1 / self.step_ratio}
        rows = [["same model, seed and data", "stock", "lowtide", "lowtide / stock"]]
        for name, value in self.figures(self.stock).items():
            other, form = patched[name], ".4f" if "loss" in name else ",.0f"
            if "peak" in name and value and other:
                ratios[name] = other / value
            cells = ["-" if figure is None else format(figure, form) for figure in (value, other)]
            rows.append([name, *cells, f"{ratios[name]:.2f}" if name in ratios else ""])
        said = [f"{d:.0e} (rounding: up to {most:.0e})" for d, most in zip(self.differences, self.bounds, strict=True)]
        return f"""
{table(rows)}

losses of {len(self.stock.losses)} steps: {"equal to rounding" if self.equal else "NOT EQUAL"}; the largest \
difference is {said[0]} in the first {_EARLY_STEPS} steps and {said[1]} later
losses without logits: {self.patched.calls_fused}, with: {self.patched.calls_materialised}
times: the runs took turns every {self.block} steps; the ratio is the median over pairs of blocks
"""


def compare(found: Arguments) -> Comparison:
    """Train the same model on the same data with lowtide and without, in two interleaved processes, and compare.

    Args:
        found: the options of a run.

    Returns:
        Comparison: both runs' losses, peaks and step times; print it for the table.

    Raises:
        ArgumentValueError: the options or the data cannot be used, or the figures' file not be written.
        CompareError: the process of one of the runs was killed; its other errors are those of `train`.
    """
    if launched_ranks() > 1:
        raise ArgumentValueError(message("--compare", "one process", "a distributed launch", "Start it by itself."))
    if not found.run.patch or found.run.memory_budget or found.training.resume_from_checkpoint:
        expected = "no --no-patch, --memory-budget or --resume_from_checkpoint beside it"
        raise ArgumentValueError(message("--compare", expected, "one of them"))
    check_output_file("json", found.run.json)
    quiet(bars=False)  # of the two processes as well
    block = max(_SHORTEST, max(found.training.max_steps, 0) // _BLOCKS)
    with tempfile.TemporaryDirectory(prefix="lowtide-compare-") as folder:
        words = [*found.words, f"--output_dir={folder}", "--save_strategy=no", "--disable_tqdm=true"]
        words += ["--logging_strategy=steps", "--logging_steps=1"]
        if found.fine_tunes:
            words.append("--lora_dropout=0")  # fused MLPs draw other random numbers than stock ones
        stock, patched = _interleaved(words, block)
    narrow = found.gemm_dtype != "float32"
    comparison = Comparison(stock=stock, patched=patched, block=block, bounds=_NARROW if narrow else _FLOAT32)
    if found.run.json is not None:
        content = {"command": ["lowtide", "train", *found.words], **comparison.to_json()}
        Path(found.run.json).write_text(json.dumps(content, indent=2) + "\n")
    return comparison


def _interleaved(words: list[str], block: int) -> list[RunResult]:
    """Run the stock and the patched model by turns, block by block; the first error of either ends both."""
    context, sides, pipes, results = get_context("spawn"), [], list[Any](), dict[Any, RunResult]()
    for patched in (False, True):
        ours, theirs = context.Pipe()
        sides.append(context.Process(target=_train_side, args=(theirs, words, block, patched)))
        sides[-1].start()
        theirs.close()  # here: so that the end of the process is that of the pipe
        pipes.append(ours)
    pipe: Any
    next_of, blocks = {pipes[0]: pipes[1], pipes[1]: pipes[0]}, 0
    try:
        pipes[0].send("your turn")  # the stock model begins
        while len(results) < len(sides):
            for pipe in wait([each for each in pipes if each not in results]):
                outcome = pipe.recv()
                if isinstance(outcome, BaseException):
                    raise outcome
                if isinstance(outcome, RunResult):
                    results[pipe] = outcome
                elif pipe is pipes[1] and (blocks := blocks + 1) % _SAID_BLOCKS == 0:
                    say(outcome)
                turn = pipe if next_of[pipe] in results else next_of[pipe]
                if turn not in results:
                    turn.send("your turn")
    except (EOFError, BrokenPipeError, ConnectionResetError) as error:
        raise CompareError("the process of one of the runs was killed; is there memory for both?") from error
    finally:
        for side in sides:
            side.terminate()
            side.join()
    return [results[pipe] for pipe in pipes]


def _train_side(pipe: Any, words: list[str], block: int, patched: bool) -> None:
    """Train as one of the two sides, and send what was measured, or the error."""
    logging.disable(logging.WARNING)
    quiet(bars=False)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C reaches the whole group: end without a traceback
    try:
        found = parse(words if patched else [*words, "--patch=false"])
        pipe.send(train(found, saves=False, callbacks=[Turns(pipe, block)]))
    except Exception as error:
        if not isinstance(error, LowtideError):
            error.add_note(traceback.format_exc())  # which is not sent
        pipe.send(error)


class Turns(TrainerCallback):  # type: ignore[misc]
    """Waits for this process's turn before each ``block`` of steps, and tells through ``pipe`` when one is done."""

    def __init__(self, pipe: Any, block: int) -> None:
        self._pipe, self._block = pipe, block

    def on_step_begin(self, args: Any, state: Any, _control: Any, **_: Any) -> None:
        """Hand over the turn after a block, and wait for the next."""
        step = state.global_step
        if step % self._block:
            return
        if step:
            if args.device.type == "cuda":
                torch.cuda.empty_cache()  # the other one needs the memory
            losses = [entry["loss"] for entry in state.log_history if "loss" in entry]  # evaluations are there too
            self._pipe.send(f"step {step}/{state.max_steps}, loss {losses[-1]:.3f}")
        try:
            self._pipe.recv()
        except (EOFError, ConnectionError):
            raise SystemExit(1) from None  # nobody waits for the figures any more
