"""What linear_apply really allocates: never the logits, and with two chunks at most half of what plain PyTorch does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from head.test_apply_values import in_chunks
from lowtide import HeadOptions, linear_apply, plan_head
from lowtide.head.function import checks as apply_checks
from lowtide.measure.allocations import Allocations, track_allocations
from support import head

MIB = 2**20


def cross_entropy(z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z, y, reduction="none")


def focal(z: Tensor, y: Tensor) -> Tensor:
    logp = -F.cross_entropy(z, y, reduction="none")
    return -((1 - logp.exp()) ** 2) * logp


def entropy(z: Tensor, y: Tensor) -> Tensor:
    logp = z.log_softmax(-1)
    return -(logp.exp() * logp).sum(-1)


def top(z: Tensor, y: Tensor) -> Tensor:
    return z.topk(5)[0].logsumexp(-1)


FUNCTIONS = [cross_entropy, focal, entropy, top]


def of(fn: Callable[..., Tensor], out: str) -> Callable[..., Tensor]:
    return fn if out == "token" else lambda z, y: fn(z, y).sum()


@pytest.mark.parametrize("out", ["token", "sum"])
@pytest.mark.parametrize("fn", FUNCTIONS)
def test_two_chunks_take_at_most_half_and_more_take_far_less(fn: Any, out: str) -> None:
    N, D, V = 512, 16, 4096

    def tracked(run: Callable[[], Tensor]) -> Allocations:
        with track_allocations() as seen:
            run().backward()
        return seen

    x, w, _, y = head(N, D, V, bias=False)
    naive = tracked(lambda: fn(F.linear(x, w), y).sum()).peak_bytes
    # plain PyTorch holds one copy of the logits for the largest of them, and so do two chunks hold half of one
    for chunks, share in ((2, 0.65 if fn is top else 0.5), (16, 0.2), (None, 1 / 3)):
        options = None if chunks is None else in_chunks(chunks, N, D, V, torch.float32)
        x.grad = w.grad = None
        taken = tracked(lambda options=options: linear_apply(of(fn, out), x, w, y, out=out, options=options).sum())
        assert taken.peak_bytes <= share * naive
        assert chunks == 2 or 0 < taken.largest_bytes < N * V


def test_masked_rows_take_no_logits() -> None:
    x, w, _, y = head(4096, 16, 2000)
    mask = torch.zeros(4096, dtype=torch.bool)
    mask[::512] = True
    with track_allocations() as seen:
        linear_apply(entropy, x, w, y, mask=mask).sum().backward()
    assert seen.peak_bytes < 2 * (x.nbytes + w.nbytes) + 8 * 2000 * 4 * 12


@pytest.mark.parametrize("fn", [lambda z: z + torch.rand_like(z), lambda z: z * 2])
def test_looking_for_coupled_tokens_takes_a_few_rows(fn: Any) -> None:
    V = 20000
    x, w, _, _ = head(32, 4, V, bias=False)
    with track_allocations() as seen:
        out = linear_apply(fn, x, w)
    assert seen.peak_bytes < out.nbytes + apply_checks.ROWS * V * 4 * 12
    # with a bound on the workspace, two rows are compared
    with track_allocations() as seen:
        out = linear_apply(fn, x, w, options=HeadOptions(workspace_mib=0.1))
    assert seen.peak_bytes < out.nbytes + 2 * V * 4 * 14


def test_the_plan_says_what_the_function_gets() -> None:
    plan = plan_head(16384, 4096, 128256, torch.bfloat16, "cpu", HeadOptions(workspace_mib=512), function=True)
    assert plan.scratch_bytes <= 512 * MIB
    assert 1 <= plan.piece_rows <= plan.chunk_rows
    assert f"gets {plan.piece_rows} rows" in str(plan)
    assert plan_head(16384, 4096, 128256, torch.bfloat16, "cpu").piece_rows == 0
    on_gpu = plan_head(16384, 4096, 128256, torch.bfloat16, "cuda", function=True)
    assert (on_gpu.backend, on_gpu.logits_gemm, on_gpu.backward_gemm) == ("torch", "out_dtype", "narrow")
    assert 64 <= on_gpu.piece_rows < on_gpu.chunk_rows
    assert on_gpu.scratch_bytes <= 3072 * MIB
    assert on_gpu.chunk_rows * 8 == 16384
    small = plan_head(8192, 256, 32000, torch.bfloat16, "cuda", function=True)
    assert small.piece_rows * 16 == small.chunk_rows * 4 == 8192, "pieces are small beside all tokens"
    assert on_gpu.chunk_rows - on_gpu.piece_rows * (-(-on_gpu.chunk_rows // on_gpu.piece_rows) - 1) > 0.9 * (
        on_gpu.piece_rows
    ), "pieces are of one size"
    rows: list[int] = []
    x, w, _, _ = head(500, 8, 1000)
    linear_apply(lambda z: (rows.append(len(z)), z.sum(-1))[1], x, w, options=HeadOptions(workspace_mib=1))
    planned = plan_head(500, 8, 1000, torch.float32, "cpu", HeadOptions(workspace_mib=1), function=True)
    assert max(rows) == planned.piece_rows
