"""The head's benchmark: for each shape a table of peers, a sweep of memory, other settings, other numbers of tokens."""

from __future__ import annotations

import datetime as dt
import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from lowtide.bench.config import HeadBenchConfig
from lowtide.bench.peers import LIGER, LOWTIDE, LOWTIDE_AT_LIGERS, PEERS, lowtide_peer
from lowtide.bench.problem import PLAIN, SETTINGS, Problem, make_problem
from lowtide.bench.report import header, line, ratio
from lowtide.bench.results import Files
from lowtide.bench.rows import Bench, Row, plan_of, release
from lowtide.bench.shapes import Shape
from lowtide.errors import UnsupportedError, message
from lowtide.head.plan import MIB
from lowtide.measure import describe_machine, source_commit

SWEEP_POINTS = 7
SETTING_PEERS = (LOWTIDE, "compile", "liger-large", "cce-exact")


@dataclass(kw_only=True)
class ShapeResult:
    """Everything that was measured of one shape.

    Attributes:
        shape: which.
        dtype: of the products' operands.
        limits: by setting (and number of tokens, where it is not the shape's): milliseconds by rows of a chunk, the
            best of them, and its rate.
        gradients_mib: size of the two gradients, which is in every peak.
        table: the peers; ``sweep``, ``settings`` and ``tokens`` what the options of that name ask for.
    """

    shape: Shape
    dtype: str
    limits: list[dict[str, Any]] = field(default_factory=list)
    gradients_mib: float = 0.0
    table: list[Row] = field(default_factory=list)
    sweep: list[Row] = field(default_factory=list)
    settings: list[Row] = field(default_factory=list)
    tokens: list[Row] = field(default_factory=list)

    @property
    def rows(self) -> list[Row]:
        """All rows."""
        return [*self.table, *self.sweep, *self.settings, *self.tokens]

    def to_json(self) -> dict[str, Any]:
        """Return the numbers."""
        shape = self.shape
        told: dict[str, Any] = {"name": shape.name, "N": shape.N, "D": shape.D, "V": shape.V, "dtype": self.dtype}
        told |= {"limits": self.limits, "gradients_mib": self.gradients_mib}
        parts = {"table": self.table, "sweep": self.sweep, "settings": self.settings, "tokens": self.tokens}
        return told | {name: [row.to_json() for row in rows] for name, rows in parts.items() if rows}

    def row(self, name: str) -> Row | None:
        """Return a peer's row of the table."""
        return next((row for row in self.table if row.name == name), None)


def run(config: HeadBenchConfig, say: Callable[[str], object]) -> list[ShapeResult]:
    """Measure, tell each line as it is known, and write the result after each shape.

    Args:
        config: what.
        say: gets the text, a line or more at a time.

    Returns:
        list: A `ShapeResult` for each shape.

    Raises:
        UnsupportedError: there is no such device, or pictures are asked for without matplotlib.
        ArgumentValueError: the folder for the results cannot be written.
    """
    device = _device(config.device)
    dtype = _dtype(config.dtype, device)
    machine = describe_machine(sorted({peer.package for peer in PEERS.values()} - {""}))
    today = dt.datetime.now(tz=dt.UTC).date().isoformat()
    files = Files.prepare(config.output, f"{today}-head", machine["gpu"] if device.type == "cuda" else None)
    pictures = config.sweep or bool(config.tokens)
    if pictures:
        _require_matplotlib()
    told: dict[str, Any] = {
        "command": config.command(),
        "date": today,
        "commit": source_commit(),
        "machine": machine,
        "warm": config.warm,
        "reps": config.reps,
        "shapes": [],
    }
    results = []
    for shape in config.shapes:
        result = ShapeResult(shape=shape, dtype=str(dtype).removeprefix("torch."))
        _measure(result, config, dtype, device, say)
        results.append(result)
        told["shapes"].append(result.to_json())
        files.write_json(told)
        if pictures:
            from lowtide.bench.pictures import draw

            for file in draw(result, files, machine):
                say(f"drawn: {file}\n")
    say(f"written: {files.json}\n")
    return results


def _measure(
    result: ShapeResult, config: HeadBenchConfig, dtype: torch.dtype, device: torch.device, say: Callable[[str], object]
) -> None:
    options = {"warm": config.warm, "reps": config.reps}
    shape = result.shape
    if config.table or config.sweep or config.settings:
        problem = make_problem(shape, dtype, device, seed=config.seed)
        bench = Bench.of(problem, error=config.error, **options)
        result.gradients_mib = bench.gradients_mib
        _add_limit(result, bench, say)
        if config.table:
            for name in config.peers:
                result.table.append(_say(bench.measure(PEERS[name]), say))
            say(ratio(result.row(LOWTIDE_AT_LIGERS), result.row(LIGER)))
        if config.sweep:
            _sweep(result, bench, config.sweep_mib, say)
        if config.settings:
            chosen = [name for name in config.peers if config.only or name in SETTING_PEERS]
            for setting in SETTINGS:
                if setting.wide and dtype == torch.float32:
                    continue  # nothing is cast
                other = bench.in_setting(setting)
                _add_limit(result, other, say)
                # its own option is all that this setting changes, so it says nothing of others
                own = [name for name in chosen if setting.accumulate == PLAIN.accumulate or PEERS[name].options]
                result.settings += [_say(other.measure(PEERS[name]), say) for name in own]
        del problem, bench
        release(device)
    peers = [PEERS[name] for name in config.peers if name == LOWTIDE or config.only]
    for N in config.token_counts:
        release(device)
        problem = make_problem(replace(shape, N=N), dtype, device, seed=config.seed)
        bench = Bench.of(problem, error=False, **options)
        _add_limit(result, bench, say)
        result.tokens += [_say(bench.measure(peer), say) for peer in peers]
        del problem, bench
    release(device)


def _sweep(result: ShapeResult, bench: Bench, values: tuple[float, ...], say: Callable[[str], object]) -> None:
    """Measure lowtide with each workspace; of those that come to the same plan, the smallest alone."""
    seen: list[object] = []
    for value in sorted(values) or default_sweep(result.shape, bench.problem.dtype):
        peer = lowtide_peer(f"{LOWTIDE} {value:g} MiB", "with this workspace", partial(_constant, value))
        plan = plan_of(peer, bench.problem)
        key = tuple(plan[name] for name in ("backend", "gradient", "accumulate", "chunk_rows"))
        if key not in seen:
            row = bench.measure(peer)
            row.workspace_mib = value
            result.sweep.append(_say(row, say))
        seen.append(key)


def _constant(value: float, problem: Problem) -> float:
    del problem
    return value


def default_sweep(shape: Shape, dtype: torch.dtype) -> tuple[float, ...]:
    """Return powers of two in MiB: from all logits of the shape down to a 64th of them."""
    top = math.ceil(math.log2(shape.N * shape.V * dtype.itemsize / MIB))
    return tuple(2.0**k for k in range(top - SWEEP_POINTS + 1, top + 1))


def _add_limit(result: ShapeResult, bench: Bench, say: Callable[[str], object]) -> None:
    problem = bench.problem
    result.limits.append(
        {
            "setting": problem.setting.name,
            "tokens": problem.shape.N,
            "ms": bench.limit_ms,
            "rows": bench.best_rows,
            "ms_by_rows": {str(rows): ms for rows, ms in bench.limit.items()},
            "tflops": bench.tflops,
        }
    )
    say(header(bench))


def _say(row: Row, say: Callable[[str], object]) -> Row:
    say(line(row))
    return row


def _device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise UnsupportedError(message("device", "a GPU that PyTorch can use", "none", "Take --device cpu."))
    return torch.device(name if name != "auto" else "cuda" if torch.cuda.is_available() else "cpu")


def _dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}[name]


def _require_matplotlib() -> None:
    if importlib.util.find_spec("matplotlib") is None:
        hint = "Install lowtide[plot]."
        raise UnsupportedError(message("sweep and tokens", "matplotlib, for the pictures", "none", hint))
