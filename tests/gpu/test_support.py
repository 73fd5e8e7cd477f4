"""Sets of classes on a CUDA device: values and gradients, what is read, no host waits, the same bits, memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from gpu.conftest import ON_GPU, no_waits, peak_beyond_gradients
from lowtide import HeadOptions, TokenStats, linear_logprobs, linear_token_stats
from support import in_float64, mask_of_ids, on_gpu, relative_error, sets_oracle

pytestmark = ON_GPU
WANT = ("logprob", "entropy", "lse", "argmax", "sum_sq_prob", "is_top1")
NEAR = {torch.float64: (1e-12, 1e-11), torch.float32: (1e-5, 1e-5), torch.float16: (1e-4, 2e-3)}
NEAR |= {torch.bfloat16: (1e-4, 1e-2)}
N, D, V, K = 203, 136, 3001, 70
ONLY_DEVICE = [torch.profiler.ProfilerActivity.CUDA]
FORMS = ("padded", "csr", "shared")


def sets_of(form: str) -> tuple[Any, Tensor]:
    """Return sets, a class of all tokens, repetitions, more pads than a tile and an empty one; and bool [N, V]."""
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(0, V // 2, (N, K), generator=g)
    ids[:, 3], ids[:, 5] = 7, ids[:, 6]
    ids[torch.rand(N, K, generator=g) < 0.3] = -1
    ids[4] = -1
    if form == "shared":
        ids = torch.cat((ids[:9].reshape(-1), torch.full((600,), -1)))
    mask = mask_of_ids(ids.expand(N, -1), V).cuda()
    if form != "csr":
        return ids.cuda(), mask
    lengths = (ids >= 0).sum(1)
    return (ids[ids >= 0].cuda(), torch.cat((lengths.new_zeros(1), lengths.cumsum(0))).cuda()), mask


def targets(mask: Tensor, T: int) -> Tensor:
    y = torch.multinomial(mask.float() + 1e-4, T, replacement=True)
    y[::7] = -100
    return y


def total(stats: Any) -> Tensor:
    finite = [getattr(stats, n) for n in ("logprob", "entropy", "lse")] if isinstance(stats, TokenStats) else stats
    weights = torch.linspace(0.5, 2, N, device="cuda", dtype=finite[0].dtype)
    sums = [(weights[:, None] * x.masked_fill(x.detach() == -torch.inf, 0).view(N, -1)).sum() for x in finite]
    return torch.stack(sums).sum()


@pytest.mark.parametrize("dtype", NEAR)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("more", [{}, {"softcap": 4.0, "logit_scale": torch.tensor(0.7)}, {"sparse": True}], ids=str)
def test_values_and_gradients(dtype: torch.dtype, form: str, more: dict[str, Any]) -> None:
    x, w, b, _ = on_gpu(N, D, V, dtype=dtype)
    support, mask = sets_of(form)
    y = targets(mask, 3)
    stats = linear_token_stats(x, w, y, want=WANT, linear_bias=b, support=support, **more)
    given = {k: v for k, v in more.items() if k != "sparse"}
    true = in_float64({"input": x, "linear_weight": w, "linear_bias": b})
    want = sets_oracle(target=y, mask=mask, **true, **given)
    near, of_gradients = NEAR[dtype]
    for name, value in want.items():
        got = getattr(stats, name)
        finite = value != -torch.inf
        assert torch.equal(finite, got != -torch.inf)
        assert relative_error(got[finite], value[finite]) < near, name
    grads = torch.autograd.grad(total(stats), [x, w, b])
    exact = torch.autograd.grad(total([want[n] for n in ("logprob", "entropy", "lse")]), list(true.values()))
    assert grads[1].is_sparse == ("sparse" in more)
    for name, g, e in zip(true, grads, exact, strict=True):
        assert relative_error(g.to_dense(), e) < of_gradients, name


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("sparse", [False, True])
def test_only_listed_rows_are_read_without_a_wait_and_with_the_same_bits(form: str, sparse: bool) -> None:
    x, w, b, _ = on_gpu(N, D, V, dtype=torch.bfloat16)
    support, mask = sets_of(form)
    y = targets(mask, 3)
    others = ~mask.any(0)
    others[0] = False  # what pads stand for: read or not, it changes nothing
    with torch.no_grad():
        w[others], b[others] = torch.nan, torch.nan

    def step() -> tuple[Tensor, ...]:
        stats = linear_token_stats(x, w, y, want=WANT, linear_bias=b, support=support, sparse=sparse)
        value = total(stats)
        return (value, stats.outside, *torch.autograd.grad(value, [x, w, b]))

    first = step()
    assert all(t.to_dense().isfinite().all() for t in first)
    assert (first[3].to_dense()[others] == 0).all()
    step()
    with no_waits():
        again = step()
    for one, two in zip(first, again, strict=True):
        assert torch.equal(one.to_dense(), two.to_dense())


@pytest.mark.parametrize("form", FORMS)
def test_a_wrong_id_makes_its_token_nan(form: str) -> None:
    x, w, _, _ = on_gpu(N, D, V, dtype=torch.bfloat16)
    support, mask = sets_of(form)
    y = targets(mask, 1)[:, 0]
    y[0] = mask[0].nonzero()[0, 0]
    (support[0] if form == "csr" else support).view(-1)[0] = V + 10**6
    stats = linear_token_stats(x, w, y, want=("logprob", "lse"), support=support)
    wrong = torch.full((N,), form == "shared", device="cuda")
    wrong[0] = True
    assert torch.equal(stats.lse.isnan(), wrong)
    assert torch.equal(stats.logprob.isnan(), wrong & (y != -100))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_long_sets(form: str, dtype: torch.dtype) -> None:
    """4,096 ids a token, a third of them pads or repetitions, and as many targets as a token may have ids of them."""
    n, long, classes, T = 24, 4096, 9001, 300
    x, w, b, _ = on_gpu(n, 72, classes, dtype=dtype)
    ids = torch.randint(-classes // 4, classes, (n, long), generator=torch.Generator().manual_seed(2)).clamp(min=-1)
    ids = ids[0] if form == "shared" else ids
    mask = mask_of_ids(ids.expand(n, -1), classes).cuda()
    y = torch.multinomial(mask.float(), T, replacement=True)
    y[3], y[4, ::2] = -100, -100
    support = (ids.cuda().view(-1), long * torch.arange(n + 1, device="cuda")) if form == "csr" else ids.cuda()
    true = in_float64({"input": x, "linear_weight": w, "linear_bias": b})
    got = linear_token_stats(x, w, y, want=WANT, linear_bias=b, support=support)
    want = sets_oracle(target=y, mask=mask, **true)
    near, of_gradients = NEAR[dtype]
    for name in ("logprob", "entropy", "lse", "sum_sq_prob"):
        assert relative_error(getattr(got, name), want[name]) < near, name
    grads = torch.autograd.grad(got.logprob.sum() + got.entropy.sum(), [x, w, b])
    exact = torch.autograd.grad(want["logprob"].sum() + want["entropy"].sum(), list(true.values()))
    for g, e in zip(grads, exact, strict=True):
        assert relative_error(g, e) < of_gradients


@pytest.mark.parametrize(("form", "sparse", "forward", "backward"), [
    ("padded", False, 20, 6), ("csr", False, 22, 7), ("padded", True, 20, 23),
])  # fmt: skip
def test_launches_of_a_call(form: str, sparse: bool, forward: int, backward: int) -> None:
    """Forward: the sort's, and one each for its keys, repetitions, dot products, statistics and what is outside."""
    x, w, _, _ = on_gpu(N, D, V, dtype=torch.bfloat16)
    support, mask = sets_of(form)
    y, g = targets(mask, 1)[:, 0], torch.ones(N, device="cuda")

    for _ in range(3):  # the first compiles, the second records
        launched = []
        with torch.profiler.profile(activities=ONLY_DEVICE, acc_events=True) as seen:
            logprob = linear_logprobs(x, w, y, support=support, sparse=sparse)
            torch.cuda.synchronize()
        launched.append(_kernels(seen))
        with torch.profiler.profile(activities=ONLY_DEVICE, acc_events=True) as seen:
            torch.autograd.grad(logprob, [x, w], g)
            torch.cuda.synchronize()
        launched.append(_kernels(seen))
    assert 0 < launched[0] <= forward
    assert 0 < launched[1] <= backward


def _kernels(seen: torch.profiler.profile) -> int:
    events = [e for e in seen.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return len([e for e in events if not e.name.startswith(("Memcpy", "Memset"))])


@pytest.mark.parametrize("form", ["padded", "csr"])
def test_memory_and_chunks(form: str) -> None:
    x, w, _, _ = on_gpu(4096, 1024, 40000, dtype=torch.bfloat16)
    ids = torch.randint(0, 40000, (4096, 64), device="cuda")
    support = ids if form == "padded" else (ids.view(-1), 64 * torch.arange(4097, device="cuda"))
    y = ids[:, 0].contiguous()
    values = []
    for mib in (None, 16):
        options = HeadOptions(workspace_mib=mib)

        def step(options: HeadOptions = options) -> None:
            (linear_logprobs(x, w, y, support=support, options=options) * 0.1).sum().backward()

        step()
        saved = 20 * ids.numel() // 2**20  # classes, logits, and the pairs in the order of their classes
        total_VD = 40000 * 1024 * 4 // 2**20 if form == "padded" else 0  # of several chunks
        bound = 300 if mib is None else mib + total_VD + saved + 4
        assert peak_beyond_gradients(step, x, w) < bound * 2**20
        values.append([x.grad.clone(), w.grad.clone()])
    for one, two in zip(*values, strict=True):
        assert relative_error(one, two) < 2e-3


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
