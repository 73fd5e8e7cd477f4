"""What a step allocates and frees, by phase and by owner: every event of PyTorch's allocators, on a CPU and on a GPU.

The allocators report to the profiler, address by address, so its events miss nothing: scratch inside operators, C++
kernels and backward's threads too. Phases are ranges among them.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lowtide.measure.units import gib
from lowtide.profile.phases import (
    EMBEDDING,
    END,
    FORWARD,
    HEAD,
    HEAD_BACKWARD,
    KINDS,
    MARK,
    OPTIMIZER,
    RECOMPUTE,
    Phase,
)

POINTS = 2500  # of a timeline, at most
WEIGHTS, GRADIENTS, OPTIMIZER_STATES = "weights", "gradients", "optimizer"
ACTIVATIONS, HEAD_OWNER, RECOMPUTED, TRANSIENTS, OTHER = "activations", "head", "recomputed", "transients", "other"
OWNERS = {
    WEIGHTS: "weights",
    GRADIENTS: "gradients",
    OPTIMIZER_STATES: "optimizer states",
    ACTIVATIONS: "activations saved for backward",
    HEAD_OWNER: "head: logits, loss",
    RECOMPUTED: "recomputed",
    TRANSIENTS: "transients",
    OTHER: "inputs, workspaces",
}


@dataclass
class Block:
    """One allocation; events and phases are given by their numbers."""

    address: int
    bytes: int  # on a GPU as its allocator rounds them
    phase: int
    begin: int  # the event that allocated it
    end: float = math.inf  # the event that freed it; infinite if it outlives the step

    def is_live_before(self, event: int) -> bool:
        """Return whether the block is live just before the event of a number."""
        return self.begin < event <= self.end


@dataclass
class Recording:
    """A step's allocations, in order of time. An event is its time in ns, its bytes (negative: freed), and its block;
    None of what was there before the step.
    """

    phases: list[Phase]  # the last is the step's end
    begins: list[int] = field(default_factory=list)  # of each phase, its first event
    begins_ns: list[int] = field(default_factory=list)
    events: list[tuple[int, int, Block | None]] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)


def storages(tensors: Iterable[Any], device: torch.device) -> dict[int, int]:
    """Return address and bytes of the tensors' storages on one kind of device, each once."""
    found = [t.untyped_storage() for t in tensors if isinstance(t, Tensor) and t.device.type == device.type]
    return {storage.data_ptr(): storage.nbytes() for storage in found if storage.nbytes()}


def read_recording(profiler: torch.profiler.profile, phases: list[Phase], device: torch.device) -> Recording:
    """Return the allocations on one kind of device from the profile of a step, whose phases `PhaseMarks` marked."""
    recording, live = Recording(phases), dict[int, Block]()
    tree: Any = profiler.profiler.kineto_results.experimental_event_tree()  # type: ignore[union-attr]
    for node in sorted(_nodes(tree), key=lambda node: node.start_time_ns):  # equal times keep their order
        time_ns, number = node.start_time_ns, len(recording.events)
        if node.name.startswith(MARK):
            recording.begins.append(number)
            recording.begins_ns.append(time_ns)
        elif node.name == "[memory]":
            allocation = node.extra_fields
            if allocation.device.type != device.type or not allocation.alloc_size:
                continue
            if allocation.alloc_size > 0:
                phase = max(len(recording.begins) - 1, 0)
                recording.blocks.append(Block(allocation.ptr, allocation.alloc_size, phase, number))
                block: Block | None = recording.blocks[-1]
                live[allocation.ptr] = recording.blocks[-1]
            elif block := live.pop(allocation.ptr, None):
                block.end = number
            recording.events.append((time_ns, allocation.alloc_size, block))
    return recording


def _nodes(tree: list[Any]) -> Iterator[Any]:
    for node in tree:
        yield node
        yield from _nodes(node.children)


def owners_of(recording: Recording, gradients: Collection[int]) -> list[str]:
    """Return the owner of each block: of gradients by their addresses after backward, else by the phase and by what
    becomes of the block.
    """
    kinds = [phase.kind for phase in recording.phases]
    complete = next(begin for kind, begin in zip(kinds, recording.begins, strict=True) if kind in (OPTIMIZER, END))

    def owner(block: Block) -> str:
        kind = kinds[block.phase]
        if block.address in gradients and block.is_live_before(complete):
            return GRADIENTS
        if kind == OPTIMIZER and block.end == math.inf:
            return OPTIMIZER_STATES
        if kind in (FORWARD, EMBEDDING) and block.is_live_before(recording.begins[block.phase + 1]):
            return ACTIVATIONS
        return {HEAD: HEAD_OWNER, HEAD_BACKWARD: HEAD_OWNER, RECOMPUTE: RECOMPUTED}.get(kind, TRANSIENTS)

    return list(map(owner, recording.blocks))


def describe(
    recording: Recording, before: Mapping[str, int], gradients: Collection[int], lengths_ms: Sequence[float]
) -> dict[str, Any]:
    """Return a step's phases, timeline and peak, for json, from the bytes of each owner before it, the gradients'
    addresses after backward, and the phases' lengths in a step without recording.

    On a GPU the allocator runs ahead of the kernels: an event is drawn in its phase, not at the host's time. Of more
    than `POINTS` events neighbours are one point of the timeline: the one with the most memory.
    """
    phases, owners = (
        recording.phases,
        dict(zip(map(id, recording.blocks), owners_of(recording, gradients), strict=True)),
    )
    columns = {owner: i for i, owner in enumerate(OWNERS)}
    live = np.zeros((len(recording.events) + 1, len(OWNERS)), dtype=np.int64)  # before the step, and after each event
    live[0] = [before.get(owner, 0) for owner in OWNERS]
    for i, (_, size, block) in enumerate(recording.events, 1):
        live[i, columns[owners.get(id(block), OTHER)]] = size
    live = live.cumsum(axis=0)
    totals, bounds = live.sum(axis=1), list(accumulate(lengths_ms, initial=0.0))
    times = np.interp([0, *(time_ns for time_ns, _, _ in recording.events)], recording.begins_ns, bounds)
    peak, together = int(totals.argmax()), -(-len(totals) // POINTS)
    highest = (start + int(totals[start : start + together].argmax()) for start in range(0, len(totals), together))
    shown = sorted({0, len(totals) - 1, *highest})
    segments: list[dict[str, Any]] = [
        {"name": str(phase), "kind": phase.kind, "layer": phase.layer, "begin_ms": begin, "end_ms": end}
        for phase, (begin, end) in zip(phases, pairwise(bounds), strict=False)
    ]
    time_by_kind = {kind: sum(s["end_ms"] - s["begin_ms"] for s in segments if s["kind"] == kind) for kind in KINDS}
    return {
        "segments": segments,
        "time_by_kind_ms": time_by_kind,
        "timeline": {
            "ms": times[shown].round(4).tolist(),
            "gib": (totals[shown] / 2**30).round(9).tolist(),
            "owners": {owner: (live[shown, i] / 2**30).round(9).tolist() for owner, i in columns.items()},
        },
        "peak_gib": gib(int(totals[peak])),
        "peak": {
            "gib": gib(int(totals[peak])),
            "ms": float(times[peak]),
            "phase": str(phases[bisect_left(recording.begins, max(peak, 1)) - 1]),
            "owners_gib": {owner: gib(int(live[peak, i])) for owner, i in columns.items()},
        },
    }
