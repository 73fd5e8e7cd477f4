"""A recording as what is drawn: memory over the step's time, by owner; the peak's owners; its largest blocks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from lowtide.measure.units import gib
from lowtide.profile.owners import ACTIVATIONS, OTHER, OWNERS, Known, Owned, owners_of
from lowtide.profile.phases import FORWARD, KINDS, Phase
from lowtide.profile.recording import Recording

POINTS = 2500  # of a timeline, at most
TOLERANCE = 1 / 2000  # of the peak, by which what is drawn may be off: less than a pixel
LARGEST = 8  # blocks at the peak that are listed


def segments(phases: Sequence[Phase], lengths_ms: Sequence[float]) -> list[dict[str, Any]]:
    """Return the phases of a step with begin and end in ms, neighbours that are the same as one.

    Args:
        phases: In order; the last is the step's end.
        lengths_ms: Of all but the last.
    """
    found: list[dict[str, Any]] = []
    now = 0.0
    for phase, length in zip(phases, lengths_ms, strict=False):
        if found and found[-1]["name"] == str(phase):
            found[-1]["end_ms"] = now + length
        else:
            told = {"name": str(phase), "kind": phase.kind, "layer": phase.layer}
            found.append({**told, "begin_ms": now, "end_ms": now + length})
        now += length
    return found


def describe(recording: Recording, known: Known, lengths_ms: Sequence[float]) -> dict[str, Any]:
    """Return a recording's timeline and peak, for json.

    Args:
        recording: Of a step.
        known: What was on the device before, and what is known by identity.
        lengths_ms: Of each phase but the last, as steps without a recording took them.
    """
    owned = owners_of(recording, known)
    totals = recording.totals()
    peak = max(range(len(totals)), key=totals.__getitem__, default=-1)
    if peak >= 0 and totals[peak] < 0:
        peak = -1  # nothing was ever above what was there before
    at = _places(recording, lengths_ms)
    return {
        "timeline": _timeline(recording, known, owned, at, peak),
        "peak": {
            "gib": gib(known.baseline + (totals[peak] if peak >= 0 else 0)),
            "ms": at[peak] if peak >= 0 else 0.0,
            "phase": str(_phase_at(recording, peak)),
            **_at_peak(recording, known, owned, peak),
        },
        "allocations": len(recording.blocks),
    }


def _phase_at(recording: Recording, event: int) -> Phase:
    """Return the phase in which an event happened."""
    number = max((n for n, begin in enumerate(recording.begins) if begin <= max(event, 0)), default=0)
    return recording.phases[number]


def _places(recording: Recording, lengths_ms: Sequence[float]) -> list[float]:
    """Return when each event was, in ms of a step that nobody recorded: each phase is stretched to its length there.

    On a GPU the allocator runs ahead of the kernels: an event stands where its phase stands, not where the host was.
    """
    found: list[float] = []
    now = 0.0
    bounds = [*recording.begins, len(recording.deltas)]
    for number, (first, last) in enumerate(pairwise(bounds)):
        if number >= len(lengths_ms):  # after the step's end
            found += [now] * (last - first)
            continue
        length, begin = lengths_ms[number], recording.begins_ns[number]
        span = max(recording.begins_ns[number + 1] - begin, 1)
        found += [now + length * (recording.times_ns[event] - begin) / span for event in range(first, last)]
        now += length
    return [0.0] * (len(recording.deltas) - len(found)) + found  # before the first phase


def _timeline(
    recording: Recording, known: Known, owned: Sequence[Owned], at: Sequence[float], peak: int
) -> dict[str, Any]:
    """Return time, bytes in all, and bytes by owner, at the events that a picture needs."""
    changes = []
    for event, (delta, number) in enumerate(zip(recording.deltas, recording.event_blocks, strict=True)):
        owner = owned[number].owner if number is not None else _owner_before(recording, known, event)
        changes.append((OWNERS.index(owner), delta))
    before = list(_before(known).values())
    top = max(known.baseline, known.baseline + max(recording.totals(), default=0))
    tolerance = top * TOLERANCE
    while len(rows := drawn(before, changes, tolerance, peak)) > POINTS:
        tolerance *= 2
    return {
        "ms": [round(at[event], 4) if event >= 0 else 0.0 for event, _ in rows],
        "gib": [_short(sum(sizes)) for _, sizes in rows],
        "owners": {owner: [_short(sizes[i]) for _, sizes in rows] for i, owner in enumerate(OWNERS)},
        "tolerance_gib": _short(int(tolerance)),
    }


def drawn(
    before: Sequence[int], changes: Sequence[tuple[int, int]], tolerance: float, always: int
) -> list[tuple[int, list[int]]]:
    """Return the events at which a step function of several parts has to be drawn, and the parts behind each.

    Between two of them neither a part nor the sum is further than the tolerance from what is drawn.

    Args:
        before: The parts at first; they are drawn as event -1.
        changes: Of each event, the part and by how much it changes.
        tolerance: The largest distance of a part, or of the sum, from what is drawn.
        always: An event that is drawn whatever it changes.
    """
    live, shown, total, shown_total = list(before), list(before), sum(before), sum(before)
    found = [(-1, list(before))]
    for event, (part, delta) in enumerate(changes):
        live[part] += delta
        total += delta
        far = abs(live[part] - shown[part]) > tolerance or abs(total - shown_total) > tolerance
        if far or event in (always, len(changes) - 1):
            shown, shown_total = list(live), total
            found.append((event, shown))
    return found


def _short(size: int) -> float:
    """Return GiB with as many digits as a picture can show of a model of any size."""
    return float(f"{gib(size):.6g}")


def _before(known: Known) -> dict[str, int]:
    live = dict.fromkeys(OWNERS, 0)
    for owner, size in known.before.values():
        live[owner] += size
    live[OTHER] += known.baseline - sum(live.values())  # workspaces, and what others hold
    return live


def _owner_before(recording: Recording, known: Known, event: int) -> str:
    return known.before.get(recording.freed_before.get(event, 0), (OTHER, 0))[0]


def _at_peak(recording: Recording, known: Known, owned: Sequence[Owned], peak: int) -> dict[str, Any]:
    """Return the peak's bytes by owner, its activations by layer, and its largest blocks."""
    owners = _before(known)
    layers: dict[str, int] = defaultdict(int)
    live = list(recording.live_at(peak)) if peak >= 0 else []
    for number, block in live:
        owners[owned[number].owner] += block.bytes
        if owned[number].owner == ACTIVATIONS:
            layers[owned[number].detail] += block.bytes
    for event in recording.freed_before:
        if event <= peak:
            owners[_owner_before(recording, known, event)] += recording.deltas[event]
    largest = sorted(live, key=lambda one: -one[1].bytes)[:LARGEST]
    return {
        "owners_gib": {owner: gib(owners[owner]) for owner in OWNERS},
        "activations_gib": {_of_layer(detail): gib(size) for detail, size in layers.items()},
        "largest": [
            {
                "gib": gib(block.bytes),
                "operation": block.operation,
                "phase": str(recording.phases[block.phase]),
                "owner": owned[number].owner,
            }
            for number, block in largest
        ],
    }


def _of_layer(detail: str) -> str:
    phase = Phase.from_text(detail)
    return f"layer {phase.layer}" if phase.kind == FORWARD else str(phase)


def time_by_kind(parts: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the ms of each kind of phase, layers together."""
    return {kind: sum(one["end_ms"] - one["begin_ms"] for one in parts if one["kind"] == kind) for kind in KINDS}
