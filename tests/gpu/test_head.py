"""The head's functions on a CUDA device: values and gradients beside plain PyTorch in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from contract.cases import DIFFERENTIABLE
from gpu.conftest import ON_GPU
from head.test_apply_compile import focal, focal_sum
from lowtide import (
    HeadOptions,
    linear_apply,
    linear_cross_entropy,
    linear_divergence,
    linear_logprobs,
    linear_token_stats,
)
from lowtide.errors import UnsupportedError
from lowtide.head.token_stats import WANTS
from support import (
    assert_near,
    assert_same_gradients,
    divergence_oracle,
    doubled,
    every_pair,
    in_float64,
    logits_of,
    on_gpu,
    oracle,
    relative_error,
    stats_oracle,
)

pytestmark = ON_GPU
KINDS = ("forward_kl", "reverse_kl", "jsd", "tv")
SINGLE = torch.float32
TRAINED = (SINGLE, torch.bfloat16, torch.float16)  # by kernels of ours
TOLERANCE = {SINGLE: 2e-5, torch.bfloat16: 3.5e-3, torch.float16: 6e-4}
OF_STATS = {SINGLE: 3e-5, torch.bfloat16: 4e-3, torch.float16: 1e-3}
OF_SUMS = {SINGLE: 6e-5, torch.bfloat16: 8e-3, torch.float16: 2e-3}
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
hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] not in (9, 10),
    reason="needs Hopper or newer",
)


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


@every_pair(dtype=TRAINED, shape=SHAPES, K=[1, 3])
def test_statistics(dtype: torch.dtype, shape: tuple[tuple[int, int], int, int], K: int) -> None:
    x, w, b, y = on_gpu(*shape, dtype=dtype)
    y.view(-1)[::5] = -100
    y = y if K == 1 else torch.stack((y, y.flip(0), y), -1)
    options = {"linear_bias": b, "softcap": 9.0, "logit_scale": torch.tensor(0.75)}
    topk = 2 if K > 1 else None
    want = [name for name in WANTS if topk or name != "topk"]
    stats = linear_token_stats(x, w, y, want=want, topk=topk, **options)
    true = doubled(x, w, b)
    expected = stats_oracle(*true[:2], y, linear_bias=true[2], topk=2, softcap=9.0, logit_scale=0.75)
    for name in (*DIFFERENTIABLE, "sum_sq_prob"):
        assert relative_error(getattr(stats, name), expected[name]) < 2e-5, name
    if topk:
        assert relative_error(stats.topk.values, expected["topk_values"]) < 2e-5
    assert relative_error(linear_logprobs(x, w, y, **options), expected["logprob"]) < 2e-5
    upstream = [torch.randn_like(expected[n]) for n in DIFFERENTIABLE]
    got = torch.autograd.grad(
        [getattr(stats, n) for n in DIFFERENTIABLE], (x, w, b), [u.to(stats.lse.dtype) for u in upstream]
    )
    want_grads = torch.autograd.grad([expected[n] for n in DIFFERENTIABLE], true, upstream)
    assert_near(got[:2], want_grads[:2], 2 * OF_STATS[dtype])
    few = 2 if x.numel() <= 128 else 1  # the bias's is a sum of rounded numbers, which may cancel
    assert_near(got[2:], want_grads[2:], 2 * OF_STATS[dtype] * few)


@hopper
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


@hopper
def test_what_the_statistics_kernels_take() -> None:
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


NO_CAPS, CAPS = (None, None), (5.0, 3.0)


@every_pair(
    dtype=TRAINED,
    kind=KINDS,
    reduced=[("none", NO_CAPS), ("mean", NO_CAPS), ("mean", CAPS), ("sum", NO_CAPS), ("sum", CAPS)],
)
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


@every_pair(
    out=["token", "sum"], dtype=TRAINED, workspace_mib=[None, 0.5], masked=[False, True], autocast=[False, True]
)
def test_apply(out: str, dtype: torch.dtype, workspace_mib: float | None, masked: bool, autocast: bool) -> None:
    if autocast and dtype == SINGLE:
        pytest.skip("autocast multiplies in a narrow dtype")
    x, w, b, y = on_gpu((3, 103), 64, 1003, dtype=SINGLE if autocast else dtype)
    gamma = torch.tensor(1.7, device="cuda", requires_grad=True)
    mask = torch.rand(3, 103, device="cuda") < 0.6 if masked else torch.ones(3, 103, dtype=torch.bool, device="cuda")
    with torch.autocast("cuda", dtype if autocast else torch.bfloat16, enabled=autocast):
        got = linear_apply(
            focal if out == "token" else focal_sum, x, w, y, linear_bias=b, params=(gamma,), softcap=9.0,
            logit_scale=0.7, mask=mask if masked else None, out=out, options=HeadOptions(workspace_mib=workspace_mib),
        ).sum()  # fmt: skip
    full = [t.detach().to(dtype).double().requires_grad_() for t in (x, w)] + doubled(b, gamma)
    true = focal(logits_of(full[0][mask], full[1], full[2], 9.0, 0.7), y[mask], full[3]).sum()
    assert relative_error(got, true) < 1e-5
    near = TOLERANCE[dtype] * (2 if workspace_mib else 1)
    assert_same_gradients(got, true, (x, w, b, gamma), full, near)


@pytest.mark.parametrize("gradient", ["forward", "recompute"])
@pytest.mark.parametrize("factor", [2.0**-14, 2.0**16])
def test_float16_gradients_for_any_factor(gradient: Any, factor: float) -> None:
    g = torch.Generator().manual_seed(0)
    rows = torch.randn(400, 64, generator=g)
    rows /= rows.norm(dim=1, keepdim=True)
    y = torch.randint(400, (96,), generator=g)
    gap = 18 if factor > 1 else 0.5  # tokens that the model is sure of, and others
    heavy = torch.full((96,), 1.0 if factor > 1 else 1e6)
    x, w = ((t.half().requires_grad_()) for t in (gap * rows[y], rows))
    exact = doubled(x, w)
    x, w = (t.detach().cuda().requires_grad_() for t in (x, w))
    true = torch.autograd.grad(factor * oracle(*exact, y, token_weight=heavy), exact)
    options = HeadOptions(gradient=gradient)
    loss = linear_cross_entropy(x, w, y.cuda(), token_weight=heavy.cuda(), options=options)
    for grad, t in zip(torch.autograd.grad(factor * loss, (x, w)), true, strict=True):
        assert relative_error(grad.cpu(), t) < 1e-3 + 2 * relative_error(t.half(), t)


@pytest.mark.parametrize("wrong", [310, 10**6, -1])
def test_a_target_out_of_range_is_nan_and_never_a_number(wrong: int) -> None:
    x, w, _, y = on_gpu(20, 32, 310)
    y[7] = wrong
    assert linear_cross_entropy(x, w, y).isnan()
    each = linear_cross_entropy(x, w, y, reduction="none")
    assert each.isnan().nonzero().flatten().tolist() == [7]
    dx, dw = torch.autograd.grad(linear_cross_entropy(x, w, y, reduction="sum"), (x, w))
    assert dx[7].isnan().all()
    assert dw.isnan().any()
    assert dx[[i for i in range(20) if i != 7]].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_float32_weights_under_autocast(dtype: torch.dtype) -> None:
    x, w, b, y = on_gpu(500, 64, 3001)
    with torch.autocast("cuda", dtype=dtype):
        loss = linear_cross_entropy(x, w, y, linear_bias=b)
        naive = F.cross_entropy(F.linear(x, w, b).float(), y)
    got, base = (torch.autograd.grad(value, (x, w, b)) for value in (loss, naive))
    rounded = [t.detach().to(dtype).double().requires_grad_() for t in (x, w)] + doubled(b)
    want = torch.autograd.grad(oracle(*rounded[:2], y, linear_bias=rounded[2]), rounded)
    for g, n, e in zip(got, base, want, strict=True):
        assert g.dtype == SINGLE
        assert relative_error(g, e) <= 1.05 * relative_error(n, e)
