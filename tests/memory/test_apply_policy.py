"""What a layer saves, and that nothing else changes: values, gradients, random state, autocast, kernels called."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError, checkpoint

from lowtide.errors import UnsupportedError
from lowtide.measure.allocations import track_allocations
from lowtide.memory import ActivationPolicy, apply_policy
from lowtide.memory.offload import ON_DEVICE
from lowtide.memory.policy import word_of
from memory.models import (
    ALL,
    ATTENTION,
    GROUPED,
    INPUT,
    OFFLOADED_ATTENTION,
    OFFLOADED_INPUT,
    RECOMPUTING,
    VOCAB,
    Flash,
    Layer,
    LazySide,
    Plain,
    assert_as_stock,
    assert_same,
    layers_of,
    loss_of,
    stack_of,
    step,
)

KEEPS = ("all", "attention", "input")


@pytest.mark.parametrize("policy", [ALL, *RECOMPUTING.values()], ids=["all", *RECOMPUTING])
def test_same_to_the_bit(pair: tuple[Any, Any], policy: ActivationPolicy, side: LazySide, ids: Tensor) -> None:
    """Attention is called once where its output is saved; offloaded is what layers save, but for the last ones."""
    saves_attention = policy.keep == "attention"
    report = apply_policy(pair[0], policy)
    assert_as_stock(*pair, ids, calls=10 if policy.keep == "input" else 5, seeds=3)
    tokens, D, heads, moved = ids.numel(), 24, 3, (5 - ON_DEVICE) * policy.offload
    assert side.pinned == report.host_bytes == moved * tokens * (4 * D + (4 * D + 4 * heads) * saves_attention)
    assert side.copies == 3 * moved * (3 if saves_attention else 1)


def test_a_policy_for_each_layer(pair: tuple[Any, Any], side: LazySide, ids: Tensor) -> None:
    policies = [OFFLOADED_INPUT, OFFLOADED_ATTENTION, ALL, OFFLOADED_ATTENTION, INPUT]
    report = apply_policy(pair[0], policies)
    assert list(report.policies.values()) == policies
    assert report.on_device == tuple(list(report.policies)[i] for i in (1, 3))
    assert_as_stock(*pair, ids, calls=5 + 2, seeds=2)
    assert side.pinned == ids.numel() * 4 * 24


def test_bytes_that_stay_after_forward() -> None:
    tokens, D, heads = 512, 64, 4
    ids = torch.randint(3, VOCAB, (1, tokens))
    live: dict[tuple[int, str], int] = {}
    for layers in (4, 5):
        model = Plain(layers, D, heads)
        model(ids)
        for policy in (ALL, ATTENTION, INPUT):
            apply_policy(model, policy)
            with track_allocations() as seen:
                loss = model(ids)
            live[layers, policy.keep] = seen.events[-1].total_bytes
            del loss
    all_, attention_, input_ = ((live[5, keep] - live[4, keep]) / tokens for keep in KEEPS)
    slack = 32  # bytes a token: the random state's 5 KB and the like, over 512 tokens
    assert 4 * D <= input_ < 4 * D + slack
    assert 8 * D + 16 <= attention_ < 8 * D + 16 + slack  # and a float32 logsumexp for each of 4 heads
    assert all_ > 4 * attention_


@pytest.mark.parametrize("policy", RECOMPUTING)
def test_dropout_draws_the_same_again(policy: str, side: LazySide, ids: Tensor) -> None:
    model = Plain(dropout=0.3)
    stock = copy.deepcopy(model)
    apply_policy(model, RECOMPUTING[policy])
    after = []
    for each in (model, stock):
        results = step(each, ids)
        after.append((results, torch.rand(3)))
    assert_same(after[0][0], after[1][0])
    assert torch.equal(after[0][1], after[1][1])  # backward leaves the generator where forward left it


@pytest.mark.parametrize("policy", [ATTENTION, OFFLOADED_ATTENTION], ids=["", "offloaded"])
def test_a_packages_operator_with_dropout_is_saved_and_moves_the_random_state(
    policy: ActivationPolicy, side: LazySide, monkeypatch: pytest.MonkeyPatch, ids: Tensor
) -> None:
    """The dropout after attention draws the mask of forward, though attention's own dropout drew nothing again."""
    model = Plain(dropout=0.3)
    stock = copy.deepcopy(model)
    for block in [*model.blocks, *stock.blocks]:
        monkeypatch.setattr(block, "attend", Flash.apply)
    apply_policy(model, policy)
    assert_as_stock(model, stock, ids, calls=5)
    assert side.copies == (3 * 3 if policy.offload else 0)  # input, output and mask, of three layers


@pytest.mark.parametrize("policy", RECOMPUTING)
def test_autocast_is_as_in_forward(policy: str, side: LazySide, pair: tuple[Any, Any], ids: Tensor) -> None:
    model, _ = pair
    apply_policy(model, RECOMPUTING[policy])
    results = []
    for each in pair:
        each.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(each, ids)
        loss.backward()  # outside of autocast, as it should be
        results.append((loss.detach(), {name: p.grad for name, p in each.named_parameters()}))
    assert_same(*results)


@pytest.mark.parametrize("policy", RECOMPUTING)
def test_graphs_side_by_side(policy: str, pair: tuple[Any, Any], side: LazySide, ids: Tensor) -> None:
    """Two forwards before one backward, an evaluation between, backward twice, graphs in either order."""
    apply_policy(pair[0], RECOMPUTING[policy])
    for order in ((0, 1), (1, 0), (0, 1, 1), (1, 0, 1, 0)):
        results = []
        for each in pair:
            each.zero_grad()
            losses = []
            for batch in (ids, ids.flip(0)[:, 2:]):
                losses.append(loss_of(each, batch))
                with torch.no_grad():
                    each(batch)
            for index in order:
                losses[index].backward(retain_graph=True)
            results.append((losses[1].detach(), {name: p.grad for name, p in each.named_parameters()}))
        assert_same(*results)
        del losses


def test_second_derivatives() -> None:
    block = Plain(1).blocks[0].double()
    block.attend = lambda q, k, v: (q @ k.mT).softmax(-1) @ v  # a fused backward has no derivative of its own
    x = torch.randn(1, 3, 24, dtype=torch.float64, requires_grad=True)

    def second() -> Tensor:
        first = torch.autograd.grad(block(2 * x).square().sum(), x, create_graph=True)[0]
        return torch.autograd.grad(first.sum(), x)[0]

    want = second()
    apply_policy(stack_of(block), INPUT)
    assert torch.equal(second(), want)


def doubled_later() -> Callable[[Any, Tensor, Tensor, Tensor], Tensor]:
    """Attention that is called a second time in its recompute."""
    calls: list[int] = []

    def attend(stock: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        calls.append(1)
        return stock(q, k, v) if len(calls) == 1 else stock(stock(q, k, v), k, v)

    return attend


class Looks(Layer):
    """Does something else where gradients are recorded, and watches some of them."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if y.requires_grad:
            y = y + 0.3 * torch.randn_like(y) * torch.is_grad_enabled()
            y.register_hook(lambda gradient: gradient * 0.9)
        return y


@pytest.mark.parametrize("policy", [ATTENTION, INPUT, GROUPED], ids=word_of)
def test_layers_that_look_at_gradients(policy: ActivationPolicy, ids: Tensor) -> None:
    model = Plain()
    model.blocks = nn.ModuleList(Looks(24, 3, 0.0) for _ in range(5))
    stock = copy.deepcopy(model)
    apply_policy(model, policy)
    assert_as_stock(model, stock, ids)


class Pairs(Plain):
    """Runs two layers at a time under PyTorch's checkpoint."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for first in range(0, 5, 2):
            x = checkpoint(nn.Sequential(*self.blocks[first : first + 2]), x, use_reentrant=False)
        return x.square().mean()


@pytest.mark.parametrize("policy", [ATTENTION, INPUT, GROUPED], ids=word_of)
def test_inside_a_checkpoint_of_several_layers(policy: ActivationPolicy, ids: Tensor) -> None:
    model = Pairs()
    stock = copy.deepcopy(model)
    apply_policy(model, policy)
    assert_as_stock(model, stock, ids)


def test_a_recompute_that_saves_other_tensors_than_forward_raises(ids: Tensor) -> None:
    """PyTorch's determinism check is on."""
    model = Plain()
    apply_policy(model, INPUT)
    loss = model(ids)
    model.blocks[2].mlp = nn.Sequential(nn.Linear(24, 7), nn.Linear(7, 24))
    with pytest.raises(CheckpointError):
        loss.backward()


def test_an_input_that_is_written_to_raises(ids: Tensor) -> None:
    model = Plain()
    apply_policy(model, INPUT)
    model.blocks[1].norm.register_forward_pre_hook(lambda _, args: args[0].mul_(1.01))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        step(model, ids)


@pytest.mark.parametrize(
    ("attend", "said"),
    [(lambda stock, q, k, v: stock(q, k, v).mul_(2), "in-place"), (doubled_later(), "another path")],
    ids=["in place", "another path"],
)
def test_attention_whose_outputs_are_not_those_of_forward_raises(
    attend: Any, said: str, monkeypatch: pytest.MonkeyPatch, ids: Tensor
) -> None:
    model = Plain()
    monkeypatch.setattr(model.blocks[2], "attend", partial(attend, model.blocks[2].attend))
    apply_policy(model, ATTENTION)
    with pytest.raises(UnsupportedError, match=said):
        step(model, ids)


def test_graphs_that_never_run_backward_leave_nothing(model: Any, ids: Tensor) -> None:
    apply_policy(model, ActivationPolicy(keep="attention"))
    step(model, ids)
    with track_allocations() as seen:
        for _ in range(3):
            loss_of(model, ids)
    assert abs(seen.events[-1].total_bytes) < 1000, "without the garbage collector: a cycle would keep it"


@pytest.mark.parametrize(("keep", "calls"), [("attention", 5), ("input", 7)])  # nothing below layer 3 is recomputed
def test_a_frozen_model_before_the_first_layer_that_trains(
    pair: tuple[Any, Any], keep: Any, calls: int, ids: Tensor
) -> None:
    for each in pair:
        each.requires_grad_(requires_grad=False)
        layers_of(each)[3].requires_grad_()
    apply_policy(pair[0], ActivationPolicy(keep=keep))
    assert_as_stock(*pair, ids, calls=calls)
