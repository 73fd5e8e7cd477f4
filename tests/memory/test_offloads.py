"""Offloading, with a host beside the host: copies come as late as they may, and what is used too soon is NaN.

What holds for both, activations of layers and states of an optimizer, stands first.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from lowtide.errors import UnsupportedError
from lowtide.measure.allocations import track_allocations
from lowtide.memory import apply_policy, copies, offload_optimizer, remove_policy
from memory.models import OFFLOADED_ATTENTION as ATTENTION
from memory.models import OFFLOADED_INPUT as INPUT
from memory.models import VOCAB, LazySide, Plain, step
from memory.states import adamw
from promises import promise

pytestmark = [promise("policies"), pytest.mark.usefixtures("small_blocks")]
LONG = torch.arange(512).remainder(VOCAB - 3)[None] + 3


class Subject:
    """A model that trains with something on the host, and what is there."""

    def __init__(
        self, what: str, layers: int = 6, host_gib: float | None = None, width: int = 24, *, moves: bool = True
    ) -> None:
        self.model = Plain(layers, width, heads=width // 8)
        self.optimizer = adamw(self.model)
        self.handle: Any = None
        self.remove: Callable[[], None] = lambda: remove_policy(self.model)
        if what != "states":
            policy = replace(ATTENTION if what == "attention" else INPUT, offload=moves)
            self.handle = apply_policy(self.model, policy, host_gib=host_gib)
        elif moves:
            self.handle = offload_optimizer(self.optimizer, self.model, host_gib=host_gib)
            self.remove = self.handle.remove

    def train(self, ids: Tensor) -> None:
        self.model(ids).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def host_bytes(self) -> int:
        return 0 if self.handle is None else int(self.handle.host_bytes)


what_moves = pytest.mark.parametrize("what", ["input", "attention", "states"])


@contextmanager
def no_collector() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@promise("memory")
@what_moves
def test_what_has_moved_is_gone_from_the_device(what: str, side: LazySide) -> None:
    """After forward, by as many bytes as are on the host."""
    live = []
    for moves in (False, True):
        gc.collect()
        with no_collector(), track_allocations() as seen:
            subject = Subject(what, layers=9, width=64, moves=moves)
            for _ in range(2):
                subject.train(LONG)
            loss = subject.model(LONG)
        assert loss.requires_grad
        live.append(seen.events[-1].total_bytes - side.pinned)
        host = subject.host_bytes
        del loss
    assert live[0] - live[1] == pytest.approx(host, rel=0.02)


@what_moves
def test_twenty_steps_leak_nothing(what: str, side: LazySide) -> None:
    """Neither on the host, which grows to the longest batch, nor on the device; backward or not."""
    subject, longest = Subject(what), torch.randint(3, VOCAB, (2, 29))
    for length in (5, 29, 12):
        subject.train(longest[:, :length])
    subject.model(longest)  # what moves is on the host, at the beginning and at the end
    full = side.pinned
    with no_collector(), track_allocations() as seen:
        for k in range(20):
            loss = subject.model(longest[: 1 + k % 2, : 5 + (7 * k) % 24])
            if k % 5 < 4:
                loss.backward()
            if k % 3:
                subject.optimizer.step()
            subject.optimizer.zero_grad()
            del loss
        subject.model(longest)
    assert side.pinned == full == subject.host_bytes > 0
    assert abs(seen.events[-1].total_bytes) < 2000
    subject.remove()
    subject.remove()
    assert side.pinned == subject.host_bytes == 0


@promise("errors")
@what_moves
def test_a_budget_is_never_exceeded(what: str, side: LazySide, monkeypatch: pytest.MonkeyPatch, ids: Tensor) -> None:
    """Refused in the first layer of the first step, with nothing pinned; as much as is needed suffices."""
    whole = Subject(what)
    for _ in range(2):
        whole.train(ids)
    whole.model(ids)
    needed = whole.host_bytes
    whole.remove()
    for limit, said in ((needed - 1, r"\(host_gib\)"), (None, "what the host has free")):
        if limit is None:
            monkeypatch.setattr(copies, "available_bytes", lambda: (1 << 30) + 100)
        subject = Subject(what, host_gib=5 if limit is None else limit / 2**30)
        with pytest.raises(UnsupportedError, match=f"host_gib: expected .* GiB of host memory for .*{said}"):
            subject.train(ids)
        assert side.pinned == 0 or what == "attention", "which is second behind an input"
    monkeypatch.undo()


@pytest.mark.parametrize(("limit", "most"), [(None, 250), (700, 700)])
def test_processes_of_a_machine_share_what_is_free(
    limit: int | None, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr(copies, "available_bytes", lambda: (1 << 30) + 1000)
    pool = copies.HostPool(limit, cast(Any, LazySide()))
    pool.check(most, "it")
    with pytest.raises(UnsupportedError, match="host_gib" if limit else "each of 4 processes"):
        pool.check(most + 1, "it")


def test_graphs_that_are_alive_share_the_budget(side: LazySide, ids: Tensor) -> None:
    model = Plain(8)
    apply_policy(model, INPUT, host_gib=6 * ids.numel() * 24 * 4 / 2**30)
    loss = model(ids)
    with pytest.raises(UnsupportedError, match="graphs that are alive"):
        model(ids)
    del loss
    gc.collect()
    step(model, ids)  # the graphs that were in the way are gone


@promise("errors")
def test_changed_in_place_raises(side: LazySide, ids: Tensor) -> None:
    model = Plain(6)
    apply_policy(model, INPUT)
    step(model, ids)
    model.blocks[1].norm.register_forward_pre_hook(lambda _, args: args[0].mul_(1.01))
    with pytest.raises(UnsupportedError, match="in-place"):
        step(model, ids)


def test_removed_between_forward_and_backward(side: LazySide, ids: Tensor) -> None:
    model = Plain()
    stock = copy.deepcopy(model)
    report = apply_policy(model, ATTENTION)
    loss = model(ids)
    remove_policy(model)
    assert report.host_bytes > 0
    loss.backward()
    del loss
    assert side.pinned == report.host_bytes == 0
    gradients = step(stock, ids)[1]
    assert all(torch.equal(p.grad, gradients[name]) for name, p in model.named_parameters())


@promise("compile")
@pytest.mark.filterwarnings("ignore:The .grad attribute", "ignore::DeprecationWarning")  # of the compiler's own doing
@pytest.mark.parametrize("how", ["model", *(pytest.param(how, marks=pytest.mark.slow) for how in ("layers", "parts"))])
def test_beside_torch_compile(how: str, llama: Any, side: LazySide, ids: Tensor) -> None:
    """An offloaded layer runs in eager, once, and its parts may be compiled."""
    model = llama(num_hidden_layers=3)
    stock = copy.deepcopy(model)
    apply_policy(model, ATTENTION)
    for module in [model.model] if how == "model" else model.model.layers:
        (module.mlp if how == "parts" else module).compile(backend="aot_eager")
    got, want = step(model, ids), step(stock, ids)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)
    assert side.copies == 3  # of the one layer that moves


@promise("errors")
def test_nothing_to_offload_from(monkeypatch: pytest.MonkeyPatch, ids: Tensor) -> None:
    model = Plain()
    monkeypatch.setattr("lowtide.memory.copies.available", lambda: False)
    with pytest.raises(UnsupportedError, match="a GPU to offload from"):
        apply_policy(model, INPUT)
    monkeypatch.setattr("lowtide.memory.copies.available", lambda: True)
    apply_policy(model, INPUT)
    with pytest.raises(UnsupportedError, match="offload: expected a CUDA device, got cpu"):
        step(model, ids)
