"""What swiglu_mlp really allocates: what stays after forward, and the most that is there at once."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from lowtide import nn, swiglu_mlp
from lowtide.measure.allocations import track_allocations
from lowtide.mlp import elementwise
from support import mlp

N, D, FF = 512, 48, 160
SLACK = 2**16  # the plain pieces of rows, and what is small


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elementwise, "PIECE", 2**11)


def leaves_of(dtype: torch.dtype = torch.bfloat16) -> list[Any]:
    return mlp(N, D, FF, dtype=dtype, bias=False)[:4]


def after_forward(function: Callable[[], Tensor]) -> int:
    """Return the bytes that stay after forward beyond the output, as the allocator counts them."""
    function()
    gc.collect()
    with track_allocations() as seen:
        y = function()
        gc.collect()
    return seen.events[-1].total_bytes - y.numel() * y.element_size()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("tile", [None, 100])
def test_kept_after_forward(dtype: torch.dtype, tile: int | None) -> None:
    leaves = leaves_of(dtype)
    token = N * dtype.itemsize
    levels = [after_forward(lambda k=k: swiglu_mlp(*leaves, checkpoint_level=k, tile_tokens=tile)) for k in (0, 1)]
    assert levels == [2 * FF * token, 0]
    textbook = after_forward(
        lambda: F.linear(F.silu(F.linear(leaves[0], leaves[1])) * F.linear(leaves[0], leaves[2]), leaves[3])
    )
    assert textbook == 4 * FF * token, "the measure must see the textbook's four"


@pytest.mark.parametrize("level", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_keeps_the_input_as_it_came_and_nothing_of_the_weights(level: int, dtype: torch.dtype) -> None:
    x, *weights = leaves_of(torch.float32)

    def forward() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return swiglu_mlp(x.to(dtype, copy=True), *weights, checkpoint_level=level)  # nobody else keeps the copy

    assert after_forward(forward) == N * (D * dtype.itemsize + (2 * FF * 2 if level == 0 else 0))


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("level", [0, 1])
def test_the_input_is_kept_where_backward_reads_it(frozen: bool, level: int) -> None:
    x, *weights = leaves_of()
    for weight in weights:
        weight.requires_grad_(not frozen)

    def forward() -> Tensor:
        return swiglu_mlp(x.clone(), *weights, checkpoint_level=level)  # nobody else keeps the copy

    needed = level == 1 or not frozen
    few = 0 if needed else 2  # one number of the input's shape and dtype
    assert after_forward(forward) == (2 * FF * (level == 0) + D * needed) * 2 * N + few


@pytest.mark.parametrize("level", [0, 1])
@pytest.mark.parametrize("tile", [None, 128])
def test_peaks(level: int, tile: int | None) -> None:
    leaves = leaves_of(torch.float32)  # the CPU's narrow GEMMs have scratch of their own
    rows, token, weights = tile or N, 4, 3 * D * FF * 4
    with track_allocations() as seen:
        y = swiglu_mlp(*leaves, checkpoint_level=level, tile_tokens=tile)
    kept = 2 * FF * N if level == 0 else 0
    beside = rows * FF * (1 if level == 0 else 2)
    assert seen.peak_bytes <= token * (kept + beside + D * N) + SLACK
    upstream = torch.randn(N, D)
    with track_allocations() as seen:
        y.backward(upstream)
    beside = rows * FF * (1 if level == 0 else 3)
    assert seen.peak_bytes <= token * (beside + D * N) + weights + SLACK
    assert seen.peak_bytes > token * (beside + D * N) - SLACK, "the bound is not loose"


@pytest.mark.parametrize("shape", [(75, 50, 130, 3), (16, 64, 175, 3), (32, 32, 128, 5)])
def test_a_step_of_a_stack_peaks_at_the_sum_in_the_docs(
    shape: tuple[int, int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the byte: of docs/mlp.md, from which its published table is computed; the second step adds to gradients."""
    monkeypatch.setattr(elementwise, "PIECE", 1)
    tokens, hidden, wide, layers = shape
    X, B, w = 4 * tokens * hidden, 4 * tokens * wide, 4 * hidden * wide
    W = 3 * layers * w
    expected = (
        2 * (W + X) + layers * (2 * B + X) + max(B + w, 2 * w, 3 * w - B) + X,
        2 * (W + X) + layers * X + max(3 * B + w, 2 * B + 2 * w, B + 3 * w) + X,
    )
    for level in (0, 1):
        stack = torch.nn.Sequential(*[nn.SwiGLU(hidden, wide, checkpoint_level=level) for _ in range(layers)])
        x, upstream = torch.randn(tokens, hidden, requires_grad=True), torch.randn(tokens, hidden)
        stack(x).backward(upstream)
        with track_allocations() as seen:
            stack(x).backward(upstream)
        assert 2 * (W + X) + seen.peak_bytes == expected[level]


def test_a_retained_graph_costs_the_gradients_of_gate_and_up() -> None:
    leaves = leaves_of(torch.float32)  # what the CPU packs narrow operands into depends on its instructions
    peaks = []
    for retain in (False, True):
        y = swiglu_mlp(*leaves, checkpoint_level=0)
        with track_allocations() as seen:
            torch.autograd.grad(y, leaves, torch.ones_like(y), retain_graph=retain)
        peaks.append(seen.peak_bytes)
    assert 2 * FF * N * 4 * 0.9 < peaks[1] - peaks[0] <= 2 * FF * N * 4


@pytest.mark.parametrize("level", [0, 1])
@pytest.mark.parametrize("selective", [False, True])
def test_a_checkpoint_recomputes_no_more_than_backward_needs(level: int, selective: bool) -> None:
    leaves = leaves_of(torch.float32)

    def block(*tensors: Tensor) -> Tensor:
        return swiglu_mlp(*tensors, checkpoint_level=level) + tensors[0]

    def products(y: Tensor) -> tuple[int, tuple[Tensor, ...]]:
        with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
            grads = torch.autograd.grad(y.sum(), leaves)
        return sum(event.name in ("aten::mm", "aten::addmm") for event in profiler.events()), grads

    how = {"context_fn": partial(create_selective_checkpoint_contexts, [])} if selective else {}
    count, grads = products(checkpoint(block, *leaves, use_reentrant=False, **how))
    plain_count, plain = products(block(*leaves))
    assert all(torch.equal(a, b) for a, b in zip(grads, plain, strict=True))
    assert plain_count == (6 if level == 0 else 8)
    assert count == 8, "gate and up are computed once more, and the down projection is not"
