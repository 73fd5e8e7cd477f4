"""Optimizer states on the host, with copies that come as late as they may: always the same to the bit."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from lowtide.errors import ArgumentTypeError, ArgumentValueError, UnsupportedError
from lowtide.memory import ActivationPolicy, apply_policy, offload_optimizer
from memory.models import LazySide, Plain
from memory.states import OPTIMIZERS, Pair, adamw, batch, equal, states
from promises import promise

pytestmark = [promise("policies"), pytest.mark.usefixtures("small_blocks")]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_same_to_the_bit(name: str, side: LazySide) -> None:
    pair = Pair(name)
    assert pair.handle.offloaded_bytes == pair.handle.host_bytes == side.pinned == 0
    pair.train(4)
    total = pair.handle.offloaded_bytes
    assert total == side.pinned == pair.handle.host_bytes > 0
    large = [v for v in states(pair.ours) if v.numel() * v.element_size() > 64]
    large = [v for v in large if sum(v is other for other in large) == 1]  # bitsandbytes' tables are everybody's
    assert 0 < sum(v.numel() * v.element_size() for v in large) <= total  # with gaps for the alignment
    assert side.begun_back == 3 * len(pair.handle._blocks)
    assert "GiB of optimizer states" in str(pair.handle)


@pytest.mark.parametrize("moment", ["forward", "loss", "backward", "gradients", "next forward", "step"])
def test_a_checkpoint_at_any_moment(moment: str, side: LazySide) -> None:
    """`state_dict` has what the stock optimizer has, from hooks in the midst of a pass too.

    Into a file and out of it, into PyTorch's own optimizer and from it: the training goes on to the bit. A forward that
    follows a backward without a step leaves what has come back unused, and waits for the host's copies.
    """
    pair = Pair()
    pair.train(2)
    taken: dict[str, Any] = {}

    def take(*_: Any) -> None:
        file = io.BytesIO()
        torch.save(pair.ours.state_dict(), file)
        file.seek(0)
        taken.update(torch.load(file))

    want = copy.deepcopy(pair.theirs.state_dict())
    if moment == "forward":
        pair.model.blocks[3].register_forward_hook(take)
    if moment == "backward":
        pair.model.blocks[2].mlp[0].weight.register_post_accumulate_grad_hook(take)
    if moment == "next forward":
        pair.backward(6)
    pair.losses_of(5)
    if moment in ("loss", "next forward"):
        before = side.finished
        take()
        assert side.finished > before
    pair.backward()
    if moment == "gradients":
        take()
    pair.step()
    if moment == "step":
        take()
        want = pair.theirs.state_dict()
    assert taken["param_groups"] == want["param_groups"]
    torch.testing.assert_close(taken["state"], want["state"], rtol=0, atol=0)
    other = copy.deepcopy(pair.stock)
    alone = adamw(other)
    alone.load_state_dict(taken)
    for optimizer in (pair.ours, pair.theirs):
        optimizer.load_state_dict(copy.deepcopy(want))
    for k in range(2):
        other(batch(k)).backward()
        alone.step()
        alone.zero_grad()
    pair.train(2)
    assert equal(other.parameters(), pair.stock.parameters())


def test_steps_that_are_left_out(side: LazySide) -> None:
    """As a gradient scaler does: the host's copy is as good, and nothing travels out again."""
    pair = Pair()
    pair.train(2)
    out = side.copies
    for seed in range(3):
        pair.backward(seed)
        pair.zero_grad()
        assert pair.where() == {"coming"}
    assert side.copies == out + len(pair.handle._blocks)
    pair.model(batch(0))
    assert pair.where() == {"host"}
    pair.train(2)


@pytest.mark.parametrize(("settings", "passes"), [({"backwards_per_step": 3}, 3), ({"late": True}, 1)])
def test_states_come_back_in_the_last_backward_or_behind_it(
    settings: dict[str, Any], passes: int, side: LazySide
) -> None:
    pair = Pair(**settings)
    pair.train(2)
    blocks, late = len(pair.handle._blocks), "late" in settings
    for _ in range(2):
        begun = side.begun_back
        for k in range(passes):
            assert side.begun_back == begun
            pair.backward(k)
            assert pair.where() == ({"coming"} if k == passes - 1 and not late else {"host"})
        pair.step()
        assert side.begun_back == begun + blocks
    for k in range(passes - 1):  # one backward too few
        pair.backward(k)
    pair.step()
    pair.backward(1)
    assert pair.where() == {"host"}
    assert late != any(p._post_accumulate_grad_hooks for p in pair.model.parameters())


def test_some_parameters_without_gradients_frozen_or_tied(side: LazySide) -> None:
    model = Plain(6)
    model.head.weight = model.embed.weight
    for frozen in (1, 2, 5):
        model.blocks[frozen].requires_grad_(False)
    pair = Pair(model=model)
    pair.train(2)
    pair.backward(0)
    assert pair.where() == {"coming"}
    pair.step()
    for m in (pair.model, pair.stock):
        m.blocks[1].requires_grad_(True)  # it makes states later
    pair.train(3)
    pair.backward(1)
    for m in (pair.model, pair.stock):
        m.blocks[4].qkv.weight.grad = None  # its states stay as they are
    pair.step()
    pair.train(1)


def clear(optimizer: Optimizer) -> None:
    optimizer.state.clear()


def halve(optimizer: Optimizer) -> None:
    for entry in optimizer.state.values():
        entry["exp_avg"].mul_(0.5)


def put_others(optimizer: Optimizer) -> None:
    for entry in optimizer.state.values():
        entry["exp_avg_sq"] = torch.full_like(entry["exp_avg_sq"], 2.0)


def load(optimizer: Optimizer) -> None:
    other = Plain()
    source = adamw(other)
    other(batch(7)).backward()
    source.step()
    optimizer.load_state_dict(source.state_dict())


MOMENTS = ("before forward", "forward", "before backward", "before step")


@pytest.mark.parametrize(
    ("change", "moment"),
    [
        (halve, MOMENTS[0]),
        *((clear, moment) for moment in MOMENTS if moment != "forward"),
        *((change, moment) for moment in MOMENTS for change in (put_others, load)),
    ],
)
def test_states_changed_from_outside(change: Callable[[Optimizer], None], moment: str, side: LazySide) -> None:
    pair = Pair()
    pair.train(2)

    def come_to(now: str) -> None:
        for optimizer in (pair.ours, pair.theirs) if now == moment else ():
            change(optimizer)

    come_to("before forward")
    hook = pair.model.blocks[2].register_forward_hook(lambda *_: come_to("forward"))
    pair.losses_of(3)
    hook.remove()
    come_to("before backward")
    pair.backward()
    come_to("before step")
    pair.step()
    pair.train(2)
    assert pair.where() == {"device"}
    pair.model(batch(2))
    assert pair.where() == {"host"}


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


@pytest.mark.parametrize("how", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["copy", "pickle"])
def test_copies_offload_nothing(how: Callable[[Any], Any], side: LazySide) -> None:
    """And have all states once they are brought back."""
    pair = Pair()
    pair.come_to("coming")
    pair.handle.bring_back()
    other, made = how((pair.model, pair.ours))
    pinned_before = side.pinned
    assert all(p is q for p, q in zip(made.param_groups[0]["params"], other.parameters(), strict=True))
    assert equal(states(made), states(pair.theirs))
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
        ({"host_gib": -1}, ArgumentValueError, "host_gib: expected"),
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
    with pytest.raises(UnsupportedError, match="offload: expected a CUDA device, got cpu"):
        offload_optimizer(adamw(model), model)


def test_a_closure(side: LazySide) -> None:
    """The step that is under way needs the states."""
    pair = Pair()
    pair.train(2)
    for k in range(2):
        results = []
        for model, optimizer in pair.both():

            def closure(model: Any = model, optimizer: Any = optimizer, k: int = k) -> Tensor:
                optimizer.zero_grad()
                loss: Tensor = model(batch(k))
                assert pair.where() == {"device"}
                loss.backward()
                return loss

            results.append(optimizer.step(closure))
        assert torch.equal(*results)
        pair.same()
        pair.backward(k)
        pair.step()


def test_a_step_that_raises(side: LazySide) -> None:
    """For lack of memory, say: states stay until a step is done, and leave again."""
    pair = Pair()
    pair.train(2)
    param = next(pair.model.parameters())
    pair.backward(0)
    param.grad = torch.ones_like(param).to_sparse()
    with pytest.raises(RuntimeError):
        pair.ours.step()
    pair.zero_grad()
    pair.backward(1)
    assert pair.where() == {"device"}
    pair.step()
    pair.backward(1)
    assert pair.where() == {"coming"}, "they left in forward"
    pair.step()
    pair.train(2)
