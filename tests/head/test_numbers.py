"""Numbers at their limits: losses of thousands of nats, sure models, infinities, float16's range and its scaler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lowtide import (
    HeadOptions,
    linear_apply,
    linear_contrastive,
    linear_cross_entropy,
    linear_divergence,
    linear_logprobs,
    linear_token_stats,
    plan_head,
)
from promises import promise
from support import assert_near, doubled, every_pair, head, in_float64, oracle, relative_error, stats_oracle

pytestmark = promise("values")
SMALL = HeadOptions(workspace_mib=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_losses_of_thousands_of_nats_are_exact(dtype: torch.dtype) -> None:
    x, w, b, y = head(9, 16, 40, dtype=torch.float64)
    leaves = [t.detach().to(dtype).requires_grad_() for t in (3000 * x, w, b)]
    exact = doubled(*leaves)
    loss, want = (f(*t[:2], y, linear_bias=t[2]) for f, t in ((linear_cross_entropy, leaves), (oracle, exact)))
    assert want > 1000
    assert relative_error(loss, want) < 1e-6
    assert_near(torch.autograd.grad(loss, leaves), torch.autograd.grad(want, exact), 1e-5)


def sure(gap: float, N: int = 8, V: int = 30, D: int = 96) -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden states, a weight and targets that lead by about ``gap``."""
    w = F.normalize(torch.randn(V, D))
    y = torch.randint(V, (N,))
    return (gap * w[y]).requires_grad_(), w.requires_grad_(), y


LEFT: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "cross entropy": (linear_cross_entropy, oracle),
    "log-probability": (
        lambda x, w, y: linear_token_stats(x, w, torch.stack((y, (y + 1) % 30), -1)).logprob[:, 0],
        lambda x, w, y: stats_oracle(x, w, y)["logprob"],
    ),
    "entropy": (lambda x, w, y: linear_token_stats(x, w, y).entropy, lambda x, w, y: stats_oracle(x, w, y)["entropy"]),
    "of a set": (
        lambda x, w, y: linear_logprobs(x, w, y, support=torch.arange(30).expand(8, 30)),
        lambda x, w, y: stats_oracle(x, w, y)["logprob"],
    ),
    "contrastive": (
        lambda x, w, y: linear_contrastive(x, w, y, symmetric=False, mask=torch.zeros(8, 30, dtype=torch.bool)),
        lambda x, w, y: oracle(x, w, y),
    ),
}


@pytest.mark.parametrize("name", LEFT)
def test_a_sure_model_keeps_the_digits_of_what_is_left(name: str) -> None:
    """1 - p of about 1e-6, where a difference of probabilities holds 1e-7 of rounding."""
    run, truth = LEFT[name]
    x, w, y = sure(22)
    exact = doubled(x, w)
    got, want = run(x, w, y), truth(*exact, y)
    assert want.abs().median() < 1e-4
    assert relative_error(got, want) < 1e-4
    (g,), (e,) = torch.autograd.grad(got.sum(), x), torch.autograd.grad(want.sum(), exact[0])
    assert relative_error(g, e) < 1e-4


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_infinite_logits_are_pytorchs(dtype: torch.dtype) -> None:
    x, w, y = torch.randn(4, 8).to(dtype), torch.randn(11, 8).to(dtype), torch.tensor([0, 1, 2, 1])
    for fill, places in ((-torch.inf, slice(None)), (-torch.inf, slice(3, None)), (torch.inf, 2), (torch.nan, 4)):
        b = torch.zeros(11, dtype=dtype)
        b[places] = fill
        z = F.linear(x.double(), w.double(), b.double())
        stats = linear_token_stats(x, w, y, linear_bias=b)
        for got, want in (
            (stats.lse, z.logsumexp(-1)),
            (stats.logprob, z.log_softmax(-1).gather(1, y[:, None])[:, 0]),
            (linear_cross_entropy(x, w, y, linear_bias=b), F.cross_entropy(z, y)),
        ):
            torch.testing.assert_close(got.double(), want, equal_nan=True, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["bias", "scale"])
def test_classes_that_a_bias_rules_out(kind: str) -> None:
    """As if they were not there: no 0 times -inf, not even in the gradient of a trained scale."""
    x, w, b, y = head(20, 8, 33, dtype=torch.float64)
    with torch.no_grad():
        b[32] = -torch.inf
    s = torch.tensor(1.3, dtype=torch.float64, requires_grad=kind == "scale")
    leaves = [x, w, b, *([s] if kind == "scale" else [])]

    def value(w: Tensor, b: Tensor, loss: Any, stats: Any) -> Tensor:
        of = stats(x, w, y % 32, linear_bias=b, logit_scale=s)
        of = of if isinstance(of, dict) else of._asdict()
        return loss(x, w, y % 32, linear_bias=b, logit_scale=s) + (of["entropy"] + 2 * of["lse"]).sum()

    got = value(w, b, linear_cross_entropy, linear_token_stats)
    want = value(w[:32], b[:32], oracle, stats_oracle)
    torch.testing.assert_close(got, want)
    assert_near(torch.autograd.grad(got, leaves), torch.autograd.grad(want, leaves), 1e-10)


@promise("dtypes")
@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8])
def test_targets_of_any_integer_dtype_and_numbers_of_numpy(dtype: torch.dtype) -> None:
    x, w, _, y = head(9, 4, 30)
    for kwargs in ({}, {"shift": True}, {"ignore_index": 2**40, "shift": True}):
        assert torch.equal(linear_cross_entropy(x, w, y.to(dtype), **kwargs), linear_cross_entropy(x, w, y, **kwargs))
    plain: dict[str, Any] = {"softcap": 3.0, "num_items": 7, "logit_scale": 0.5, "label_smoothing": 0.25}
    numpy = {name: (np.int64 if isinstance(value, int) else np.float32)(value) for name, value in plain.items()}
    more = {"ignore_index": np.int64(-100), "options": HeadOptions(workspace_mib=np.int64(3))}
    assert torch.equal(linear_cross_entropy(x, w, y, **plain), linear_cross_entropy(x, w, y, **numpy, **more))


def summed(z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z, y, reduction="sum")


IN_HALF: dict[str, Callable[..., Tensor]] = {
    "mean": linear_cross_entropy,
    "chunks": lambda x, w, y: linear_cross_entropy(x, w, y, options=SMALL),
    "recomputed": lambda x, w, y: linear_cross_entropy(x, w, y, options=HeadOptions(gradient="recompute")),
    "logprobs": lambda x, w, y: -linear_logprobs(x, w, y).mean(),
    "logprobs, frozen": lambda x, w, y: -linear_logprobs(x, w.detach(), y).mean(),
    "apply": lambda x, w, y: linear_apply(summed, x, w, y, out="sum") / y.numel(),
}


@every_pair(name=IN_HALF, gap=[0.5, 18.0], factor=[2.0**-14, 1.0, 2.0**16])
def test_float16_gradients_for_any_factor(name: str, gap: float, factor: float) -> None:
    """What is stored before a GradScaler's factor is known neither sinks below float16's numbers nor leaves them."""
    if gap > 1 and (factor < 1 or "apply" in name):
        pytest.skip("the product is below float16's numbers; autograd takes the difference of 1 and p itself")
    x, w, y = sure(gap, 48, 40, 64)
    x, w = (t.detach().half().requires_grad_() for t in (x * torch.linspace(0.95, 1.05, 48)[:, None], w))
    exact = doubled(x, w)
    true = torch.autograd.grad(factor * oracle(*exact, y), exact)
    inputs = (x,) if "frozen" in name else (x, w)
    for g, t in zip(torch.autograd.grad(factor * IN_HALF[name](x, w, y), inputs), true, strict=False):
        assert relative_error(g, t) < 2 * relative_error(t.half(), t) + 4e-4


@pytest.mark.parametrize("options", [None, SMALL, HeadOptions(gradient="recompute")])
def test_float16_sums_that_pass_its_range_on_the_way(options: HeadOptions | None) -> None:
    """4096 times a hidden state of 60 is beyond it, their mean is not; nor is a heavy token times a small factor."""
    x, w, _, y = head(4096, 4, 9, dtype=torch.float16, bias=False)
    x, w = ((x.detach().abs() + 60).requires_grad_(), (w.detach() * 1e-3).requires_grad_())
    exact = doubled(x, w)
    few, heavy = slice(0, 4096 if options is None else 12), torch.full((12,), 1e6)
    for kwargs, factor, rows in (({}, 1.0, few), ({"reduction": "sum", "token_weight": heavy}, 1e-6, slice(0, 12))):
        got = torch.autograd.grad(factor * linear_cross_entropy(x[rows], w, y[rows], options=options, **kwargs), w)
        want = torch.autograd.grad(factor * oracle(exact[0][rows], exact[1], y[rows], **kwargs), exact[1])
        assert_near(got, want, 1e-3)


@pytest.mark.parametrize("gap", [70.0, 95.0, 300.0])
def test_a_float16_gradient_of_hardly_anything_is_no_nan(gap: float) -> None:
    """Its largest entry may be a subnormal number, or 0."""
    x, w, y = torch.zeros(3, 16, dtype=torch.half), torch.zeros(33, 16, dtype=torch.half), torch.zeros(3).long()
    x[:, 0], w[0, 0] = 1, gap
    x, w = x.requires_grad_(), w.requires_grad_()
    of_teacher = linear_divergence(x, w, x.detach(), w.detach() * 0.9, reduction="mean")
    for value in (linear_cross_entropy(x, w, y), linear_cross_entropy(x, w, y, reduction="sum"), of_teacher):
        assert all(g.isfinite().all() for g in torch.autograd.grad(value * 2.0**16, (x, w)))


SCALED: dict[str, tuple[Callable[..., Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "cross entropy": (
        lambda x, w, y, b, s: linear_cross_entropy(x, w, y, linear_bias=b, logit_scale=s),
        F.cross_entropy,
    ),
    "token_stats": (
        lambda x, w, y, b, s: linear_token_stats(x, w, want=("lse",), linear_bias=b, logit_scale=s).lse.mean(),
        lambda z, y: z.logsumexp(-1).mean(),
    ),
    "apply": (
        lambda x, w, y, b, s: linear_apply(summed, x, w, y, linear_bias=b, logit_scale=s, out="sum") / 200,
        F.cross_entropy,
    ),
}


@every_pair(
    name=SCALED, dtype=[torch.float64, torch.float32, torch.bfloat16, torch.float16], scale=[0.0, 0.05, 1.7, 20.0]
)
def test_a_trained_scale_errs_no_more_than_in_plain_pytorch(name: str, dtype: torch.dtype, scale: float) -> None:
    """A sum with cancellation: the rounding of its terms stays in it, whatever plain PyTorch's happens to be."""
    ours, plain = SCALED[name]
    x, w, b, y = head(200, 32, 65, dtype=dtype)
    s = torch.tensor(scale, dtype=torch.promote_types(dtype, torch.float32), requires_grad=True)
    exact = doubled(x, w, b, s)
    z = F.linear(*exact[:3])
    logits = (z * exact[3]).detach().requires_grad_()
    (g,) = torch.autograd.grad(plain(logits, y), logits)
    (got,) = torch.autograd.grad(ours(x, w, y, b, s), s)
    (stock,) = torch.autograd.grad(plain(F.linear(x, w, b) * s, y).double(), s)
    true, terms = (g * z).sum(), (g * z).abs().sum()
    assert (got - true).abs() < 2 * (stock - true).abs() + 4 * torch.finfo(s.dtype).eps * terms


def test_one_factor_for_all_tokens_is_not_rounded_with_each() -> None:
    """In bf16 a target's entry, close to its upstream, would be missed by as much in every row alike."""
    x, w, _, y = head(400, 32, 900)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        stats = linear_token_stats(x, w, y, want=("logprob", "lse"), options=HeadOptions(workspace_mib=16))
    true = [t.detach().bfloat16().double().requires_grad_() for t in (x, w)]
    upstream = torch.full((400,), 0.0040283203125 * 1.003)  # most entries a bit below half way between two of bf16
    (got,) = torch.autograd.grad(stats.logprob, w, upstream)
    (want,) = torch.autograd.grad(stats_oracle(*true, y)["logprob"], true[1], upstream.double())
    share = ((got.double() * want).sum() / want.square().sum()).item()
    assert abs(share - 1) < 5e-4


@pytest.mark.parametrize("accumulate", ["float32", "input"])
def test_the_weights_gradient_is_accumulated_as_asked(accumulate: Any) -> None:
    """In bfloat16 each of many chunks is a rounding more."""
    options, errors = HeadOptions(workspace_mib=0.05, accumulate=accumulate), []
    assert plan_head(600, 8, 60, torch.bfloat16, "cpu", options).chunks > 20
    for seed in range(8):
        x, w, _, y = head(600, 8, 60, dtype=torch.bfloat16, seed=seed, bias=False)
        exact = doubled(x, w)
        want = torch.autograd.grad(oracle(*exact, y, reduction="sum"), exact[1])[0]
        got = torch.autograd.grad(linear_cross_entropy(x, w, y, reduction="sum", options=options), w)[0]
        errors.append(relative_error(got, want))
    mean = sum(errors) / len(errors)
    assert mean < 3e-3 if accumulate == "float32" else 4e-3 < mean < 3e-2, mean


@promise("dtypes")
def test_bf16_is_right_on_a_cpu_with_its_instructions_and_on_one_without(cpu_multiplies_bf16: bool) -> None:
    x, w, b, y = head(96, 24, 515, dtype=torch.bfloat16)
    gemm = "narrow" if cpu_multiplies_bf16 else "blocks"
    assert plan_head(96, 24, 515, torch.bfloat16, "cpu").backward_gemm == gemm
    true = in_float64({"input": x, "linear_weight": w, "linear_bias": b})
    value = linear_cross_entropy(x, w, y, linear_bias=b, softcap=9.0, label_smoothing=0.1)
    value = value + linear_token_stats(x, w, y, linear_bias=b).entropy.mean()
    exact = oracle(target=y, softcap=9.0, label_smoothing=0.1, **true) + stats_oracle(**true)["entropy"].mean()
    torch.testing.assert_close(value.double(), exact, rtol=1e-5, atol=1e-5)
    grads = torch.autograd.grad(value, (x, w, b)), torch.autograd.grad(exact, list(true.values()))
    assert_near(*grads, 1e-2)
    a, c = torch.randn(64, 64), torch.randn(64, 64)
    assert relative_error(a @ c, a.double() @ c.double()) < 1e-6, "others' float32 GEMMs are float32's"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_log_probability_has_the_same_bits_from_every_function(dtype: torch.dtype) -> None:
    x, w, b, y = head(70, 16, 300, dtype=dtype)
    w, b = 2 * w, b.detach()
    y[:35] = F.linear(x, w, b)[:35].argmax(1)  # of a class that is sure, and of any
    got = linear_logprobs(x, w, y, linear_bias=b)
    assert torch.equal(got, -linear_cross_entropy(x, w, y, linear_bias=b, reduction="none"))
    assert torch.equal(got, linear_token_stats(x, w, y, linear_bias=b).logprob)
    assert torch.equal(got, linear_token_stats(x, w, torch.stack((y.flip(0), y), -1), linear_bias=b).logprob[:, 1])
