"""The head on a CUDA device: values, no host synchronisation, memory by the allocator's count, NaN where asked."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from gpu.conftest import ON_GPU
from lowtide import HeadOptions, linear_cross_entropy, plan_head
from support import in_float64, on_gpu, oracle, relative_error

pytestmark = ON_GPU
MIB = 2**20
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 3.5e-3, torch.float16: 6e-4}


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


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [((3, 43), 37, 1003), ((1, 2), 64, 2), ((2, 300), 128, 5000)])
def test_values(case: str, dtype: torch.dtype, shape: tuple[tuple[int, int], int, int]) -> None:
    if case == "row" and dtype == torch.float64:
        pytest.skip("the row kernel is for float32 and narrower")
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
    assert relative_error(loss, expected) < (1e-12 if dtype == torch.float64 else 1e-5)
    naive = oracle(**{name: value for name, value in kwargs.items() if name != "options"})
    base = torch.autograd.grad(naive, (x, w, b), upstream.to(naive.dtype))
    for g, e, n in zip(got, want, base, strict=True):
        often = 1.5 if case in ("bf16 sums", "recompute") else 1  # dW is rounded once a chunk
        few = 2 if x.numel() <= 128 else 1  # roundings, so that their norm varies
        assert relative_error(g, e) <= max(TOLERANCE[dtype] * often * few, 1.05 * relative_error(n, e))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", CASES)
def test_nothing_waits_for_the_device(dtype: torch.dtype, case: str) -> None:
    x, w, b, y = on_gpu((4, 300), 64, 3000, dtype=dtype)
    num_items = torch.tensor(77, device="cuda")
    linear_cross_entropy(x, w, y, linear_bias=b, **CASES[case]).sum().backward()  # Triton compiles
    torch.cuda.synchronize()
    try:
        with warnings.catch_warnings(action="ignore"):  # that the mode is a prototype
            torch.cuda.set_sync_debug_mode("error")
        kwargs = CASES[case] if "reduction" in CASES[case] else {**CASES[case], "num_items": num_items}
        for upstream in (1, 3):
            (linear_cross_entropy(x, w, y, linear_bias=b, **kwargs).sum() * upstream).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", ["auto", "row"])
@pytest.mark.parametrize("gradient", ["forward", "recompute"])
def test_ignored_tokens_stay_0_under_any_upstream_gradient(dtype: torch.dtype, backend: Any, gradient: Any) -> None:
    if dtype == torch.float64 and backend == "row":
        pytest.skip("its kernel computes in float32")
    x, w, b, y = on_gpu((4, 300), 64, 3000, dtype=dtype)
    scale = torch.tensor(1.5, device="cuda", requires_grad=True)
    some = y.clone()
    some[:, 5:90] = some[2] = -100
    options = HeadOptions(backend=backend, gradient=gradient)
    for target in (some, torch.full_like(y, -100)):
        kept = target != -100
        for logit_scale in (1.0, scale):
            total = linear_cross_entropy(
                x, w, target, linear_bias=b, reduction="sum", logit_scale=logit_scale, options=options
            )
            for retain in (True, False):
                leaves = (x, w, b) if logit_scale is not scale else (x, w, b, scale)
                grads = torch.autograd.grad(total * torch.inf, leaves, retain_graph=retain)
                assert torch.equal(grads[0][~kept], torch.zeros_like(x[~kept]))
                if kept.any():
                    assert not grads[0][kept].isfinite().any()
                    assert not grads[1].isfinite().any()
                else:
                    assert all(torch.equal(g, torch.zeros_like(g)) for g in grads)


@pytest.mark.parametrize("gradient", ["forward", "recompute"])
@pytest.mark.parametrize("factor", [2.0**-14, 2.0**16])
def test_float16_gradients_for_any_factor(gradient: Any, factor: float) -> None:
    g = torch.Generator().manual_seed(0)
    rows = torch.randn(400, 64, generator=g)
    rows /= rows.norm(dim=1, keepdim=True)
    y = torch.randint(400, (96,), generator=g)
    gap = 18 if factor > 1 else 0.5  # tokens that the model is sure of, and others
    heavy = torch.full((96,), 1.0 if factor > 1 else 1e6)
    x, w = (gap * rows[y]).half(), rows.half()
    exact = [t.double().requires_grad_() for t in (x, w)]
    x, w = (t.cuda().requires_grad_() for t in (x, w))
    true = torch.autograd.grad(factor * oracle(*exact, y, token_weight=heavy), exact)
    options = HeadOptions(gradient=gradient)
    loss = linear_cross_entropy(x, w, y.cuda(), token_weight=heavy.cuda(), options=options)
    for grad, t in zip(torch.autograd.grad(factor * loss, (x, w)), true, strict=True):
        assert relative_error(grad.cpu(), t) < 1e-3 + 2 * relative_error(t.half(), t)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("workspace_mib", [None, 16])
def test_peak_memory(dtype: torch.dtype, reduction: str, workspace_mib: float | None) -> None:
    N, D, V = 8192, 256, 32000
    x, w, _, y = on_gpu(N, D, V, dtype=dtype, bias=False)
    options = HeadOptions(workspace_mib=workspace_mib)
    plan = plan_head(N, D, V, dtype, "cuda", options, reduction=reduction)
    linear_cross_entropy(x[:256], w, y[:256], reduction=reduction, options=options).sum().backward()
    w.grad = x.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    linear_cross_entropy(x, w, y, reduction=reduction, options=options).sum().backward()
    peak = torch.cuda.max_memory_allocated() - before - x.grad.nbytes - w.grad.nbytes
    assert peak <= plan.scratch_bytes + plan.accumulator_bytes + MIB
    assert peak - plan.accumulator_bytes < N * V * 4 / 4
    if workspace_mib is not None:
        assert plan.scratch_bytes <= workspace_mib * MIB


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("gradient", ["auto", "recompute"])
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_ignored_tokens_may_hold_anything(reduction: str, gradient: str, poison: float) -> None:
    x, w, b, y = on_gpu(200, 32, 310, dtype=torch.bfloat16)
    y[::3] = -100
    dirty = x.detach().clone()
    dirty[::3] = poison
    dirty.requires_grad_()
    runs = []
    for input in (x, dirty):
        loss = linear_cross_entropy(
            input, w, y, linear_bias=b, reduction=reduction, options=HeadOptions(gradient=gradient)
        )
        runs.append((loss, *torch.autograd.grad(loss.sum(), (input, w, b))))
    for clean, got in zip(*runs, strict=True):
        assert torch.equal(clean, got)
    assert (runs[1][1][::3] == 0).all()


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


def test_all_ignored() -> None:
    x, w, _, y = on_gpu(20, 32, 310)
    y.fill_(-100)
    mean = linear_cross_entropy(x, w, y)
    assert mean.isnan()
    for loss in (mean, linear_cross_entropy(x, w, y, num_items=3), linear_cross_entropy(x, w, y, reduction="sum")):
        assert all((g == 0).all() for g in torch.autograd.grad(loss, (x, w)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_float32_weights_under_autocast(dtype: torch.dtype) -> None:
    x, w, b, y = on_gpu(500, 64, 3001)
    with torch.autocast("cuda", dtype=dtype):
        loss = linear_cross_entropy(x, w, y, linear_bias=b)
        naive = F.cross_entropy(F.linear(x, w, b).float(), y)
    got, base = (torch.autograd.grad(value, (x, w, b)) for value in (loss, naive))
    rounded = [t.detach().to(dtype).double().requires_grad_() for t in (x, w)] + [b.detach().double().requires_grad_()]
    want = torch.autograd.grad(oracle(*rounded[:2], y, linear_bias=rounded[2]), rounded)
    for g, n, e in zip(got, base, want, strict=True):
        assert g.dtype == torch.float32
        assert relative_error(g, e) <= 1.05 * relative_error(n, e)


@pytest.mark.parametrize("case", CASES)
def test_the_same_bits_from_run_to_run(case: str) -> None:
    x, w, b, y = on_gpu((4, 300), 64, 3000, dtype=torch.bfloat16)
    runs = []
    for _ in range(3):
        loss = linear_cross_entropy(x, w, y, linear_bias=b, **CASES[case])
        runs.append((loss, *torch.autograd.grad(loss.sum(), (x, w, b))))
    for run in runs[1:]:
        assert all(torch.equal(p, q) for p, q in zip(runs[0], run, strict=True))


@pytest.mark.parametrize("case", ["plain", "none", "all"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_compiles_whole(case: str) -> None:
    x, w, b, y = on_gpu((4, 100), 64, 3000, dtype=torch.bfloat16)

    def step(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return 2 * linear_cross_entropy(x * 2, w, y, linear_bias=b, **CASES[case]).sum()

    loss, expected = torch.compile(step, fullgraph=True)(x, w, b), step(x, w, b)
    torch.testing.assert_close(loss, expected)
    for g, e in zip(torch.autograd.grad(loss, (x, w, b)), torch.autograd.grad(expected, (x, w, b)), strict=True):
        assert relative_error(g, e) < 5e-3


def test_a_scale_of_one_reads_and_writes_nothing_else_scales() -> None:
    from lowtide.head.kernels.scale import scale_

    for n in (1, 4097, 10**6):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            x = torch.randn(n, device="cuda").to(dtype)
            expected = (x.float() * 0.3).to(dtype)
            scale_(x, torch.tensor(1.0, device="cuda"))
            scale_(x, torch.tensor(0.3, device="cuda"))
            torch.testing.assert_close(x, expected, rtol=0, atol=0)
