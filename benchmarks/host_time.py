"""Measure the host's time of a short training step, which a GPU waits for, beside stock models and Liger's.

    python benchmarks/host_time.py
    python benchmarks/host_time.py --way stock lowtide --processes 1 --model lowtide-small --device cpu

Process time of a step (all threads, autograd's too), forward, backward and fused AdamW, one sequence of a few tokens. A
process has a model of each way and runs a few steps of each in turn, for several rounds; Liger, which changes classes,
has a process of its own after it. A row has the median over the processes of each one's median over the rounds, and of
its ratio to the first way's.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from lowtide.bench.harness import Row, Run, Table, reason_in
from lowtide.bench.models import build_model, make_optimizer
from lowtide.bench.settings import RoundSettings, setting
from lowtide.bench.variant import LIGER, Variant
from lowtide.measure.child import run_child
from lowtide.train.shapes import model_config

TABLE = Table({"name": "<24", "ms": "9.2f", "of_first": "9.3f", "lowest": "8.3f", "highest": "8.3f"})


@dataclass(frozen=True, kw_only=True)
class HostTimeConfig(RoundSettings):
    benchmark, packages = "host-time", ("liger-kernel",)
    way: tuple[str, ...] = setting(
        ("stock", "lowtide", "compile", "lowtide-compile", "liger"), "implementations", metavar="WAY"
    )
    model: str = setting("qwen3-0.6b", "its shape: a built-in name or a config.json; random weights", metavar="NAME")
    tokens: int = setting(256, "of the sequence", least=2)
    processes: int = setting(5, "one after the other", least=1)
    steps: int = setting(6, "of a way in a round", least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        for way in self.way:
            Variant.named(way, "all")


def rounds_of(ways: list[str], settings: dict[str, Any]) -> dict[str, Row]:
    """Return the milliseconds of a step of each way, round by round, or why it failed; `run_child` calls it."""
    config, rows = HostTimeConfig(**settings), {way: Row() for way in ways}
    device, steps, times = torch.device(config.device), dict[str, Callable[[], None]](), dict[str, list[float]]()
    for way, row in rows.items():
        with reason_in(row):
            steps[way] = step_of(way, config, device)
            steps[way]()
    for _ in range(config.warm + config.reps):
        for way, step in steps.items():
            if device.type == "cuda":
                torch.cuda.synchronize()
            began = time.process_time()
            for _ in range(config.steps):
                step()
            times.setdefault(way, []).append((time.process_time() - began) / config.steps * 1e3)
    return {way: row or {"ms": times[way][config.warm :]} for way, row in rows.items()}


def step_of(way: str, config: HostTimeConfig, device: torch.device) -> Callable[[], None]:
    """Return a training step of a way, whose layers save everything."""
    model = build_model(Variant.named(way, "all"), model_config(config.model), getattr(torch, config.dtype), device)
    optimizer = make_optimizer("adamw", list(model.parameters()))
    ids = torch.randint(model.config.get_text_config().vocab_size, (1, config.tokens), device=device)

    def step() -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure(run: Run) -> None:
    """Measure all ways in each process, then write a row for each."""
    config, rows = run.config, run.result.setdefault("rows", [])
    run.say(f"\n{config.model}, {config.tokens} tokens, {run.dtype_name}\n{TABLE.header}")
    apart = [way for way in config.way if Variant.named(way, "all").impl == LIGER]
    groups = [group for group in ([way for way in config.way if way not in apart], apart) if group]
    found: dict[str, list[Row]] = {way: [] for way in config.way}
    for _ in range(config.processes):
        for group in groups:
            rows_of = run_child(rounds_of, group, run.settings)
            for way in group:
                found[way].append(rows_of.get(way, rows_of))
    for way, each in found.items():
        row: Row = {"name": way, "processes": each}
        failed = next((one for one in each + found[config.way[0]] if "failed" in one), None)
        if failed is None:
            medians, firsts = ([statistics.median(one["ms"]) for one in of] for of in (each, found[config.way[0]]))
            ratios = [ms / first for ms, first in zip(medians, firsts, strict=True)]
            row |= {"ms": statistics.median(medians), "of_first": statistics.median(ratios)}
            row |= {"lowest": min(ratios), "highest": max(ratios)}
        run.add(row | (failed or {}), rows, TABLE)


if __name__ == "__main__":
    import host_time  # children import `rounds_of` by this name
    from script import main

    sys.exit(main(host_time.measure, host_time.HostTimeConfig, __doc__))
