"""Factors of gradients: a trained ``logit_scale``, a GradScaler's over float16, what is infinite or no number."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lowtide import (
    HeadOptions,
    linear_apply,
    linear_cross_entropy,
    linear_divergence,
    linear_logprobs,
    linear_token_stats,
)
from support import assert_near, doubled, head, oracle, relative_error


def per_token(z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z, y, reduction="none")


FUNCTIONS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "cross_entropy": (
        lambda x, w, y, b, s: linear_cross_entropy(x, w, y, linear_bias=b, logit_scale=s),
        lambda z, y: F.cross_entropy(z, y),
    ),
    "logprobs": (
        lambda x, w, y, b, s: linear_logprobs(x, w, y, linear_bias=b, logit_scale=s).mean(),
        lambda z, y: -F.cross_entropy(z, y),
    ),
    "token_stats": (
        lambda x, w, y, b, s: linear_token_stats(x, w, want=("lse",), linear_bias=b, logit_scale=s).lse.mean(),
        lambda z, y: z.logsumexp(-1).mean(),
    ),
    "apply": (
        lambda x, w, y, b, s: linear_apply(per_token, x, w, y, linear_bias=b, logit_scale=s).mean(),
        lambda z, y: F.cross_entropy(z, y),
    ),
}


def grads(
    function: Callable[..., Tensor], leaves: list[Tensor], y: Tensor, factor: float, *, whole: bool
) -> list[Tensor]:
    x, w, b, s = leaves
    value = function(F.linear(x, w, b) * s, y) if whole else function(x, w, y, b, s)
    return list(torch.autograd.grad(value.double() * factor, leaves))


@pytest.mark.parametrize("scale", [0.0, 0.05, 1.7, 20.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_error_is_within_plain_pytorchs(name: str, dtype: torch.dtype, scale: float) -> None:
    ours, plain = FUNCTIONS[name]
    x, w, b, y = head(200, 32, 65, dtype=dtype)
    leaves = [x, w, b, torch.tensor(scale, dtype=torch.promote_types(dtype, torch.float32), requires_grad=True)]
    exact = doubled(*leaves)
    factor = 1.0 if dtype != torch.float16 or scale < 0.5 else 2.0**10
    true = grads(plain, exact, y, factor, whole=True)
    got, stock = grads(ours, leaves, y, factor, whole=False), grads(plain, leaves, y, factor, whole=True)
    eps = torch.finfo(leaves[3].dtype).eps
    for g, s, t in zip(got[:3], stock[:3], true[:3], strict=True):
        assert relative_error(g, t) < 2 * relative_error(s, t) + 30 * eps
    # a sum with cancellation: the rounding of its terms stays in it, whatever plain PyTorch's happens to be
    z = F.linear(*exact[:3]).detach()
    scaled = (z * exact[3].detach()).requires_grad_()
    (g,) = torch.autograd.grad(plain(scaled, y) * factor, scaled)
    terms = (g * z).abs().sum()
    assert (got[3] - true[3]).abs() < 2 * (stock[3] - true[3]).abs() + 4 * eps * terms


@pytest.mark.parametrize("name", FUNCTIONS)
def test_large_hidden_states_in_half_precision(name: str) -> None:
    """Their product with the scale would be above float16's largest number, and so would a sum of the gradient's."""
    ours, plain = FUNCTIONS[name]
    x, w, b, y = head(64, 32, 65, dtype=torch.float64)
    exact = [(700 * x).half(), (w / 3000).half(), (b / 100).half(), torch.tensor(100.0)]
    leaves = [t.detach().clone().requires_grad_() for t in exact]
    exact = doubled(*leaves)
    assert_near(grads(ours, leaves, y, 0.5, whole=False), grads(plain, exact, y, 0.5, whole=True), 2e-3)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_alone_and_beside_a_bias_of_minus_infinity(name: str) -> None:
    ours, plain = FUNCTIONS[name]
    x, w, b, y = head(20, 8, 33)
    with torch.no_grad():
        b[32] = -torch.inf
    y = y.clamp(max=31)
    s = torch.tensor(1.3, requires_grad=True)
    got = torch.autograd.grad(ours(x.detach(), w.detach(), y, b, s), (b, s))
    exact = doubled(b, s)
    true = torch.autograd.grad(plain(F.linear(x.double(), w.double(), exact[0]) * exact[1], y), exact)
    assert not true[1].isfinite()  # 0 times -inf
    exact = [b.detach()[:32].double().requires_grad_(), exact[1]]
    true = torch.autograd.grad(plain(F.linear(x.double(), w[:32].double(), exact[0]) * exact[1], y), exact)
    assert relative_error(got[0][:32], true[0]) < 1e-5
    assert relative_error(got[1], true[1]) < 1e-5


SMALL = HeadOptions(workspace_mib=1e-6)
FACTORS = [2.0**-14, 1.0, 2.0**16]
MANY = 2.0**26


def surely(z: Tensor, y: Tensor, reduction: str = "sum") -> Tensor:
    return F.cross_entropy(z, y, reduction=reduction)


def over_many(z: Tensor, y: Tensor, reduction: str = "sum") -> Tensor:
    return surely(z, y, reduction) / MANY


LOSSES: dict[str, Callable[..., Tensor]] = {
    "mean": lambda x, w, y: linear_cross_entropy(x, w, y),
    "chunks": lambda x, w, y: linear_cross_entropy(x, w, y, options=SMALL),
    "recomputed": lambda x, w, y: linear_cross_entropy(x, w, y, options=HeadOptions(gradient="recompute")),
    "logprobs": lambda x, w, y: -linear_logprobs(x, w, y).mean(),
    "logprobs, frozen": lambda x, w, y: -linear_logprobs(x, w.detach(), y).mean(),
    "apply": lambda x, w, y: linear_apply(surely, x, w, y, out="sum") / y.numel(),
    "apply, fn divides": lambda x, w, y: linear_apply(over_many, x, w, y, out="sum") * MANY / y.numel(),
    "apply, fn divides each": lambda x, w, y: (
        linear_apply(partial(over_many, reduction="none"), x, w, y).sum() * MANY / y.numel()
    ),
}


def confident(N: int, D: int, V: int, gap: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden states and a weight with which each token's own class leads by about ``gap``."""
    g = torch.Generator().manual_seed(0)
    w = torch.randn(V, D, generator=g)
    w /= w.norm(dim=1, keepdim=True)
    y = torch.randint(V, (N,), generator=g)
    scale = torch.linspace(0.95, 1.05, N)[:, None] * gap  # each token's gradient has a size of its own
    return (scale * w[y]).half().requires_grad_(), w.half().requires_grad_(), y


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("gap", [0.5, 18.0])
@pytest.mark.parametrize("name", LOSSES)
def test_the_product_with_the_factor_is_right(name: str, gap: float, factor: float) -> None:
    x, w, y = confident(48, 64, 40, gap)
    if gap > 1 and factor < 1:
        pytest.skip("the product itself is below float16's numbers")
    if gap > 1 and "apply" in name:
        pytest.skip("autograd's cross entropy of float32 logits takes the difference of 1 and p itself")
    exact = doubled(x, w)
    (factor * oracle(*exact, y)).backward()
    inputs = (x, w) if "frozen" not in name else (x,)
    grads = torch.autograd.grad(factor * LOSSES[name](x, w, y), inputs)
    for grad, t in zip(grads, exact, strict=False):
        rounded = relative_error(t.grad.half(), t.grad)  # what no float16 gradient can do without
        assert relative_error(grad, t.grad) < 2 * rounded + 4e-4


@pytest.mark.parametrize("options", [None, SMALL, HeadOptions(gradient="recompute")])
def test_what_is_too_large_before_a_small_factor(options: HeadOptions | None) -> None:
    x, w, y = confident(12, 64, 40, 0.5)
    exact = doubled(x, w)
    factor, heavy = 2.0**-14, torch.full((12,), 1e6)
    (factor * oracle(*exact, y, reduction="sum", token_weight=heavy)).backward()
    loss = linear_cross_entropy(x, w, y, reduction="sum", token_weight=heavy, options=options)
    for grad, t in zip(torch.autograd.grad(factor * loss, (x, w)), exact, strict=True):
        assert relative_error(grad, t.grad) < 1e-3


@pytest.mark.parametrize("gap", [70.0, 85.0, 95.0, 110.0, 300.0])
def test_a_gradient_of_hardly_anything_is_no_nan(gap: float) -> None:
    """Its largest entry may be a subnormal number, or 0."""
    D, V = 16, 33
    x = torch.zeros(3, D, dtype=torch.half)
    x[:, 0] = 1
    w = torch.zeros(V, D, dtype=torch.half)
    w[0, 0] = gap
    for leaf in (x, w):
        leaf.requires_grad_()
    y = torch.zeros(3, dtype=torch.long)
    for kwargs in ({}, {"reduction": "sum"}):
        loss = linear_cross_entropy(x, w, y, **kwargs) * 2.0**16
        for grad in torch.autograd.grad(loss, (x, w)):
            assert grad.isfinite().all()
    value = linear_divergence(x, w, x.detach(), w.detach() * 0.9, reduction="mean")
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(value * 2.0**16, (x, w)))


DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def all_leaves(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    x, w, b, y = head((2, 5), 8, 33, dtype=dtype)
    return x, w, y, b, torch.tensor(1.5, requires_grad=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_num_items_of_0_beside_kept_tokens_is_stocks(dtype: torch.dtype) -> None:
    x, w, y, b, _ = all_leaves(dtype)
    y[0] = -100
    loss = linear_cross_entropy(x, w, y, linear_bias=b, num_items=torch.tensor(0.0))
    assert loss == math.inf
    grad_x, grad_w = torch.autograd.grad(loss, (x, w))
    assert not grad_x[1].isfinite().any()
    assert not grad_w.isfinite().any()
    assert torch.equal(grad_x[0], torch.zeros_like(grad_x[0]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("factor", [1.0, math.inf, -math.inf, math.nan])
def test_rows_that_fn_itself_leaves_out(dtype: torch.dtype, factor: float) -> None:
    """Stored gradients of a sum: what is 0 in them stays 0, whether all rows are ignored or some."""
    x, w, y, b, s = all_leaves(dtype)
    for ignored in (slice(None), (torch.tensor([0, 1, 1]), torch.tensor([1, 2, 3]))):
        y[:], kept = 3, torch.ones_like(y, dtype=torch.bool)
        y[ignored], kept[ignored] = -100, False
        loss = linear_apply(surely, x, w, y, linear_bias=b, logit_scale=s, out="sum")
        for retain in (True, False):
            grads = torch.autograd.grad(loss * factor, (x, w, b, s), retain_graph=retain)
            assert torch.equal(grads[0][~kept], torch.zeros_like(x[~kept]))
            for grad in (grads[0][kept], *grads[1:]):
                zero = not kept.any()
                assert (grad == 0).all() if zero else grad.isfinite().all() == (factor == 1)
