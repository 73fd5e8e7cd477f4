"""linear_apply against the same function of float64 logits in full, and what it allocates: never the logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lowtide import HeadOptions, linear_apply, plan_head
from lowtide.errors import ArgumentValueError
from lowtide.head import apply as public
from lowtide.head.function import checks as apply_checks
from lowtide.measure.allocations import Allocations, track_allocations
from support import assert_near, assert_same_gradients, head, logits_of, relative_error


def in_chunks(chunks: int, N: int, D: int, V: int, dtype: torch.dtype, **kwargs: Any) -> HeadOptions:
    """Return options with the largest workspace in which so many chunks are needed."""
    for exponent in range(80, -160, -1):
        options = HeadOptions(workspace_mib=2.0 ** (exponent / 8), **kwargs)
        if plan_head(N, D, V, dtype, "cpu", options, function=True).chunks >= chunks:
            return options
    raise AssertionError(chunks)


@pytest.mark.parametrize("accumulate", ["float32", "input"])
def test_accumulate_says_where_the_weights_gradient_is_summed(accumulate: str) -> None:
    x, w, _, y = head(256, 16, 40, dtype=torch.bfloat16, bias=False)
    options = in_chunks(64, 256, 16, 40, torch.bfloat16, accumulate=accumulate)
    loss = linear_apply(lambda z, y: F.cross_entropy(z, y, reduction="sum"), x, w, y, out="sum", options=options)
    (got,) = torch.autograd.grad(loss, w)
    full = [t.detach().double().requires_grad_() for t in (x, w)]
    (want,) = torch.autograd.grad(F.cross_entropy(F.linear(*full), y, reduction="sum"), full[1])
    errors = relative_error(got, want)
    assert errors < 3e-3 if accumulate == "float32" else errors > 4e-3
    assert errors < 3e-2


class HandsOn(torch.autograd.Function):
    """A function whose backward returns the logits' own memory, rows and columns exchanged."""

    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Tensor:
        ctx.save_for_backward(z)
        return z.sum(-1)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (z,) = ctx.saved_tensors
        return z.T if len(z) == z.shape[1] else torch.zeros_like(z)


def test_a_gradient_that_lies_in_the_logits_own_memory() -> None:
    leaves = head(11, 5, 11, dtype=torch.float64)[:3]
    options = in_chunks(1, 11, 5, 11, torch.float64)
    value = linear_apply(HandsOn.apply, leaves[0], leaves[1], linear_bias=leaves[2], options=options)
    got = torch.autograd.grad(value.sum(), leaves)
    z = F.linear(*leaves)
    assert_near(got, torch.autograd.grad(z, leaves, z.detach().T.contiguous()), 1e-13)


def test_upstream_gradients_of_any_strides() -> None:
    x, w, _, _ = head((3, 4, 2), 5, 13, dtype=torch.float64, bias=False)
    for use in (
        lambda z: z.sum(),
        lambda z: z.mean((0, 1)).square().sum(),
        lambda z: (z.transpose(0, 1) * torch.arange(13.0)).sum(),
        lambda z: z[1, ..., ::2].exp().sum(),
        lambda z: z.permute(3, 2, 0, 1).flatten().cumsum(0).sin().sum(),
    ):
        assert_same_gradients(use(linear_apply(lambda z: z.softmax(-1), x, w)), use(F.linear(x, w).softmax(-1)), (x, w))


@pytest.mark.parametrize("D", [1, 7, 8, 15, 16])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_a_bias_that_is_a_column_of_the_weight(D: int, softcap: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """On GPUs, where the copy of the weight is small beside the workspace."""
    plan_head = public.plan_head
    monkeypatch.setattr(public, "plan_head", lambda *a, **k: replace(plan_head(*a, **k), bias_column=True))
    x, w, b, y = head((3, 7), D, 13, dtype=torch.float64)
    a = torch.randn(3, 7, 2, dtype=torch.float64)
    temperature = torch.tensor(1.3, dtype=torch.float64)
    params = (temperature, torch.randn(13, 4, dtype=torch.float64))
    kwargs: dict[str, Any] = {"params": params, "out": "sum", "softcap": softcap, "logit_scale": 0.7}

    def fn(z: Tensor, y: Tensor, a: Tensor, temperature: Tensor, matrix: Tensor) -> Tensor:
        logp = (z / temperature).log_softmax(-1)
        return (logp.gather(-1, y[:, None])[:, 0] * a[:, 0]).sum() + (logp @ matrix).square().sum()

    got = linear_apply(fn, x, w, y, a, linear_bias=b, **kwargs)
    want = fn(logits_of(x, w, b, softcap, 0.7).view(21, 13), y.flatten(), a.view(21, 2), *params)
    torch.testing.assert_close(got, want)
    assert_same_gradients(got, want, (x, w, b))


@pytest.mark.parametrize("D", [5, 7, 8])
def test_a_bias_that_rules_a_class_out_is_a_column_too(D: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its -inf stands beside columns that pad the weight, and must not be multiplied with their zeros."""
    plan_head = public.plan_head
    monkeypatch.setattr(public, "plan_head", lambda *a, **k: replace(plan_head(*a, **k), bias_column=True))
    x, w, b, _ = head((3, 7), D, 13, dtype=torch.float64)
    with torch.no_grad():
        b[4] = -torch.inf
    got = linear_apply(lambda z: z.logsumexp(-1), x, w, linear_bias=b)
    want = F.linear(x, w, b).logsumexp(-1)
    torch.testing.assert_close(got, want)
    assert_same_gradients(got.sum(), want.sum(), (x, w, b))


def test_the_plan_says_where_a_copy_of_the_weight_is_small() -> None:
    def of(D: int, V: int, dtype: torch.dtype = torch.bfloat16, **kwargs: Any) -> bool:
        return public.plan_head(32768, D, V, dtype, "cuda", function=True, **kwargs).bias_column

    assert of(768, 32000)
    assert not of(768, 32000, torch.float32)
    assert not of(4096, 128256)
    assert not of(768, 32000, options=HeadOptions(workspace_mib=8 * 32000 * 776 * 2 / 2**20 - 1))
    assert of(768, 32000, options=HeadOptions(workspace_mib=8 * 32000 * 776 * 2 / 2**20 + 1))
    assert not public.plan_head(32768, 768, 32000, torch.bfloat16, "cuda").bias_column


def test_sums_of_narrow_results_are_summed_wide() -> None:
    x, w, _, _ = head(3000, 4, 9, bias=False)
    ones = linear_apply(lambda z: torch.full((), float(len(z)), dtype=torch.float16), x, w, out="sum",
                        options=HeadOptions(workspace_mib=1e-6))  # fmt: skip
    assert ones.dtype == torch.float16
    assert ones.item() == 3000
    count, share = linear_apply(lambda z: (len(z), len(z) / 4), x[:12], w, out="sum")
    assert (count.item(), share.item()) == (12, 3.0)
    assert count.dtype == torch.int64


@pytest.mark.parametrize("workspace_mib", [1e-6, 5e-4, 7e-4, 1e-3, 2e-3, 4e-3])
def test_no_piece_of_a_single_row_unless_need_be(workspace_mib: float) -> None:
    for N in (2, 3, 5, 7, 11, 25, 39):
        x, w, _, _ = head(N, 5, 13, bias=False)
        rows: list[int] = []
        options = HeadOptions(workspace_mib=workspace_mib)
        linear_apply(lambda z, rows=rows: (rows.append(len(z)), z.sum(-1))[1], x.detach(), w.detach(), options=options)
        most, pieces = plan_head(N, 5, 13, torch.float32, "cpu", options, function=True).piece_rows, []
        while sum(pieces) < N:  # from the end: rows are compared at the start
            pieces.append(rows.pop())
        assert sum(pieces) == N
        assert max(pieces) <= most
        assert min(pieces) > 1 or most <= 2


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


def test_a_mask_may_be_on_the_host() -> None:
    x, w = (torch.empty(n, 16, device="meta", requires_grad=True) for n in (40, 2000))
    mask = torch.arange(40) % 3 == 0
    out = linear_apply(lambda z: z.logsumexp(-1), x, w, mask=mask)
    assert (out.device.type, out.shape) == ("meta", (40,))
    with pytest.raises(ArgumentValueError, match="mask: expected a tensor on cpu"):
        linear_apply(lambda z: z.logsumexp(-1), torch.ones(40, 16), torch.ones(9, 16), mask=mask.to("meta"))


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
