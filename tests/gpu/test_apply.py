"""linear_apply on a CUDA device: values, random numbers, no host synchronisation, memory by the allocator's count."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters

from gpu.conftest import ON_GPU
from lowtide import HeadOptions, linear_apply
from lowtide.head.function import checks as apply_checks
from lowtide.measure.timing import peak_above
from support import on_gpu, relative_error

pytestmark = ON_GPU
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 3.5e-3, torch.float16: 6e-4}


@pytest.fixture(autouse=True)
def _forgotten() -> None:
    apply_checks._passed.clear()


def focal(z: Tensor, y: Tensor, gamma: Tensor) -> Tensor:
    logp = -F.cross_entropy(z, y, reduction="none")
    return -((1 - logp.exp()) ** gamma) * logp


def focal_sum(z: Tensor, y: Tensor, gamma: Tensor) -> Tensor:
    return focal(z, y, gamma).sum()


def capped(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return 9 * torch.tanh(F.linear(x, w, b) * 0.7 / 9)


@pytest.mark.parametrize("out", ["token", "sum"])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("workspace_mib", [None, 0.5])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_values(out: str, dtype: torch.dtype, workspace_mib: float | None, masked: bool, autocast: bool) -> None:
    if autocast and dtype not in (torch.bfloat16, torch.float16):
        pytest.skip("autocast multiplies in a narrow dtype")
    x, w, b, y = on_gpu((3, 103), 64, 1003, dtype=torch.float32 if autocast else dtype)
    gamma = torch.tensor(1.7, device="cuda", dtype=dtype if dtype == torch.float64 else None, requires_grad=True)
    mask = torch.rand(3, 103, device="cuda") < 0.6 if masked else torch.ones(3, 103, dtype=torch.bool, device="cuda")
    with torch.autocast("cuda", dtype if autocast else torch.bfloat16, enabled=autocast):
        got = linear_apply(
            focal if out == "token" else focal_sum, x, w, y, linear_bias=b, params=(gamma,), softcap=9.0,
            logit_scale=0.7, mask=mask if masked else None, out=out, options=HeadOptions(workspace_mib=workspace_mib),
        ).sum()  # fmt: skip
    full = [t.detach().to(dtype).double().requires_grad_() for t in (x, w)]
    full += [t.detach().double().requires_grad_() for t in (b, gamma)]
    true = focal(capped(full[0][mask], full[1], full[2]), y[mask], full[3]).sum()
    assert relative_error(got, true) < (1e-12 if dtype == torch.float64 else 1e-5)
    grads = torch.autograd.grad(got, (x, w, b, gamma))
    for g, e in zip(grads, torch.autograd.grad(true, full), strict=True):
        assert relative_error(g, e) < TOLERANCE[dtype] * (2 if workspace_mib else 1)


@pytest.mark.parametrize("out", ["token", "sum"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_no_host_synchronisation_from_the_second_call_on(out: str, dtype: torch.dtype) -> None:
    x, w, b, y = on_gpu(600, 64, 1000, dtype=dtype)
    gamma = torch.tensor(1.7, device="cuda", requires_grad=True)
    scale = torch.tensor(0.7, device="cuda")

    def step() -> None:
        fn = lambda z, y, g: focal(z, y, g) if out == "token" else focal_sum(z, y, g)  # noqa: E731  made anew each time
        loss = linear_apply(fn, x, w, y, linear_bias=b, params=(gamma,), logit_scale=scale, softcap=9.0, out=out)
        torch.autograd.grad(loss.mean() * 3, (x, w, b, gamma))

    step()
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode", UserWarning)
        try:
            torch.cuda.set_sync_debug_mode("error")
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("workspace_mib", [None, 0.5])
def test_random_numbers_are_the_same_on_recompute(workspace_mib: float | None) -> None:
    x, w, _, _ = on_gpu(200, 16, 300, dtype=torch.float64, bias=False)
    masks: list[Tensor] = []

    def fn(z: Tensor) -> Tensor:
        masks.append(torch.rand_like(z) < 0.5)
        return (z * masks[-1]).logsumexp(-1)

    loss = linear_apply(fn, x, w, options=HeadOptions(workspace_mib=workspace_mib))
    drawn: list[Tensor] = []  # without those of the comparison that looks for coupled rows, which comes before
    while sum(map(len, drawn)) < 200:
        drawn.insert(0, masks.pop())
    kept = torch.cat(drawn)
    after = torch.cuda.get_rng_state()
    got = torch.autograd.grad(loss.sum(), (x, w))
    assert torch.equal(torch.cuda.get_rng_state(), after)
    want = torch.autograd.grad((F.linear(x, w) * kept).logsumexp(-1).sum(), (x, w))
    for g, e in zip(got, want, strict=True):
        torch.testing.assert_close(g, e)


def test_coupled_tokens_are_refused_in_every_call() -> None:
    x, w, _, y = on_gpu(64, 16, 300)
    for _ in range(2):
        with pytest.raises(ValueError, match="depend on the other tokens"):
            linear_apply(lambda z: z - z.mean(0), x, w)
        with pytest.raises(ValueError, match="does not add up"):
            linear_apply(lambda z, y: F.cross_entropy(z, y), x, w, y, out="sum")


@pytest.mark.filterwarnings(
    "ignore:`torch.jit:DeprecationWarning", "ignore:The .grad attribute:UserWarning"
)  # torch.compile's own
@pytest.mark.parametrize("out", ["token", "sum"])
def test_compiled(out: str) -> None:
    x, w, b, y = on_gpu(1000, 64, 3001, dtype=torch.bfloat16)
    gamma = torch.tensor(1.7, device="cuda", requires_grad=True)
    fn = focal if out == "token" else focal_sum
    torch._dynamo.reset()
    counters.clear()
    results = [
        linear_apply(fn, x, w, y, linear_bias=b, params=(gamma,), out=out, compile=flag,
                     options=HeadOptions(workspace_mib=8)).sum()
        for flag in (True, False)
    ]  # fmt: skip
    torch.testing.assert_close(*results)
    grads = [torch.autograd.grad(loss, (x, w, b, gamma)) for loss in results]
    for g, e in zip(*grads, strict=True):
        assert relative_error(g, e) < 3e-3
    for N in (999, 2, 1, 1500, 517):
        loss = linear_apply(fn, x[:N], w, y[:N], params=(gamma,), out=out, compile=True, linear_bias=b).sum()
        torch.autograd.grad(loss, (x, w, b, gamma))
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("out", ["token", "sum"])
def test_memory_is_far_below_that_of_the_logits(out: str) -> None:
    x, w, _, y = on_gpu(8192, 256, 32000, dtype=torch.bfloat16, bias=False)

    def step(mean: Any) -> None:
        x.grad = w.grad = None
        mean().backward()

    fn = F.cross_entropy
    naive = lambda: fn(F.linear(x, w).float(), y)  # noqa: E731
    applied = lambda: linear_apply(  # noqa: E731
        lambda z, y: fn(z, y, reduction="none" if out == "token" else "sum"), x, w, y, out=out
    ).sum()
    for mean in (naive, applied):
        step(mean)
    assert peak_above(lambda: step(applied), "cuda") < peak_above(lambda: step(naive), "cuda") / 4
