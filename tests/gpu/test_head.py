"""The head's kernels at their real sizes, on a CUDA device: values and gradients beside plain PyTorch in float64.

What small inputs show, options and all, `pytest tests/contract --device cuda` holds.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from gpu.conftest import EXPONENTIAL, ON_GPU
from lowtide import (
    HeadOptions,
    linear_contrastive,
    linear_cross_entropy,
    linear_divergence,
    linear_logprobs,
    linear_token_stats,
)
from lowtide.head.token_stats import WANTS
from promises import promise
from support import (
    assert_near,
    divergence_oracle,
    doubled,
    every_pair,
    in_float64,
    mask_of_ids,
    on_gpu,
    oracle,
    relative_error,
    sets_oracle,
    stats_oracle,
)

pytestmark = [*ON_GPU, promise("values", "kernels")]
KINDS = ("forward_kl", "reverse_kl", "jsd", "tv")
DIFFERENTIABLE = ("logprob", "entropy", "lse", "mean_logit")
SINGLE = torch.float32
TRAINED = (SINGLE, torch.bfloat16, torch.float16)  # by kernels of ours
TOLERANCE = {SINGLE: 2e-5, torch.bfloat16: 3.5e-3, torch.float16: 6e-4}
OF_STATS = {SINGLE: 3e-5, torch.bfloat16: 4e-3, torch.float16: 1e-3}
OF_SUMS = {SINGLE: 6e-5, torch.bfloat16: 8e-3, torch.float16: 2e-3}
OF_SETS = {SINGLE: (1e-5, 1e-5), torch.float16: (1e-4, 2e-3), torch.bfloat16: (1e-4, 1e-2)}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "all": {"label_smoothing": 0.1, "z_loss": 0.01, "softcap": 9.0, "logit_scale": 0.7, "num_items": 50, "shift": True},
    "sum": {"reduction": "sum", "logit_scale": torch.tensor(0.5)},
    "none": {"reduction": "none"},
    "recompute": {"options": HeadOptions(gradient="recompute", workspace_mib=0.3)},
    "bf16 sums": {"options": HeadOptions(accumulate="input", workspace_mib=2)},
    "smooth": {"label_smoothing": 0.1, "z_loss": 0.01, "logit_scale": 0.7},
    "capped": {"softcap": 9.0, "z_loss": 0.01},
    "row": {"options": HeadOptions(backend="row")},
    "torch": {"options": HeadOptions(backend="torch")},
}
SHAPES = [((3, 43), 37, 1003), ((1, 2), 64, 2), ((2, 300), 128, 5000)]


@every_pair(case=CASES, dtype=TRAINED, shape=SHAPES)
def test_cross_entropy(case: str, dtype: torch.dtype, shape: tuple[tuple[int, int], int, int]) -> None:
    x, w, b, y = on_gpu(*shape, dtype=dtype)
    y.view(-1)[::5] = -100
    kwargs = {**CASES[case], "input": x, "linear_weight": w, "target": y, "linear_bias": b}
    if case == "all":
        kwargs |= {"weight": torch.rand(shape[2], device="cuda"), "token_weight": torch.rand(shape[0], device="cuda")}
    truth = in_float64(kwargs)
    loss, expected = linear_cross_entropy(**kwargs), oracle(**truth)
    # A scalar's factor near 1 would round all products of 16 bits to one side: an error of its own.
    upstream = torch.randn_like(expected) if expected.dim() else torch.full_like(expected, -0.7)
    got = torch.autograd.grad(loss, (x, w, b), upstream.to(loss.dtype))
    want = torch.autograd.grad(expected, [truth[n] for n in ("input", "linear_weight", "linear_bias")], upstream)
    assert relative_error(loss, expected) < 1e-5
    naive = oracle(**{name: value for name, value in kwargs.items() if name != "options"})
    base = torch.autograd.grad(naive, (x, w, b), upstream.to(naive.dtype))
    for g, e, n in zip(got, want, base, strict=True):
        often = 1.5 if case in ("bf16 sums", "recompute") else 1  # dW is rounded once a chunk
        few = 2 if x.numel() <= 128 else 1.1 if x.numel() <= 8192 else 1  # roundings, so that their norm varies
        assert relative_error(g, e) <= max(TOLERANCE[dtype] * often * few, 1.05 * relative_error(n, e))


@pytest.mark.parametrize("precision", ["highest", "high"])
def test_float32_errs_as_plain_pytorch_does(precision: str) -> None:
    """By PyTorch's setting of the precision of float32 GEMMs, read in each call."""
    x, w, b, y = on_gpu(513, 1000, 12345)
    copies = doubled(x, w, b)
    true = F.cross_entropy(F.linear(*copies), y)
    exact = [true, *torch.autograd.grad(true, copies)]
    try:
        for setting in ("highest", precision):
            torch.set_float32_matmul_precision(setting)
            losses = linear_cross_entropy(x, w, y, linear_bias=b), F.cross_entropy(F.linear(x, w, b), y)
            got, plain = ([loss, *torch.autograd.grad(loss, (x, w, b))] for loss in losses)
            for g, p, e in zip(got, plain, exact, strict=True):
                assert relative_error(g, e) <= 2 * relative_error(p, e) + 2.0**-20
    finally:
        torch.set_float32_matmul_precision("highest")


@EXPONENTIAL
def test_many_targets_and_highest_logits() -> None:
    """The exponential path beside plain PyTorch on the same bfloat16 numbers: as near to float64."""
    N, D, V, K, k = 700, 512, 33001, 17, 33
    x, w, b, _ = on_gpu(N, D, V, dtype=torch.bfloat16)
    y = torch.randint(0, V, (N, K), device="cuda")
    y[::3, 5], y[::4, 2], y[::5, 0] = y[::3, 1], -100, (x @ w.T + b).argmax(1)[::5]
    true = doubled(x, w, b)
    expected = stats_oracle(*true[:2], y, linear_bias=true[2], topk=k, logit_scale=0.8)
    upstream = [torch.randn_like(expected[name]) for name in DIFFERENTIABLE]
    want = torch.autograd.grad([expected[n] for n in DIFFERENTIABLE], true, upstream)
    errors = {}
    for backend in ("exp", "torch"):
        kwargs: Any = {"linear_bias": b, "logit_scale": 0.8, "options": HeadOptions(backend=backend)}
        stats = linear_token_stats(x, w, y, want=WANTS, topk=k, **kwargs)
        for name in (*DIFFERENTIABLE, "sum_sq_prob"):
            assert relative_error(getattr(stats, name), expected[name]) < 1e-5, name
        assert torch.equal(stats.argmax, expected["argmax"])
        assert torch.equal(stats.is_top1, expected["is_top1"])
        assert relative_error(stats.topk.values, expected["topk_values"]) < 1e-5
        assert (stats.topk.ids == expected["topk_ids"]).float().mean() > 0.999  # but for logits that are all but equal
        got = torch.autograd.grad([getattr(stats, n) for n in DIFFERENTIABLE], (x, w, b), [u.float() for u in upstream])
        errors[backend] = [relative_error(g, e) for g, e in zip(got, want, strict=True)]
    assert all(e < 1.1 * t for e, t in zip(errors["exp"][:2], errors["torch"][:2], strict=True)), errors
    assert errors["exp"][2] < OF_STATS[torch.bfloat16]  # the bias's is a sum of rounded numbers


@every_pair(dtype=TRAINED, kind=KINDS, reduced=[("none", (None, None)), ("mean", (5.0, 3.0)), ("sum", (None, None))])
def test_divergences(dtype: torch.dtype, kind: str, reduced: tuple[str, Any]) -> None:
    """Reduced to one number some tokens are masked, in several chunks, the last one short, of several pieces."""
    reduction, caps = reduced
    leading = (2, 300) if reduction == "none" else (2, 700)
    x, w, b, _ = on_gpu(leading, 64, 3001, dtype=dtype)
    *teacher, teacher_bias = (t.detach() for t in on_gpu(leading, 40, 3001, dtype=dtype, seed=1)[:3])
    kwargs: Any = {"kind": kind, "temperature": 1.5, "reduction": reduction}
    kwargs |= {"softcap": caps[0], "teacher_softcap": caps[1]}
    if reduction != "none":
        kwargs |= {"mask": torch.rand(2, 700, device="cuda") < 0.7, "teacher_bias": teacher_bias}
    options = HeadOptions() if reduction == "none" else HeadOptions(workspace_mib=9)
    value = linear_divergence(x, w, *teacher, linear_bias=b, options=options, **kwargs)
    true = doubled(x, w, b)
    wide = in_float64({"teacher_input": teacher[0], "teacher_weight": teacher[1], **kwargs})
    expected = divergence_oracle(*true[:2], linear_bias=true[2], **wide)
    assert value.shape == expected.shape
    assert relative_error(value, expected) < 2e-5
    # a mean's gradient alone is among fp16's subnormal numbers
    upstream = torch.randn_like(expected) if expected.dim() else torch.full_like(expected, 3 * 2**10)
    got = torch.autograd.grad(value, (x, w, b), upstream.to(value.dtype))
    near = 2 * OF_STATS[dtype] if reduction == "none" else OF_SUMS[dtype]
    # where s and t agree but for rounding tv's sign is a matter of luck: float32 logits in full err by 2e-4
    near = 4e-4 if kind == "tv" and dtype == SINGLE and reduction != "none" else near
    assert_near(got, torch.autograd.grad(expected, true, upstream), near)


@pytest.mark.parametrize(("shared", "dtype"), [(False, torch.bfloat16), (False, torch.float16), (True, SINGLE)])
def test_long_sets(shared: bool, dtype: torch.dtype) -> None:
    """4,096 ids a token, a third of them pads or repetitions, and as many targets as a token may have ids of them."""
    n, long, classes, T = 24, 4096, 9001, 300
    x, w, b, _ = on_gpu(n, 72, classes, dtype=dtype)
    ids = torch.randint(-classes // 4, classes, (n, long), generator=torch.Generator().manual_seed(2)).clamp(min=-1)
    ids = ids[0] if shared else ids
    mask = mask_of_ids(ids.expand(n, -1), classes).cuda()
    y = torch.multinomial(mask.float(), T, replacement=True)
    y[3], y[4, ::2] = -100, -100
    true = in_float64({"input": x, "linear_weight": w, "linear_bias": b})
    names = ("logprob", "entropy", "lse", "sum_sq_prob")
    got = linear_token_stats(x, w, y, want=names, linear_bias=b, support=ids.cuda())
    want = sets_oracle(target=y, mask=mask, **true)
    near, of_gradients = OF_SETS[dtype]
    for name in names:
        assert relative_error(getattr(got, name), want[name]) < near, name
    grads = torch.autograd.grad(got.logprob.sum() + got.entropy.sum(), [x, w, b])
    exact = torch.autograd.grad(want["logprob"].sum() + want["entropy"].sum(), list(true.values()))
    assert_near(grads, exact, of_gradients)


@promise("errors")
@pytest.mark.parametrize("wrong", [310, 10**6, -1])
def test_a_target_out_of_range_is_nan_and_never_a_number(wrong: int) -> None:
    """An error would make the host wait."""
    x, w, _, y = on_gpu(20, 32, 310)
    y[7] = wrong
    assert linear_cross_entropy(x, w, y).isnan()
    each = linear_cross_entropy(x, w, y, reduction="none")
    assert each.isnan().nonzero().flatten().tolist() == [7]
    dx, dw = torch.autograd.grad(linear_cross_entropy(x, w, y, reduction="sum"), (x, w))
    assert dx[7].isnan().all()
    assert dw.isnan().any()
    assert dx[[i for i in range(20) if i != 7]].isfinite().all()
    if wrong > 0:
        ids = torch.randint(0, 310, (20, 9), device="cuda")
        ids[7, 3] = wrong
        assert linear_logprobs(x, w, ids[:, 0], support=ids).isnan().nonzero().flatten().tolist() == [7]
        assert linear_logprobs(x, w, ids[7, :1].repeat(20), support=ids[7]).isnan().all()
        for symmetric in (False, True):
            assert linear_contrastive(x, w, positives=y, symmetric=symmetric).isnan()
