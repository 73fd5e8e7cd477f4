"""The recorder, and whose its bytes are, beside allocations that are known."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lowtide.profile.memory import Recording, describe, owners_of, read_recording, storages
from lowtide.profile.phases import (
    BACKWARD,
    EMBEDDING,
    END,
    FORWARD,
    HEAD,
    HEAD_BACKWARD,
    OPTIMIZER,
    RECOMPUTE,
    Phase,
    PhaseMarks,
    profiler_range,
)
from promises import promise

pytestmark = promise("commands", "memory")

CPU = torch.device("cpu")
KIB = 1024


def kib(n: int) -> Tensor:
    return torch.empty(n * KIB, dtype=torch.uint8)


def tensors_of_known_sizes() -> tuple[Recording, list[Tensor]]:
    """A step made by hand: what each phase allocates and frees is written here."""
    marks = PhaseMarks(nn.ModuleList(nn.Sequential(nn.Tanh()) for _ in range(2)), CPU)
    profiler = torch.profiler.profile(profile_memory=True, acc_events=True)
    with profiler, profiler_range("all"), marks.step():
        stream = kib(3)
        marks.begin(Phase(FORWARD, 0))
        kept, passing, late = kib(5), kib(7), kib(4)
        del passing
        marks.begin(Phase(HEAD))
        del late  # the next phase's first event: it was there when that began
        logits = kib(40)
        marks.begin(Phase(HEAD_BACKWARD))
        del logits
        marks.begin(Phase(RECOMPUTE, 0))
        again = kib(11)
        marks.begin(Phase(BACKWARD, 0))
        gradient, scratch = kib(6), kib(13)
        del kept, again, scratch
        marks.begin(Phase(OPTIMIZER))
        state = kib(9)
    return read_recording(profiler, marks.phases, CPU), [stream, gradient, state]


def test_each_block_has_its_phase_and_its_owner() -> None:
    recording, (_, gradient, _state) = tensors_of_known_sizes()
    gradients = storages([gradient], CPU)
    kinds = [EMBEDDING, FORWARD, HEAD, HEAD_BACKWARD, RECOMPUTE, BACKWARD, OPTIMIZER, END]
    assert [phase.kind for phase in recording.phases] == kinds
    found = [
        (block.bytes // KIB, kinds[block.phase], owner)
        for block, owner in zip(recording.blocks, owners_of(recording, gradients), strict=True)
    ]
    assert found == [
        (3, EMBEDDING, "activations"), (5, FORWARD, "activations"), (7, FORWARD, "transients"),
        (4, FORWARD, "activations"), (40, HEAD, "head"), (11, RECOMPUTE, "recomputed"), (6, BACKWARD, "gradients"),
        (13, BACKWARD, "transients"), (9, OPTIMIZER, "optimizer"),
    ]  # fmt: skip
    lengths = [100.0, 1.0, 300.0, 7.0, 1.5, 20.0, 1000.0]
    told = describe(recording, {"weights": 100 * KIB, "other": 30 * KIB}, gradients, lengths)
    peak = {owner: gib * 2**20 for owner, gib in told["peak"]["owners_gib"].items() if gib}
    assert peak == {"weights": 100, "other": 30, "activations": 8, "head": 40}
    assert told["peak"]["gib"] == told["peak_gib"] == 178 * KIB / 2**30
    assert told["peak"]["phase"] == "head"
    assert 101 <= told["peak"]["ms"] <= 401
    assert told["segments"][-1]["end_ms"] == sum(lengths)
    assert told["time_by_kind_ms"][HEAD] == 300
    line = told["timeline"]
    # each phase's events are drawn within it: the drop behind the head's forward is in its backward
    drop = next(ms for ms, gib in zip(line["ms"], line["gib"], strict=True) if ms > 401)
    assert 401 < drop <= 408
    assert line["ms"] == sorted(line["ms"])
    assert max(line["gib"]) == pytest.approx(178 / 2**20, rel=1e-4)
    for i, gib in enumerate(line["gib"]):
        assert sum(line["owners"][owner][i] for owner in line["owners"]) == pytest.approx(gib, rel=1e-4)
