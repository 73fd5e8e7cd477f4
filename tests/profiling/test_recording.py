"""The recorder, and whose its bytes are, beside allocations that are known."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowtide.measure.allocations import track_allocations
from lowtide.profile.memory import Recording, describe, owners_of, read_recording, storages
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
    profiler_range,
)
from promises import promise

pytestmark = promise("commands", "memory")

CPU = torch.device("cpu")
KIB = 1024


def kib(n: int) -> Tensor:
    return torch.empty(n * KIB, dtype=torch.uint8)


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


def profiler() -> Any:
    return torch.profiler.profile(profile_memory=True, acc_events=True)


def tensors_of_known_sizes() -> tuple[Recording, list[Tensor]]:
    """A step made by hand: what each phase allocates and frees is written here."""
    marks = PhaseMarks(Model(), CPU)
    with profiler() as seen, profiler_range("all"), marks.step():
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
    return read_recording(seen, marks.phases, CPU), [stream, gradient, state]


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
    by_layer = {name: gib * 2**20 for name, gib in told["peak"]["activations_gib"].items()}
    assert by_layer == {"embedding": 3, "layer 0": 5}
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


def step(model: nn.Module, optimizer: Any, ids: Tensor, marks: PhaseMarks) -> dict[int, int]:
    with marks.step():
        loss = model(ids)
        marks.begin(Phase(HEAD_BACKWARD))
        loss.backward()
        marks.begin(Phase(OPTIMIZER))
        gradients = storages((p.grad for p in model.parameters()), CPU)
        optimizer.step()
        optimizer.zero_grad()
    return gradients


def test_a_models_step_byte_by_byte() -> None:
    torch.manual_seed(0)
    N, D = 45, 33
    model, ids = Model(D), torch.randint(0, 71, (N,))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    marks = PhaseMarks(model, CPU)
    assert not model.layers[0].linear._forward_hooks, "a hook there would change which code runs"
    step(model, optimizer, ids, marks)
    with track_allocations() as plain:
        step(model, optimizer, ids, marks)
    with profiler() as seen, profiler_range("all"):
        gradients = step(model, optimizer, ids, marks)
    recording = read_recording(seen, marks.phases, CPU)
    told = describe(recording, {}, gradients, marks.lengths_ms())
    assert told["peak"]["gib"] * 2**30 == plain.peak_bytes
    layers = [Phase(FORWARD, i) for i in range(3)], [Phase(BACKWARD, i) for i in (2, 1, 0)]
    ends = [Phase(kind) for kind in (EMBEDDING_BACKWARD, OPTIMIZER, END)]
    assert recording.phases == [Phase(EMBEDDING), *layers[0], Phase(HEAD), Phase(HEAD_BACKWARD), *layers[1], *ends]
    owned = owners_of(recording, gradients)
    by_owner: dict[str, int] = {}
    for block, owner in zip(recording.blocks, owned, strict=True):
        by_owner[owner] = by_owner.get(owner, 0) + block.bytes
    assert by_owner["gradients"] == sum(p.numel() for p in model.parameters()) * 4  # each parameter's, once
    # of a layer: what tanh returned, and the sum; of the embedding: its output
    assert by_owner["activations"] == (1 + 2 * 3) * N * D * 4
    saving = {recording.phases[b.phase] for b, one in zip(recording.blocks, owned, strict=True) if one == "activations"}
    assert saving == {Phase(EMBEDDING), *layers[0]}
