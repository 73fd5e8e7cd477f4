"""Forward and backward of the loss on the CPU, interleaved with stock PyTorch's: a process for each setting of threads.

    python benchmarks/cpu_loss.py
    python benchmarks/cpu_loss.py --threads 1 2 8 --policy PASSIVE ACTIVE --dtype bfloat16 --shape 2048,256,8192

A row has the milliseconds of the fastest calls, their ratio, and the median ratio of consecutive calls. The step of a
training run is `lowtide train --compare`.
"""

from __future__ import annotations

import statistics
import sys
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F

from lowtide import linear_cross_entropy
from lowtide.bench.case import make_case
from lowtide.bench.harness import Row, Run, Table
from lowtide.bench.settings import Shape, ShapeSettings, setting, shape_setting
from lowtide.measure.child import run_child
from lowtide.measure.timing import time_side_by_side

SHAPES = {"small": (2048, 256, 8192), "medium": (1024, 1024, 32000), "large": (256, 2048, 128256)}
TABLE = Table(
    {
        "name": "<18", "threads": "9", "policy": ">9", "stock_ms": "10.1f", "lowtide_ms": "12.1f", "ratio": "8.3f",
        "median_ratio": "14.3f",
    },
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class CpuLossConfig(ShapeSettings):
    benchmark = "loss"
    shape: tuple[str, ...] = shape_setting("all", shapes=SHAPES)
    threads: tuple[int, ...] = setting((1, 2, 8), "OMP_NUM_THREADS", least=1)
    policy: tuple[str, ...] = setting(("PASSIVE", "ACTIVE"), "OMP_WAIT_POLICY", names=("PASSIVE", "ACTIVE"))


def row_of(shape: dict[str, Any], dtype: str, warm: int, reps: int) -> Row:
    """Return the times of one setting in this process; `run_child` calls it."""
    case = make_case(Shape(**shape), getattr(torch, dtype), "cpu")

    def stock(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(F.linear(x, w).float(), y)

    losses = {"stock": lambda: case.step(stock), "lowtide": lambda: case.step(linear_cross_entropy)}
    stocks, ours = (timing.times_ms for timing in time_side_by_side(losses, "cpu", warm=warm, reps=reps).values())
    row = {"stock_ms": min(stocks), "lowtide_ms": min(ours), "ratio": min(ours) / min(stocks)}
    return row | {"median_ratio": statistics.median(b / a for a, b in zip(stocks, ours, strict=True))}


def measure(run: Run) -> None:
    config, rows = run.config, run.result.setdefault("rows", [])
    run.say(f"{run.dtype_name}\n{TABLE.header}")
    for shape, threads, policy in product(config.shapes, config.threads, config.policy):
        env = {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": policy}
        row = run_child(row_of, vars(shape), run.dtype_name, config.warm, config.reps, env=env)
        run.add({**vars(shape), "threads": threads, "policy": policy, **row}, rows, TABLE)


if __name__ == "__main__":
    import cpu_loss  # children import `row_of` by this name
    from script import main

    sys.exit(main(cpu_loss.measure, cpu_loss.CpuLossConfig, __doc__))
