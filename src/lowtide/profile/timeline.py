"""A recording as the json has it: memory over the step's time, by owner; the peak's owners; its largest blocks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from lowtide.measure.units import gib
from lowtide.profile.owners import ACTIVATIONS, OTHER, OWNERS, Known, owners_of
from lowtide.profile.phases import FORWARD, KINDS, Phase
from lowtide.profile.recording import Recording

POINTS = 2500  # of a timeline, at most
LARGEST = 8  # blocks at the peak that are listed


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


def describe(recording: Recording, known: Known, lengths_ms: Sequence[float]) -> dict[str, Any]:
    """Return a recording's timeline and peak, for json; its phases are as long as in steps without recording.

    Of more than `POINTS` events neighbours are one point of the timeline: the one with the most memory.
    """
    owners = owners_of(recording, known)
    live = dict.fromkeys(OWNERS, 0)
    for owner, size in known.before.values():
        live[owner] += size
    live[OTHER] += known.baseline - sum(live.values())  # workspaces, and other processes' tensors
    parts = [dict(live)]  # the bytes of each owner before the step, and after each event
    for event in recording.events:
        freed_before, _ = known.before.get(event.address, (OTHER, 0))
        live[freed_before if event.block is None else owners[event.block]] += event.bytes
        parts.append(dict(live))
    totals, at = [sum(each.values()) for each in parts], [0.0, *_times(recording, lengths_ms)]
    peak = totals.index(max(totals))
    together = -(-len(parts) // POINTS)
    groups = [range(start, min(start + together, len(parts))) for start in range(0, len(parts), together)]
    shown = sorted({0, len(parts) - 1, *(max(group, key=totals.__getitem__) for group in groups)})
    blocks = [each for each in zip(recording.blocks, owners, strict=True) if each[0].is_live_before(peak)]
    layers: dict[str, int] = defaultdict(int)
    for block, owner in blocks:
        if owner == ACTIVATIONS:
            phase = recording.phases[block.phase]
            layers[f"layer {phase.layer}" if phase.kind == FORWARD else str(phase)] += block.bytes
    reached = max((n for n, begin in enumerate(recording.begins) if begin < max(peak, 1)), default=0)
    return {
        "timeline": {
            "ms": [round(at[i], 4) for i in shown],
            "gib": [_short(totals[i]) for i in shown],
            "owners": {owner: [_short(parts[i][owner]) for i in shown] for owner in OWNERS},
        },
        "peak": {
            "gib": gib(totals[peak]),
            "ms": at[peak],
            "phase": str(recording.phases[reached]),
            "owners_gib": {owner: gib(size) for owner, size in parts[peak].items()},
            "activations_gib": {layer: gib(size) for layer, size in layers.items()},
            "largest": [
                {
                    "gib": gib(block.bytes),
                    "operation": block.operation,
                    "phase": str(recording.phases[block.phase]),
                    "owner": owner,
                }
                for block, owner in sorted(blocks, key=lambda each: -each[0].bytes)[:LARGEST]
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


def time_by_kind(parts: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the ms of each kind of phase, layers together."""
    return {kind: sum(one["end_ms"] - one["begin_ms"] for one in parts if one["kind"] == kind) for kind in KINDS}
