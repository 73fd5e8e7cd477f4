"""float16 under a GradScaler: small gradients are not lost, and large ones not infinite, before its factor comes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from lowtide import HeadOptions, linear_apply, linear_cross_entropy, linear_divergence, linear_logprobs
from lowtide.head.scaling import lift_of, lift_of_rows, weight_lift
from support import oracle, relative_error

SMALL = HeadOptions(workspace_mib=1e-6)
FACTORS = [2.0**-14, 1.0, 2.0**16]
MANY = 2.0**26


def surely(z: Tensor, y: Tensor, reduction: str = "sum") -> Tensor:
    return torch.nn.functional.cross_entropy(z, y, reduction=reduction)


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
    exact = [t.detach().double().requires_grad_() for t in (x, w)]
    (factor * oracle(*exact, y)).backward()
    inputs = (x, w) if "frozen" not in name else (x,)
    grads = torch.autograd.grad(factor * LOSSES[name](x, w, y), inputs)
    for grad, t in zip(grads, exact, strict=False):
        assert t.grad is not None
        rounded = relative_error(t.grad.half(), t.grad)  # what no float16 gradient can do without
        assert relative_error(grad, t.grad) < 2 * rounded + 4e-4


@pytest.mark.parametrize("options", [None, SMALL, HeadOptions(gradient="recompute")])
def test_what_is_too_large_before_a_small_factor(options: HeadOptions | None) -> None:
    x, w, y = confident(12, 64, 40, 0.5)
    exact = [t.detach().double().requires_grad_() for t in (x, w)]
    factor, heavy = 2.0**-14, torch.full((12,), 1e6)
    (factor * oracle(*exact, y, reduction="sum", token_weight=heavy)).backward()
    loss = linear_cross_entropy(x, w, y, reduction="sum", token_weight=heavy, options=options)
    for grad, t in zip(torch.autograd.grad(factor * loss, (x, w)), exact, strict=True):
        assert t.grad is not None
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


def test_lifts() -> None:
    x = torch.tensor([0.0, 1e-44, 3e-38, 1.0, 16383.0, 3e38, torch.inf, torch.nan])
    lift = lift_of(x)
    assert lift.isfinite().all()
    assert torch.equal(lift[[0, 6, 7]], torch.ones(3))
    top = x[3:6] * lift[3:6]
    assert ((top >= 2**13) & (top < 2**14)).all()
    assert (x * lift)[:6].half().isfinite().all()
    assert torch.equal(lift_of_rows(torch.empty(3, 0)), torch.ones(3))
    tiny = torch.tensor([2.0**-120, 2.0**-140, 0])
    assert 2.0**-3 <= tiny.max() * weight_lift(tiny, torch.tensor(2.0**10)) * 2.0 ** (10 - 14) < 2.0**-2


def test_no_width_at_all() -> None:
    """D = 0: the logits are the bias."""
    for dtype in (torch.half, torch.bfloat16, torch.float32):
        x, w = torch.empty(3, 0, dtype=dtype, requires_grad=True), torch.empty(5, 0, dtype=dtype, requires_grad=True)
        b, y = torch.randn(5).to(dtype).requires_grad_(), torch.tensor([0, 4, 2])
        calls: list[Any] = [
            lambda x=x, w=w, b=b, y=y: linear_cross_entropy(x, w, y, linear_bias=b),
            lambda x=x, w=w, b=b, y=y: -linear_logprobs(x, w, y, linear_bias=b).mean(),
            lambda x=x, w=w, b=b, y=y: linear_apply(surely, x, w, y, linear_bias=b, out="sum") / 3,
        ]
        exact = b.detach().double().requires_grad_()
        loss = torch.nn.functional.cross_entropy(exact.expand(3, 5), y)
        loss.backward()
        for call in calls:
            got = call()
            assert abs(got.item() - loss.item()) < 1e-5
            grad_x, grad_w, grad_b = torch.autograd.grad(got, (x, w, b))
            assert grad_x.shape == x.shape
            assert grad_w.shape == w.shape
            assert exact.grad is not None
            assert relative_error(grad_b, exact.grad) < 1e-2
