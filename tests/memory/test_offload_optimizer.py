"""Optimizer states on the host, with copies that come as late as they may: always the same to the bit."""

from __future__ import annotations

import copy
import gc
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import Optimizer

from lowtide.measure.allocations import track_allocations
from lowtide.memory import offload_optimizer
from memory.models import LazySide, Plain
from memory.states import OPTIMIZERS, Pair, adamw, batch, equal, states

pytestmark = pytest.mark.usefixtures("small_blocks")


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


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_few_layers(layers: int, side: LazySide) -> None:
    pair = Pair(model=Plain(layers))
    pair.come_to("host")
    assert pair.where() == {"host"}
    pair.train(1)


@pytest.mark.parametrize("steps", [1, 2])
def test_memory_after_forward(steps: int, side: LazySide) -> None:
    """Lower by what left, once it was laid out and in every step."""

    def live_and_left(*, offloaded: bool) -> tuple[int, int]:
        model = Plain(6, 64, 4)
        optimizer = adamw(model)
        gc.collect()  # what other tests have left
        with track_allocations() as seen:
            handle = offload_optimizer(optimizer, model) if offloaded else None
            for k in range(steps):
                model(batch(k)).backward()
                optimizer.step()
                optimizer.zero_grad()
            loss = model(batch(5))
        assert loss.requires_grad
        return seen.events[-1].total_bytes - side.pinned, handle.offloaded_bytes if handle else 0

    gc.disable()
    try:
        (stock, _), (ours, left) = (live_and_left(offloaded=offloaded) for offloaded in (False, True))
    finally:
        gc.enable()
    assert stock - ours == pytest.approx(left, rel=0.02)


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


def test_offloading_begins_with_states_that_exist(side: LazySide) -> None:
    pair = Pair(before=lambda pair: pair.train(1))
    pair.model(batch(1))
    assert pair.handle.offloaded_bytes > 0
    pair.train(2)


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

    for steps in (2, 0):
        hook = pair.model.blocks[3].register_forward_hook(fail)
        with pytest.raises(KeyboardInterrupt):
            pair.model(batch(0))
        hook.remove()
        assert len(pair.where()) > 1
        pair.train(steps)
    for p in (*pair.model.parameters(), *pair.stock.parameters()):
        p.grad = torch.ones_like(p)
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


def clear(optimizer: Optimizer) -> None:
    optimizer.state.clear()


def halve(optimizer: Optimizer) -> None:
    """In place, wherever they are: what is being copied is copied again."""
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
        *((clear, moment) for moment in MOMENTS if moment != "forward"),
        *((halve, moment) for moment in MOMENTS[1:]),
        *((change, moment) for moment in MOMENTS for change in (put_others, load)),
    ],
)
def test_states_changed_from_outside(change: Callable[[Optimizer], None], moment: str, side: LazySide) -> None:
    pair = Pair()
    pair.train(2)

    def come_to(now: str) -> None:
        for optimizer in (pair.ours, pair.theirs) if now == moment else ():
            change(optimizer)
        assert change is not load or now != moment or now == "forward" or pair.where() == {"device"}

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
