"""A run of ``lowtide bench stats`` or ``lowtide bench divergence``: a table for each shape and each work."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from lowtide.bench.config import DivergenceBenchConfig, StatsBenchConfig, TokenBenchConfig
from lowtide.bench.divergence import divergence_tasks
from lowtide.bench.head import chosen_device, chosen_dtype
from lowtide.bench.results import begin
from lowtide.bench.rows import release
from lowtide.bench.stats import stats_tasks
from lowtide.bench.tokens import Task, TokenBench, TokenPeer, TokenRow, header, line

Say = Callable[[str], object]
Tasks = Callable[[tuple[str, ...], Any, torch.dtype, torch.device, int], Iterator[Task]]


def run_stats(config: StatsBenchConfig, say: Say) -> list[TokenRow]:
    """Measure log-probabilities and entropies: see `run`."""
    return run(config, stats_tasks, say)


def run_divergence(config: DivergenceBenchConfig, say: Say) -> list[TokenRow]:
    """Measure divergences: see `run`."""
    return run(config, divergence_tasks, say)


def run(config: TokenBenchConfig, tasks: Tasks, say: Say) -> list[TokenRow]:
    """Measure, tell each line as it is known, and write the result after each row.

    Args:
        config: what.
        tasks: makes the tables' tasks of the works' names, a shape, dtype, device and seed.
        say: gets the text, a line or more at a time.

    Returns:
        list: All rows.

    Raises:
        UnsupportedError: there is no such device.
        ArgumentValueError: the folder for the results cannot be written.
    """
    device = chosen_device(config.device)
    dtype = chosen_dtype(config.dtype, device)
    peers: Mapping[str, TokenPeer] = config.known_peers
    packages = (peer.package for peer in peers.values())
    files, about = begin(config.output, config.benchmark, config.command(), device, packages)
    shapes: list[dict[str, Any]] = []
    told = {**about, "warm": config.warm, "reps": config.reps, "shapes": shapes}
    rows: list[TokenRow] = []
    for shape in config.shapes:
        tables: list[dict[str, Any]] = []
        shapes.append({**vars(shape), "dtype": str(dtype).removeprefix("torch."), "tables": tables})
        for task in tasks(config.works, shape, dtype, device, config.seed):
            bench = TokenBench.of(task, error=config.error, warm=config.warm, reps=config.reps)
            table: list[dict[str, Any]] = []
            tables.append({**bench.to_json(), "rows": table})
            say(header(bench))
            for name in config.peers:
                rows.append(bench.measure(peers[name]))
                table.append(rows[-1].to_json())
                say(line(bench, rows[-1]))
                files.write_json(told)
            del bench, task  # its truth, before the next is computed
        release(device)
    say(f"written: {files.json}\n")
    return rows
