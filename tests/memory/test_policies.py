"""What layers save, and that nothing else changes: values, gradients, random state, autocast, kernels called."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError, checkpoint

import lowtide
from lowtide.errors import ArgumentTypeError, ArgumentValueError, UnsupportedError
from lowtide.memory import ActivationPolicy, apply_policy
from lowtide.memory.offload import ON_DEVICE
from lowtide.memory.policy import parse_policies, word_of
from memory.models import (
    ALL,
    ATTENTION,
    GROUPED,
    INPUT,
    OFFLOADED_ATTENTION,
    OFFLOADED_INPUT,
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
from promises import promise

pytestmark = promise("policies")
TWO, EIGHT = (replace(GROUPED, every=k) for k in (2, 8))
RECOMPUTING = [ATTENTION, INPUT, GROUPED, OFFLOADED_ATTENTION, OFFLOADED_INPUT, replace(TWO, offload=True)]
every_policy = pytest.mark.parametrize("policy", RECOMPUTING, ids=word_of)
LAYERS, D, HEADS = 5, 24, 3


def groups_of(policy: ActivationPolicy) -> int:
    """How many layers save something for backward."""
    return -(-LAYERS // policy.every)


def calls_of(policy: ActivationPolicy) -> int:
    """How often a step calls attention: with groups three times a layer, twice the last one of a group."""
    return LAYERS if policy.keep != "input" else 3 * LAYERS - groups_of(policy)


@pytest.mark.parametrize("policy", [ALL, *RECOMPUTING, TWO, EIGHT], ids=word_of)
def test_same_to_the_bit(pair: tuple[Any, Any], policy: ActivationPolicy, side: LazySide, ids: Tensor) -> None:
    """Attention is called once where its output is saved; offloaded is what layers save, but for the last ones."""
    report = apply_policy(pair[0], policy)
    assert_as_stock(*pair, ids, calls=calls_of(policy), seeds=3)
    moved, output = (groups_of(policy) - ON_DEVICE) * policy.offload, policy.keep == "attention"
    assert side.pinned == report.host_bytes == moved * ids.numel() * (4 * D + (4 * D + 4 * HEADS) * output)
    assert side.copies == side.begun_back == 3 * moved * (3 if output else 1)


@pytest.mark.parametrize("offload", [False, True])
def test_a_policy_for_each_layer(offload: bool, pair: tuple[Any, Any], side: LazySide, ids: Tensor) -> None:
    """Groups are of equal policies."""
    policies = [replace(TWO, offload=offload)] * 3 + [ATTENTION, TWO]
    report = apply_policy(pair[0], policies)
    assert list(report.policies.values()) == policies
    assert len(report.on_device) == 3 * offload
    assert_as_stock(*pair, ids, calls=(3 + 2) + 2 + 1 + 2, seeds=2)
    apply_policy(pair[0], [TWO, GROUPED, OFFLOADED_INPUT if offload else INPUT, ATTENTION, ALL])
    assert_as_stock(*pair, ids, calls=3 * 2 + 2)


@every_policy
def test_dropout_draws_the_same_again(policy: ActivationPolicy, side: LazySide, ids: Tensor) -> None:
    model = Plain(dropout=0.3)
    stock = copy.deepcopy(model)
    apply_policy(model, policy)
    (got, after), (want, stock_after) = [(step(each, ids), torch.rand(3)) for each in (model, stock)]
    assert_same(got, want)
    assert torch.equal(after, stock_after)  # backward leaves the generator where forward left it


@pytest.mark.parametrize("policy", [ATTENTION, OFFLOADED_ATTENTION], ids=word_of)
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


@every_policy
@pytest.mark.parametrize("around_backward", [False, True])
def test_autocast_is_as_in_forward(
    policy: ActivationPolicy, around_backward: bool, side: LazySide, pair: tuple[Any, Any], ids: Tensor
) -> None:
    """Also where backward runs under it: no cast of a weight without a graph stays in its cache."""
    apply_policy(pair[0], policy)
    results = []
    for each in pair:
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(each, ids)
        with torch.autocast("cpu", torch.bfloat16, enabled=around_backward):
            loss.backward()
        results.append((loss.detach(), {name: p.grad for name, p in each.named_parameters()}))
    assert_same(*results)


@every_policy
def test_graphs_side_by_side(policy: ActivationPolicy, pair: tuple[Any, Any], side: LazySide, ids: Tensor) -> None:
    """Two forwards before one backward, an evaluation between, a part of one, graphs in either order."""
    apply_policy(pair[0], policy)
    for order in ((0, 1), (1, 0, 1, 0)):
        results = []
        for each in pair:
            each.zero_grad()
            losses = []
            for batch in (ids, ids.flip(0)[:, 2:]):
                losses.append(loss_of(each, batch))
                with torch.no_grad():
                    each(batch)
            torch.autograd.grad(losses[0], list(layers_of(each)[3].parameters()), retain_graph=True)
            for index in order:
                losses[index].backward(retain_graph=True)
            results.append((losses[1].detach(), {name: p.grad for name, p in each.named_parameters()}))
        assert_same(*results)
        del losses


@pytest.mark.parametrize(
    ("policy", "frozen", "calls"),  # nothing below the first layer that trains is recomputed
    [(ATTENTION, 3, 5), (INPUT, 3, 7), (TWO, 1, 1 + 3 * 4 - 3), (TWO, 2, 2 + 3 * 3 - 2), (TWO, 3, 3 + 3 * 2 - 2)],
)
def test_layers_before_the_first_that_trains(
    policy: ActivationPolicy, frozen: int, calls: int, pair: tuple[Any, Any], ids: Tensor
) -> None:
    """They save nothing, and the first that trains saves its input, wherever in its group it is."""
    for each in pair:
        each.requires_grad_(requires_grad=False)
        for layer in layers_of(each)[frozen:]:
            layer.requires_grad_()
    apply_policy(pair[0], policy)
    assert_as_stock(*pair, ids, calls=calls)


def test_same_to_the_bit_after_patch(llama: Callable[..., Any], ids: Tensor) -> None:
    """In bfloat16, in which fused parts round differently where no graph is recorded."""
    model = llama().bfloat16()
    lowtide.patch(model)
    other = copy.deepcopy(model)
    apply_policy(model, GROUPED)
    apply_policy(other, INPUT)
    assert_same(*(step(each, ids, use_cache=False) for each in (model, other)))


class Looks(Layer):
    """Does something else where gradients are recorded, and watches some of them."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if y.requires_grad:
            y = y + 0.3 * torch.randn_like(y) * torch.is_grad_enabled()
            y.register_hook(lambda gradient: gradient * 0.9)
        return y


class Tuples(Layer):
    """Returns more than hidden states."""

    def forward(self, x: Tensor) -> Any:
        return 3, super().forward(x), x.sum()


class Odd(Plain):
    """A model whose layers, or what is between them, are not the usual."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        kind = {"looks": Looks, "tuples": Tuples}.get(how, Layer)
        self.blocks = nn.ModuleList(kind(D, HEADS, 0.0) for _ in range(LAYERS))
        if how == "hooks":  # of modules on backward, which make views of the whole output
            for layer in self.blocks:
                layer.register_full_backward_hook(lambda *_: None)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        if self.how == "checkpoint":  # two layers at a time under PyTorch's own
            for first in range(0, LAYERS, 2):
                x = checkpoint(nn.Sequential(*self.blocks[first : first + 2]), x, use_reentrant=False)
            return x.square().mean()
        for block in self.blocks:
            x = block(x)
            x = x[1] if self.how == "tuples" else x
            change = {"other": lambda x: x + 1, "part": lambda x: x[:, :-1], "in place": lambda x: x.add_(1)}
            x = change.get(self.how, lambda x: x)(x)
        return x.square().mean()


@pytest.mark.parametrize("policy", [ATTENTION, INPUT, GROUPED], ids=word_of)
@pytest.mark.parametrize("how", ["looks", "tuples", "hooks", "checkpoint", "other", "part", "in place between layers"])
def test_unusual_layers(how: str, policy: ActivationPolicy, ids: Tensor) -> None:
    """A group ends where hidden states change between two layers."""
    how = how.removesuffix(" between layers")
    if how == "in place" and policy is not GROUPED:
        pytest.skip("an input that is written to is an error")
    model = Odd(how)
    stock = copy.deepcopy(model)
    apply_policy(model, policy)
    between = how in ("other", "part", "in place")
    assert_as_stock(model, stock, ids, calls=2 * LAYERS if between and policy is GROUPED else None)


def doubled_later() -> Callable[[Any, Tensor, Tensor, Tensor], Tensor]:
    """Attention that is called a second time in its recompute."""
    calls: list[int] = []

    def attend(stock: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        calls.append(1)
        return stock(q, k, v) if len(calls) == 1 else stock(stock(q, k, v), k, v)

    return attend


@promise("errors")
@pytest.mark.parametrize(
    ("attend", "said"),
    [(lambda stock, q, k, v: stock(q, k, v).mul_(2), "in-place"), (doubled_later(), "another path")],
    ids=["in place", "another path"],
)
def test_attention_whose_outputs_are_not_those_of_forward_raises(attend: Any, said: str, ids: Tensor) -> None:
    model = Plain()
    model.blocks[2].attend = partial(attend, model.blocks[2].attend)
    apply_policy(model, ATTENTION)
    with pytest.raises(UnsupportedError, match=said):
        step(model, ids)


@promise("errors")
def test_a_recompute_that_is_not_as_forward_raises(ids: Tensor) -> None:
    """PyTorch's determinism check is on, and its check of versions; a layer needs hidden states."""
    model = Plain()
    apply_policy(model, INPUT)
    loss = model(ids)
    model.blocks[2].mlp = nn.Sequential(nn.Linear(24, 7), nn.Linear(7, 24))
    with pytest.raises(CheckpointError):
        loss.backward()
    model.blocks[1].norm.register_forward_pre_hook(lambda _, args: args[0].mul_(1.01))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        step(model, ids)
    holder = stack_of(nn.Sequential(nn.Embedding(VOCAB, 4)))
    apply_policy(holder, INPUT)
    with pytest.raises(UnsupportedError, match="hidden states: a floating-point tensor"):
        holder.blocks[0](torch.tensor([3]))


@promise("errors")
@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        ({"every": 0}, ArgumentValueError, "every: expected at least 1, got 0"),
        ({"every": 1.5}, ArgumentTypeError, "every: expected a whole number, got 1.5"),
        (
            {"every": 2, "keep": "all"},
            ArgumentValueError,
            "every: expected 1 with keep='all', got 2. Take keep='input'",
        ),
        ({"keep": "some"}, ArgumentValueError, "keep: expected one of 'all', 'attention', 'input'"),
        ({"offload": True}, ArgumentValueError, "offload: expected False with keep='all'"),
        ({"offload": 1, "keep": "input"}, ArgumentTypeError, "offload: expected a bool"),
        *(({"mlp_level": level}, ArgumentValueError, "mlp_level: expected") for level in (1.0, True, 2)),
        ({"mlp_tile_tokens": 0}, ArgumentValueError, "mlp_tile_tokens: expected"),
        ({"mlp_tile_tokens": 1.5}, ArgumentTypeError, "mlp_tile_tokens: expected"),
    ],
)
def test_what_is_no_policy(given: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        ActivationPolicy(**given)


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("input/1 every 4", ActivationPolicy(keep="input", every=4, mlp_level=1)),
        (
            "input/0 by 512 every 12 offloaded",
            ActivationPolicy(keep="input", every=12, mlp_level=0, mlp_tile_tokens=512, offload=True),
        ),
        ("attention offloaded", OFFLOADED_ATTENTION),
        ("all/1", ActivationPolicy(mlp_level=1)),
    ],
)
def test_words(text: str, policy: ActivationPolicy) -> None:
    assert word_of(policy) == text
    short = text.replace(" by ", "-tile").replace(" every ", "-every").replace(" offloaded", "-offload")
    assert parse_policies(text) == parse_policies(short) == policy
    assert parse_policies(f"3 x {text}, 2 x all", LAYERS) == [policy] * 3 + [ActivationPolicy()] * 2
    for wrong in ("input every 0", "input every", "attention every 2", "all-every2", "inputevery 2", "3 x all"):
        with pytest.raises(ArgumentValueError):
            parse_policies(wrong, LAYERS)
