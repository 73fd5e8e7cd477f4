"""What linear_token_stats really allocates: no logits, and what the workspace allows."""

from __future__ import annotations

import itertools

import pytest
import torch

from lowtide import HeadOptions, TokenStats, linear_logprobs, linear_token_stats, plan_head
from lowtide.measure import track_allocations
from support import head, stats_oracle

MIB = 2**20
CASES = ("plain", "capped", "frozen head", "some rows")


@pytest.mark.usefixtures("short_chunks")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("K", [0, 1, 2])
def test_no_quarter_of_the_logits_is_ever_allocated(dtype: torch.dtype, K: int) -> None:
    N, D, V = 256, 16, 3001
    x, w, b, y = head(N, D, V, dtype=dtype)
    y[::7] = -100
    with track_allocations() as seen:
        if K:
            y = y if K == 1 else torch.stack((y, y), -1)
            stats = linear_token_stats(x, w, y, want=TokenStats._fields, topk=5, linear_bias=b, softcap=9.0)
            total = stats.logprob.sum() + stats.entropy.sum() + stats.lse.sum() + stats.mean_logit.sum()
        else:
            total = linear_logprobs(x, w, y, linear_bias=b).sum()
        total.backward()
    assert 0 < seen.largest_bytes < N * V / 4 * (8 if dtype == torch.float64 else 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_logits_are_seen_where_there_are_any(dtype: torch.dtype) -> None:
    N, D, V = 512, 16, 3001
    x, w, _, _ = head(N, D, V, dtype=dtype)
    with track_allocations() as seen:
        stats_oracle(x, w)["entropy"].sum().backward()
    assert seen.largest_bytes >= N * V * dtype.itemsize


@pytest.mark.parametrize(
    ("dtype", "case", "workspace_mib"),
    [
        *itertools.product([torch.float32], [*CASES, "autocast"], [0.5, 1, 10]),
        *itertools.product([torch.bfloat16, torch.float16], CASES, [0.5]),
        *itertools.product([torch.bfloat16, torch.float16], ["plain", "capped"], [10]),
    ],
)
def test_the_workspace_is_kept(workspace_mib: float, dtype: torch.dtype, case: str) -> None:
    N, D, V = 210, 48, 4099
    x, w, b, y = head((7, 30), D, V, dtype=dtype)
    w.requires_grad_(case != "frozen head")
    b.requires_grad_(case != "frozen head")
    options = HeadOptions(workspace_mib=workspace_mib)
    operand = dtype if case != "autocast" else torch.bfloat16
    plan = plan_head(
        N, D, V, operand, "cpu", options, weight_dtype=w.dtype, reduction="none", weight_frozen=case == "frozen head"
    )
    with track_allocations() as seen, torch.autocast("cpu", torch.bfloat16, enabled=case == "autocast"):
        stats = linear_token_stats(
            x, w, y, want=("logprob", "entropy", "sum_sq_prob"), linear_bias=b, options=options,
            softcap=9.0 if case == "capped" else None,
        )  # fmt: skip
        chosen = torch.arange(30) % 3 == 0 if case == "some rows" else torch.ones(30)
        ((stats.logprob + stats.entropy) * chosen).sum().backward()
    returned = sum(t.grad.nbytes for t in (x, w, b) if t.grad is not None)
    beyond = seen.peak_bytes - returned - plan.accumulator_bytes - plan.cast_bytes
    assert beyond <= workspace_mib * MIB
    if workspace_mib < 4 and dtype == torch.float32 and case != "some rows":
        assert beyond >= 0.3 * workspace_mib * MIB, "what is allowed is put to use"


def test_what_is_kept_between_forward_and_backward() -> None:
    N, D, V = 400, 32, 2000
    x, w, _, y = head(N, D, V)
    with track_allocations() as seen:
        stats = linear_token_stats(x, w, y)
    assert stats.logprob.requires_grad
    assert seen.events[-1].total_bytes <= 128 * N
    with torch.no_grad(), track_allocations() as seen:
        stats = linear_token_stats(x, w, y)
    assert seen.events[-1].total_bytes <= 64 * N
