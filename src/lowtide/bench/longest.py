"""The benchmark of long context: tokens per second at one length, and the longest sequence that runs, by each way.

The search starts at the planner's limit, goes up or down in growing steps, and then halves the interval between a
length that ran and one that did not. Each attempt is a process. What should not fit into the host is skipped. Where the
rate is measured, lowtide's layers save what makes the step fastest; in the search, as little as they can.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from lowtide.bench import longest_way
from lowtide.bench.harness import Benchmark, Column, Row, Run, Table, own_failure
from lowtide.bench.longest_fit import OWN, Demand, Fit
from lowtide.bench.longest_way import ON_HOST, OUT_OF_HOST, OUT_OF_TIME, config_of
from lowtide.bench.train_config import LongestBenchConfig
from lowtide.measure.child import ALLOCATOR, run_child
from lowtide.measure.resident import available_bytes
from lowtide.measure.units import gib, parse_gib
from lowtide.memory.planner.at_hand import find_gpu
from lowtide.memory.planner.gpus import GPUS
from lowtide.memory.planner.shapes import read_shape
from lowtide.memory.policy_words import words_of

KEPT_FREE = 6 * 2**30  # of the host's memory, for Python, CUDA and the system, without --host
LEAST_FREE = 2**30  # an attempt is ended before less than that is left
UNKNOWN_BUILD = 60.0  # seconds of an attempt before its first step, before any was made
KILLED = -9  # by the system, as a rule for want of memory
TABLE = Table(
    (Column("", "way", "<16"), Column("T", "tokens", "9")),
    (
        Column("s", "seconds", "10.3f"), Column("tokens/s", "tokens_per_s", "10.0f"),
        Column("GPU GiB", "peak_gib", "9.2f"), Column("should", "gpu_gib_predicted", "8.2f"),
        Column("host GiB", "host_gib", "10.2f"), Column("should", "host_gib_predicted", "8.2f"),
        Column("  what is kept", lambda row: f"  {row['kept']}", ""),
    ),
    reason=lambda row: f"out of {row['out_of']}: {row['failed']}" if row.get("out_of") else row.get("failed"),
)  # fmt: skip


def measure(run: Run[LongestBenchConfig]) -> None:
    """Measure the rate of each way, and look for its longest sequence."""
    config, on_gpu = run.config, run.device.type == "cuda"
    shape = read_shape(config_of(config.model, config.layers))
    gpu = find_gpu(None) if on_gpu else GPUS["h100"]
    budget = gpu.default_budget_bytes if config.budget is None else parse_gib("budget", config.budget) * 2**30
    host = available_bytes() - KEPT_FREE if config.host is None else parse_gib("host", config.host) * 2**30
    fit = Fit(
        way=OWN, train=config.train, shape=shape, gpu=gpu, dtype=run.dtype,
        gpu_bytes=int(budget) if on_gpu else None, host_bytes=int(host), tile=config.tile,
    )  # fmt: skip
    run.result |= {"dtype": run.dtype_name, "config": config.recorded()}
    run.result |= {"budget_gib": None if fit.gpu_bytes is None else gib(fit.gpu_bytes), "host_gib": gib(host)}
    run.result |= {"ways": [], "rows": []}
    run.say(
        f"\n{config.model}, {fit.shape.layers} layers, {config.train}, {run.dtype_name}; host memory {gib(host):.1f}"
        f" GiB, {gib(fit.states):.1f} of it for parameters, gradients and optimizer\n{TABLE.header}"
    )

    def tell(row: Row) -> None:
        run.add(row, run.result["rows"], TABLE)

    for way in config.way:
        tries = Tries(config, replace(fit, way=way), run.settings, tell)
        end = time.monotonic() + config.seconds
        if config.tokens:
            demand = tries.fit.fastest(config.tokens)
            tries.once(config.tokens, demand, warm=config.warm, reps=config.reps, seconds=config.seconds)
        if config.search:
            run.result["ways"].append(search(tries, config, run.say, end))
        run.save()


@dataclass
class Tries:
    """The attempts of one way, each a process, and what they have shown of the time that one takes.

    Attributes:
        config: what was requested.
        fit: what should fit.
        settings: of the config, device and dtype chosen.
        tell: gets each row.
        build_s: seconds of an attempt before its first step.
        slower: seconds that a step takes over those predicted.
    """

    config: LongestBenchConfig
    fit: Fit
    settings: dict[str, Any]
    tell: Callable[[Row], object]
    build_s: float = UNKNOWN_BUILD
    slower: float = 1.0

    def seconds(self, T: int) -> float:
        """Return about how many seconds an attempt of one step takes."""
        return self.build_s + self.slower * self.fit.at(T).seconds

    def once(self, T: int, demand: Demand, *, warm: int, reps: int, seconds: float) -> Row:
        """Run a length in a process of at most so many seconds, and return its row.

        It has ``seconds``, or ``failed`` and, where memory or time ran out, ``out_of``.
        """
        config = self.config
        own = self.fit.way == OWN
        kept = words_of(demand.groups) if own else ""
        row: Row = {"way": self.fit.way, "train": config.train, "tokens": T, "warm": warm, "kept": kept}
        row |= {"gpu_gib_predicted": gib(demand.gpu), "host_gib_predicted": gib(demand.host)}
        row["seconds_predicted"] = demand.seconds
        if demand.host > self.fit.host_bytes:
            row |= {"out_of": ON_HOST, "failed": f"{gib(demand.host):.1f} GiB of host memory needed: not tried"}
            self.tell(row)
            return row
        for_layers = gib(max(self.fit.host_bytes - self.fit.states, 0))
        begun = time.monotonic()
        ended = run_child(
            longest_way.measure, self.fit.way, self.settings, T, kept, for_layers, warm, reps, LEAST_FREE, seconds,
            env=ALLOCATOR,
        )  # fmt: skip
        if ended.value is not None:
            row |= ended.value
        elif ended.returncode in (OUT_OF_HOST, KILLED):
            row |= {"out_of": ON_HOST, "failed": "ended when the host had no memory left"}
        elif ended.returncode == OUT_OF_TIME:
            row |= {"out_of": "time", "failed": f"ended after {seconds:.0f} s"}
        else:
            row["failed"] = f"the process ended with status {ended.returncode}: {_last_line(ended.stderr)}"
        if "seconds" in row:
            self.build_s = max(time.monotonic() - begun - (warm + reps) * row["seconds"], 0.0)
            self.slower = row["seconds"] / demand.seconds
        self.tell(row)
        return row


def search(tries: Tries, config: LongestBenchConfig, say: Callable[[str], object], end: float) -> dict[str, Any]:
    """Search for the longest sequence that runs until the clock is at ``end``.

    Returns:
        dict: ``longest`` tokens that ran (0: none), ``shortest_failed`` (None: none), ``predicted``, and why it ended.
    """
    step = config.step
    predicted = tries.fit.longest(step)
    at = max(step, (config.start or predicted) // step * step)
    low, high, leap = 0, None, max(step, at // 8 // step * step)
    why = f"within {step} tokens"
    while high is None or high - low > step:
        left = end - time.monotonic()
        if tries.seconds(at) > left:
            why = f"{at} tokens would take about {tries.seconds(at):.0f} s, of {max(left, 0):.0f} that are left"
            break
        row = tries.once(at, tries.fit.at(at), warm=0, reps=1, seconds=left)
        if "seconds" in row:
            low = at
        elif row.get("out_of") in (None, "time"):
            why = row["failed"]
            break
        else:
            high = at
        if high is None:
            at, leap = low + leap, 2 * leap
        elif low == 0 and high > step:  # down in growing steps, until one runs
            at, leap = max(step, high - leap), 2 * leap
        else:
            at = low + max(step, (high - low) // 2 // step * step)
    say(f"{tries.fit.way}: {low} tokens run (predicted {predicted}); {why}\n")
    return {
        "way": tries.fit.way, "train": config.train, "longest": low, "shortest_failed": high, "predicted": predicted,
        "ended": why,
    }  # fmt: skip


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1][:200] if lines else "nothing was said"


LONGEST = Benchmark(
    measure=measure,
    failed=lambda row: own_failure(row) and not row.get("out_of"),
    packages=["liger-kernel", "peft", "accelerate"],
    check=lambda config: config_of(config.model, config.layers),
)
