"""The benchmark of long context: tokens per second at one length, and the longest sequence that runs, by each way.

The search starts at the planner's limit, goes up or down in growing steps, and then halves the interval between a
length that ran and one that did not. Each attempt is a process. What should not fit into the host is skipped. Where the
rate is measured, lowtide's layers save what makes the step fastest; in the search, as little as they can.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from shutil import disk_usage
from typing import Any

import torch

from lowtide.bench import longest_way
from lowtide.bench.harness import Benchmark, Column, Row, Run, Table, own_failure, why_ended
from lowtide.bench.longest_way import LORA, ON_HOST, OUT_OF_HOST, OUT_OF_TIME
from lowtide.bench.train_config import OFFLOADED, LongestBenchConfig, Train
from lowtide.bench.way import LIGER, LOWTIDE, STOCK
from lowtide.bench.ways import config_of
from lowtide.errors import ArgumentValueError, message
from lowtide.head.options import HeadOptions
from lowtide.measure.child import ALLOCATOR, run_child
from lowtide.measure.resident import available_bytes
from lowtide.measure.units import gib, parse_gib
from lowtide.memory.offload import ON_DEVICE
from lowtide.memory.planner.at_hand import find_gpu
from lowtide.memory.planner.disk import NO_DISK, DiskSpace
from lowtide.memory.planner.gpus import GPUS, Gpu
from lowtide.memory.planner.job import Job
from lowtide.memory.planner.layer_costs import PAGES, checkpoint_bytes
from lowtide.memory.planner.runs import Groups
from lowtide.memory.planner.search import Search, largest
from lowtide.memory.planner.shapes import ModelShape, read_shape
from lowtide.memory.planner.step_costs import StepCosts
from lowtide.memory.planner.tile_costs import EVERY
from lowtide.memory.policy import ActivationPolicy, words_of

LAYERS_ON_GPU = 5  # of parameters' size under FSDP2: one at work, one fetched ahead, a copy of each, a gradient
STATES = 2  # tensors that AdamW has for each parameter
HOST_RATE = 5e9  # parameters a second that AdamW updates on the host
PEERS_MORE = 14  # bytes per token and hidden size that a peer's recomputed layer saves beyond a patched one
LOGIT = 12  # bytes of each logit that the stock loss has at once: measured, 24 GiB of 16384 x 131072


@dataclass(frozen=True)
class Demand:
    """What a step should take: bytes on the GPU, the host and the disk, seconds, and what the layers save."""

    gpu: int
    host: int
    seconds: float
    groups: Groups
    disk: int = 0


@dataclass(frozen=True, kw_only=True)
class Fit:
    """One way to train one model on one machine.

    Attributes:
        gpu: whose rates the times are computed with.
        gpu_bytes: that may be allocated on the GPU; None: a CPU trains, in the host's memory.
        host_bytes: the same on the host.
        tile: tokens per tile of lowtide's layers.
        disk: what there is for offloaded layers that the host has no room for.
    """

    way: str
    train: Train
    shape: ModelShape
    gpu: Gpu
    dtype: torch.dtype
    gpu_bytes: int | None
    host_bytes: int
    tile: int
    disk: DiskSpace = NO_DISK

    @property
    def states(self) -> int:
        """Bytes of parameters, gradients and optimizer states on the host; FSDP2 pins the first two."""
        if self.train == "lora":
            return 0
        pinned = sum(pinned_bytes(n * self.dtype.itemsize) for n in parameter_sizes(self.shape))
        return 2 * pinned + STATES * self.shape.params * self.dtype.itemsize

    def at(self, T: int) -> Demand:
        """Return what a step of T tokens takes where the layers save as little on the GPU as they can.

        That is one input for several layers only where those of all layers have no room.
        """
        job = self._job(T)
        for every in (1, *EVERY):
            demand = self._demand(job, self._groups(job, every))
            if self._has_room(demand) or self.way != LOWTIDE or self.train == "full":  # FSDP2 refuses more than one
                return demand
        return demand

    def fastest(self, T: int) -> Demand:
        """Return what the fastest step of T tokens takes that should fit, with nothing of the layers on the host.

        That is `at`'s for peers, whose layers have no choice, and where nothing else fits or is faster.
        """
        leanest = self.at(T)
        if self.way != LOWTIDE or self.gpu_bytes is None:
            return leanest
        job = self._job(T)
        for one in reversed(Search(job, 0).front):
            demand = self._demand(job, one.groups)
            grouped = any(policy.every > 1 for policy, _ in one.groups)
            if self._has_room(demand) and not (grouped and self.train == "full"):
                return min(demand, leanest, key=lambda demand: demand.seconds)
        return leanest

    def _job(self, T: int) -> Job:
        adapters = LORA if self.train == "lora" else None
        return Job(self.shape, T, 1, self.gpu, self.dtype, "sgd", head=HeadOptions(), adapters=adapters)

    def _demand(self, job: Job, groups: Groups) -> Demand:
        T, costs, full = job.seq_len, StepCosts(job), self.train == "full"
        logits = LOGIT * T * self.shape.vocab if self.way.startswith(STOCK) else 0  # a stock loss builds them
        peak = max(
            phase.bytes - phase.gradients - phase.weights * full + logits * (phase.name == "head")
            for phase in costs.phases(groups)
            if full or phase.name not in ("embedding", "optimizer")
        )
        host, disk, seconds = self.states, 0, costs.seconds(groups)
        if self.way == LOWTIDE:
            where = costs.placed(groups, self.host_bytes - host, self.disk)
            host, disk, seconds = host + where.host, where.disk, seconds + where.seconds
        else:
            peak += T * PEERS_MORE * self.shape.hidden // 2 * self.dtype.itemsize
            if self.way.endswith(OFFLOADED) and self.gpu_bytes is not None:  # a CPU's tensors stay where they are
                each = checkpoint_bytes(job, groups[0][0])
                saved = [each] * self.shape.layers + self.saved_outside(T)
                host += sum(map(pinned_bytes, saved))
                peak -= (self.shape.layers - ON_DEVICE) * each
        if full:  # with the parameters and gradients that are on the GPU at once under FSDP2
            vocab = self.shape.vocab_params * (1 if self.shape.tied else 2) * self.dtype.itemsize
            peak += 2 * vocab + LAYERS_ON_GPU * costs.layer_gradients
            seconds += self.shape.params / HOST_RATE
        if self.gpu_bytes is None:
            host += peak
        return Demand(peak, host, seconds, groups, disk)

    def saved_outside(self, T: int) -> list[int]:
        """Return the bytes of the large tensors that autograd saves of a peer's step outside its layers.

        ``save_on_cpu`` around the step takes them to the host too, one that is saved twice in two copies.
        """
        e, full = self.dtype.itemsize, self.train == "full"
        stream, weight = T * self.shape.hidden * e, self.shape.vocab_params * e
        if self.way.startswith(LIGER):  # what the final norm reads, and the gradients that the loss has made in forward
            return [stream, stream] + [weight] * full
        # Twice what the final norm reads, in float32, and twice what it returns, for its weight and for the head's; the
        # head's weight; twice the log-probabilities.
        wide, logits = 4 * T * self.shape.hidden, 4 * T * self.shape.vocab
        return [wide, wide, *[stream, stream] * full, weight, logits, logits]

    def fits(self, T: int) -> bool:
        """Return whether a step of T tokens should fit."""
        return self._has_room(self.at(T))

    def _has_room(self, demand: Demand) -> bool:
        return demand.host <= self.host_bytes and (self.gpu_bytes is None or demand.gpu <= self.gpu_bytes)

    def longest(self, step: int) -> int:
        """Return the longest sequence that should fit, in steps of so many tokens; 0 where none does."""
        return step * largest(lambda n: self.fits(n * step))

    def _groups(self, job: Job, every: int) -> list[tuple[ActivationPolicy, int]]:
        """Return what the layers save: their inputs, lowtide's on the host while there is room, first layers first.

        All offload if a disk has room for the rest.
        """
        layers = self.shape.layers
        if self.way != LOWTIDE:
            return [(ActivationPolicy(keep="input", mlp_level=0), layers)]
        here = ActivationPolicy(keep="input", mlp_level=1, tile_tokens=self.tile, every=every)
        if self.gpu_bytes is None:  # nothing to offload from
            return [(here, layers)]
        there, host = replace(here, offload=True), max(self.host_bytes - self.states, 0)
        room = host // (checkpoint_bytes(job, here) + PAGES)
        moved = min(layers, (room + ON_DEVICE) * every) if room else 0
        if self.disk.nbytes and StepCosts(job).placed([(there, layers)], host, self.disk).host <= host:
            moved = layers
        return [(one, n) for one, n in ((there, moved), (here, layers - moved)) if n]


def pinned_bytes(size: int) -> int:
    """Return what PyTorch's own allocator of pinned memory takes: the next power of two."""
    return 1 << (size - 1).bit_length() if size > 0 else 0


def parameter_sizes(shape: ModelShape) -> Sequence[int]:
    """Return the sizes of the large parameters: four of attention and three of the MLP a layer, the vocabulary's."""
    h, q, k, f = shape.hidden, shape.query_width, shape.kv_width, shape.intermediate
    layer = [h * q, h * k, h * k, h * q, h * f, h * f, h * f]
    return layer * shape.layers + [shape.vocab_params] * (1 if shape.tied else 2)


KEPT_FREE = 6 * 2**30  # of the host's memory, for Python, CUDA and the system, without --host
UNKNOWN_BUILD = 60.0  # seconds of an attempt before its first step, before any was made
KILLED = -9  # by the system: as a rule memory ran out
TABLE = Table(
    (Column("", "way", "<16"), Column("T", "tokens", "9")),
    (
        Column("s", "seconds", "10.3f"), Column("tokens/s", "tokens_per_s", "10.0f"),
        Column("GPU GiB", "peak_gib", "9.2f"), Column("predicted", "gpu_gib_predicted", "11.2f"),
        Column("host GiB", "host_gib", "10.2f"), Column("predicted", "host_gib_predicted", "11.2f"),
        Column("  saved", lambda row: f"  {row['kept']}", ""),
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
    if not on_gpu:
        _check_on_cpu(config)
    fit = Fit(
        way=LOWTIDE, train=config.train, shape=shape, gpu=gpu, dtype=run.dtype,
        gpu_bytes=int(budget) if on_gpu else None, host_bytes=int(host), tile=config.tile,
        disk=NO_DISK if config.disk is None else DiskSpace(disk_usage(config.disk).free),
    )  # fmt: skip
    run.result |= {"dtype": run.dtype_name, "config": config.recorded()}
    run.result |= {"budget_gib": None if fit.gpu_bytes is None else gib(fit.gpu_bytes), "host_gib": gib(host)}
    run.result |= {"ways": [], "rows": []}
    run.say(
        f"\n{config.model}, {fit.shape.layers} layers, {config.train}, {run.dtype_name}; host memory {gib(host):.1f}"
        f" GiB, {gib(fit.states):.1f} of it for parameters, gradients and optimizer\n{TABLE.header}"
    )

    for way in config.way:
        tries = Tries(replace(fit, way=way), run.settings, partial(run.add, rows=run.result["rows"], table=TABLE))
        end = time.monotonic() + config.seconds
        if config.tokens:
            demand = tries.fit.fastest(config.tokens)
            tries.once(config.tokens, demand, (config.warm, config.reps), config.seconds)
        if config.search:
            run.result["ways"].append(search(tries, config, run.say, end))
        run.save()


def _check_on_cpu(config: LongestBenchConfig) -> None:
    """Raise where an option is for a GPU alone."""
    for name, expected in (("disk", "a GPU, from which layers offload"), ("budget", "a GPU, whose memory it is")):
        if getattr(config, name) is not None:
            raise ArgumentValueError(message(name, expected, "a CPU", "Leave it out."))
    if config.sdpa in ("cudnn", "efficient"):
        raise ArgumentValueError(message("sdpa", "auto, flash or math on a CPU", config.sdpa))


@dataclass
class Tries:
    """The attempts of one way, each a process, and what they have shown of the time that one takes.

    Attributes:
        build_s: seconds of an attempt before its first step.
        slower: seconds that a step takes over those predicted.
    """

    fit: Fit
    settings: dict[str, Any]
    add: Callable[[Row], object]
    build_s: float = UNKNOWN_BUILD
    slower: float = 1.0

    def seconds(self, T: int) -> float:
        """Return about how many seconds an attempt of one step takes."""
        return self.build_s + self.slower * self.fit.at(T).seconds

    def once(self, T: int, demand: Demand, rounds: tuple[int, int], seconds: float) -> Row:
        """Run a length in a process of at most so many seconds, and return its row; ``rounds``: warm, and counted.

        It has ``seconds``, or ``failed`` and, where memory or time ran out, ``out_of``.
        """
        kept = words_of(demand.groups) if self.fit.way == LOWTIDE else ""
        row: Row = {"way": self.fit.way, "train": self.fit.train, "tokens": T, "warm": rounds[0], "kept": kept}
        row |= {"gpu_gib_predicted": gib(demand.gpu), "host_gib_predicted": gib(demand.host)}
        row |= {"disk_gib_predicted": gib(demand.disk), "seconds_predicted": demand.seconds}
        if demand.host > self.fit.host_bytes:
            row |= {"out_of": ON_HOST, "failed": f"{gib(demand.host):.1f} GiB of host memory needed: not tried"}
            self.add(row)
            return row
        for_layers = gib(max(self.fit.host_bytes - self.fit.states, 0))
        begun = time.monotonic()
        attempt = (self.fit.way, self.settings, T, kept, for_layers, rounds, seconds)
        ended = run_child(longest_way.measure, *attempt, env=ALLOCATOR)
        if ended.value is not None:
            row |= ended.value
        elif ended.returncode in (OUT_OF_HOST, KILLED):
            row |= {"out_of": ON_HOST, "failed": "ended when the host had no memory left"}
        elif ended.returncode == OUT_OF_TIME:
            row |= {"out_of": "time", "failed": f"ended after {seconds:.0f} s"}
        else:
            row["failed"] = why_ended(ended)
        if "seconds" in row:
            self.build_s = max(time.monotonic() - begun - sum(rounds) * row["seconds"], 0.0)
            self.slower = row["seconds"] / demand.seconds
        self.add(row)
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
        row = tries.once(at, tries.fit.at(at), (0, 1), left)
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
        "way": tries.fit.way, "train": tries.fit.train, "longest": low, "shortest_failed": high, "predicted": predicted,
        "ended": why,
    }  # fmt: skip


LONGEST = Benchmark(
    measure=measure,
    failed=lambda row: own_failure(row) and not row.get("out_of"),
    packages=["liger-kernel", "peft", "accelerate"],
    check=lambda config: config_of(config.model, config.layers),
)
