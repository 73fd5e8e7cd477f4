"""The head on a CUDA device: no host waits, the same bits, CUDA graphs, memory as planned, compiled, and quick sets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gpu.conftest import EXPONENTIAL, HOPPER, ON_GPU, no_waits, peak_beyond_gradients
from gpu.test_head import CASES, DIFFERENTIABLE, KINDS, TRAINED
from lowtide import (
    HeadOptions,
    linear_apply,
    linear_contrastive,
    linear_cross_entropy,
    linear_divergence,
    linear_logprobs,
    linear_token_stats,
    losses,
    plan_head,
)
from lowtide.head.token_stats import WANTS
from promises import promise
from support import assert_near, on_gpu

pytestmark = ON_GPU
MIB = 2**20


def focal(z: Tensor, y: Tensor, gamma: Tensor) -> Tensor:
    logp = -F.cross_entropy(z, y, reduction="none")
    return -((1 - logp.exp()) ** gamma) * logp


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
    for out in ("token", "sum"):
        of_fn: Any = {"linear_bias": b, "params": (gamma,), "logit_scale": scale, "softcap": 9.0, "out": out}
        calls[f"apply {out}"] = lambda of_fn=of_fn: linear_apply(  # of a function that is made anew each time
            lambda z, y, g: focal(z, y, g).sum() if of_fn["out"] == "sum" else focal(z, y, g), x, w, y, **of_fn
        ).mean()
    # whether the default skips ignored tokens follows from earlier calls of this size: those of other tests too
    skip = HeadOptions(ignored_tokens="skip") if dtype == torch.bfloat16 else None
    calls |= {
        "logprobs": lambda: linear_logprobs(x, w, y, linear_bias=b).sum(),
        "several": lambda: linear_logprobs(x, w, several, linear_bias=b).sum(),
        "stats": lambda: sum(getattr(linear_token_stats(x, w, y, want=WANTS, topk=4), n).sum() for n in DIFFERENTIABLE),
        "sets, mean": lambda: linear_logprobs(x, w, ids[..., 0].contiguous(), linear_bias=b, support=ids).mean(),
        "contrastive, mean": lambda: linear_contrastive(x.reshape(-1, 64), w, y.view(-1), symmetric=True, options=skip),
        "multi-token, mean": lambda: losses.multi_token_loss([x, x], w, y, options=skip).loss,
    }
    return calls, (x, w, b, gamma)


@promise("host", "bitwise", "again")
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


@promise("bitwise")
@HOPPER
@pytest.mark.parametrize(
    ("D", "V", "spread", "form"),
    [
        (256, 50257, 1.0, {}), (1024, 128256, 1.0, {}), (1024, 151936, 1.0, {}), (768, 1000, 30.0, {}),
        (1024, 50257, 1.0, {"softcap": 30.0, "logit_scale": 0.7}), (768, 1000, 30.0, {"linear_bias": ...}),
    ],
)  # fmt: skip
def test_a_token_has_the_same_bits_in_every_function_and_batch(
    D: int, V: int, spread: float, form: dict[str, Any]
) -> None:
    """With and without gradients, a frozen weight too; some targets are the highest class, some far below it."""
    N = 20000
    x = torch.randn(N, D, device="cuda").bfloat16()
    w, y = (2 * spread / D**0.5 * torch.randn(V, D, device="cuda")).bfloat16(), torch.randint(V, (N,), device="cuda")
    y[::6] = -100
    options = HeadOptions(batch_invariant=True)
    given: dict[str, Any] = {"options": options, **form}
    if "linear_bias" in form:
        given["linear_bias"] = torch.randn(V, device="cuda").bfloat16()
    y[1::9] = linear_token_stats(x, w, want=["argmax"], **given).argmax[1::9]
    want = ("logprob", "entropy", "lse")
    one, alone = linear_logprobs(x, w, y, **given), linear_token_stats(x, w, want=["entropy"], **given).entropy
    order = torch.randperm(N, device="cuda")
    parts = [order[:3000], order[:1], order[-200:]]
    small = {**given, "options": HeadOptions(batch_invariant=True, workspace_mib=64)}
    for trained in range(3):  # leaves: the weight is frozen with one
        leaves = [x.detach().requires_grad_(trained > 0), w.detach().requires_grad_(trained > 1)]
        for kwargs in (given, small):
            stats = linear_token_stats(*leaves, y, want=want, **kwargs)
            found = {
                "logprobs": linear_logprobs(*leaves, y, **kwargs),
                "statistics": stats.logprob,
                "of several": linear_logprobs(*leaves, torch.stack((y, y.flip(0)), 1), **kwargs)[:, 0],
                "loss": 0 - linear_cross_entropy(*leaves, y, reduction="none", **kwargs),
            }
            wrong = {name: int((value != one).sum()) for name, value in found.items()}
            assert not any(wrong.values()), (trained, wrong)
            assert torch.equal(stats.entropy, alone)
            for part in parts if kwargs is given else []:
                of_part = [leaves[0].detach()[part].requires_grad_(trained > 0), leaves[1]]
                stats = linear_token_stats(*of_part, y[part], want=want, **kwargs)
                assert torch.equal(linear_logprobs(*of_part, y[part], **kwargs), one[part])
                assert torch.equal(stats.logprob, one[part])
                assert torch.equal(stats.entropy, alone[part])
        summed = linear_cross_entropy(leaves[0][7:8], leaves[1], y[7:8], reduction="sum", **given)
        assert torch.equal(0 - summed, one[7])


@promise("host")
@EXPONENTIAL
@pytest.mark.parametrize(
    "kwargs",
    [
        {"softcap": 9.0, "label_smoothing": 0.0},
        {"reduction": "none"},
        {"label_smoothing": 0.1},
        {"options": HeadOptions(gradient="recompute", workspace_mib=1)},
        {"options": HeadOptions(backend="row")},
    ],
)
def test_a_cuda_graph_captures_it(kwargs: dict[str, Any]) -> None:
    x, w, _, y = on_gpu(600, 64, 3000, dtype=torch.bfloat16, bias=False)

    def step() -> tuple[Tensor, ...]:
        leaves = x.detach().requires_grad_(), w.detach().requires_grad_()  # autograd ties a leaf to its stream
        loss = linear_cross_entropy(*leaves, y, **kwargs)
        return loss, *torch.autograd.grad(loss.sum(), leaves)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(6):  # counts of ignored tokens are read some calls later: none by the one that is captured
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        x.copy_(torch.randn_like(x))
        y.copy_(torch.randint(0, 3000, y.shape, device="cuda"))
    graph.replay()
    for got, expected in zip(captured, step(), strict=True):
        assert torch.equal(got, expected)


@promise("memory", "plans")
@pytest.mark.parametrize("workspace_mib", [None, 16])
@pytest.mark.parametrize(
    ("dtype", "reduction", "gradient"),
    [*((dtype, reduction, "auto") for dtype in TRAINED for reduction in ("mean", "none")),
     (torch.bfloat16, "mean", "recompute")],
)  # fmt: skip
def test_the_plan_of_a_loss_is_kept(
    dtype: torch.dtype, reduction: str, gradient: Any, workspace_mib: float | None
) -> None:
    N, D, V = 8192, 256, 32000
    x, w, _, y = on_gpu(N, D, V, dtype=dtype, bias=False)
    options = HeadOptions(workspace_mib=workspace_mib, gradient=gradient)
    plan = plan_head(N, D, V, dtype, "cuda", options, reduction=reduction)

    def step(x: Tensor, y: Tensor) -> None:
        linear_cross_entropy(x, w, y, reduction=reduction, options=options).sum().backward()

    step(x[:256], y[:256])
    peak = peak_beyond_gradients(lambda: step(x, y), x, w)
    assert peak <= plan.scratch_bytes + plan.accumulator_bytes + MIB
    assert peak - plan.accumulator_bytes < N * V * 4 / 3
    if workspace_mib is not None:
        assert plan.scratch_bytes <= workspace_mib * MIB


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
