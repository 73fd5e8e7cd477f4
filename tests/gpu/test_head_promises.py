"""The head on a CUDA device: no host waits, the same bits, memory as planned, compiled; NaN stays where it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters

from gpu.conftest import ON_GPU, no_waits, peak_beyond_gradients
from gpu.test_head import CASES, DIFFERENTIABLE, KINDS, SINGLE, TRAINED, focal, focal_sum
from lowtide import (
    HeadOptions,
    linear_apply,
    linear_cross_entropy,
    linear_divergence,
    linear_logprobs,
    linear_token_stats,
    plan_divergence,
    plan_head,
)
from lowtide.head.function import checks as apply_checks
from lowtide.head.token_stats import WANTS
from lowtide.measure.timing import peak_above
from support import assert_near, assert_same_gradients, every_pair, on_gpu

pytestmark = ON_GPU
MIB = 2**20


@pytest.fixture(autouse=True)
def _forgotten() -> None:
    apply_checks._compared.clear()


def ways(dtype: torch.dtype, cut: bool = False) -> tuple[dict[str, Callable[[], Tensor]], tuple[Tensor, ...]]:
    """Return every way through the functions, forward to one number, and the leaves.

    ``cut``: the hidden states are part of longer sequences, and no view of them has one axis of tokens.
    """
    x, w, b, y = on_gpu((4, 300), 64, 3000, dtype=dtype)
    tx, tw, _, _ = on_gpu((4, 300), 40, 3000, dtype=dtype, seed=1)
    if cut:
        x, tx = (torch.cat((t, t), 1).detach()[:, :300].requires_grad_() for t in (x, tx))
    mask = torch.rand(4, 300, device="cuda") < 0.5
    several = torch.stack((y, y.flip(0), y), -1)
    gamma, scale = torch.tensor(1.7, device="cuda", requires_grad=True), torch.tensor(0.7, device="cuda")
    with torch.no_grad():
        logprobs, ids = (tx.float() @ tw.float().T).log_softmax(-1).topk(8)
    calls: dict[str, Callable[[], Tensor]] = {}
    for name, kwargs in CASES.items():
        given = kwargs if "reduction" in kwargs else {**kwargs, "num_items": torch.tensor(77, device="cuda")}
        calls[name] = lambda given=given: linear_cross_entropy(x, w, y, linear_bias=b, **given).sum()
    for kind in KINDS:
        pair = {"kind": kind, "mask": mask, "linear_bias": b}
        calls[kind] = lambda pair=pair: linear_divergence(x, w, tx, tw, **pair).sum()
        of_one = pair | {"reduction": "mean", "num_items": 700}
        calls[f"{kind} mean"] = lambda of_one=of_one: linear_divergence(x, w, tx, tw, **of_one)
    for tail in ("bucket", "renormalise", "drop"):
        known = (ids, logprobs, tail)
        calls[tail] = lambda known=known: linear_divergence(x, w, None, None, mask=mask, teacher_topk=known).sum()
    for fn in (focal, focal_sum):
        of_fn: Any = {"linear_bias": b, "params": (gamma,), "logit_scale": scale, "softcap": 9.0}
        of_fn["out"] = "token" if fn is focal else "sum"
        calls[fn.__name__] = lambda fn=fn, of_fn=of_fn: linear_apply(  # of a function that is made anew each time
            lambda z, y, g: fn(z, y, g), x, w, y, **of_fn
        ).mean()
    calls |= {
        "logprobs": lambda: linear_logprobs(x, w, y, linear_bias=b).sum(),
        "several": lambda: linear_logprobs(x, w, several, linear_bias=b).sum(),
        "stats": lambda: sum(getattr(linear_token_stats(x, w, y, want=WANTS, topk=4), n).sum() for n in DIFFERENTIABLE),
    }
    return calls, (x, w, b, gamma)


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("dtype", TRAINED)
def test_nothing_waits_bits_repeat_and_a_graph_can_be_kept(dtype: torch.dtype, cut: bool) -> None:
    calls, leaves = ways(dtype, cut)
    for name, call in calls.items():
        call().backward()  # Triton compiles, and a function is looked at
        with no_waits():
            one, two = call(), call()
            grads = [
                torch.autograd.grad(value, leaves, retain_graph=retain, allow_unused=True)
                for value, retain in ((one, True), (one, False), (two, False))
            ]
            (call() * 3).backward()
        assert torch.equal(one, two), name
        if name in CASES or name.endswith("mean"):  # of others the user's or PyTorch's operators add up
            for first, *others in zip(*grads, strict=True):
                assert all(g is first or torch.equal(g, first) for g in others), name


def test_bits_of_statistics_gradients_repeat() -> None:
    x, w, b, y = on_gpu(900, 256, 9001, dtype=torch.bfloat16)
    several = torch.stack((y, y, y.flip(0), y.roll(7)), -1)
    runs = []
    for _ in range(3):
        stats = linear_token_stats(x, w, several, linear_bias=b, topk=5)
        total = (stats.logprob * torch.linspace(-1, 1, 4, device="cuda")).sum() + stats.entropy.sum()
        runs.append((stats.topk.values, stats.topk.ids, *torch.autograd.grad(total, (x, w, b))))
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run, strict=True))


@every_pair(dtype=TRAINED, backend=["auto", "row"], gradient=["forward", "recompute"])
def test_ignored_tokens_stay_0_under_any_upstream_gradient(dtype: torch.dtype, backend: Any, gradient: Any) -> None:
    x, w, b, y = on_gpu((4, 300), 64, 3000, dtype=dtype)
    scale = torch.tensor(1.5, device="cuda", requires_grad=True)
    some = y.clone()
    some[:, 5:90] = some[2] = -100
    kwargs: Any = {"linear_bias": b, "reduction": "sum", "options": HeadOptions(backend=backend, gradient=gradient)}
    for target in (some, torch.full_like(y, -100)):
        kept = target != -100
        for logit_scale, leaves in ((1.0, (x, w, b)), (scale, (x, w, b, scale))):
            total = linear_cross_entropy(x, w, target, logit_scale=logit_scale, **kwargs)
            for retain in (True, False):
                grads = torch.autograd.grad(total * torch.inf, leaves, retain_graph=retain)
                assert torch.equal(grads[0][~kept], torch.zeros_like(x[~kept]))
                if kept.any():
                    assert not grads[0][kept].isfinite().any()
                    assert not grads[1].isfinite().any()
                else:
                    assert all(torch.equal(g, torch.zeros_like(g)) for g in grads)


@every_pair(dtype=TRAINED, reduction=["mean", "none"], workspace_mib=[None, 16])
def test_the_plan_of_a_loss_is_kept(dtype: torch.dtype, reduction: str, workspace_mib: float | None) -> None:
    N, D, V = 8192, 256, 32000
    x, w, _, y = on_gpu(N, D, V, dtype=dtype, bias=False)
    options = HeadOptions(workspace_mib=workspace_mib)
    plan = plan_head(N, D, V, dtype, "cuda", options, reduction=reduction)

    def step(x: Tensor, y: Tensor) -> None:
        linear_cross_entropy(x, w, y, reduction=reduction, options=options).sum().backward()

    step(x[:256], y[:256])
    peak = peak_beyond_gradients(lambda: step(x, y), x, w)
    assert peak <= plan.scratch_bytes + plan.accumulator_bytes + MIB
    assert peak - plan.accumulator_bytes < N * V * 4 / 3
    if workspace_mib is not None:
        assert plan.scratch_bytes <= workspace_mib * MIB


@pytest.mark.parametrize("kind", ["forward_kl", "jsd"])
@pytest.mark.parametrize("workspace_mib", [None, 64])
def test_the_plan_of_a_divergence_is_kept(kind: str, workspace_mib: float | None) -> None:
    N, D, V = 8192, 256, 32000
    x, w, _, _ = on_gpu(N, D, V, dtype=torch.bfloat16, bias=False)
    tx, tw, _, _ = on_gpu(N, 128, V, dtype=torch.bfloat16, bias=False, seed=1)
    options = HeadOptions(workspace_mib=workspace_mib)
    plan = plan_divergence(N, D, V, 128, torch.bfloat16, "cuda", options, reduction="mean")

    def step() -> None:
        linear_divergence(x, w, tx, tw, kind=kind, reduction="mean", options=options).backward()

    step()
    assert peak_beyond_gradients(step, x, w) <= plan.scratch_bytes + plan.accumulator_bytes
    assert plan.scratch_bytes < N * V * 2, "less than one side's logits in bfloat16"


def test_the_workspace_of_statistics_and_divergences_is_kept() -> None:
    N, D, V = 4096, 256, 32000
    x, w, _, y = on_gpu(N, D, V, dtype=torch.bfloat16, bias=False)
    tx, tw, _, _ = on_gpu(N, D, V, dtype=torch.bfloat16, bias=False, seed=1)
    options = HeadOptions(workspace_mib=64)
    several = torch.randint(0, V, (N, 8), device="cuda")
    for call in (
        lambda: linear_token_stats(x, w, y, options=options).entropy,
        lambda: linear_token_stats(x, w, several, topk=8, options=options).logprob,
        lambda: linear_divergence(x, w, tx, tw, kind="jsd", options=options),
    ):
        call().sum().backward()
        assert peak_beyond_gradients(lambda call=call: call().sum().backward(), x, w) - V * D * 4 <= 64 * MIB


@pytest.mark.parametrize("out", ["token", "sum"])
def test_apply_takes_far_less_than_the_logits(out: str) -> None:
    x, w, _, y = on_gpu(8192, 256, 32000, dtype=torch.bfloat16, bias=False)
    reduction = "none" if out == "token" else "sum"

    def naive() -> None:
        F.cross_entropy(F.linear(x, w).float(), y).backward()

    def applied() -> None:
        linear_apply(lambda z, y: F.cross_entropy(z, y, reduction=reduction), x, w, y, out=out).sum().backward()

    peaks = []
    for step in (naive, applied):
        step()
        x.grad = w.grad = None
        peaks.append(peak_above(step, "cuda"))
        x.grad = w.grad = None
    assert peaks[1] < peaks[0] / 4


@pytest.mark.parametrize("dtype", [SINGLE, torch.bfloat16])
def test_what_does_not_count_may_hold_anything(dtype: torch.dtype) -> None:
    x, w, b, y = on_gpu(200, 32, 310, dtype=dtype)
    tx, tw, _, _ = on_gpu(200, 16, 310, dtype=dtype, seed=1)
    mask = torch.arange(200, device="cuda") % 3 != 0
    y = y.where(mask, -100)
    several = torch.stack((y, y.where(y < 0, 3)), 1)

    def statistics(x: Tensor, tx: Tensor) -> Tensor:
        stats = linear_token_stats(x, w, y, linear_bias=b)
        return stats.logprob + stats.entropy.where(mask, 0)

    calls: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "statistics": statistics,
        "several": lambda x, tx: linear_logprobs(x, w, several, linear_bias=b),
    }
    for reduction in ("mean", "none"):
        for gradient in ("auto", "recompute") if dtype == torch.bfloat16 else ():
            given: Any = {"linear_bias": b, "reduction": reduction, "options": HeadOptions(gradient=gradient)}
            calls[f"{reduction} {gradient}"] = lambda x, tx, given=given: linear_cross_entropy(x, w, y, **given)
        for kind in KINDS:
            pair: Any = {"kind": kind, "mask": mask, "linear_bias": b, "reduction": reduction}
            calls[f"{kind} {reduction}"] = lambda x, tx, pair=pair: linear_divergence(x, w, tx, tw, **pair)
    for name, call in calls.items():
        results = []
        for bad in (0.0, torch.nan, *([torch.inf] if "auto" in name or "recompute" in name else [])):
            x_, tx_ = (t.detach().where(mask[:, None], bad).requires_grad_() for t in (x, tx))
            value = call(x_, tx_)
            results.append((value, *torch.autograd.grad(value.sum(), (x_, w, b))))
            assert not results[-1][1][~mask].any(), name
        for clean, *others in zip(*results, strict=True):
            assert clean.isfinite().all(), name
            assert all(torch.equal(clean, got) for got in others), name


@pytest.mark.parametrize("case", ["plain", "none", "all"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_compiles_whole(case: str) -> None:
    x, w, b, y = on_gpu((4, 100), 64, 3000, dtype=torch.bfloat16)

    def step(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return 2 * linear_cross_entropy(x * 2, w, y, linear_bias=b, **CASES[case]).sum()

    loss, expected = torch.compile(step, fullgraph=True)(x, w, b), step(x, w, b)
    torch.testing.assert_close(loss, expected)
    assert_same_gradients(loss, expected, (x, w, b), bound=5e-3)


@pytest.mark.filterwarnings(
    "ignore:`torch.jit:DeprecationWarning", "ignore:The .grad attribute:UserWarning"
)  # torch.compile's own
@pytest.mark.parametrize("out", ["token", "sum"])
def test_apply_compiles_its_function(out: str) -> None:
    x, w, b, y = on_gpu(1000, 64, 3001, dtype=torch.bfloat16)
    gamma = torch.tensor(1.7, device="cuda", requires_grad=True)
    fn = focal if out == "token" else focal_sum
    torch._dynamo.reset()
    counters.clear()

    def run(rows: int, mib: float | None, compile: bool) -> tuple[Tensor, ...]:
        kwargs: Any = {"linear_bias": b, "params": (gamma,), "out": out, "options": HeadOptions(workspace_mib=mib)}
        loss = linear_apply(fn, x[:rows], w, y[:rows], compile=compile, **kwargs).sum()
        return loss, *torch.autograd.grad(loss, (x, w, b, gamma))

    (loss, *got), (same, *want) = (run(1000, 8, flag) for flag in (True, False))
    torch.testing.assert_close(loss, same)
    assert_near(got, want, 3e-3)
    for N in (999, 2, 1, 1500, 517):
        run(N, None, True)
    assert counters["stats"]["unique_graphs"] == 1


def test_random_numbers_are_the_same_on_recompute() -> None:
    x, w, _, _ = on_gpu(200, 16, 300, dtype=torch.float64, bias=False)
    masks: list[Tensor] = []

    def fn(z: Tensor) -> Tensor:
        masks.append(torch.rand_like(z) < 0.5)
        return (z * masks[-1]).logsumexp(-1)

    loss = linear_apply(fn, x, w, options=HeadOptions(workspace_mib=0.5))
    drawn: list[Tensor] = []  # without those of the comparison that looks for coupled rows, which comes before
    while sum(map(len, drawn)) < 200:
        drawn.insert(0, masks.pop())
    after = torch.cuda.get_rng_state()
    got = torch.autograd.grad(loss.sum(), (x, w))
    assert torch.equal(torch.cuda.get_rng_state(), after)
    want = torch.autograd.grad((F.linear(x, w) * torch.cat(drawn)).logsumexp(-1).sum(), (x, w))
    assert_near(got, want)


def test_a_scale_of_one_reads_and_writes_nothing_else_scales() -> None:
    from lowtide.head.kernels.elementwise import scale_

    for n in (1, 4097, 10**6):
        for dtype in (torch.bfloat16, torch.float16, SINGLE):
            x = torch.randn(n, device="cuda").to(dtype)
            expected = (x.float() * 0.3).to(dtype)
            scale_(x, torch.tensor(1.0, device="cuda"))
            scale_(x, torch.tensor(0.3, device="cuda"))
            torch.testing.assert_close(x, expected, rtol=0, atol=0)
