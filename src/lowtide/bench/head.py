"""The head's benchmark: for each shape a table of peers, a sweep of memory, other settings, other numbers of tokens."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from lowtide.bench.config import HeadBenchConfig
from lowtide.bench.peers import LIGER, LOWTIDE, LOWTIDE_AT_LIGERS, PEERS, lowtide_peer
from lowtide.bench.pictures import draw, require_matplotlib
from lowtide.bench.problem import PLAIN, SETTINGS, Problem, make_problem
from lowtide.bench.report import header, line, ratio
from lowtide.bench.results import begin
from lowtide.bench.rows import Bench, Row, ShapeResult, plan_of, release
from lowtide.bench.shapes import Shape
from lowtide.errors import UnsupportedError, message
from lowtide.head.planner import MIB

SWEEP_POINTS = 7
SETTING_PEERS = (LOWTIDE, "compile", "liger-large", "cce-exact")


def run(config: HeadBenchConfig, say: Callable[[str], object]) -> list[ShapeResult]:
    """Measure, tell each line as it is known, and write the result after each row.

    Args:
        config: what.
        say: gets the text, a line or more at a time.

    Returns:
        list: A `ShapeResult` for each shape.

    Raises:
        UnsupportedError: there is no such device, or pictures are asked for without matplotlib.
        ArgumentValueError: the folder for the results cannot be written.
    """
    device = chosen_device(config.device)
    packages = (peer.package for peer in PEERS.values())
    files, about = begin(config.output, "head", config.command(), device, packages)
    pictures = config.sweep or bool(config.tokens)
    if pictures:
        require_matplotlib("sweep and tokens")
    results: list[ShapeResult] = []
    told = {**about, "warm": config.warm, "reps": config.reps}

    def save() -> None:
        files.write_json({**told, "shapes": [result.to_json() for result in results]})

    each = _Run(config=config, dtype=chosen_dtype(config.dtype, device), device=device, say=say, save=save)
    for shape in config.shapes:
        results.append(ShapeResult(shape=shape, dtype=str(each.dtype).removeprefix("torch.")))
        each.measure(results[-1])
        if pictures:
            for file in draw(results[-1], files, about["machine"]):
                say(f"drawn: {file}\n")
    say(f"written: {files.json}\n")
    return results


@dataclass(frozen=True, kw_only=True)
class _Run:
    """What is the same for every shape of a run; ``save`` writes what is known so far."""

    config: HeadBenchConfig
    dtype: torch.dtype
    device: torch.device
    say: Callable[[str], object]
    save: Callable[[], None]

    def measure(self, result: ShapeResult) -> None:
        """Fill a shape's result with all that is asked for."""
        config = self.config
        if config.table or config.sweep or config.settings:
            bench = self.bench(result.shape, error=config.error)
            result.gradients_mib = bench.gradients_mib
            if config.table or config.sweep:
                self.add_limit(result, bench)
            if config.table:
                self.add_table(result, bench)
            if config.sweep:
                self.add_sweep(result, bench)
            if config.settings:
                self.add_settings(result, bench)
            del bench
        if config.tokens:
            self.add_tokens(result)
        release(self.device)

    def bench(self, shape: Shape, *, error: bool) -> Bench:
        """Return the bench of a shape's random inputs."""
        release(self.device)
        problem = make_problem(shape, self.dtype, self.device, seed=self.config.seed)
        return Bench.of(problem, error=error, warm=self.config.warm, reps=self.config.reps)

    def add_table(self, result: ShapeResult, bench: Bench) -> None:
        """Measure the peers."""
        for name in self.config.peers:
            self.add_row(result.table, bench.measure(PEERS[name]))
        self.say(ratio(result.row(LOWTIDE_AT_LIGERS), result.row(LIGER)))

    def add_sweep(self, result: ShapeResult, bench: Bench) -> None:
        """Measure lowtide with each workspace; of those that come to the same plan, the smallest alone."""
        seen: list[object] = []
        for value in sorted(self.config.sweep_mib) or default_sweep(result.shape, self.dtype):
            peer = lowtide_peer(f"{LOWTIDE} {value:g} MiB", "with this workspace", partial(_constant, value))
            plan = plan_of(peer, bench.problem)
            key = (plan.backend, plan.gradient, plan.accumulate, plan.chunk_rows)
            if key not in seen:
                row = bench.measure(peer)
                row.workspace_mib = value
                self.add_row(result.sweep, row)
            seen.append(key)

    def add_settings(self, result: ShapeResult, bench: Bench) -> None:
        """Measure other uses of the loss, each beside its own limit."""
        chosen = [name for name in self.config.peers if self.config.only or name in SETTING_PEERS]
        for setting in SETTINGS:
            if setting.wide and self.dtype == torch.float32:
                continue  # nothing is cast
            other = bench.in_setting(setting)
            self.add_limit(result, other)
            for name in chosen:
                # an option of lowtide's is no other setting to anyone else
                if setting.accumulate == PLAIN.accumulate or PEERS[name].options:
                    self.add_row(result.settings, other.measure(PEERS[name]))

    def add_tokens(self, result: ShapeResult) -> None:
        """Measure other numbers of tokens."""
        for N in self.config.token_counts:
            bench = self.bench(replace(result.shape, N=N), error=False)
            self.add_limit(result, bench)
            for name in self.config.peers:
                if name == LOWTIDE or self.config.only:
                    self.add_row(result.tokens, bench.measure(PEERS[name]))
            del bench

    def add_limit(self, result: ShapeResult, bench: Bench) -> None:
        """Keep and tell a limit."""
        result.limits.append(
            {
                "setting": bench.problem.setting.name,
                "tokens": bench.problem.shape.N,
                "ms": bench.limit_ms,
                "rows": bench.best_rows,
                "ms_by_rows": {str(rows): ms for rows, ms in bench.limit.items()},
                "tflops": bench.tflops,
            }
        )
        self.say(header(bench))

    def add_row(self, rows: list[Row], row: Row) -> None:
        """Keep, tell and write a row."""
        rows.append(row)
        self.say(line(row))
        self.save()


def _constant(value: float, problem: Problem) -> float:
    del problem
    return value


def default_sweep(shape: Shape, dtype: torch.dtype) -> tuple[float, ...]:
    """Return powers of two in MiB: from all logits of the shape down to a 64th of them."""
    top = math.ceil(math.log2(shape.N * shape.V * dtype.itemsize / MIB))
    return tuple(2.0**k for k in range(top - SWEEP_POINTS + 1, top + 1))


def chosen_device(name: str) -> torch.device:
    """Return the device of that name; auto: a GPU if there is one.

    Raises:
        UnsupportedError: there is no such device.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise UnsupportedError(message("device", "a GPU that PyTorch can use", "none", "Take --device cpu."))
    return torch.device(name if name != "auto" else "cuda" if torch.cuda.is_available() else "cpu")


def chosen_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the dtype of that name; auto: bfloat16 on a GPU, float32 on a CPU."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}[name]
