"""linear_divergence on a CUDA device, reduced to one number: values, gradients, memory, and no host synchronisation.

A value for each token: `test_token_stats`.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gpu.conftest import ON_GPU
from lowtide import HeadOptions, linear_divergence, plan_divergence
from support import divergence_of, on_gpu, relative_error

pytestmark = ON_GPU
TOLERANCE = {torch.float64: 1e-11, torch.float32: 6e-5, torch.bfloat16: 8e-3, torch.float16: 2e-3}
KINDS = ("forward_kl", "reverse_kl", "jsd", "tv")


def expected_of(
    student: list[Tensor], teacher: list[Tensor], kind: str, mask: Tensor, T: float, caps: tuple[Any, Any]
) -> Tensor:
    """Each token's divergence from logits in full, 0 where masked."""
    logps = []
    for (x, w, b), cap in zip((student, teacher), caps, strict=True):
        z = F.linear(x, w, b)
        logps.append(((z if cap is None else cap * torch.tanh(z / cap)) / T).log_softmax(-1))
    return divergence_of(logps[0], logps[1].detach(), kind).masked_fill(~mask, 0)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("caps", [(None, None), (5.0, 3.0)])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_one_number(dtype: torch.dtype, kind: str, caps: tuple[Any, Any], reduction: str) -> None:
    student, teacher = on_gpu((2, 700), 64, 3001, dtype=dtype)[:3], on_gpu((2, 700), 40, 3001, dtype=dtype, seed=1)[:3]
    mask = torch.rand(2, 700, device="cuda") < 0.7
    options = HeadOptions(workspace_mib=9)  # several chunks, the last one short, of several pieces
    (x, w, b), (tx, tw, tb) = student, teacher
    value = linear_divergence(
        x, w, tx, tw, kind=kind, linear_bias=b, teacher_bias=tb, mask=mask, temperature=1.5, reduction=reduction,
        softcap=caps[0], teacher_softcap=caps[1], options=options,
    )  # fmt: skip
    true = [t.detach().double().requires_grad_() for t in student]
    each = expected_of(true, [t.double() for t in teacher], kind, mask, 1.5, caps)
    expected = each.sum() / (mask.sum() if reduction == "mean" else 1)
    assert value.shape == ()
    assert relative_error(value, expected) < (1e-11 if dtype == torch.float64 else 2e-5)
    scale = 3 * 2**10  # a mean's gradient alone is among fp16's subnormal numbers
    got, want = torch.autograd.grad(scale * value, student), torch.autograd.grad(scale * expected, true)
    # where s and t agree but for rounding tv's sign is a matter of luck: float32 logits in full err by 2e-4
    near = 4e-4 if kind == "tv" and dtype == torch.float32 else TOLERANCE[dtype]
    assert all(relative_error(g, e) < near for g, e in zip(got, want, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_waits_bits_repeat_and_a_graph_can_be_kept(dtype: torch.dtype, kind: str) -> None:
    x, w, b, _ = on_gpu((4, 300), 64, 3000, dtype=dtype)
    tx, tw, _, _ = on_gpu((4, 300), 40, 3000, dtype=dtype, seed=1)
    mask = torch.rand(4, 300, device="cuda") < 0.5

    def call() -> Tensor:
        return linear_divergence(x, w, tx, tw, kind=kind, mask=mask, linear_bias=b, reduction="mean", num_items=700)

    call().backward()  # Triton compiles
    torch.cuda.synchronize()
    try:
        with warnings.catch_warnings(action="ignore"):  # that the mode is a prototype
            torch.cuda.set_sync_debug_mode("error")
        value = call()
        first = torch.autograd.grad(value, (x, w, b), retain_graph=True)
        second = torch.autograd.grad(value, (x, w, b))
        again = torch.autograd.grad(call(), (x, w, b))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for one, two, other in zip(first, second, again, strict=True):
        assert torch.equal(one, two)
        assert torch.equal(one, other)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masked_tokens_may_hold_anything(kind: str, dtype: torch.dtype) -> None:
    x, w, b, _ = on_gpu(60, 16, 310, dtype=dtype)
    tx, tw, _, _ = on_gpu(60, 8, 310, dtype=dtype, seed=1)
    mask = torch.arange(60, device="cuda") % 3 != 0
    results = []
    for bad in (0.0, torch.nan):
        x_, tx_ = (t.detach().where(mask[:, None], t.detach() * 0 + bad).requires_grad_() for t in (x, tx))
        value = linear_divergence(x_, w, tx_, tw, kind=kind, mask=mask, linear_bias=b, reduction="mean")
        results.append((value, *torch.autograd.grad(value, (x_, w, b))))
    for clean, got in zip(*results, strict=True):
        assert clean.isfinite().all()
        assert torch.equal(clean, got)
    none = linear_divergence(x, w, tx, tw, kind=kind, mask=mask & ~mask, linear_bias=b, reduction="mean")
    assert none.isnan()
    assert all((g == 0).all() for g in torch.autograd.grad(none, (x, w, b)))


@pytest.mark.parametrize("kind", ["forward_kl", "jsd"])
@pytest.mark.parametrize("workspace_mib", [None, 64])
def test_the_plan_is_kept(kind: str, workspace_mib: float | None) -> None:
    N, D, V = 8192, 256, 32000
    x, w, _, _ = on_gpu(N, D, V, dtype=torch.bfloat16, bias=False)
    tx, tw, _, _ = on_gpu(N, 128, V, dtype=torch.bfloat16, bias=False, seed=1)
    options = HeadOptions(workspace_mib=workspace_mib)
    plan = plan_divergence(N, D, V, 128, torch.bfloat16, "cuda", options, reduction="mean")
    for turn in range(2):
        x.grad = w.grad = None
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        linear_divergence(x, w, tx, tw, kind=kind, reduction="mean", options=options).backward()
        beyond = torch.cuda.max_memory_allocated() - before - x.nbytes - w.nbytes
        if turn:
            assert beyond <= plan.scratch_bytes + plan.accumulator_bytes
    assert plan.scratch_bytes < N * V * 2, "less than one side's logits in bfloat16"
