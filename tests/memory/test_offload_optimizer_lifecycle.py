"""Offloaded optimizer states among all else: copies, removal, compilers, wrappers, limits, and what is refused."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lowtide.errors import ArgumentTypeError, ArgumentValueError, UnsupportedError
from lowtide.measure.allocations import track_allocations
from lowtide.memory import ActivationPolicy, apply_policy, offload_optimizer, pinned
from memory.models import LazySide, Plain
from memory.states import Pair, adamw, batch, equal, states

pytestmark = pytest.mark.usefixtures("small_blocks")


def test_groups_that_come_later(side: LazySide) -> None:
    pair = Pair(lambda m: torch.optim.AdamW(m.blocks.parameters(), lr=1e-2))
    pair.train(2)
    before = pair.handle.offloaded_bytes
    for m, optimizer in pair.both():
        optimizer.add_param_group({"params": [*m.embed.parameters(), *m.head.parameters()], "lr": 1e-3})
    pair.train(3)
    assert pair.handle.offloaded_bytes > before
    assert {len(p._post_accumulate_grad_hooks) for p in pair.model.blocks.parameters()} == {1}
    assert side.pinned == pair.handle.host_bytes


def test_several_optimizers(side: LazySide) -> None:
    pair = Pair(lambda m: torch.optim.AdamW(m.blocks.parameters(), lr=1e-2))
    ours, theirs = (torch.optim.SGD(m.head.parameters(), 0.1, 0.9) for m in (pair.model, pair.stock))
    handle = offload_optimizer(ours, pair.model)
    for k in range(6):
        pair.backward(k)
        if k % 2:  # one of them alone: the other's step is left out
            ours.step()
            theirs.step()
            pair.same()
        else:
            pair.step()
        pair.zero_grad()
    assert min(pair.handle.offloaded_bytes, handle.offloaded_bytes) > 0


@pytest.mark.parametrize("moment", ["device", "host", "coming"])
@pytest.mark.parametrize("how", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["copy", "pickle"])
def test_copies_have_all_states_and_offload_nothing(how: Callable[[Any], Any], moment: str, side: LazySide) -> None:
    pair = Pair()
    pair.come_to(moment)
    other, made = how((pair.model, pair.ours))
    assert pair.where() == {"device"}
    pinned_before = side.pinned
    assert all(p is q for p, q in zip(made.param_groups[0]["params"], other.parameters(), strict=True))
    assert equal(states(made), states(pair.theirs))
    pair.losses.clear()
    other.zero_grad()
    other(batch(1)).backward()
    made.step()
    assert side.pinned == pinned_before
    pair.zero_grad()
    pair.train(2)
    assert not any(torch.equal(p, q) for p, q in zip(pair.model.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("moment", ["device", "host", "coming"])
def test_removed(moment: str, side: LazySide) -> None:
    pair = Pair()
    pair.come_to(moment)
    pair.handle.remove()
    pair.handle.remove()
    assert side.pinned == pair.handle.host_bytes == pair.handle.offloaded_bytes == 0
    pair.same()
    pair.zero_grad()
    pair.losses.clear()
    copies = side.copies
    pair.train(2)
    assert side.copies == copies


@pytest.mark.parametrize("moment", ["device", "host", "coming"])
def test_an_optimizer_that_goes_takes_all_with_it(moment: str, side: LazySide) -> None:
    gc.disable()
    try:
        pair = Pair()
        pair.come_to(moment)
        del pair.ours, pair.handle
        assert side.pinned == 0
        assert sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in pair.model.modules()) == 0
        pair.model(batch(1)).backward()
    finally:
        gc.enable()


def test_calling_again_replaces(side: LazySide) -> None:
    pair = Pair()
    pair.train(2)
    everything = pair.handle.offloaded_bytes
    former = pair.handle
    pair.model(batch(0))
    pair.handle = offload_optimizer(pair.ours, pair.model, gib=0.5 * everything / 2**30)
    assert former.host_bytes == former.offloaded_bytes == 0
    pair.train(2)
    assert 0.4 * everything < pair.handle.offloaded_bytes <= 0.5 * everything
    assert side.pinned == pair.handle.host_bytes == pair.handle.offloaded_bytes
    pair.model(batch(0))
    assert pair.where() == {"host"}


def test_forty_steps_leak_nothing(side: LazySide) -> None:
    pair = Pair()
    pair.train(2)
    model, optimizer = pair.model, pair.ours
    model(batch(0))  # the states are on the host, at the beginning and at the end
    gc.disable()
    try:
        full = side.pinned
        with track_allocations() as seen:
            for k in range(40):
                loss = model(batch(k))
                if k % 7:
                    loss.backward()
                if k % 5 == 0:
                    optimizer.state_dict()
                if k % 3:
                    optimizer.step()
                optimizer.zero_grad()
                del loss
            model(batch(0))
    finally:
        gc.enable()
    assert side.pinned == full == pair.handle.host_bytes
    assert abs(seen.events[-1].total_bytes) < 2000 < pair.handle.offloaded_bytes


class Checkpointed(Plain):
    """Its layers, hooks and all, are run again in backward."""

    reentrant = False

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


@pytest.mark.parametrize("way", ["reentrant", "not reentrant", "policy"])
def test_with_checkpointed_layers(way: str, side: LazySide) -> None:
    """What backward runs again sends nothing out and drops nothing; a policy's own copies are beside."""
    model = Plain() if way == "policy" else Checkpointed()
    model.reentrant = way == "reentrant"
    pair = Pair(model=model)
    if way == "policy":
        apply_policy(model, ActivationPolicy(keep="attention", offload=True))
    pair.train(1)
    moved = 3 * 3 if way == "policy" else 0  # tensors of three layers
    for k in range(2):
        pair.losses_of(k)
        assert pair.where() == {"host"}
        out, back = side.copies, side.begun_back
        pair.backward()
        assert side.copies == out
        assert side.begun_back == back + len(pair.handle._blocks) + moved
        pair.step()


@pytest.mark.filterwarnings("ignore")  # of the compiler's own doing
@pytest.mark.parametrize("how", ["before", "after", "layers"])
def test_beside_torch_compile(how: str, side: LazySide) -> None:
    compiled = (lambda pair: pair.model.compile(backend="eager")) if how == "before" else (lambda pair: None)
    pair = Pair(model=Plain(3), before=compiled)
    for module in {"after": [pair.model], "layers": pair.model.blocks}.get(how, []):
        module.compile(backend="eager")
    for k in range(3):
        pair.losses_of(k)
        assert pair.where() == ({"host"} if k else set())
        pair.backward()
        pair.step()


def test_accelerates_wrapper(side: LazySide, accelerate_anew: None) -> None:
    accelerator = pytest.importorskip("accelerate").Accelerator(cpu=True)

    def prepare(pair: Pair) -> None:
        pair.model, pair.ours = accelerator.prepare(pair.model, pair.ours)

    pair = Pair(before=prepare)
    pair.train(3)
    assert pair.handle.offloaded_bytes > 0


def test_limits(side: LazySide, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Plain()
    for host_gib in (100_000 / 2**30, 5):
        if host_gib == 5:
            monkeypatch.setattr(pinned, "available_bytes", lambda: (1 << 30) + 100_000)
        optimizer = adamw(model)
        handle = offload_optimizer(optimizer, model, host_gib=host_gib)
        model(batch(0)).backward()
        with pytest.raises(UnsupportedError, match=r"host_gib: .* for the optimizer's states, .* \(gib\)"):
            optimizer.step()
        assert side.pinned == 0
        assert handle.offloaded_bytes == 0
        handle = offload_optimizer(optimizer, model, host_gib=host_gib, gib=90_000 / 2**30)
        model(batch(0)).backward()
        optimizer.step()
        assert 80_000 < side.pinned <= 90_000
        handle.remove()


def test_nothing_to_offload(side: LazySide) -> None:
    model = Plain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    offload_optimizer(optimizer, model)
    optimizer.step()  # no gradients yet
    model(batch(0)).backward()
    with pytest.raises(UnsupportedError, match="SGD without momentum has none"):
        optimizer.step()


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"optimizer": 3}, ArgumentTypeError, "optimizer: expected a torch.optim.Optimizer, got int"),
        ({"model": None}, ArgumentTypeError, "model: expected a torch.nn.Module"),
        ({"model": nn.Linear(2, 3)}, ArgumentValueError, "model: expected a model with a ModuleList"),
        ({"gib": 0}, ArgumentValueError, "gib: expected a finite number of GiB, above 0, got 0"),
        ({"gib": True}, ArgumentTypeError, "gib: expected"),
        ({"gib": float("nan")}, ArgumentValueError, "gib: expected"),
        ({"host_gib": -1}, ArgumentValueError, "host_gib: expected"),
        ({"host_gib": "5"}, ArgumentTypeError, "host_gib: expected"),
        ({"backwards_per_step": 0}, ArgumentValueError, "backwards_per_step: expected at least 1"),
        ({"late": 1}, ArgumentTypeError, "late: expected True or False"),
        ({"backwards_per_step": 1.0}, ArgumentTypeError, "backwards_per_step: expected a whole number"),
    ],
)
def test_what_is_refused(change: dict[str, Any], error: type[Exception], said: str, side: LazySide) -> None:
    model = Plain()
    given: dict[str, Any] = {"optimizer": adamw(model), "model": model, **change}
    with pytest.raises(error, match=said):
        offload_optimizer(given.pop("optimizer"), given.pop("model"), **given)


def test_cpus_and_dtensors_are_refused(side: LazySide, monkeypatch: pytest.MonkeyPatch) -> None:
    class DTensor(nn.Parameter):
        pass

    parameter = DTensor(torch.ones(3))
    parameter.__class__ = DTensor
    with pytest.raises(UnsupportedError, match="CPUOffloadPolicy"):
        offload_optimizer(torch.optim.SGD([parameter], lr=0.1), Plain())
    monkeypatch.undo()  # of the side
    model = Plain()
    with pytest.raises(UnsupportedError, match="optimizer: expected parameters on a CUDA device, got all on cpu"):
        offload_optimizer(adamw(model), model)
