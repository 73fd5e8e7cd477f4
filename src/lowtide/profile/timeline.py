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
TOLERANCE = 1 / 2000  # of the peak, the error of what is drawn: less than a pixel
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
    """Return a recording's timeline and peak, for json; its phases are as long as in steps without recording."""
    owners, totals = owners_of(recording, known), recording.totals()
    peak = max(range(-1, len(totals)), key=lambda event: totals[event] if event >= 0 else 0)  # -1: before the step
    highest = known.baseline + (totals[peak] if peak >= 0 else 0)
    tolerance = highest * TOLERANCE
    while len(rows := drawn(*_changes(recording, known, owners), tolerance, peak)) > POINTS:
        tolerance *= 2
    at_peak = next(sizes for event, sizes in rows if event == peak)
    blocks = zip(recording.blocks, owners, strict=True)
    live = [(block, owner) for block, owner in blocks if block.is_live_before(peak + 1)]
    at = _times(recording, lengths_ms)
    layers: dict[str, int] = defaultdict(int)
    for block, owner in live:
        if owner == ACTIVATIONS:
            phase = recording.phases[block.phase]
            layers[f"layer {phase.layer}" if phase.kind == FORWARD else str(phase)] += block.bytes
    reached = max((n for n, begin in enumerate(recording.begins) if begin <= max(peak, 0)), default=0)
    return {
        "timeline": {
            "ms": [round(at[event], 4) if event >= 0 else 0.0 for event, _ in rows],
            "gib": [_short(sum(sizes)) for _, sizes in rows],
            "owners": {owner: [_short(sizes[i]) for _, sizes in rows] for i, owner in enumerate(OWNERS)},
            "tolerance_gib": _short(int(tolerance)),
        },
        "peak": {
            "gib": gib(highest),
            "ms": at[peak] if peak >= 0 else 0.0,
            "phase": str(recording.phases[reached]),
            "owners_gib": {owner: gib(size) for owner, size in zip(OWNERS, at_peak, strict=True)},
            "activations_gib": {layer: gib(size) for layer, size in layers.items()},
            "largest": [
                {
                    "gib": gib(block.bytes),
                    "operation": block.operation,
                    "phase": str(recording.phases[block.phase]),
                    "owner": owner,
                }
                for block, owner in sorted(live, key=lambda one: -one[0].bytes)[:LARGEST]
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


def _changes(recording: Recording, known: Known, owners: Sequence[str]) -> tuple[list[int], list[tuple[int, int]]]:
    """Return the bytes of each owner before the step, and of each event the owner's place and the change."""
    before = dict.fromkeys(OWNERS, 0)
    for owner, size in known.before.values():
        before[owner] += size
    before[OTHER] += known.baseline - sum(before.values())  # workspaces, and other processes' tensors
    place = {owner: i for i, owner in enumerate(OWNERS)}
    changes = []
    for event in recording.events:
        freed_before, _ = known.before.get(event.address, (OTHER, 0))
        changes.append((place[freed_before if event.block is None else owners[event.block]], event.bytes))
    return list(before.values()), changes


def drawn(
    before: Sequence[int], changes: Sequence[tuple[int, int]], tolerance: float, always: int
) -> list[tuple[int, list[int]]]:
    """Return the events at which a step function of several parts has to be drawn, and the parts after each.

    Between two of them neither a part nor the sum is further than the tolerance from what is drawn. The parts at first
    are event -1; ``changes`` has the part and its change for each event; ``always`` is drawn whatever it changes.
    """
    live, shown, total, shown_total = list(before), list(before), sum(before), sum(before)
    rows = [(-1, list(before))]
    for event, (part, delta) in enumerate(changes):
        live[part] += delta
        total += delta
        far = abs(live[part] - shown[part]) > tolerance or abs(total - shown_total) > tolerance
        if far or event in (always, len(changes) - 1):
            shown, shown_total = list(live), total
            rows.append((event, shown))
    return rows


def _short(size: int) -> float:
    """Return GiB with as many digits as a plot can show of a model of any size."""
    return float(f"{gib(size):.6g}")


def time_by_kind(parts: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the ms of each kind of phase, layers together."""
    return {kind: sum(one["end_ms"] - one["begin_ms"] for one in parts if one["kind"] == kind) for kind in KINDS}
