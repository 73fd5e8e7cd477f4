"""The recorder, and whose its bytes are, beside allocations that are known."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowtide.measure.allocations import track_allocations
from lowtide.profile.memory import Known, describe, known_before, optimizer_tensors, owners_of, segments
from lowtide.profile.phases import (
    BACKWARD,
    EMBEDDING,
    EMBEDDING_BACKWARD,
    END,
    FORWARD,
    HEAD,
    HEAD_BACKWARD,
    OPTIMIZER,
    RECOMPUTE,
    Phase,
    PhaseMarks,
    with_whole_recomputes,
)
from lowtide.profile.recording import Recording, record, storages
from promises import promise

pytestmark = promise("commands", "memory")

CPU = torch.device("cpu")
KIB = 1024


def kib(n: int) -> Tensor:
    return torch.empty(n * KIB, dtype=torch.uint8)


def tensors_of_known_sizes() -> tuple[Recording, list[Tensor]]:
    """A step made by hand: what each phase allocates and frees is written here."""
    marks = PhaseMarks()
    with record(marks, CPU) as recording:
        marks.begin(Phase(EMBEDDING))
        stream = kib(3)
        marks.begin(Phase(FORWARD, 0))
        kept, passing, late = kib(5), kib(7), kib(4)
        del passing
        marks.begin(Phase(HEAD))
        del late  # the next phase's first event: it was there when that began
        logits = kib(40)
        marks.begin(Phase(HEAD_BACKWARD))
        del logits
        marks.begin(Phase(BACKWARD, 0))
        marks.begin(Phase(RECOMPUTE, 0))
        again = kib(11)
        marks.begin(Phase(BACKWARD, 0))  # an addition between two modules
        between = kib(2)
        marks.begin(Phase(RECOMPUTE, 0))
        more = kib(1)
        marks.begin(Phase(BACKWARD, 0))
        gradient, scratch = kib(6), kib(13)
        del kept, again, between, more, scratch
        marks.begin(Phase(OPTIMIZER))
        state = kib(9)
        marks.begin(Phase(END))
    return recording, [stream, gradient, state]


def test_blocks_are_what_was_allocated_and_freed() -> None:
    recording, _ = tensors_of_known_sizes()
    assert [block.bytes // KIB for block in recording.blocks] == [3, 5, 7, 4, 40, 11, 2, 1, 6, 13, 9]
    live = [block.bytes // KIB for block in recording.blocks if block.end is None]
    assert live == [3, 6, 9]
    assert max(recording.totals()) == 48 * KIB
    assert recording.totals()[-1] == 18 * KIB
    kinds = [phase.kind for phase in recording.phases]
    recomputed = [RECOMPUTE] * 3
    assert kinds == [EMBEDDING, FORWARD, HEAD, HEAD_BACKWARD, BACKWARD, *recomputed, BACKWARD, OPTIMIZER, END]
    assert len(recording.begins) == len(recording.begins_ns) == len(kinds)
    assert recording.begins_ns == sorted(recording.begins_ns)
    assert all(block.operation == "aten::empty" for block in recording.blocks)


def test_each_block_has_its_owner() -> None:
    recording, (_, gradient, state) = tensors_of_known_sizes()
    known = Known(
        before={1: ("weights", 100 * KIB)},
        baseline=130 * KIB,
        gradients=set(storages([gradient], CPU)),
        states=set(storages([state], CPU)),
    )
    owners = owners_of(recording, known)
    assert owners == [
        "activations", "activations", "transients", "activations", "head", "recomputed", "recomputed", "recomputed",
        "gradients", "transients", "optimizer",
    ]  # fmt: skip
    lengths = [100.0, 1.0, 300.0, 7.0, 2.0, 0.5, 0.5, 0.5, 20.0, 1000.0]
    told = describe(recording, known, lengths)
    peak = {owner: gib * 2**20 for owner, gib in told["peak"]["owners_gib"].items() if gib}
    assert peak == {"weights": 100, "other": 30, "activations": 8, "head": 40}
    assert told["peak"]["gib"] == 178 * KIB / 2**30
    assert told["peak"]["phase"] == "head"
    assert 101 <= told["peak"]["ms"] <= 401
    phases = iter(segments(recording.phases, lengths))
    assert [one["end_ms"] for one in phases][-1] == sum(lengths)
    # each phase's events are drawn within it: the drop behind the head's forward is in its backward
    drop = next(ms for ms, gib in zip(told["timeline"]["ms"], told["timeline"]["gib"], strict=True) if ms > 401)
    assert 401 < drop <= 408
    assert told["timeline"]["ms"][-1] > sum(lengths[:-1])
    assert {name: gib * 2**20 for name, gib in told["peak"]["activations_gib"].items()} == {
        "embedding": 3, "layer 0": 5,
    }  # fmt: skip
    assert told["peak"]["largest"][0]["gib"] == 40 / 2**20
    line = told["timeline"]
    assert max(line["gib"]) == pytest.approx(178 / 2**20, rel=1e-4)
    for i, gib in enumerate(line["gib"]):
        assert sum(line["owners"][owner][i] for owner in line["owners"]) == pytest.approx(gib, rel=1e-4)
    assert line["ms"] == sorted(line["ms"])


def test_an_error_leaves_what_was_recorded_until_then() -> None:
    marks, told = PhaseMarks(), []
    marks.on_begin = told.append
    found = []
    with pytest.raises(RuntimeError, match="no more"), record(marks, CPU) as recording:  # noqa: PT012
        found.append(recording)
        marks.begin(Phase(EMBEDDING))
        kept = kib(4)
        raise RuntimeError("no more")
    assert kept.numel() == 4 * KIB
    recording = found[0]
    assert [phase.kind for phase in recording.phases] == [EMBEDDING, END]
    assert recording.totals() == [4 * KIB]
    assert marks.on_begin == told.append, "the recorder has taken its own away"
    assert told == [Phase(EMBEDDING)]


class Layer(nn.Module):
    def __init__(self, D: int) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)
        self.act = nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.act(self.linear(x))
        return x + y


class Model(nn.Module):
    def __init__(self, D: int = 33, V: int = 71) -> None:
        super().__init__()
        self.embed = nn.Embedding(V, D)
        self.layers = nn.ModuleList(Layer(D) for _ in range(3))
        self.head = nn.Linear(D, V)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x), ids)


def step(model: nn.Module, optimizer: Any, ids: Tensor, marks: PhaseMarks) -> set[int]:
    marks.begin(Phase(EMBEDDING))
    loss = model(ids)
    marks.begin(Phase(HEAD_BACKWARD))
    loss.backward()
    marks.begin(Phase(OPTIMIZER))
    gradients = set(storages((p.grad for p in model.parameters()), CPU))
    optimizer.step()
    optimizer.zero_grad()
    marks.begin(Phase(END))
    return gradients


def test_a_models_step_byte_by_byte() -> None:
    torch.manual_seed(0)
    N, D = 45, 33
    model, ids = Model(D), torch.randint(0, 71, (N,))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    marks = PhaseMarks()
    with track_allocations() as first:
        step(model, optimizer, ids, marks)
    assert first.peak_bytes > 0
    marks.install(model, children=True)
    assert not model.layers[0].linear._forward_hooks, "a hook there would change which code runs"
    with track_allocations() as plain:
        step(model, optimizer, ids, marks)
    known = known_before(model, optimizer, [ids], CPU)
    weights = sum(p.numel() for p in model.parameters()) * 4
    before = {owner: sum(size for o, size in known.before.values() if o == owner) for owner in ("weights", "other")}
    assert before == {"weights": weights, "other": N * 8}
    assert known.baseline == 3 * weights + N * 8 + 4 * len(list(model.parameters()))  # and each state's step
    with record(marks, CPU) as recording:
        known.gradients = step(model, optimizer, ids, marks)
    known.states = set(storages(optimizer_tensors(optimizer), CPU))
    assert max(recording.totals()) == plain.peak_bytes
    layers = [Phase(FORWARD, i) for i in range(3)], [Phase(BACKWARD, i) for i in (2, 1, 0)]
    ends = [Phase(kind) for kind in (EMBEDDING_BACKWARD, OPTIMIZER, END)]
    assert recording.phases == [Phase(EMBEDDING), *layers[0], Phase(HEAD), Phase(HEAD_BACKWARD), *layers[1], *ends]
    owned = owners_of(recording, known)
    by_owner: dict[str, int] = {}
    for block, one in zip(recording.blocks, owned, strict=True):
        by_owner[one] = by_owner.get(one, 0) + block.bytes
    assert by_owner["gradients"] == weights  # each parameter's, once
    # of a layer: what tanh returned, and the sum; of the embedding: its output
    assert by_owner["activations"] == (1 + 2 * 3) * N * D * 4
    saving = {recording.phases[b.phase] for b, one in zip(recording.blocks, owned, strict=True) if one == "activations"}
    assert saving == {Phase(EMBEDDING), *layers[0]}


def test_what_stands_between_two_parts_of_a_recompute_is_of_it() -> None:
    phases = [Phase(BACKWARD, 1), Phase(RECOMPUTE, 1), Phase(BACKWARD, 1), Phase(RECOMPUTE, 1), Phase(BACKWARD, 1)]
    assert with_whole_recomputes(phases) == [phases[0], *[Phase(RECOMPUTE, 1)] * 3, phases[4]]
    one_each = [Phase(RECOMPUTE, 1), Phase(BACKWARD, 1), Phase(RECOMPUTE, 0), Phase(BACKWARD, 0)]
    assert with_whole_recomputes(one_each) == one_each
