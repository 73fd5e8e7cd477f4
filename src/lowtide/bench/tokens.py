"""The benchmarks of per-token values: a table for each shape and each work, in which each value's error is a column."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from lowtide.bench.config import TokenBenchConfig
from lowtide.bench.harness import Benchmark, Column, Peer, Row, Run, Table, release
from lowtide.bench.task import NAME, SHARE, Bench, Task

Tasks = Callable[[tuple[str, ...], Any, torch.dtype, torch.device, int], Iterator[Task]]
"""Makes the tasks of the works' names, a shape, dtype, device and seed."""
_TITLES = {"dx": "dX err", "dw": "dW err", "mean_logit": "mean err", "sum_sq_prob": "sumsq err"}


def _error(name: str, row: Row) -> float | None:
    found: float | None = row.get("errors", {}).get(name)
    return found


def table_of(task: Task) -> Table:
    """Return how a task's rows are printed: with a column for each error."""
    names = (*task.names, "dx", "dw") if task.head.setting.grad else task.names
    columns = [Column(_TITLES.get(name, f"{name} err"), partial(_error, name), "14.1e") for name in names]
    return Table((NAME,), (*SHARE, *columns))


def limits_of(bench: Bench) -> dict[str, Any]:
    """Return what a table of the result has before a peer runs."""
    return {
        "work": bench.problem.setting.name,
        "limit_ms": bench.limit_ms,
        "limit_rows": bench.best_rows,
        "limit_ms_by_rows": {str(rows): ms for rows, ms in bench.limit.items()},
        "tflops": bench.tflops,
        "gradients_mib": bench.gradients_mib,
    }


def token_benchmark(tasks: Tasks, peers: Mapping[str, Peer]) -> Benchmark[Any]:
    """Return the benchmark of these tasks by these peers."""

    def measure(run: Run[TokenBenchConfig]) -> None:
        config, shapes = run.config, run.result.setdefault("shapes", [])
        run.result |= {"warm": config.warm, "reps": config.reps}
        for shape in config.shapes:
            tables: list[dict[str, Any]] = []
            shapes.append({**vars(shape), "dtype": run.dtype_name, "tables": tables})
            for task in tasks(config.works, shape, run.dtype, run.device, config.seed):
                bench, table = Bench(task, error=config.error, warm=config.warm, reps=config.reps), table_of(task)
                rows: list[Row] = []
                tables.append({**limits_of(bench), "rows": rows})
                run.say(bench.title() + table.header)
                for name in config.peers:
                    run.add(bench.measure(peers[name]), rows, table)
                del bench, task  # its truth, before the next is computed
            release(run.device)

    return Benchmark(measure=measure, peers=peers)
