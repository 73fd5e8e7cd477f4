"""Sets of classes on a CUDA device: values and gradients, what is read, no host waits, the same bits, memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from gpu.conftest import ON_GPU, no_waits, peak_beyond_gradients
from lowtide import HeadOptions, TokenStats, linear_logprobs, linear_token_stats
from support import every_pair, in_float64, mask_of_ids, on_gpu, relative_error, sets_oracle

pytestmark = ON_GPU
WANT = ("logprob", "entropy", "lse", "argmax", "sum_sq_prob", "is_top1")
NEAR = {torch.float32: (1e-5, 1e-5), torch.float16: (1e-4, 2e-3), torch.bfloat16: (1e-4, 1e-2)}
N, D, V, K = 203, 136, 3001, 70
FORMS = ("padded", "shared")


def sets_of(form: str) -> tuple[Tensor, Tensor]:
    """Return sets, a class of all tokens, repetitions, more pads than a tile and an empty one; and bool [N, V]."""
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(0, V // 2, (N, K), generator=g)
    ids[:, 3], ids[:, 5] = 7, ids[:, 6]
    ids[torch.rand(N, K, generator=g) < 0.3] = -1
    ids[4] = -1
    if form == "shared":
        ids = torch.cat((ids[:9].reshape(-1), torch.full((600,), -1)))
    return ids.cuda(), mask_of_ids(ids.expand(N, -1), V).cuda()


def targets(mask: Tensor, T: int) -> Tensor:
    y = torch.multinomial(mask.float() + 1e-4, T, replacement=True)
    y[::7] = -100
    return y


def total(stats: Any) -> Tensor:
    finite = [getattr(stats, n) for n in ("logprob", "entropy", "lse")] if isinstance(stats, TokenStats) else stats
    weights = torch.linspace(0.5, 2, N, device="cuda", dtype=finite[0].dtype)
    sums = [(weights[:, None] * x.masked_fill(x.detach() == -torch.inf, 0).view(N, -1)).sum() for x in finite]
    return torch.stack(sums).sum()


@every_pair(dtype=NEAR, form=FORMS, more=[{}, {"softcap": 4.0, "logit_scale": torch.tensor(0.7)}])
def test_values_and_gradients(dtype: torch.dtype, form: str, more: dict[str, Any]) -> None:
    x, w, b, _ = on_gpu(N, D, V, dtype=dtype)
    support, mask = sets_of(form)
    y = targets(mask, 3)
    stats = linear_token_stats(x, w, y, want=WANT, linear_bias=b, support=support, **more)
    true = in_float64({"input": x, "linear_weight": w, "linear_bias": b})
    want = sets_oracle(target=y, mask=mask, **true, **more)
    near, of_gradients = NEAR[dtype]
    for name, value in want.items():
        got = getattr(stats, name)
        finite = value != -torch.inf
        assert torch.equal(finite, got != -torch.inf)
        assert relative_error(got[finite], value[finite]) < near, name
    grads = torch.autograd.grad(total(stats), [x, w, b])
    exact = torch.autograd.grad(total([want[n] for n in ("logprob", "entropy", "lse")]), list(true.values()))
    for name, g, e in zip(true, grads, exact, strict=True):
        assert relative_error(g, e) < of_gradients, name


@pytest.mark.parametrize("form", FORMS)
def test_only_listed_rows_are_read_without_a_wait_and_with_the_same_bits(form: str) -> None:
    x, w, b, _ = on_gpu(N, D, V, dtype=torch.bfloat16)
    support, mask = sets_of(form)
    y = targets(mask, 3)
    others = ~mask.any(0)
    others[0] = False  # what pads stand for: read or not, it changes nothing
    with torch.no_grad():
        w[others], b[others] = torch.nan, torch.nan

    def step() -> tuple[Tensor, ...]:
        stats = linear_token_stats(x, w, y, want=WANT, linear_bias=b, support=support)
        value = total(stats)
        return (value, stats.outside, *torch.autograd.grad(value, [x, w, b]))

    first = step()
    assert all(t.isfinite().all() for t in first)
    assert (first[3][others] == 0).all()
    step()
    with no_waits():
        again = step()
    for one, two in zip(first, again, strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("form", FORMS)
def test_a_wrong_id_makes_its_token_nan(form: str) -> None:
    x, w, _, _ = on_gpu(N, D, V, dtype=torch.bfloat16)
    support, mask = sets_of(form)
    y = targets(mask, 1)[:, 0]
    y[0] = mask[0].nonzero()[0, 0]
    support.view(-1)[0] = V + 10**6
    stats = linear_token_stats(x, w, y, want=("logprob", "lse"), support=support)
    wrong = torch.full((N,), form == "shared", device="cuda")
    wrong[0] = True
    assert torch.equal(stats.lse.isnan(), wrong)
    assert torch.equal(stats.logprob.isnan(), wrong & (y != -100))


@pytest.mark.parametrize(("form", "dtype"), [("padded", torch.bfloat16), ("shared", torch.float32)])
def test_long_sets(form: str, dtype: torch.dtype) -> None:
    """4,096 ids a token, a third of them pads or repetitions, and as many targets as a token may have ids of them."""
    n, long, classes, T = 24, 4096, 9001, 300
    x, w, b, _ = on_gpu(n, 72, classes, dtype=dtype)
    ids = torch.randint(-classes // 4, classes, (n, long), generator=torch.Generator().manual_seed(2)).clamp(min=-1)
    ids = ids[0] if form == "shared" else ids
    mask = mask_of_ids(ids.expand(n, -1), classes).cuda()
    y = torch.multinomial(mask.float(), T, replacement=True)
    y[3], y[4, ::2] = -100, -100
    true = in_float64({"input": x, "linear_weight": w, "linear_bias": b})
    got = linear_token_stats(x, w, y, want=WANT, linear_bias=b, support=ids.cuda())
    want = sets_oracle(target=y, mask=mask, **true)
    near, of_gradients = NEAR[dtype]
    for name in ("logprob", "entropy", "lse", "sum_sq_prob"):
        assert relative_error(getattr(got, name), want[name]) < near, name
    grads = torch.autograd.grad(got.logprob.sum() + got.entropy.sum(), [x, w, b])
    exact = torch.autograd.grad(want["logprob"].sum() + want["entropy"].sum(), list(true.values()))
    for g, e in zip(grads, exact, strict=True):
        assert relative_error(g, e) < of_gradients


def test_memory_and_chunks() -> None:
    x, w, _, _ = on_gpu(4096, 1024, 40000, dtype=torch.bfloat16)
    ids = torch.randint(0, 40000, (4096, 64), device="cuda")
    y = ids[:, 0].contiguous()
    values = []
    for mib in (None, 16):
        options = HeadOptions(workspace_mib=mib)

        def step(options: HeadOptions = options) -> None:
            (linear_logprobs(x, w, y, support=ids, options=options) * 0.1).sum().backward()

        step()
        of_ids = 60 * ids.numel() // 2**20  # what is saved, the dot products' gradient, and the pairs sorted by class
        assert peak_beyond_gradients(step, x, w) < (512 if mib is None else mib + of_ids + 4) * 2**20
        values.append([x.grad.clone(), w.grad.clone()])
    for one, two in zip(*values, strict=True):
        assert relative_error(one, two) < 2e-3


def test_sets_take_a_fraction_of_the_whole_vocabularys_time() -> None:
    """8192 tokens with 64 ids each of 152,064: no pass over the vocabulary, which takes ten times as long."""
    x, w, _, _ = on_gpu(8192, 3584, 152064, dtype=torch.bfloat16)
    ids = torch.randint(0, 152064, (8192, 64), device="cuda")
    y, g = ids[:, 0].contiguous(), torch.ones(8192, device="cuda")

    def milliseconds(**kwargs: Any) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        torch.autograd.grad(linear_logprobs(x, w, y, **kwargs), [x, w], g)
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)

    ratios = [milliseconds(support=ids) / milliseconds() for _ in range(8)]
    assert min(ratios) < 0.25, ratios


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # PyTorch 2.11 does it itself
def test_compiled_and_in_autocast() -> None:
    x, w, b, _ = on_gpu(N, D, V)
    for form in FORMS:
        support, mask = sets_of(form)
        y = targets(mask, 2)

        def values(x: Tensor, w: Tensor, y: Tensor = y, support: Any = support) -> Tensor:
            return linear_logprobs(x, w, y, linear_bias=b, support=support)

        with torch.autocast("cuda", dtype=torch.bfloat16):
            want, got = values(x, w), torch.compile(values, fullgraph=True)(x, w)
        torch.testing.assert_close(got, want)
        grads = [torch.autograd.grad(total([v]), [x, w]) for v in (got, want)]
        assert grads[0][1].dtype == torch.float32
        for one, two in zip(*grads, strict=True):
            torch.testing.assert_close(one, two)
