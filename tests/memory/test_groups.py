"""One saved input for several layers: the same to the bit, in the memory of one input a group, and what is refused."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.errors import ArgumentTypeError, ArgumentValueError, UnsupportedError
from lowtide.measure.allocations import track_allocations
from lowtide.memory import ActivationPolicy, apply_policy, remove_policy
from lowtide.memory.offload import ON_DEVICE
from lowtide.memory.policy import parse_policies, word_of
from memory.models import (
    ALL,
    ATTENTION,
    INPUT,
    VOCAB,
    LazySide,
    Plain,
    assert_as_stock,
    assert_same,
    layers_of,
    loss_of,
    step,
)

LAYERS = 5


def every(k: int, **more: Any) -> ActivationPolicy:
    return ActivationPolicy(keep="input", every=k, **more)


def groups(layers: int, k: int) -> int:
    return -(-layers // k)


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("k", [2, 3, 5, 8])
def test_same_to_the_bit(pair: tuple[Any, Any], k: int, offload: bool, side: LazySide, ids: Tensor) -> None:
    """Each layer runs three times, the last one of a group twice; only a group's input goes to the host."""
    report = apply_policy(pair[0], every(k, offload=offload))
    assert_as_stock(*pair, ids, calls=3 * LAYERS - groups(LAYERS, k), seeds=3)
    moved = max(0, groups(LAYERS, k) - ON_DEVICE) * offload
    assert side.pinned == report.host_bytes == moved * ids.numel() * 4 * 24
    assert side.copies == side.begun_back == 3 * moved
    remove_policy(pair[0])
    assert_as_stock(*pair, ids, calls=LAYERS)


def test_same_to_the_bit_after_patch(llama: Callable[..., Any], ids: Tensor) -> None:
    """In bfloat16, in which fused parts round differently where no graph is recorded."""
    model = llama().bfloat16()
    lowtide.patch(model)
    other = copy.deepcopy(model)
    apply_policy(model, every(3))
    apply_policy(other, INPUT)
    assert_same(*(step(each, ids, use_cache=False) for each in (model, other)))


@pytest.mark.parametrize("offload", [False, True])
def test_groups_are_of_equal_policies(pair: tuple[Any, Any], offload: bool, side: LazySide, ids: Tensor) -> None:
    policies = [every(2, offload=offload)] * 3 + [ATTENTION, every(2)]
    report = apply_policy(pair[0], policies)
    assert list(report.policies.values()) == policies
    assert len(report.on_device) == 3 * offload
    assert_as_stock(*pair, ids, calls=(3 + 2) + 2 + 1 + 2, seeds=2)
    apply_policy(pair[0], [every(2), every(3), every(2), INPUT, ALL])  # groups of one
    assert_as_stock(*pair, ids, calls=4 * 2 + 1)


@pytest.mark.parametrize("offload", [False, True])
def test_random_states(offload: bool, side: LazySide, ids: Tensor) -> None:
    model = Plain(layers=7, dropout=0.3)
    stock = copy.deepcopy(model)
    apply_policy(model, every(3, offload=offload))
    after = [(step(each, ids), torch.rand(3)) for each in (model, stock)]
    assert_same(after[0][0], after[1][0])
    assert torch.equal(after[0][1], after[1][1])


@pytest.mark.parametrize("around_backward", [False, True])
def test_autocast(around_backward: bool, pair: tuple[Any, Any], ids: Tensor) -> None:
    """Also where backward runs under it: no cast of a weight without a graph stays in its cache."""
    apply_policy(pair[0], every(3))
    gradients = []
    for model in pair:
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model, ids)
        with torch.autocast("cpu", torch.bfloat16, enabled=around_backward):
            loss.backward()
        gradients.append((loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}))
    assert_same(*gradients)


@pytest.mark.parametrize("offload", [False, True])
def test_several_graphs_at_a_time_and_one_twice(
    pair: tuple[Any, Any], offload: bool, side: LazySide, ids: Tensor
) -> None:
    apply_policy(pair[0], every(2, offload=offload))
    other = (ids + 5) % (VOCAB - 3) + 3
    found = []
    for model in pair:
        params = list(model.parameters())
        first, second = loss_of(model, ids), loss_of(model, other)
        again = [torch.autograd.grad(first, params, retain_graph=True) for _ in range(2)]
        part = torch.autograd.grad(first, list(layers_of(model)[3].parameters()), retain_graph=True)
        found.append([*again[0], *again[1], *part, *torch.autograd.grad(second, params)])
        found[-1] += torch.autograd.grad(first, params)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_second_derivatives(ids: Tensor) -> None:
    model = Plain()
    for block in model.blocks:  # SDPA's fused kernels have none
        block.attend = lambda q, k, v: (q @ k.mT).softmax(-1) @ v
    stock = copy.deepcopy(model)
    apply_policy(model, every(3))
    found = []
    for each in (model, stock):
        params = list(each.parameters())
        first = torch.autograd.grad(each(ids), params, create_graph=True)
        found.append(torch.autograd.grad(sum(g.square().sum() for g in first), params))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_without_gradients_each_layer_runs_once(pair: tuple[Any, Any], ids: Tensor) -> None:
    apply_policy(pair[0], every(2))
    with torch.no_grad():
        assert torch.equal(loss_of(pair[0], ids), loss_of(pair[1], ids))
    assert_as_stock(*pair, ids, calls=3 * LAYERS - 3)


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("frozen", [1, 2, 3])
def test_layers_before_the_first_that_trains(
    pair: tuple[Any, Any], frozen: int, offload: bool, side: LazySide, ids: Tensor
) -> None:
    """They save nothing, and the first that trains saves its input, wherever in its group it is."""
    for model in pair:
        model.requires_grad_(False)
        for layer in layers_of(model)[frozen:]:
            layer.requires_grad_(True)
    apply_policy(pair[0], every(2, offload=offload))
    saving = groups(LAYERS - frozen - frozen % 2, 2) + frozen % 2
    assert_as_stock(*pair, ids, calls=frozen + 3 * (LAYERS - frozen) - saving)
    assert side.copies == (offload and frozen < 2)  # of three groups the last two stay


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies(how: str, pair: tuple[Any, Any], ids: Tensor) -> None:
    apply_policy(pair[0], every(3))
    copied = copy.deepcopy(pair[0]) if how == "deepcopy" else pickle.loads(pickle.dumps(pair[0]))
    assert_as_stock(copied, pair[1], ids, calls=3 * LAYERS - 2)


def test_caches(llama: Callable[..., Any], ids: Tensor) -> None:
    """The empty one of training is left out; in evaluation layers with a cache run stock."""
    model = llama()
    stock = copy.deepcopy(model)
    apply_policy(model, every(2))
    assert_as_stock(model, stock, ids, use_cache=True)
    filled = stock(ids, use_cache=True).past_key_values
    with pytest.raises(UnsupportedError, match="a cache that holds keys and values"):
        model(ids, past_key_values=filled)
    for each in (model, stock):
        each.eval()
    assert torch.equal(model(ids, use_cache=True).logits, stock(ids, use_cache=True).logits)


def bytes_of(k: int, layers: int) -> tuple[int, int]:
    """What a step of a frozen model saves in forward, and the most that its backward holds beyond that."""
    model = Plain(layers, D=64, heads=4).requires_grad_(False)
    model.embed.requires_grad_(True)
    apply_policy(model, every(k))
    ids = torch.randint(3, VOCAB, (1, 512))
    model(ids).backward()
    with track_allocations() as forward:
        loss = model(ids)
    with track_allocations() as backward:
        loss.backward()
    return forward.events[-1].total_bytes, backward.peak_bytes


@pytest.mark.parametrize("k", [2, 4])
def test_bytes_between_forward_and_backward_and_in_it(k: int) -> None:
    """One input for each group; in backward the other inputs of one group, and the activations of one layer."""
    one, slack = 4 * 64 * 512, 8 * 12_000  # random states and the counts, for each layer
    (saved, peak), (fewer, _) = bytes_of(k, 8), bytes_of(k, 8 - k)
    assert one <= saved - fewer < one + slack
    plain_saved, plain_peak = bytes_of(1, 8)
    assert plain_saved - saved == pytest.approx((8 - 8 // k) * one, abs=slack)
    assert peak - plain_peak == pytest.approx((k - 1) * one, abs=slack)


def test_inputs_that_were_recomputed_do_not_outlive_their_use() -> None:
    model = Plain(6, D=64, heads=4)
    apply_policy(model, every(3))
    ids = torch.randint(3, VOCAB, (1, 512))
    model(ids).backward()
    loss = model(ids)
    with track_allocations() as seen:
        loss.backward(retain_graph=True)
    assert seen.events[-1].total_bytes < 64 * 512 * 4  # one input


class Between(Plain):
    """A model that changes hidden states between its layers."""

    how = "other"

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
            x = x + 1 if self.how == "other" else x[:, :-1] if self.how == "part" else x.add_(1)
        return x.sum()


@pytest.mark.parametrize("how", ["other", "part", "in place"])
def test_a_group_ends_where_hidden_states_change_between_layers(how: str, ids: Tensor) -> None:
    model = Between()
    model.how = how
    stock = copy.deepcopy(model)
    apply_policy(model, every(3))
    assert_as_stock(model, stock, ids, calls=2 * LAYERS)


def test_views_of_the_whole_output_are_followed(ids: Tensor) -> None:
    """As hooks of modules on backward make them."""
    model = Plain()
    stock = copy.deepcopy(model)
    apply_policy(model, every(3))
    for layer in model.blocks:
        layer.register_full_backward_hook(lambda *_: None)
    assert_as_stock(model, stock, ids)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of the compiler's own doing
@pytest.mark.parametrize("whole", [False, True])
def test_compiled_layers_are_refused(whole: bool, ids: Tensor) -> None:
    model = Plain()
    apply_policy(model, every(2))
    for part in [model] if whole else model.blocks:
        part.compile(backend="eager")
    with pytest.raises(UnsupportedError, match=r"^blocks\.0: expected a layer in eager, with every > 1, got one"):
        model(ids)


def test_layers_that_return_more_than_hidden_states(ids: Tensor) -> None:
    class Tuple(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> tuple[int, Tensor, Tensor]:
            return 3, self.inner(x), x.sum()

    class Tuples(Plain):
        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids)
            for block in self.blocks:
                _, x, _ = block(x)
            return x.square().mean()

    model = Tuples()
    model.blocks = nn.ModuleList(map(Tuple, model.blocks))
    stock = copy.deepcopy(model)
    apply_policy(model, every(4))
    assert_as_stock(model, stock, ids, calls=3 * LAYERS - 2)


@pytest.mark.parametrize(
    ("value", "more", "error", "says"),
    [
        (0, {}, ArgumentValueError, "every: expected at least 1, got 0"),
        (1.5, {}, ArgumentTypeError, "every: expected a whole number, got 1.5"),
        (True, {}, ArgumentTypeError, "every: expected a whole number, got True"),
        (2, {"keep": "all"}, ArgumentValueError, "every: expected 1 with keep='all', got 2. Take keep='input'"),
        (2, {"keep": "attention"}, ArgumentValueError, "every: expected 1 with keep='attention', got 2"),
    ],
)
def test_values(value: Any, more: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        ActivationPolicy(**{"keep": "input", "every": value, **more})


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("input every 4", every(4)),
        ("input/1 every 4", every(4, mlp_level=1)),
        ("input/0 by 512 every 12 offloaded", every(12, mlp_level=0, mlp_tile_tokens=512, offload=True)),
        ("input every 2 offloaded", every(2, offload=True)),
        ("input/1", every(1, mlp_level=1)),
    ],
)
def test_words(text: str, policy: ActivationPolicy) -> None:
    assert word_of(policy) == text
    assert parse_policies(text) == policy
    short = text.replace(" by ", "-tile").replace(" every ", "-every").replace(" offloaded", "-offload")
    assert parse_policies(short) == policy
    assert parse_policies(f"3 x {text}, 2 x all", LAYERS) == [policy] * 3 + [ActivationPolicy()] * 2
    for wrong in ("input every 0", "input every", "attention every 2", "all-every2", "inputevery 2"):
        with pytest.raises(ArgumentValueError):
            parse_policies(wrong)


def test_the_report(llama: Callable[..., Any]) -> None:
    model = llama()
    report = apply_policy(model, [*[every(2)] * 4, ALL])
    name = report.stack
    assert [report.bytes_per_token[f"{name}.{i}"] for i in range(5)] == [4 * 24 // 2] * 4 + [None]
    first = str(report).splitlines()[2]
    assert first.split() == f"{name}.0 - {name}.3 input of every 2 layers GPU unchanged 48".split()


def test_every_alone_saves_inputs() -> None:
    assert ActivationPolicy(every=4) == ActivationPolicy(keep="input", every=4)
    assert ActivationPolicy(every=1) == ActivationPolicy() == ActivationPolicy(keep="all")
    with pytest.raises(ArgumentValueError, match="every: expected 1 with keep='all', got 2"):
        ActivationPolicy(keep="all", every=2)
