"""The owner of each byte of a recording, and what the json has of it: memory over time by owner, and the peak."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from lowtide.measure.units import gib
from lowtide.profile.phases import (
    EMBEDDING,
    END,
    FORWARD,
    HEAD,
    HEAD_BACKWARD,
    KINDS,
    OPTIMIZER,
    RECOMPUTE,
    Label,
    Phase,
)
from lowtide.profile.recording import Block, Recording, storages

POINTS = 2500  # of a timeline, at most
LARGEST = 8  # blocks at the peak that are listed
WEIGHTS, GRADIENTS, OPTIMIZER_STATES = "weights", "gradients", "optimizer"
ACTIVATIONS, HEAD_OWNER, RECOMPUTED, TRANSIENTS, OTHER = "activations", "head", "recomputed", "transients", "other"
OWNERS = {
    WEIGHTS: Label("weights", "#5b6770", dark=True),
    GRADIENTS: Label("gradients", "#9fa8ad"),
    OPTIMIZER_STATES: Label("optimizer states", "#cfd4d6"),
    ACTIVATIONS: Label("activations saved for backward", "#2f7fb8", dark=True),
    HEAD_OWNER: Label("head: logits, loss", "#d1602a", dark=True),
    RECOMPUTED: Label("recomputed", "#8fc1e3"),
    TRANSIENTS: Label("transients", "#e8b84a"),
    OTHER: Label("inputs, workspaces", "#b9a3c9"),
}
_BY_PHASE = {HEAD: HEAD_OWNER, HEAD_BACKWARD: HEAD_OWNER, RECOMPUTE: RECOMPUTED}


@dataclass
class Known:
    """What is known by identity: by the address of its storage."""

    before: dict[int, tuple[str, int]] = field(default_factory=dict)  # owner and bytes of what the recording found
    baseline: int = 0  # all bytes that were live on the device then
    gradients: set[int] = field(default_factory=set)  # when the optimizer began, or an error ended the step
    states: set[int] = field(default_factory=set)  # the optimizer's tensors after its step


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Yield the tensors of an optimizer's state."""
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))


def known_before(
    model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Iterable[Tensor], device: torch.device
) -> Known:
    """Return what is on the device between two steps."""
    known = Known()
    for owner, tensors in (
        (WEIGHTS, model.parameters()),
        (OPTIMIZER_STATES, optimizer_tensors(optimizer)),
        (OTHER, (*model.buffers(), *inputs)),
    ):
        for address, size in storages(tensors, device).items():
            known.before.setdefault(address, (owner, size))
    listed = sum(size for _, size in known.before.values())
    known.baseline = listed if device.type == "cpu" else int(torch.cuda.memory_allocated(device))
    return known


def owners_of(recording: Recording, known: Known) -> list[str]:
    """Return the owner of each block: by identity if that is known, else by the phase that allocated it."""
    starts = zip(recording.phases, recording.begins, strict=True)
    complete = next(event for phase, event in starts if phase.kind in (OPTIMIZER, END))  # of the gradients

    def owner(block: Block) -> str:
        kind = recording.phases[block.phase].kind
        if block.end is None and block.address in known.states:
            return OPTIMIZER_STATES
        if block.address in known.gradients and block.is_live_before(complete):
            return GRADIENTS
        if kind in (FORWARD, EMBEDDING) and block.is_live_before(recording.begins[block.phase + 1]):
            return ACTIVATIONS
        return _BY_PHASE.get(kind, TRANSIENTS)

    return list(map(owner, recording.blocks))


def segments(phases: Sequence[Phase], lengths_ms: Sequence[float]) -> list[dict[str, Any]]:
    """Return the phases of a step, the last its end, with begin and end in ms, equal neighbours merged."""
    parts: list[dict[str, Any]] = []
    now = 0.0
    for phase, length in zip(phases, lengths_ms, strict=False):
        if not parts or parts[-1]["name"] != str(phase):
            parts.append({"name": str(phase), "kind": phase.kind, "layer": phase.layer, "begin_ms": now})
        now += length
        parts[-1]["end_ms"] = now
    return parts


def time_by_kind(parts: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the ms of each kind of phase, layers together."""
    return {kind: sum(part["end_ms"] - part["begin_ms"] for part in parts if part["kind"] == kind) for kind in KINDS}


def describe(recording: Recording, known: Known, lengths_ms: Sequence[float]) -> dict[str, Any]:
    """Return a recording's timeline and peak, for json; its phases are as long as in steps without recording.

    Of more than `POINTS` events neighbours are one point of the timeline: the one with the most memory.
    """
    owners, phases = owners_of(recording, known), recording.phases
    live = dict.fromkeys(OWNERS, 0)
    for owner, size in known.before.values():
        live[owner] += size
    live[OTHER] += known.baseline - sum(live.values())  # workspaces, and other processes' tensors
    parts = [dict(live)]  # the bytes of each owner before the step, and after each event
    for event in recording.events:
        freed_before, _ = known.before.get(event.address, (OTHER, 0))
        live[freed_before if event.block is None else owners[event.block]] += event.bytes
        parts.append(dict(live))
    totals, times = [sum(part.values()) for part in parts], [0.0, *_times(recording, lengths_ms)]
    peak = totals.index(max(totals))
    together = -(-len(parts) // POINTS)
    groups = [range(start, min(start + together, len(parts))) for start in range(0, len(parts), together)]
    shown = sorted({0, len(parts) - 1, *(max(group, key=totals.__getitem__) for group in groups)})
    blocks = [pair for pair in zip(recording.blocks, owners, strict=True) if pair[0].is_live_before(peak)]
    layers: dict[str, int] = defaultdict(int)
    for block, owner in blocks:
        if owner == ACTIVATIONS:
            phase = phases[block.phase]
            layers[f"layer {phase.layer}" if phase.kind == FORWARD else str(phase)] += block.bytes
    reached = max((n for n, begin in enumerate(recording.begins) if begin < max(peak, 1)), default=0)
    largest = sorted(blocks, key=lambda pair: -pair[0].bytes)[:LARGEST]
    return {
        "timeline": {
            "ms": [round(times[i], 4) for i in shown],
            "gib": [_short(totals[i]) for i in shown],
            "owners": {owner: [_short(parts[i][owner]) for i in shown] for owner in OWNERS},
        },
        "peak": {
            "gib": gib(totals[peak]),
            "ms": times[peak],
            "phase": str(phases[reached]),
            "owners_gib": {owner: gib(size) for owner, size in parts[peak].items()},
            "activations_gib": {layer: gib(size) for layer, size in layers.items()},
            "largest": [
                {"gib": gib(b.bytes), "operation": b.operation, "phase": str(phases[b.phase]), "owner": owner}
                for b, owner in largest
            ],
        },
        "allocations": len(recording.blocks),
    }


def _times(recording: Recording, lengths_ms: Sequence[float]) -> list[float]:
    """Return the time of each event in ms of a step that was not recorded: each phase is stretched to its length there.

    On a GPU the allocator runs ahead of the kernels: an event is drawn in its phase, not at the host's time.
    """
    now = 0.0
    bounds = [*recording.begins, len(recording.events)]
    times = [0.0] * bounds[0]  # before the first phase
    for number, (first, last) in enumerate(pairwise(bounds)):
        if number >= len(lengths_ms):  # after the step's end
            times += [now] * (last - first)
            continue
        length, begin = lengths_ms[number], recording.begins_ns[number]
        span = max(recording.begins_ns[number + 1] - begin, 1)
        times += [now + length * (event.time_ns - begin) / span for event in recording.events[first:last]]
        now += length
    return times


def _short(size: int) -> float:
    """Return GiB with as many digits as a plot can show of a model of any size."""
    return float(f"{gib(size):.6g}")
