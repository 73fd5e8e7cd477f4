"""The tracker sees what it must: naive logits, also inside custom operators and in backward."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lowtide.measure.allocations import track_allocations

N, D, V = 96, 32, 4096
LOGITS = N * V * 4


@torch.library.custom_op("lowtide_tests::hidden_naive_loss", mutates_args=())
def hidden_naive_loss(x_ND: Tensor, w_VD: Tensor, target_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Loss and gradients: all outputs are small, the logits live and die inside the operator."""
    logits_NV = x_ND @ w_VD.T
    loss = F.cross_entropy(logits_NV, target_N)
    d_NV = (logits_NV.softmax(-1) - F.one_hot(target_N, len(w_VD))) / len(x_ND)
    return loss, d_NV @ w_VD, d_NV.T @ x_ND


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(N, D, requires_grad=True), torch.randn(V, D, requires_grad=True), torch.randint(V, (N,))


def test_naive_loss_is_seen() -> None:
    x, w, y = inputs()
    with track_allocations() as seen:
        F.cross_entropy(x @ w.T, y).backward()
    assert seen.largest_bytes >= LOGITS
    assert seen.peak_bytes >= 2 * LOGITS  # logits and their log-probabilities


def test_naive_loss_inside_a_custom_op_is_seen() -> None:
    x, w, y = inputs()
    with track_allocations() as seen:
        hidden_naive_loss(x, w, y)
    assert seen.largest_bytes >= LOGITS


def test_sizes_are_exact_and_frees_are_counted() -> None:
    with track_allocations() as seen:
        a = torch.empty(1 << 20, dtype=torch.uint8)
        del a
        b = torch.empty(3 << 20, dtype=torch.uint8)
        c = torch.empty(2 << 20, dtype=torch.uint8)
        del b, c
    assert [e.bytes >> 20 for e in seen.events] == [1, -1, 3, 2, -3, -2]
    assert seen.largest_bytes == 3 << 20
    assert seen.peak_bytes == 5 << 20
    assert seen.events[-1].total_bytes == 0


def test_peak_is_above_the_start() -> None:
    held = torch.empty(8 << 20, dtype=torch.uint8)
    with track_allocations() as seen:
        torch.empty(1 << 20, dtype=torch.uint8)
    assert seen.peak_bytes == 1 << 20
    assert held.numel() == 8 << 20
