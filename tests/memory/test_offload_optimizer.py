"""Optimizer states on the host, with copies that come as late as they may: always the same to the bit."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lowtide.errors import ArgumentTypeError, ArgumentValueError, UnsupportedError
from lowtide.measure import track_allocations
from lowtide.memory import ActivationPolicy, OptimizerOffload, apply_policy, offload, offload_optimizer, pinned
from lowtide.memory import optimizer_blocks as blocks
from memory.models import VOCAB, LazySide, Plain

OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True, amsgrad=True),
    "adam-loop": lambda p: torch.optim.Adam(p, lr=1e-2, foreach=False),
    "sgd-momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.5, centered=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "adamw-8bit": lambda p: pytest.importorskip("bitsandbytes").optim.AdamW8bit(p, lr=1e-2, min_8bit_size=100),
}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of a few states of the tests' models."""
    monkeypatch.setattr(blocks, "MIN_BYTES", 64)
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 20_000)


def adamw(model: nn.Module) -> Optimizer:
    return OPTIMIZERS["adamw-fused"](model.parameters())


def batch(seed: int) -> Tensor:
    return torch.randint(3, VOCAB, (2, 13), generator=torch.Generator().manual_seed(seed))


def states(optimizer: Optimizer) -> list[Tensor]:
    return [v for entry in optimizer.state.values() for v in entry.values() if isinstance(v, Tensor)]


class Pair:
    """A model that trains with offloaded states beside one without."""

    def __init__(self, name: str = "adamw-fused", model: nn.Module | None = None, **kwargs: Any) -> None:
        self.model = model or Plain()
        self.stock = copy.deepcopy(self.model)
        self.ours, self.theirs = (OPTIMIZERS[name](m.parameters()) for m in (self.model, self.stock))
        self.handle = offload_optimizer(self.ours, self.model, **kwargs)

    def backward(self, seed: int) -> None:
        for model in (self.model, self.stock):
            model(batch(seed)).backward()

    def step(self) -> None:
        for optimizer in (self.ours, self.theirs):
            optimizer.step()
            optimizer.zero_grad()
        self.same()

    def train(self, steps: int, seed: int = 0) -> None:
        for k in range(steps):
            self.backward(seed + k)
            self.step()

    def same(self) -> None:
        for a, b in zip(self.model.parameters(), self.stock.parameters(), strict=True):
            assert torch.equal(a, b)
        mine, others = states(self.ours), states(self.theirs)
        assert len(mine) == len(others)
        for a, b in zip(mine, others, strict=True):
            assert torch.equal(a, b)

    def where(self) -> set[str]:
        return {block.where for block in self.handle._blocks}

    def away(self) -> int:
        return sum(block.nbytes for block in self.handle._blocks if block.where in ("host", "coming"))


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


def test_they_leave_with_the_layers_and_come_back_with_them(side: LazySide) -> None:
    """By the shares that the planner counts with: no later, and back no earlier."""
    layers = 13
    pair = Pair(model=Plain(layers))
    pair.train(1)
    total, largest = pair.handle.offloaded_bytes, max(block.nbytes for block in pair.handle._blocks)
    gone, back = {}, {}
    for k, block in enumerate(pair.model.blocks):
        block.register_forward_hook(lambda *_, k=k: gone.update({k: pair.away()}))
        block.mlp[2].weight.register_post_accumulate_grad_hook(
            lambda _, k=k: back.update({k: sum(b.nbytes for b in pair.handle._blocks if b.where == "coming")})
        )
    loss = pair.model(batch(1))
    assert pair.where() == {"host"}
    loss.backward()
    assert pair.where() == {"coming"}
    for k in range(layers - 1):
        share = blocks.share_away(k, layers) * total
        assert share <= gone[k] < share + largest
    for k in range(layers):
        share = blocks.share_back(layers - 1 - k, layers) * total
        assert share - largest < back[k] <= share
    assert [blocks.layers_to_leave(n) for n in (1, 8, 13, 32)] == [2, 2, 3, 4]
    assert blocks.share_away(2, layers) == 0
    assert blocks.share_away(layers - 1, layers) == pytest.approx(1 - 2 / (layers - 1))
    assert [blocks.share_back(done, layers) for done in (0, layers - 2, layers - 1)] == [0, 1, 1]


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_few_layers(layers: int, side: LazySide) -> None:
    pair = Pair(model=Plain(layers))
    pair.train(1)
    pair.model(batch(0))
    assert pair.where() == {"host"}
    pair.train(2)


@pytest.mark.parametrize("steps", [1, 2])
def test_memory_after_forward(steps: int, side: LazySide) -> None:
    """Lower by what left, once it was laid out and in every step."""
    stock, _ = _live_after_forward(steps, side, offloaded=False)
    ours, left = _live_after_forward(steps, side, offloaded=True)
    assert stock - ours == pytest.approx(left, rel=0.02)


def _live_after_forward(steps: int, side: LazySide, *, offloaded: bool) -> tuple[int, int]:
    """Return the bytes that a forward after some steps leaves on the device, and those that are on the host."""
    model = Plain(6, 64, 4)
    optimizer = adamw(model)
    gc.collect()  # what other tests have left
    gc.disable()
    try:
        with track_allocations() as seen:
            handle = offload_optimizer(optimizer, model) if offloaded else None
            for k in range(steps):
                model(batch(k)).backward()
                optimizer.step()
                optimizer.zero_grad()
            loss = model(batch(5))
        assert loss.requires_grad
        return seen.events[-1].total_bytes - side.pinned, handle.offloaded_bytes if handle else 0
    finally:
        gc.enable()


@pytest.mark.parametrize("moment", ["forward", "loss", "backward", "gradients", "step"])
def test_a_checkpoint_at_any_moment(moment: str, side: LazySide) -> None:
    """`state_dict` has what the stock optimizer has, from hooks in the midst of a pass too, and loads elsewhere."""
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
    losses = [model(batch(5)) for model in (pair.model, pair.stock)]
    if moment == "loss":
        take()
    for loss in losses:
        loss.backward()
    if moment == "gradients":
        take()
    pair.step()
    if moment == "step":
        take()
        want = pair.theirs.state_dict()
    assert taken["param_groups"] == want["param_groups"]
    for index, entry in want["state"].items():
        for key, value in entry.items():
            assert torch.equal(taken["state"][index][key], value), (index, key)
    fresh = adamw(pair.model)
    fresh.load_state_dict(taken)
    pair.train(1)


def test_a_checkpoint_is_as_large_as_it_was(side: LazySide) -> None:
    """States that share a block's memory are saved once, and no more of it than they are."""
    pair = Pair(model=Plain(2, 256, 4))
    pair.train(2)

    def size(optimizer: Optimizer) -> int:
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        return file.tell()

    assert size(pair.ours) == pytest.approx(size(pair.theirs), rel=0.01)
    pair.model(batch(0))
    assert pair.where() == {"host"}
    assert size(pair.ours) == pytest.approx(size(pair.theirs), rel=0.01)


def test_a_checkpoint_waits_for_the_copies_alone(side: LazySide) -> None:
    pair = Pair()
    pair.train(2)
    pair.ours.state_dict()
    assert side.finished == 0
    loss = pair.model(batch(0))
    pair.ours.state_dict()
    assert side.finished == len(pair.handle._blocks)
    loss.backward()
    pair.ours.state_dict()
    assert side.finished == 2 * len(pair.handle._blocks)


def test_states_that_are_loaded(side: LazySide) -> None:
    for moment in range(4):
        pair, other = Pair(), Plain()
        source = adamw(other)
        other(batch(7)).backward()
        source.step()
        pair.train(2)
        if moment == 1:
            pair.backward(1)
        if moment == 2:
            losses = [model(batch(3)) for model in (pair.model, pair.stock)]
        if moment == 3:  # while half of them are leaving
            hook = pair.model.blocks[2].register_forward_hook(
                lambda *_, o=pair.ours, s=source: o.load_state_dict(copy.deepcopy(s.state_dict()))
            )
            losses = [model(batch(3)) for model in (pair.model, pair.stock)]
            hook.remove()
            pair.theirs.load_state_dict(copy.deepcopy(source.state_dict()))
        else:
            for optimizer in (pair.ours, pair.theirs):
                optimizer.load_state_dict(copy.deepcopy(source.state_dict()))
        if moment > 1:
            for loss in losses:
                loss.backward()
        if moment:
            pair.step()
        pair.train(3)
        assert pair.where() == {"device"}
        pair.model(batch(2))
        assert pair.where() == {"host"}


def test_offloading_begins_with_states_that_exist(side: LazySide) -> None:
    model = Plain()
    stock = copy.deepcopy(model)
    ours, theirs = adamw(model), adamw(stock)
    for m, o in ((model, ours), (stock, theirs)):
        m(batch(0)).backward()
        o.step()
        o.zero_grad()
    handle = offload_optimizer(ours, model)
    model(batch(1))
    assert handle.offloaded_bytes > 0
    for m, o in ((model, ours), (stock, theirs)):
        m(batch(1)).backward()
        o.step()
    assert all(torch.equal(a, b) for a, b in zip(states(ours), states(theirs), strict=True))


def test_steps_that_are_left_out(side: LazySide) -> None:
    """As a gradient scaler does: the host's copy is as good, and nothing travels out again."""
    pair = Pair()
    pair.train(2)
    out = side.copies
    for seed in range(3):
        pair.backward(seed)
        for model in (pair.model, pair.stock):
            model.zero_grad()
        assert pair.where() == {"coming"}
    assert side.copies == out + len(pair.handle._blocks)
    pair.model(batch(0))
    assert pair.where() == {"host"}
    pair.train(2)


def test_gradients_accumulated_over_several_backward_passes(side: LazySide) -> None:
    pair = Pair(backwards_per_step=3)
    pair.train(1)
    for _ in range(2):
        for k in range(3):
            begun = side.begun_back
            pair.backward(k)
            assert (side.begun_back > begun) == (k == 2)
            assert pair.where() == ({"coming"} if k == 2 else {"host"})
        pair.step()
    for k in range(2):  # one backward too few
        pair.backward(k)
    pair.step()
    pair.backward(1)
    assert pair.where() == {"host"}


def test_two_forwards_before_one_backward_and_evaluation_between(side: LazySide) -> None:
    pair = Pair()
    pair.train(1)
    for model in (pair.model, pair.stock):
        losses = [model(batch(k)) for k in range(2)]
        with torch.inference_mode():
            model(batch(4))
        losses[0].backward()
        with torch.no_grad():
            model(batch(5))
        losses[1].backward()
    pair.step()
    with torch.inference_mode():
        pair.model(batch(4))
    assert pair.where() == {"host"}
    pair.train(2)


def test_a_forward_that_is_broken_off(side: LazySide) -> None:
    pair = Pair()
    pair.train(1)

    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    hook = pair.model.blocks[3].register_forward_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        pair.model(batch(0))
    hook.remove()
    assert len(pair.where()) > 1
    pair.train(2)
    hook = pair.model.blocks[3].register_forward_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        pair.model(batch(0))
    hook.remove()
    for p, q in zip(pair.model.parameters(), pair.stock.parameters(), strict=True):
        p.grad, q.grad = torch.ones_like(p), torch.ones_like(p)
    pair.step()  # with some states on their way out


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


def test_groups_that_come_later(side: LazySide) -> None:
    model = Plain()
    stock = copy.deepcopy(model)
    optimizers = [torch.optim.AdamW(m.blocks.parameters(), lr=1e-2) for m in (model, stock)]
    handle = offload_optimizer(optimizers[0], model)
    for k in range(5):
        for m, optimizer in zip((model, stock), optimizers, strict=True):
            m(batch(k)).backward()
            optimizer.step()
            if k == 1:
                optimizer.add_param_group({"params": [*m.embed.parameters(), *m.head.parameters()], "lr": 1e-3})
        if k == 1:
            before = handle.offloaded_bytes
    assert handle.offloaded_bytes > before
    assert {len(p._post_accumulate_grad_hooks) for p in model.blocks.parameters()} == {1}
    assert side.pinned == handle.host_bytes
    assert all(torch.equal(a, b) for a, b in zip(states(optimizers[0]), states(optimizers[1]), strict=True))


@pytest.mark.parametrize("moment", ["before forward", "before backward", "before step"])
def test_states_that_are_cleared(moment: str, side: LazySide) -> None:
    pair = Pair()
    pair.train(2)

    def clear(now: str) -> None:
        if now == moment:
            pair.ours.state.clear()
            pair.theirs.state.clear()

    clear("before forward")
    losses = [model(batch(3)) for model in (pair.model, pair.stock)]
    clear("before backward")
    for loss in losses:
        loss.backward()
    clear("before step")
    pair.step()
    pair.train(2)


class EarlySide(LazySide):
    """Its copies are made at once."""

    def copy_out(self, host: Tensor, tensor: Tensor) -> Any:
        event = super().copy_out(host, tensor)
        event()
        return event

    def copy_back(self, tensor: Tensor, host: Tensor) -> Any:
        event = super().copy_back(tensor, host)
        event()
        return event


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("moment", ["forward", "before backward", "before step"])
def test_states_that_somebody_writes_to(
    moment: str, early: bool, side: LazySide, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In place, wherever they are: what is being copied is copied again."""
    if early:
        at_once = EarlySide()
        monkeypatch.setattr(offload, "side_for", lambda _: at_once)
    pair = Pair()
    pair.train(2)

    def halve(now: str, *optimizers: Optimizer) -> None:
        if now == moment:
            for optimizer in optimizers:
                for entry in optimizer.state.values():
                    entry["exp_avg"].mul_(0.5)

    both = (pair.ours, pair.theirs)
    hook = pair.model.blocks[2].register_forward_hook(lambda *_: halve("forward", *both))
    losses = [model(batch(3)) for model in (pair.model, pair.stock)]
    hook.remove()
    halve("before backward", *both)
    for loss in losses:
        loss.backward()
    halve("before step", *both)
    pair.step()
    pair.train(1)


@pytest.mark.parametrize("moment", ["before forward", "forward", "before backward", "before step"])
def test_states_that_somebody_replaces(moment: str, side: LazySide) -> None:
    pair = Pair()
    pair.train(2)

    def replace(now: str) -> None:
        if now == moment:
            for optimizer in (pair.ours, pair.theirs):
                for entry in optimizer.state.values():
                    entry["exp_avg_sq"] = torch.full_like(entry["exp_avg_sq"], 2.0)

    replace("before forward")
    hook = pair.model.blocks[2].register_forward_hook(lambda *_: replace("forward"))
    losses = [model(batch(3)) for model in (pair.model, pair.stock)]
    hook.remove()
    replace("before backward")
    for loss in losses:
        loss.backward()
    replace("before step")
    pair.step()
    pair.train(1)


def test_a_closure(side: LazySide) -> None:
    pair = Pair()
    pair.train(2)
    for k in range(2):
        for model, optimizer in ((pair.model, pair.ours), (pair.stock, pair.theirs)):

            def closure(model: Any = model, optimizer: Any = optimizer, k: int = k) -> Tensor:
                optimizer.zero_grad()
                loss: Tensor = model(batch(k))
                assert pair.where() == {"device"}  # the step that is under way needs them
                loss.backward()
                return loss

            optimizer.step(closure)
        pair.same()
        pair.backward(k)
        pair.step()


def test_several_optimizers(side: LazySide) -> None:
    model = Plain()
    stock = copy.deepcopy(model)
    made = [[torch.optim.AdamW(m.blocks.parameters(), lr=1e-2), torch.optim.SGD(m.head.parameters(), 0.1, 0.9)] for m in
            (model, stock)]  # fmt: skip
    handles = [offload_optimizer(optimizer, model) for optimizer in made[0]]
    for k in range(6):
        for m, optimizers in zip((model, stock), made, strict=True):
            m(batch(k)).backward()
            optimizers[k % 2].step()  # in turns: the other's step is left out
            m.zero_grad()
    assert all(handle.offloaded_bytes > 0 for handle in handles)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), stock.parameters(), strict=True))


@pytest.mark.parametrize("moment", ["device", "host", "coming"])
@pytest.mark.parametrize("how", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["copy", "pickle"])
def test_copies_have_all_states_and_offload_nothing(how: Callable[[Any], Any], moment: str, side: LazySide) -> None:
    pair = Pair()
    pair.train(2)
    losses = [m(batch(3)) for m in (pair.model, pair.stock)] if moment != "device" else []
    if moment == "coming":
        for loss in losses:
            loss.backward()
    other, made = how((pair.model, pair.ours))
    assert pair.where() == {"device"}
    pinned_before = side.pinned
    for p, q in zip(made.param_groups[0]["params"], other.parameters(), strict=True):
        assert p is q
    for a, b in zip(states(made), states(pair.theirs), strict=True):
        assert torch.equal(a, b)
    del losses
    other.zero_grad()
    other(batch(1)).backward()
    made.step()
    assert side.pinned == pinned_before
    for m in (pair.model, pair.stock):
        m.zero_grad()
    pair.train(2)
    for p, q in zip(pair.model.parameters(), other.parameters(), strict=True):
        assert not torch.equal(p, q) or p.numel() == 0


@pytest.mark.parametrize("moment", ["device", "host", "coming"])
def test_removed(moment: str, side: LazySide) -> None:
    pair = Pair()
    hooks = _hooks(pair)
    pair.train(2)
    losses = [m(batch(3)) for m in (pair.model, pair.stock)] if moment != "device" else []
    if moment == "coming":
        for loss in losses:
            loss.backward()
    pair.handle.remove()
    pair.handle.remove()
    assert side.pinned == pair.handle.host_bytes == pair.handle.offloaded_bytes == 0
    assert all(a < b for a, b in zip(_hooks(pair), hooks, strict=True))
    assert _hooks(pair) == (0,) * len(hooks)
    assert not {"_lowtide_offload", "__getstate__"} & set(vars(pair.ours))
    pair.same()
    for m in (pair.model, pair.stock):
        m.zero_grad()
    del losses
    copies = side.copies
    pair.train(2)
    assert side.copies == copies


def _hooks(pair: Pair) -> tuple[int, ...]:
    optimizer: Any = pair.ours
    return (
        sum(len(m._forward_pre_hooks) for m in pair.model.modules()),
        sum(len(m._forward_hooks) for m in pair.model.modules()),
        len(optimizer._optimizer_step_pre_hooks),
        len(optimizer._optimizer_step_post_hooks),
        len(optimizer._optimizer_state_dict_pre_hooks),
        len(optimizer._optimizer_load_state_dict_post_hooks),
    )


@pytest.mark.parametrize("moment", ["device", "host", "coming"])
def test_an_optimizer_that_goes_takes_all_with_it(moment: str, side: LazySide) -> None:
    gc.disable()
    try:
        pair = Pair()
        pair.train(2)
        if moment != "device":
            loss = pair.model(batch(1))
        if moment == "coming":
            loss.backward()
        del pair.ours, pair.handle
        assert side.pinned == 0
        assert sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in pair.model.modules()) == 0
        pair.model(batch(1)).backward()
    finally:
        gc.enable()


def test_calling_again_replaces(side: LazySide) -> None:
    pair = Pair()
    pair.train(2)
    everything, hooks = pair.handle.offloaded_bytes, _hooks(pair)
    former = pair.handle
    pair.model(batch(0))
    pair.handle = offload_optimizer(pair.ours, pair.model, gib=0.5 * everything / 2**30)
    assert former.host_bytes == former.offloaded_bytes == 0
    pair.train(2)
    assert 0.4 * everything < pair.handle.offloaded_bytes <= 0.5 * everything
    assert side.pinned == pair.handle.host_bytes == pair.handle.offloaded_bytes
    assert _hooks(pair) == hooks
    pair.model(batch(0))
    assert pair.where() == {"host"}


def test_a_hundred_steps_leak_nothing(side: LazySide) -> None:
    pair = Pair()
    pair.train(2)
    model, optimizer = pair.model, pair.ours
    model(batch(0))  # the states are on the host, at the beginning and at the end
    gc.disable()
    try:
        full = side.pinned
        with track_allocations() as seen:
            for k in range(101):
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


def test_with_checkpointed_layers(side: LazySide, llama: Any, ids: Tensor) -> None:
    """Forward is run again in backward, by transformers and by policies that offload too: nothing leaves then."""
    for way in ("transformers", "policy"):
        model = llama()
        if way == "transformers":
            # the former name before transformers 5.23
            enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
            enable({"use_reentrant": True})
            model.enable_input_require_grads()
            model.config.use_cache = False
        stock = copy.deepcopy(model)
        if way == "policy":
            apply_policy(model, ActivationPolicy(keep="attention", offload=True))
        optimizers = [adamw(m) for m in (model, stock)]
        handle = offload_optimizer(optimizers[0], model)
        for _ in range(3):
            out = side.copies
            for m, optimizer in zip((model, stock), optimizers, strict=True):
                loss = m(input_ids=ids, labels=ids).loss
                left = side.copies
                loss.backward()
                assert side.copies == left
                optimizer.step()
                optimizer.zero_grad()
            assert all(torch.equal(a, b) for a, b in zip(model.parameters(), stock.parameters(), strict=True))
        assert side.copies - out == len(handle._blocks) + (way == "policy") * 3 * 3


@pytest.mark.filterwarnings("ignore")  # of the compiler's own doing
@pytest.mark.parametrize("how", ["before", "after", "layers"])
def test_beside_torch_compile(how: str, side: LazySide) -> None:
    torch._dynamo.reset()
    model = Plain(3)
    stock = copy.deepcopy(model)
    if how == "before":
        model.compile(backend="eager")
    optimizers = [adamw(m) for m in (model, stock)]
    handle = offload_optimizer(optimizers[0], model)
    if how == "after":
        model.compile(backend="eager")
    if how == "layers":
        for block in model.blocks:
            block.compile(backend="eager")
    for k in range(3):
        for m, optimizer in zip((model, stock), optimizers, strict=True):
            loss = m(batch(k))
            if m is model and k:
                assert {block.where for block in handle._blocks} == {"host"}
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), stock.parameters(), strict=True))


def test_accelerates_wrapper(side: LazySide) -> None:
    accelerate = pytest.importorskip("accelerate")
    model = Plain()
    stock = copy.deepcopy(model)
    accelerator = accelerate.Accelerator(cpu=True)
    prepared, wrapped = accelerator.prepare(model, adamw(model))
    handle = offload_optimizer(wrapped, model)
    theirs = adamw(stock)
    for k in range(3):
        accelerator.backward(prepared(batch(k)))
        wrapped.step()
        wrapped.zero_grad()
        stock(batch(k)).backward()
        theirs.step()
        theirs.zero_grad()
    assert handle.offloaded_bytes > 0
    assert side.copies > 0
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), stock.parameters(), strict=True))


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
    with pytest.raises(UnsupportedError, match="SGD without momentum keeps none"):
        optimizer.step()


def test_states_of_another_class_are_refused(side: LazySide) -> None:
    class Other(Tensor):
        pass

    model = Plain()
    optimizer = adamw(model)
    offload_optimizer(optimizer, model)
    model(batch(0)).backward()
    optimizer.step()
    optimizer.state[model.head.weight]["exp_avg"] = torch.zeros_like(model.head.weight).as_subclass(Other)
    with pytest.raises(UnsupportedError, match="'exp_avg' as a Other"):
        optimizer.step()


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"optimizer": 3}, ArgumentTypeError, "optimizer: expected a torch.optim.Optimizer, got int"),
        ({"model": None}, ArgumentTypeError, "model: expected a torch.nn.Module"),
        ({"model": nn.Linear(2, 3)}, ArgumentValueError, "model: expected a model with a ModuleList"),
        ({"gib": 0}, ArgumentValueError, "gib: expected a finite number of GiB above 0, got 0"),
        ({"gib": True}, ArgumentTypeError, "gib: expected"),
        ({"gib": float("nan")}, ArgumentValueError, "gib: expected"),
        ({"host_gib": -1}, ArgumentValueError, "host_gib: expected"),
        ({"host_gib": "5"}, ArgumentTypeError, "host_gib: expected"),
        ({"backwards_per_step": 0}, ArgumentValueError, "backwards_per_step: expected at least 1"),
        ({"backwards_per_step": 1.0}, ArgumentTypeError, "backwards_per_step: expected a whole number"),
    ],
)
def test_what_is_refused(change: dict[str, Any], error: type[Exception], said: str, side: LazySide) -> None:
    model = Plain()
    given: dict[str, Any] = {"optimizer": adamw(model), "model": model, **change}
    with pytest.raises(error, match=said):
        offload_optimizer(given.pop("optimizer"), given.pop("model"), **given)


def test_a_cpu_is_refused() -> None:
    model = Plain()
    with pytest.raises(UnsupportedError, match="optimizer: expected parameters on a CUDA device, got all on cpu"):
        offload_optimizer(adamw(model), model)


def test_dtensors_are_refused(side: LazySide, monkeypatch: pytest.MonkeyPatch) -> None:
    class DTensor(nn.Parameter):
        pass

    model = Plain()
    parameter = DTensor(torch.ones(3))
    parameter.__class__ = DTensor
    with pytest.raises(UnsupportedError, match="CPUOffloadPolicy"):
        offload_optimizer(torch.optim.SGD([parameter], lr=0.1), model)


def test_cuda_graphs_are_refused(side: LazySide, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair()
    pair.train(1)
    capturing = [True]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    for capture in (pair.ours.step, lambda: pair.model(batch(0))):
        with pytest.raises(UnsupportedError, match="a training step outside of CUDA graphs"):
            capture()
    capturing[0] = False
    pair.train(2)


def test_the_handle_is_what_is_documented(side: LazySide) -> None:
    pair = Pair()
    assert isinstance(pair.handle, OptimizerOffload)
    pair.train(1)
    pair.model(batch(0))
    assert pair.where() == {"host"}
    pair.handle.bring_back()
    assert pair.where() == {"device"}
    pair.same()
