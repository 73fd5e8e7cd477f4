"""What linear_divergence really allocates: neither side's logits, and what the workspace allows."""

from __future__ import annotations

import itertools

import pytest
import torch

from lowtide import HeadOptions, linear_divergence
from lowtide.head.head_plan import Work
from lowtide.head.planner import plan_of
from lowtide.measure import track_allocations
from support import divergence_oracle, head

MIB = 2**20


@pytest.mark.usefixtures("short_chunks")
@pytest.mark.parametrize(
    ("dtype", "kind"),
    [
        *itertools.product([torch.float32, torch.bfloat16], ["forward_kl", "reverse_kl", "jsd", "tv", "top k"]),
        *itertools.product([torch.float16, torch.float64], ["jsd", "top k"]),
    ],
)
@pytest.mark.parametrize("reduction", ["none", "sum"])
def test_no_quarter_of_the_logits_is_ever_allocated(dtype: torch.dtype, kind: str, reduction: str) -> None:
    N, D, V = 256, 16, 3001
    x, w, b, _ = head(N, D, V, dtype=dtype)
    tx, tw, _, _ = head(N, 24, V, dtype=dtype, seed=1)
    known = (torch.arange(5).expand(N, 5), torch.full((N, 5), 0.15).log())
    with track_allocations() as seen:
        if kind == "top k":
            value = linear_divergence(x, w, None, None, linear_bias=b, teacher_topk=known, reduction=reduction)
        else:
            value = linear_divergence(x, w, tx, tw, kind=kind, linear_bias=b, reduction=reduction)
        value.sum().backward()
    assert 0 < seen.largest_bytes < N * V / 4 * (8 if dtype == torch.float64 else 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_logits_are_seen_where_there_are_any(dtype: torch.dtype) -> None:
    N, D, V = 512, 16, 3001
    (x, w, _, _), (tx, tw, _, _) = head(N, D, V, dtype=dtype), head(N, 24, V, dtype=dtype, seed=1)
    with track_allocations() as seen:
        divergence_oracle(x, w, tx, tw).sum().backward()
    assert seen.largest_bytes >= N * V * dtype.itemsize


@pytest.mark.parametrize(
    ("dtype", "case"),
    [
        *((torch.float32, case) for case in ("plain", "frozen head", "larger teacher")),
        *((torch.bfloat16, case) for case in ("plain", "larger teacher", "autocast")),
        *((torch.float16, case) for case in ("plain", "frozen head")),
    ],
)
@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "jsd", "tv", "top k"])
@pytest.mark.parametrize(("workspace_mib", "reduction"), [(10, "none"), (1, "mean")])
def test_the_workspace_is_kept(workspace_mib: float, dtype: torch.dtype, kind: str, case: str, reduction: str) -> None:
    T = 30 if workspace_mib > 1 else 8  # several chunks either way
    N, D, V = 7 * T, 48, 4099
    stored = torch.float32 if case == "autocast" else dtype
    teacher_V = 5001 if case == "larger teacher" else V
    x, w, b, _ = head((7, T), D, V, dtype=stored)
    tx, tw, _, _ = head((7, T), 64, teacher_V, dtype=stored, seed=1)
    w.requires_grad_(case != "frozen head")
    b.requires_grad_(case != "frozen head")
    options = HeadOptions(workspace_mib=workspace_mib)
    work = Work(
        size=(N, D, V),
        dtype=dtype,
        weight_dtype=stored,
        device=torch.device("cpu"),
        choice=("torch", ""),
        gradient="recompute" if reduction == "none" else "forward",
        weight_frozen=case == "frozen head",
        teacher=(*((0, 20) if kind == "top k" else (64, teacher_V)), dtype),
    )
    plan = plan_of(work, options)
    known = (torch.arange(20).expand(7, T, 20), torch.full((7, T, 20), 0.04).log())
    common = {"linear_bias": b, "options": options, "reduction": reduction, "softcap": 5.0, "temperature": 1.3}
    with track_allocations() as seen, torch.autocast("cpu", torch.bfloat16, enabled=case == "autocast"):
        if kind == "top k":
            value = linear_divergence(x, w, None, None, teacher_topk=known, **common)
        else:
            value = linear_divergence(x, w, tx, tw, kind=kind, teacher_softcap=4.0, **common)
        value.sum().backward()
    returned = sum(t.grad.nbytes for t in (x, w, b) if t.grad is not None)
    beyond = seen.peak_bytes - returned - plan.accumulator_bytes - plan.cast_bytes
    assert plan.scratch_bytes <= workspace_mib * MIB
    assert beyond <= workspace_mib * MIB
    if workspace_mib < 4 and dtype == torch.float32 and case == "plain":
        assert beyond >= 0.3 * workspace_mib * MIB, "what is allowed is put to use"


def test_what_is_kept_between_forward_and_backward() -> None:
    N, D, V = 400, 32, 2000
    x, w, _, _ = head(N, D, V)
    tx, tw, _, _ = head(N, D, V, seed=1)
    with track_allocations() as seen:
        value = linear_divergence(x, w, tx.detach(), tw.detach())
    assert value.requires_grad
    assert seen.events[-1].total_bytes <= 64 * N


@pytest.mark.parametrize("frozen", [False, True])
def test_what_a_stored_gradient_keeps(frozen: bool) -> None:
    """The gradients themselves, which backward hands on; only the input's where the head is frozen."""
    N, D, V = 400, 32, 2000
    x, w, _, _ = head(N, D, V)
    tx, tw, _, _ = head(N, D, V, seed=1)
    w.requires_grad_(not frozen)
    with track_allocations() as seen:
        value = linear_divergence(x, w, tx.detach(), tw.detach(), reduction="mean")
    held = x.nbytes + (0 if frozen else w.nbytes)
    assert held <= seen.events[-1].total_bytes <= held + 64 * N
    with track_allocations() as seen:
        value.backward()
    assert seen.peak_bytes <= 4096, "scaled where they lie"
