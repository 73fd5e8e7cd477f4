"""The gradient of a trained ``logit_scale``, in every function that takes one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lowtide import linear_apply, linear_cross_entropy, linear_logprobs, linear_token_stats
from support import assert_near, head, relative_error


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
    assert b is not None
    leaves = [x, w, b, torch.tensor(scale, dtype=torch.promote_types(dtype, torch.float32), requires_grad=True)]
    exact = [t.detach().double().requires_grad_() for t in leaves]
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
    assert b is not None
    exact = [(700 * x).half(), (w / 3000).half(), (b / 100).half(), torch.tensor(100.0)]
    leaves = [t.detach().clone().requires_grad_() for t in exact]
    exact = [t.detach().double().requires_grad_() for t in leaves]
    assert_near(grads(ours, leaves, y, 0.5, whole=False), grads(plain, exact, y, 0.5, whole=True), 2e-3)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_alone_and_beside_a_bias_of_minus_infinity(name: str) -> None:
    ours, plain = FUNCTIONS[name]
    x, w, b, y = head(20, 8, 33)
    assert b is not None
    with torch.no_grad():
        b[32] = -torch.inf
    y = y.clamp(max=31)
    s = torch.tensor(1.3, requires_grad=True)
    got = torch.autograd.grad(ours(x.detach(), w.detach(), y, b, s), (b, s))
    exact = [t.detach().double().requires_grad_() for t in (b, s)]
    true = torch.autograd.grad(plain(F.linear(x.double(), w.double(), exact[0]) * exact[1], y), exact)
    assert not true[1].isfinite()  # 0 times -inf
    exact = [b.detach()[:32].double().requires_grad_(), exact[1]]
    true = torch.autograd.grad(plain(F.linear(x.double(), w[:32].double(), exact[0]) * exact[1], y), exact)
    assert relative_error(got[0][:32], true[0]) < 1e-5
    assert relative_error(got[1], true[1]) < 1e-5
