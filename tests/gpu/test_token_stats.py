"""linear_token_stats and linear_divergence on a CUDA device: values, no host synchronisation, memory, NaN kept out."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gpu.conftest import ON_GPU
from lowtide import HeadOptions, TokenStats, linear_divergence, linear_logprobs, linear_token_stats
from lowtide.errors import UnsupportedError
from support import divergence_oracle, on_gpu, relative_error, stats_oracle

pytestmark = ON_GPU
TOLERANCE = {torch.float64: 1e-11, torch.float32: 3e-5, torch.bfloat16: 4e-3, torch.float16: 1e-3}
DIFFERENTIABLE = ("logprob", "entropy", "lse", "mean_logit")
KINDS = ("forward_kl", "reverse_kl", "jsd", "tv")


def doubled(*leaves: Tensor) -> list[Tensor]:
    return [t.detach().double().requires_grad_() for t in leaves]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [((3, 43), 37, 1003), ((1, 2), 64, 2), ((2, 300), 128, 5000)])
@pytest.mark.parametrize("K", [1, 3])
def test_statistics(dtype: torch.dtype, shape: tuple[tuple[int, int], int, int], K: int) -> None:
    x, w, b, y = on_gpu(*shape, dtype=dtype)
    y.view(-1)[::5] = -100
    y = y if K == 1 else torch.stack((y, y.flip(0), y), -1)
    options = {"softcap": 9.0, "logit_scale": torch.tensor(0.75)}
    topk = 2 if K > 1 else None
    want = [name for name in TokenStats._fields if topk or name != "topk"]
    stats = linear_token_stats(x, w, y, want=want, topk=topk, linear_bias=b, **options)
    true = doubled(x, w, b)
    expected = stats_oracle(*true[:2], y, linear_bias=true[2], topk=2, softcap=9.0, logit_scale=0.75)
    for name in (*DIFFERENTIABLE, "sum_sq_prob"):
        assert relative_error(getattr(stats, name), expected[name]) < (1e-12 if dtype == torch.float64 else 2e-5), name
    if topk:
        assert relative_error(stats.topk.values, expected["topk_values"]) < 2e-5
    alone = linear_logprobs(x, w, y, linear_bias=b, **options)
    assert relative_error(alone, expected["logprob"]) < 2e-5
    upstream = [torch.randn_like(expected[n]) for n in DIFFERENTIABLE]
    got = torch.autograd.grad(
        [getattr(stats, n) for n in DIFFERENTIABLE], (x, w, b), [u.to(stats.lse.dtype) for u in upstream]
    )
    want = torch.autograd.grad([expected[n] for n in DIFFERENTIABLE], true, upstream)
    assert all(relative_error(g, e) < 2 * TOLERANCE[dtype] for g, e in zip(got, want, strict=True))


def test_many_targets_and_highest_logits() -> None:
    """The exponential path beside plain PyTorch on the same bfloat16 numbers: as near to float64."""
    if torch.cuda.get_device_capability()[0] not in (9, 10):
        pytest.skip("needs Hopper or newer")
    N, D, V, K, k = 700, 512, 33001, 17, 33
    x, w, b, _ = on_gpu(N, D, V, dtype=torch.bfloat16)
    y = torch.randint(0, V, (N, K), device="cuda")
    y[::3, 5], y[::4, 2], y[::5, 0] = y[::3, 1], -100, (x @ w.T + b).argmax(1)[::5]
    true = doubled(x, w, b)
    expected = stats_oracle(*true[:2], y, linear_bias=true[2], topk=k, logit_scale=0.8)
    upstream = {name: torch.randn_like(expected[name]) for name in DIFFERENTIABLE}
    want = torch.autograd.grad([expected[n] for n in DIFFERENTIABLE], true, list(upstream.values()))
    errors = {}
    for backend in ("exp", "torch"):
        stats = linear_token_stats(
            x,
            w,
            y,
            want=TokenStats._fields,
            topk=k,
            linear_bias=b,
            logit_scale=0.8,
            options=HeadOptions(backend=backend),
        )
        for name in (*DIFFERENTIABLE, "sum_sq_prob"):
            assert relative_error(getattr(stats, name), expected[name]) < 1e-5, name
        assert torch.equal(stats.argmax, expected["argmax"])
        assert torch.equal(stats.is_top1, expected["is_top1"])
        assert relative_error(stats.topk.values, expected["topk_values"]) < 1e-5
        assert (stats.topk.ids == expected["topk_ids"]).float().mean() > 0.999  # but for logits that are all but equal
        got = torch.autograd.grad(
            [getattr(stats, n) for n in DIFFERENTIABLE], (x, w, b), [upstream[n].float() for n in DIFFERENTIABLE]
        )
        errors[backend] = [relative_error(g, e) for g, e in zip(got, want, strict=True)]
    assert all(e < 1.1 * t for e, t in zip(errors["exp"][:2], errors["torch"][:2], strict=True)), errors
    assert errors["exp"][2] < TOLERANCE[torch.bfloat16]  # the bias's is a sum of rounded numbers


def test_what_the_kernels_take() -> None:
    if torch.cuda.get_device_capability()[0] not in (9, 10):
        pytest.skip("needs Hopper or newer")
    exp = HeadOptions(backend="exp")
    x, w, _, y = on_gpu(5, 64, 20000, dtype=torch.bfloat16, bias=False)
    for K, k in ((64, 64), (65, 1), (1, 65)):
        y = torch.randint(0, 20000, (5, K), device="cuda")
        stats = linear_token_stats(x, w, y, topk=k)
        z = x.double() @ w.double().T
        assert relative_error(stats.topk.values, z.topk(k).values) < 1e-5
        assert relative_error(stats.logprob, z.log_softmax(1).gather(1, y)) < 1e-5
        if max(K, k) > 64:
            with pytest.raises(UnsupportedError, match="64"):
                linear_token_stats(x, w, y, topk=k, options=exp)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kind", KINDS)
def test_divergences(dtype: torch.dtype, kind: str) -> None:
    x, w, b, _ = on_gpu((2, 300), 64, 3001, dtype=dtype)
    tx, tw, _, _ = on_gpu((2, 300), 40, 3001, dtype=dtype, seed=1)
    true = doubled(x, w, b)
    value = linear_divergence(x, w, tx, tw, kind=kind, linear_bias=b, temperature=1.5)
    teacher = (tx.detach().double(), tw.detach().double())
    expected = divergence_oracle(*true[:2], *teacher, kind=kind, linear_bias=true[2], temperature=1.5)
    assert relative_error(value, expected) < (1e-11 if dtype == torch.float64 else 2e-5)
    upstream = torch.randn_like(expected)
    got = torch.autograd.grad(value, (x, w, b), upstream.to(value.dtype))
    want = torch.autograd.grad(expected, true, upstream)
    assert all(relative_error(g, e) < 2 * TOLERANCE[dtype] for g, e in zip(got, want, strict=True))


def runs(dtype: torch.dtype) -> dict[str, Callable[[], Tensor]]:
    """Every way through the two functions, forward to one number."""
    x, w, b, y = on_gpu((4, 300), 64, 3000, dtype=dtype)
    tx, tw, _, _ = on_gpu((4, 300), 40, 3000, dtype=dtype, seed=1)
    mask = torch.rand(4, 300, device="cuda") < 0.5
    several = torch.stack((y, y.flip(0), y), -1)
    with torch.no_grad():
        logprobs, ids = (tx.float() @ tw.float().T).log_softmax(-1).topk(8)
    calls: dict[str, Callable[[], Tensor]] = {
        "logprobs": lambda: linear_logprobs(x, w, y, linear_bias=b).sum(),
        "several": lambda: linear_logprobs(x, w, several, linear_bias=b).sum(),
        "stats": lambda: sum(
            getattr(linear_token_stats(x, w, y, want=TokenStats._fields, topk=4), n).sum() for n in DIFFERENTIABLE
        ),
    }
    for kind in KINDS:
        calls[kind] = lambda kind=kind: linear_divergence(x, w, tx, tw, kind=kind, mask=mask, linear_bias=b).sum()
    for tail in ("bucket", "renormalise", "drop"):
        known = (ids, logprobs, tail)
        calls[tail] = lambda known=known: linear_divergence(x, w, None, None, mask=mask, teacher_topk=known).sum()
    return calls


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_nothing_waits_for_the_device_and_bits_repeat(dtype: torch.dtype) -> None:
    for name, call in runs(dtype).items():
        call().backward()  # Triton compiles
        torch.cuda.synchronize()
        try:
            with warnings.catch_warnings(action="ignore"):  # that the mode is a prototype
                torch.cuda.set_sync_debug_mode("error")
            first = call()
            first.backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.equal(first, call()), name


def test_bits_of_gradients_repeat() -> None:
    x, w, b, y = on_gpu(900, 256, 9001, dtype=torch.bfloat16)
    several = torch.stack((y, y, y.flip(0), y.roll(7)), -1)
    runs = []
    for _ in range(3):
        stats = linear_token_stats(x, w, several, linear_bias=b, topk=5)
        total = (stats.logprob * torch.linspace(-1, 1, 4, device="cuda")).sum() + stats.entropy.sum()
        runs.append((stats.topk.values, stats.topk.ids, *torch.autograd.grad(total, (x, w, b))))
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run, strict=True))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_does_not_count_may_hold_anything(kind: str, dtype: torch.dtype) -> None:
    x, w, b, y = on_gpu(60, 16, 310, dtype=dtype)
    tx, tw, _, _ = on_gpu(60, 8, 310, dtype=dtype, seed=1)
    mask = torch.arange(60, device="cuda") % 3 != 0
    y = y.where(mask, -100)
    results = []
    for bad in (0.0, torch.nan):
        x_, tx_ = (t.detach().where(mask[:, None], t.detach() * 0 + bad).requires_grad_() for t in (x, tx))
        stats = linear_token_stats(x_, w, y, linear_bias=b)
        several = linear_logprobs(x_, w, torch.stack((y, y.where(y < 0, 3)), 1), linear_bias=b)
        value = linear_divergence(x_, w, tx_, tw, kind=kind, mask=mask, linear_bias=b)
        total = stats.logprob.sum() + stats.entropy.where(mask, 0).sum() + value.sum() + several.sum()
        results.append((value, several, stats.logprob, *torch.autograd.grad(total, (x_, w, b))))
    for clean, got in zip(*results, strict=True):
        assert clean.isfinite().all()
        assert torch.equal(clean, got)


def test_the_workspace_is_kept() -> None:
    N, D, V = 4096, 256, 32000
    x, w, _, y = on_gpu(N, D, V, dtype=torch.bfloat16, bias=False)
    tx, tw, _, _ = on_gpu(N, D, V, dtype=torch.bfloat16, bias=False, seed=1)
    options = HeadOptions(workspace_mib=64)
    several = torch.randint(0, V, (N, 8), device="cuda")
    calls = (
        lambda: linear_token_stats(x, w, y, options=options).entropy,
        lambda: linear_token_stats(x, w, several, topk=8, options=options).logprob,
        lambda: linear_divergence(x, w, tx, tw, kind="jsd", options=options),
    )
    for call in calls:
        call().sum().backward()
        x.grad = w.grad = None
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call().sum().backward()
        beyond = torch.cuda.max_memory_allocated() - before - x.nbytes - w.nbytes - V * D * 4
        assert beyond <= 64 * 2**20
        x.grad = w.grad = None
