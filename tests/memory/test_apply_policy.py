"""What a layer keeps, and that nothing else changes: values, gradients, random state, autocast, kernels called."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.errors import UnsupportedError
from lowtide.measure.allocations import track_allocations
from lowtide.memory import ActivationPolicy, apply_policy, attention, remove_policy
from memory.models import (
    ATTENTION,
    INPUT,
    OFFLOADED_ATTENTION,
    RECOMPUTING,
    VOCAB,
    CountAttention,
    Flash,
    LazySide,
    Plain,
    assert_same,
    loss_of,
    step,
)

KEEPS = ("all", "attention", "input")


@pytest.mark.parametrize("kind", ["flash", "efficient", "cudnn", "fused", "flash_for_cpu", "package", "flex"])
def test_operators_that_are_attention(kind: str) -> None:
    """By name, so that every backend of PyTorch counts, whether or not this machine can run it; no backward does."""
    aten, found = torch.ops.aten, attention.is_attention
    if kind == "flex":
        operators = torch.ops.higher_order.flex_attention, torch.ops.higher_order.flex_attention_backward
    elif kind == "package":
        operators = torch.ops.lowtide_test_flash_attn.fwd.default, aten.mm.default
    elif kind == "flash_for_cpu":
        forward = aten._scaled_dot_product_flash_attention_for_cpu.default
        operators = forward, aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    elif kind == "fused":
        forward = aten._scaled_dot_product_fused_attention_overrideable.default
        operators = forward, aten._scaled_dot_product_fused_attention_overrideable_backward.default
    else:
        forward = getattr(aten, f"_scaled_dot_product_{kind}_attention").default
        operators = forward, getattr(aten, f"_scaled_dot_product_{kind}_attention_backward").default
        inner, inner_backward = f"_{kind}_attention_forward", f"_{kind}_attention_backward"
        assert found(getattr(aten, inner).default)
        assert not found(getattr(aten, inner_backward).default)
    assert [found(operator) for operator in operators] == [True, False]
    assert not found(aten._scaled_dot_product_attention_math.default)


@pytest.mark.parametrize("keep", KEEPS)
def test_same_to_the_bit(pair: tuple[Any, Any], keep: Any, ids: Tensor) -> None:
    model, stock = pair
    apply_policy(model, ActivationPolicy(keep=keep))
    for seed in range(2):
        assert_same(step(model, ids, seed), step(stock, ids, seed))


@pytest.mark.parametrize(("keep", "calls"), [("all", 5), ("attention", 5), ("input", 10)])
def test_attention_is_called_once_where_it_is_kept(model: Any, keep: Any, calls: int, ids: Tensor) -> None:
    apply_policy(model, ActivationPolicy(keep=keep))
    with CountAttention() as counted:
        step(model, ids)
    assert counted.calls == calls


def test_a_policy_for_each_layer(pair: tuple[Any, Any], ids: Tensor) -> None:
    model, stock = pair
    keeps = ["input", "input", "attention", "all", "input"]
    report = apply_policy(model, [ActivationPolicy(keep=keep) for keep in keeps])
    assert [policy.keep for policy in report.policies.values()] == keeps
    with CountAttention() as counted:
        got = step(model, ids)
    assert counted.calls == 5 + 3
    assert_same(got, step(stock, ids))


def live_after_forward(model: Any, ids: Tensor) -> int:
    """Bytes that a forward leaves allocated, its gradients' graph included."""
    with track_allocations() as seen:
        kept = model(ids) if isinstance(model, Plain) else model(input_ids=ids, use_cache=False).last_hidden_state
    del kept
    return seen.events[-1].total_bytes


@pytest.mark.parametrize("family", ["llama", "plain"])
def test_bytes_that_stay_after_forward(family: str, llama: Any) -> None:
    tokens, D, layers = 512, 64, 5
    ids = torch.randint(3, VOCAB, (1, tokens))
    shape = {"hidden_size": D, "intermediate_size": 160, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = llama(**shape, head_dim=16).model if family == "llama" else Plain(layers, D, heads=4)
    model(ids) if family == "plain" else model(input_ids=ids)
    live = {}
    for keep in KEEPS:
        apply_policy(model, ActivationPolicy(keep=keep))
        live[keep] = live_after_forward(model, ids)
    # One layer is taken away, so that what embedding and head keep cancels out.
    short = copy.deepcopy(model)
    stack = short.layers if family == "llama" else short.blocks
    del stack[-1]
    if family == "llama":
        short.config.num_hidden_layers = layers - 1
    a_layer = {}
    for keep in KEEPS:
        apply_policy(short, ActivationPolicy(keep=keep))
        a_layer[keep] = (live[keep] - live_after_forward(short, ids)) / tokens
    slack = 32  # bytes a token: the random state's 5 KB and the like, over 512 tokens
    assert 4 * D <= a_layer["input"] < 4 * D + slack
    assert 8 * D + 16 <= a_layer["attention"] < 8 * D + 16 + slack  # and a float32 logsumexp for each of 4 heads
    assert a_layer["all"] > 4 * a_layer["attention"]


def test_bytes_of_a_patched_layer(llama: Any) -> None:
    """The table of docs/memory.md, in bf16."""
    tokens, h, q, k, f, heads = 512, 64, 64, 32, 160, 4
    ids = torch.randint(3, VOCAB, (1, tokens))
    shape = {"hidden_size": h, "intermediate_size": f, "num_attention_heads": heads, "num_key_value_heads": 2}
    live: dict[tuple[int, ActivationPolicy], int] = {}
    policies = {
        ActivationPolicy(mlp_level=0): 8 * h + 4 * q + 4 * k + 4 * f + 4 * heads + 8,
        ActivationPolicy(mlp_level=1): 8 * h + 4 * q + 4 * k + 4 * heads + 8,
        ATTENTION: 2 * h + 2 * q + 4 * heads,
        INPUT: 2 * h,
    }
    for layers in (2, 3):
        model = llama(**shape, head_dim=16, num_hidden_layers=layers, use_cache=False).bfloat16()
        lowtide.patch(model)
        for policy in policies:
            apply_policy(model, policy)
            model.model(input_ids=ids)
            live[layers, policy] = live_after_forward(model.model, ids)
    for policy, expected in policies.items():
        got = (live[3, policy] - live[2, policy]) / tokens
        assert expected <= got < expected + 16, policy  # the random state's 5 KB, over 512 tokens


@pytest.mark.parametrize("policy", RECOMPUTING)
def test_dropout_draws_the_same_again(policy: str, side: LazySide, ids: Tensor) -> None:
    model = Plain(dropout=0.3)
    stock = copy.deepcopy(model)
    apply_policy(model, RECOMPUTING[policy])
    assert_same(step(model, ids), step(stock, ids))
    after = []
    for each in (model, stock):
        torch.manual_seed(7)
        each(ids).backward()
        after.append(torch.rand(3))
    assert torch.equal(*after)  # backward leaves the generator where forward left it


@pytest.mark.parametrize("policy", [ATTENTION, OFFLOADED_ATTENTION], ids=["", "offloaded"])
def test_a_packages_operator_with_dropout_is_kept_and_moves_the_random_state(
    policy: ActivationPolicy, side: LazySide, monkeypatch: pytest.MonkeyPatch, ids: Tensor
) -> None:
    """The dropout after attention draws the mask of forward, though attention's own dropout drew nothing again."""
    model = Plain(dropout=0.3)
    stock = copy.deepcopy(model)
    for block in [*model.blocks, *stock.blocks]:
        monkeypatch.setattr(block, "attend", Flash.apply)
    apply_policy(model, policy)
    with CountAttention() as counted:
        got = step(model, ids)
    assert counted.calls == 5
    assert_same(got, step(stock, ids))
    assert side.copies == (3 * 3 if policy.offload else 0)  # input, output and mask, of three layers
    with monkeypatch.context() as broken:  # and the test would see it if it were not so
        broken.setattr(attention, "_set_rng_state", lambda device, state: None)
        got = step(model, ids)
    with pytest.raises(AssertionError):
        assert_same(got, step(stock, ids))


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


def test_backward_twice_and_second_derivatives() -> None:
    for keep in ("attention", "input"):
        model, ids = Plain(), torch.randint(3, VOCAB, (2, 9))
        apply_policy(model, ActivationPolicy(keep=keep))
        loss = model(ids)
        first = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        second = torch.autograd.grad(loss, list(model.parameters()))
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    block = Plain(1).blocks[0].double()
    block.attend = lambda q, k, v: (q @ k.mT).softmax(-1) @ v  # a fused backward has no derivative of its own
    holder = nn.Module()
    holder.blocks = nn.ModuleList([block])
    x = torch.randn(1, 3, 24, dtype=torch.float64, requires_grad=True)
    want = torch.autograd.grad(torch.autograd.grad(block(2 * x).square().sum(), x, create_graph=True)[0].sum(), x)[0]
    apply_policy(holder, ActivationPolicy(keep="input"))
    got = torch.autograd.grad(torch.autograd.grad(block(2 * x).square().sum(), x, create_graph=True)[0].sum(), x)[0]
    assert torch.equal(got, want)


def test_attention_that_cannot_be_kept_raises(llama: Any, ids: Tensor) -> None:
    model = llama(attn_implementation="eager")
    apply_policy(model, ActivationPolicy(keep="attention"))
    with pytest.raises(UnsupportedError, match=r"model\.layers\.0: expected a fused attention .* keep='input'"):
        step(model, ids)
    apply_policy(model, ActivationPolicy(keep="input"))
    step(model, ids)


def test_attention_changed_in_place_raises(monkeypatch: pytest.MonkeyPatch, ids: Tensor) -> None:
    model = Plain()
    attend = model.blocks[0].attend
    monkeypatch.setattr(model.blocks[2], "attend", lambda q, k, v: attend(q, k, v).mul_(2))
    apply_policy(model, ActivationPolicy(keep="attention"))
    with pytest.raises(UnsupportedError, match="in-place"):
        step(model, ids)


def test_a_recompute_that_takes_another_path_raises(monkeypatch: pytest.MonkeyPatch, ids: Tensor) -> None:
    model = Plain()
    attend, calls = model.blocks[0].attend, []

    def other(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        calls.append(1)
        return attend(q, k, v) if len(calls) == 1 else attend(attend(q, k, v), k, v)

    monkeypatch.setattr(model.blocks[2], "attend", other)
    apply_policy(model, ActivationPolicy(keep="attention"))
    with pytest.raises(UnsupportedError, match="another path"):
        step(model, ids)


def test_graphs_that_never_run_backward_leave_nothing(model: Any, ids: Tensor) -> None:
    apply_policy(model, ActivationPolicy(keep="attention"))
    step(model, ids)
    with track_allocations() as seen:
        for _ in range(3):
            loss_of(model, ids)
    assert abs(seen.events[-1].total_bytes) < 1000, "without the garbage collector: a cycle would keep it"


@pytest.mark.parametrize("keep", ["attention", "input"])
def test_a_frozen_model_before_the_first_layer_that_trains(pair: tuple[Any, Any], keep: Any, ids: Tensor) -> None:
    model, stock = pair
    for each in pair:
        layers = each.blocks if isinstance(each, Plain) else each.model.layers
        each.requires_grad_(requires_grad=False)
        layers[3].requires_grad_()
    apply_policy(model, ActivationPolicy(keep=keep))
    with CountAttention() as counted:
        got = step(model, ids)
    assert counted.calls == (5 if keep == "attention" else 7)  # nothing below layer 3 is run again
    assert_same(got, step(stock, ids))


@pytest.mark.parametrize("keep", ["attention", "input"])
def test_values_against_float64(keep: Any) -> None:
    """Beside the same model in float64 with attention written out: as near as the stock model in float32."""
    model, ids = Plain(), torch.randint(3, VOCAB, (3, 17))
    true = copy.deepcopy(model).double()
    for block in true.blocks:
        block.attend = lambda q, k, v: (
            (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(torch.ones(17, 17).triu(1).bool(), -torch.inf).softmax(-1) @ v
        )
    want, stock = step(true, ids), step(copy.deepcopy(model), ids)
    apply_policy(model, ActivationPolicy(keep=keep))
    got = step(model, ids)
    for name, exact in want[1].items():
        error = (got[1][name] - exact).norm()
        assert error <= 1.01 * (stock[1][name] - exact).norm() + 1e-9 * exact.norm(), name
        assert error < 1e-4 * exact.norm() + 1e-7, name


def test_removing_gives_back_the_class(pair: tuple[Any, Any], ids: Tensor) -> None:
    model, stock = pair
    apply_policy(model, ActivationPolicy(keep="input"))
    remove_policy(model)
    remove_policy(model)
    for (_, a), b in zip(model.named_modules(), stock.modules(), strict=True):
        assert type(a) is type(b)
        assert vars(a).keys() == vars(b).keys()
    with CountAttention() as counted:
        step(model, ids)
    assert counted.calls == 5
