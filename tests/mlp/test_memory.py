"""What the gated MLP really allocates, and computes: what stays after forward, the most at once, and which GEMMs."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from contract.function import Mode, leaves, trained
from contract.parts import FUNCTIONS
from lowtide import nn, swiglu_mlp
from lowtide.measure.allocations import track_allocations
from lowtide.mlp import elementwise
from promises import promise
from support import counted_flop, every_pair, gemm_flop

pytestmark = promise("memory")
N, D, FF = 512, 48, 160
SLACK = 2**16  # the plain pieces of rows, and what is small
MLP, ADAPTED, EXPERTS = (Mode(FUNCTIONS[name]) for name in ("swiglu_mlp", "adapted_mlp", "experts"))
GEMM = 2 * N * D * FF


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elementwise, "PIECE", 2**11)


def arguments(mode: Mode = MLP, dtype: torch.dtype = torch.float32, *, frozen: bool = False, **choice: Any) -> Any:
    """Return a mode's arguments without biases; ``frozen``: the weights need no gradient."""
    kwargs = mode.arguments(N, D=D, F=FF, dtype=dtype, bias=False, **choice)
    if frozen:
        kwargs |= {name: kwargs[name].detach() for name in trained(kwargs) if "weight" in name}
    return kwargs


def run(mode: Mode, kwargs: Any) -> Tensor:
    return mode.function.run(**kwargs)


def after_forward(function: Callable[[], Tensor]) -> int:
    """Return the bytes that stay after forward beyond the output, as the allocator counts them."""
    function()
    gc.collect()
    with track_allocations() as seen:
        y = function()
        gc.collect()
    return seen.events[-1].total_bytes - y.numel() * y.element_size()


def backward_of(mode: Mode, kwargs: Any) -> Any:
    y, upstream = run(mode, kwargs), torch.ones(N, D, dtype=kwargs["input"].dtype)
    with track_allocations() as seen:
        torch.autograd.grad(y, leaves(kwargs), upstream)
    return seen


@every_pair(
    level=[0, 1], frozen=[False, True], dtype=[torch.bfloat16, torch.float32], tile=[None, 100], lora=[False, True]
)
def test_kept_after_forward(level: int, frozen: bool, dtype: torch.dtype, tile: int | None, lora: bool) -> None:
    """Gate and up or neither, and the input where backward reads it; with adapters what frozen weights keep."""
    mode = ADAPTED if lora else MLP
    kwargs = arguments(mode, dtype, frozen=frozen, checkpoint_level=level, tile_tokens=tile)
    kept = after_forward(lambda: run(mode, kwargs | {"input": kwargs["input"].clone()}))  # nobody else keeps the copy
    needed = level == 1 or not frozen or lora
    few = 0 if needed else dtype.itemsize  # one number of the input's shape and dtype
    assert kept == (2 * FF * (level == 0) + D * needed) * N * dtype.itemsize + few
    x, gate, up, down = (kwargs[name] for name in ("input", "gate_weight", "up_weight", "down_weight"))
    if not frozen:
        textbook = after_forward(lambda: F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down))
        assert textbook == 4 * FF * N * dtype.itemsize, "the measure must see the textbook's four"


@pytest.mark.parametrize("level", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_keeps_the_input_as_it_came_and_nothing_of_the_weights(level: int, dtype: torch.dtype) -> None:
    kwargs = arguments(checkpoint_level=level)

    def forward() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return swiglu_mlp(**kwargs | {"input": kwargs["input"].to(dtype, copy=True)})

    assert after_forward(forward) == N * (D * dtype.itemsize + (2 * FF * 2 if level == 0 else 0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_keep_gate_and_up_and_the_order_of_the_pairs_or_the_order_alone(dtype: torch.dtype) -> None:
    for level in (0, 1):
        kwargs = EXPERTS.arguments(64, D=32, F=48, dtype=dtype, bias=False, checkpoint_level=level)
        (T, K), E = kwargs["ids"].shape, 5
        order, activations = 4 * (T * K + E), 2 * 48 * T * K * dtype.itemsize if level == 0 else 0
        saved = after_forward(lambda kwargs=kwargs: run(EXPERTS, kwargs))
        assert order + activations <= saved <= order + activations + 64  # empty tensors have a few bytes


@every_pair(level=[0, 1], tile=[None, 128], joined=["", "gate first", "interleaved"], lora=[False, True])
def test_peaks(level: int, tile: int | None, joined: str, lora: bool) -> None:
    """The gradient of a joined weight is one tensor, written once; adapters hold little more."""
    # in float32: the CPU's narrow GEMMs have scratch of their own
    kwargs = arguments(ADAPTED, checkpoint_level=level, tile_tokens=tile, joined=joined, adapted=lora)
    rows, token = tile or N, 4
    small = 2 * sum(t.nbytes for name, t in kwargs.items() if name[-2:] in ("_a", "_b")) + 4 * N * 9 * lora
    with track_allocations() as seen:
        run(ADAPTED, kwargs)
    beside = rows * FF * (1 if level == 0 else 2)
    assert seen.peak_bytes <= token * ((2 * FF * N if level == 0 else 0) + beside + D * N) + SLACK + small
    seen = backward_of(ADAPTED, kwargs)
    bound = token * (rows * FF * (1 if level == 0 else 3) + D * N)
    assert bound - SLACK < seen.peak_bytes <= bound + 3 * D * FF * 4 + SLACK + small
    if joined:
        sizes = [event.bytes for event in seen.events if event.bytes > 0]
        assert sizes.count(kwargs["gate_weight"].nbytes) == 1
        assert sizes.count(kwargs["down_weight"].nbytes) == 1


@pytest.mark.parametrize("shape", [(75, 50, 130, 3), (16, 64, 175, 3), (32, 32, 128, 5)])
def test_a_step_of_a_stack_peaks_at_the_sum_in_the_docs(
    shape: tuple[int, int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the byte, by the bytes that docs/mlp.md names; the second step adds to gradients."""
    monkeypatch.setattr(elementwise, "PIECE", 1)
    tokens, hidden, wide, layers = shape
    X, B, w = 4 * tokens * hidden, 4 * tokens * wide, 4 * hidden * wide
    W = 3 * layers * w
    expected = (
        2 * (W + X) + layers * (2 * B + X) + max(B + w, 2 * w, 3 * w - B) + X,
        2 * (W + X) + layers * X + max(3 * B + w, 2 * B + 2 * w, B + 3 * w) + X,
    )
    for level, tile in itertools.product((0, 1), (None, tokens)):  # in the node of dense MLPs, and with options
        stack = torch.nn.Sequential(*[nn.SwiGLU(hidden, wide, checkpoint_level=level) for _ in range(layers)])
        for mlp in stack:
            mlp.tile_tokens = tile
        x, upstream = torch.randn(tokens, hidden, requires_grad=True), torch.randn(tokens, hidden)
        stack(x).backward(upstream)
        with track_allocations() as seen:
            stack(x).backward(upstream)
        assert 2 * (W + X) + seen.peak_bytes == expected[level]


def test_a_retained_graph_costs_the_gradients_of_gate_and_up() -> None:
    kwargs = arguments(checkpoint_level=0)
    peaks = []
    for retain in (False, True):
        y = run(MLP, kwargs)
        with track_allocations() as seen:
            torch.autograd.grad(y, leaves(kwargs), torch.ones_like(y), retain_graph=retain)
        peaks.append(seen.peak_bytes)
    assert 2 * FF * N * 4 * 0.9 < peaks[1] - peaks[0] <= 2 * FF * N * 4


@pytest.mark.parametrize("level", [0, 1])
def test_flop(level: int) -> None:
    """As they run and as PyTorch's counter has them; a checkpoint recomputes gate and up alone, frozen weights none."""
    kwargs = arguments(checkpoint_level=level)
    tensors = leaves(kwargs)

    def block(*given: Tensor) -> Tensor:
        return swiglu_mlp(**kwargs | dict(zip(trained(kwargs), given, strict=True))) + given[0]

    for count in (gemm_flop, counted_flop):
        y, again = block(*tensors), checkpoint(block, *tensors, use_reentrant=False)
        plain, recomputed, forward = count(
            lambda y=y: torch.autograd.grad(y.sum(), tensors),
            lambda again=again: torch.autograd.grad(again.sum(), tensors),
            lambda: block(*tensors),
        )
        assert (plain, recomputed, forward) == ((6 + 2 * level) * GEMM, 8 * GEMM, 3 * GEMM)
    found = []
    for frozen in (False, True):
        given = arguments(ADAPTED, frozen=frozen, checkpoint_level=level)
        y = run(ADAPTED, given).sum()
        found += gemm_flop(lambda y=y, given=given: torch.autograd.grad(y, leaves(given)))
    assert found[0] - found[1] == 3 * GEMM
    given = EXPERTS.arguments(N, D=D, F=FF, checkpoint_level=level)
    y = run(EXPERTS, given).sum()
    pair = given["ids"].shape[1] * GEMM
    assert counted_flop(lambda: torch.autograd.grad(y, leaves(given))) == [(6 + 2 * level) * pair]
