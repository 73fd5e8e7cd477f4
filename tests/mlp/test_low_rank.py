"""The gated MLP with low-rank adapters: values, every gradient, and what is kept, against plain PyTorch."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from lowtide.measure.allocations import track_allocations
from lowtide.mlp import elementwise, low_rank
from lowtide.mlp.call import Adapter, Projection, SwigluCall, Wanted
from lowtide.mlp.swiglu import adapted_mlp
from mlp.calls import grads, in_float64
from mlp.test_swiglu_memory import after_forward
from support import mlp, mlp_slack, relative_error

pytestmark = pytest.mark.filterwarnings("ignore:.*Function.* should not be instantiated:DeprecationWarning")  # dynamo's

SCALES = (0.5, 1.7, 2.0)
RANKS = (3, 1, 5)


def adapters_of(
    D: int, FF: int, dtype: torch.dtype = torch.float32, seed: int = 7, ranks: tuple[int, ...] = RANKS
) -> list[Tensor]:
    """Return A and B of gate, up and down, as leaves."""
    g = torch.Generator().manual_seed(seed)
    shapes = [((r, i), (o, r)) for r, (i, o) in zip(ranks, ((D, FF), (D, FF), (FF, D)), strict=True)]
    leaves = []
    for a, b in shapes:
        for shape in (a, b):
            weight = torch.randn(*shape, generator=g, dtype=torch.float64) / max(shape[1], 1) ** 0.5
            leaves.append(weight.to(dtype).requires_grad_())
    return leaves


def call(leaves: list[Any], ab: list[Any], level: int = 0, dropout: float = 0.0, activation: str = "silu") -> Tensor:
    x, *rest = leaves
    projections = [
        Projection(w, b, None if ab[2 * i] is None else Adapter(ab[2 * i], ab[2 * i + 1], SCALES[i], dropout))
        for i, (w, b) in enumerate(zip(rest[:3], rest[3:], strict=True))
    ]
    return adapted_mlp(x, *projections, activation=activation, checkpoint_level=level)


def plain(leaves: list[Any], ab: list[Any], activation: str = "silu") -> Tensor:
    """The same as PEFT computes it: in the leaves' dtypes, a module at a time."""

    def project(x: Tensor, i: int) -> Tensor:
        y = F.linear(x, leaves[1 + i], leaves[4 + i])
        if ab[2 * i] is None:
            return y
        low = F.linear(F.linear(x.to(ab[2 * i].dtype), ab[2 * i]), ab[2 * i + 1])
        return (y + low * SCALES[i]).to(y.dtype)

    act = F.silu if activation == "silu" else partial(F.gelu, approximate="tanh")
    x = leaves[0]
    return project(act(project(x, 0)) * project(x, 1), 2)


@pytest.mark.parametrize("level", [0, 1])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("shape", [(2, 5), (1,), (0,), (3, 0)])
def test_float64(level: int, activation: str, shape: tuple[int, ...]) -> None:
    leaves, ab = mlp(shape, 7, 11, dtype=torch.float64), adapters_of(7, 11, torch.float64)
    y, expected = (f(leaves, ab, activation=activation) for f in (partial(call, level=level), plain))
    torch.testing.assert_close(y, expected)
    upstream = torch.randn(*shape, 7, dtype=torch.float64)
    torch.testing.assert_close(grads(y, [*leaves, *ab], upstream), grads(expected, [*leaves, *ab], upstream))


@pytest.mark.parametrize("level", [0, 1])
@pytest.mark.parametrize("bias", [True, False])
def test_every_subset_of_adapters_and_of_what_is_trained(level: int, bias: bool) -> None:
    whole = mlp(5, 4, 6, dtype=torch.float64, bias=bias)
    upstream = torch.randn(5, 4, dtype=torch.float64)
    for present in itertools.product((True, False), repeat=3):
        pairs = adapters_of(4, 6, torch.float64)
        ab = [pairs[i] if present[i // 2] else None for i in range(6)]
        for x, base, a, b in itertools.product((True, False), repeat=4):
            flags = [x, *[base] * 6]
            for tensor, flag in zip([*whole, *ab], [*flags, *[a, b] * 3], strict=True):
                if tensor is not None:
                    tensor.requires_grad_(flag)
            everything = [*whole, *ab]
            if not any(t is not None and t.requires_grad for t in everything):
                assert not call(whole, ab, level).requires_grad
                continue
            y = call(whole, ab, level)
            expected = grads(plain(whole, ab), everything, upstream)
            for g, again, e in zip(
                grads(y, everything, upstream, retain_graph=True), grads(y, everything, upstream), expected, strict=True
            ):
                torch.testing.assert_close(g, e)
                assert torch.equal(g, again)


@pytest.mark.parametrize("level", [0, 1])
@pytest.mark.parametrize(
    ("dtype", "adapters", "autocast"),
    [
        (torch.float32, torch.float32, None),
        (torch.bfloat16, torch.bfloat16, None),
        (torch.bfloat16, torch.float32, None),  # what peft makes of a bfloat16 model
        (torch.float16, torch.float32, None),
        (torch.float32, torch.bfloat16, None),
        (torch.float32, torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float32, torch.bfloat16),
    ],
)
def test_no_further_from_the_truth_than_plain(
    level: int, dtype: torch.dtype, adapters: torch.dtype, autocast: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(low_rank, "PIECE", 7 * 96)  # several pieces, the last one shorter
    leaves, ab = mlp(67, 64, 96, dtype=dtype), adapters_of(64, 96, adapters, ranks=(4, 4, 4))
    tensors, true = [*leaves, *ab], in_float64([*leaves, *ab])
    exact = plain(true[:7], true[7:])
    upstream = torch.randn(67, 64)
    wanted = [exact, *grads(exact, true, upstream.double())]
    found = []
    for f in (partial(call, level=level), plain):
        with torch.autocast("cpu", autocast, enabled=autocast is not None):
            y = f(leaves, ab)
        assert y.dtype == (autocast or dtype)
        found.append([y, *grads(y, tensors, upstream.to(y.dtype))])
    slack = mlp_slack(autocast or dtype, leaves)
    for tensor, ours, theirs, e in zip([y, *tensors], *found, wanted, strict=True):
        assert ours.dtype == tensor.dtype
        assert relative_error(ours, e) <= 1.3 * relative_error(theirs, e) + slack


N, D, FF = 512, 48, 160


@pytest.mark.parametrize("level", [0, 1])
@pytest.mark.parametrize("adapters", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dropout", [0.0, 0.25])
def test_kept_is_what_frozen_weights_keep(level: int, adapters: torch.dtype, dropout: float) -> None:
    x, *weights = mlp(N, D, FF, dtype=torch.bfloat16, bias=False)[:4]
    for weight in weights:
        weight.requires_grad_(False)
    ab = adapters_of(D, FF, adapters)
    kept = after_forward(lambda: call([x.clone(), *weights, None, None, None], ab, level, dropout))
    assert kept == (2 * FF * (level == 0) + D) * 2 * N
    textbook = after_forward(lambda: plain([x.clone(), *weights, None, None, None], ab))
    assert textbook > (4 * FF + D) * 2 * N


@pytest.mark.parametrize("level", [0, 1])
def test_peaks_are_those_without_adapters(level: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elementwise, "PIECE", 2**11)
    leaves = mlp(N, D, FF, bias=False)
    for weight in leaves[1:4]:
        weight.requires_grad_(False)
    peaks = []
    for ab in ([None] * 6, adapters_of(D, FF)):
        with track_allocations() as forward:
            y = call(leaves, ab, level)
        with track_allocations() as backward:
            grads(y, [*leaves, *ab], torch.ones(N, D))
        peaks.append((forward.peak_bytes, backward.peak_bytes))
    small = sum(a.nbytes for a in adapters_of(D, FF)) * 2 + 4 * N * sum(RANKS)
    assert all(b - a <= small for a, b in zip(*peaks, strict=True)), peaks


def test_a_frozen_weight_costs_no_product_in_backward() -> None:
    leaves, ab = mlp(64, 48, 80, bias=False), adapters_of(48, 80)

    def flop(frozen: bool) -> int:
        for weight in leaves[1:4]:
            weight.requires_grad_(not frozen)
        y = call(leaves, ab).sum()
        with profile(activities=[ProfilerActivity.CPU], with_flops=True, acc_events=True) as profiler:
            grads(y, [*leaves, *ab])
        return sum(event.flops or 0 for event in profiler.key_averages() if event.key in ("aten::mm", "aten::addmm"))

    assert flop(frozen=False) - flop(frozen=True) == 3 * 2 * 64 * 48 * 80


@pytest.mark.parametrize("level", [0, 1])
@pytest.mark.parametrize("reentrant", [True, False])
def test_inside_a_checkpoint(level: int, reentrant: bool) -> None:
    """It drops the same numbers when it is recomputed."""
    leaves, ab = mlp((2, 5), 7, 11), adapters_of(7, 11)

    def block(*tensors: Tensor) -> Tensor:
        return call(list(tensors[:7]), list(tensors[7:]), level, 0.3)

    torch.manual_seed(3)
    expected = grads(block(*leaves, *ab).square().sum(), [*leaves, *ab])
    torch.manual_seed(3)
    y = checkpoint(block, *leaves, *ab, use_reentrant=reentrant)
    y.square().sum().backward()
    assert all(torch.equal(t.grad, e) for t, e in zip([*leaves, *ab], expected, strict=True))


@pytest.mark.parametrize(
    ("level", "dropout", "dtype"),
    [(0, 0.0, torch.float32), (1, 0.25, torch.float32), (0, None, torch.bfloat16), (1, None, torch.float32)],
)
def test_operators(level: int, dropout: float | None, dtype: torch.dtype) -> None:
    """``dropout`` None: without adapters."""
    leaves, ab = ([t.detach().to(dtype) for t in ts] for ts in (mlp((2, 5), 7, 11), adapters_of(7, 11)))
    scales, rates = (1.0, 0.5, 2.0), (dropout,) * 3
    if dropout is None:
        fields = SwigluCall.of(tuple(leaves), dtype=dtype, activation="silu", checkpoint_level=level, tile_tokens=4)
        subsets = [(True,) * 7, (True, *[False] * 6), (False, True, *[False] * 5)]
    else:
        fields = SwigluCall(*leaves, dtype, "silu", level, 4, *ab, dtype, *scales, *rates, seed=5)
        subsets = [(True,) * 13, (*[False] * 7, *[True] * 6)]
    torch.library.opcheck(torch.ops.lowtide.swiglu_projections.default, tuple(fields))
    kept = torch.ops.lowtide.swiglu_projections(*fields) if level == 0 else (leaves[0].new_empty(0),) * 2
    torch.library.opcheck(torch.ops.lowtide.swiglu.default, (*fields, *kept))
    for subset in subsets:
        args = (*fields, *Wanted(*subset), torch.randn(2, 5, 7).to(dtype), *kept)
        torch.library.opcheck(torch.ops.lowtide.swiglu_backward.default, args)
        before = [t.clone() for t in kept]
        torch.ops.lowtide.swiglu_backward(*args)
        assert all(torch.equal(a, b) for a, b in zip(kept, before, strict=True)), "the operator writes to nothing"


@pytest.mark.parametrize("level", [0, 1])
@pytest.mark.parametrize("dropout", [0.25, 1.0])
def test_backward_drops_what_forward_dropped(level: int, dropout: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(low_rank, "PIECE", 4 * 6)  # several pieces
    leaves, ab = mlp(9, 5, 6, dtype=torch.float64), adapters_of(5, 6, torch.float64)

    def again(*tensors: Tensor) -> Tensor:
        torch.manual_seed(1)
        return call(list(tensors[:7]), list(tensors[7:]), level, dropout)

    assert torch.autograd.gradcheck(again, (*leaves, *ab))
    if dropout == 1:
        torch.testing.assert_close(again(*leaves, *ab), plain(leaves, [None] * 6))


def test_dropout_keeps_its_share_and_draws_anew() -> None:
    ones, zeros = torch.ones(500, 1), torch.zeros(1, 1)
    biases = [torch.ones(1), torch.ones(1), torch.zeros(1)]
    y = call([ones, zeros, zeros, zeros, *biases], [*[None] * 4, torch.ones(1, 1), torch.ones(1, 1)], dropout=0.3)
    dropped = y == 0
    torch.testing.assert_close(y[~dropped], torch.full_like(y[~dropped], SCALES[2] * F.silu(ones[0]).item() / 0.7))
    assert abs(dropped.float().mean().item() - 0.3) < 5 * (0.21 / 500) ** 0.5
    leaves, ab = mlp(9, 7, 11), adapters_of(7, 11)
    torch.manual_seed(1)
    first, second = call(leaves, ab, dropout=0.3), call(leaves, ab, dropout=0.3)
    torch.manual_seed(1)
    again = call(leaves, ab, dropout=0.3)
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
