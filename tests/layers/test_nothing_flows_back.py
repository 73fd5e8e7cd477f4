"""What nothing was computed of, or a function further on gives no gradient for, gets None as from PyTorch's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lowtide import swiglu_mlp
from lowtide.layers import add_rms_norm, rms_norm, rotary


class Nothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> None:
        return None


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "rms_norm": lambda x, w: rms_norm(x, w[0], 1e-5),
    "add_rms_norm": lambda x, w: add_rms_norm(x, 2 * x, w[0], 1e-5)[0],
    "swiglu_mlp, level 0": lambda x, w: swiglu_mlp(x, w, w, w.T, checkpoint_level=0),
    "swiglu_mlp, level 1": lambda x, w: swiglu_mlp(x, w, w, w.T, checkpoint_level=1),
    "rotary": lambda x, w: rotary(x[None, None], x[None, None], *torch.randn(2, 1, *x.shape))[0],
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_no_gradient_from_further_on(name: str) -> None:
    x, w = leaf(4, 8), leaf(6, 8)
    Nothing.apply(FUNCTIONS[name](x, w)).sum().backward()  # type: ignore[no-untyped-call]
    assert x.grad is None
    assert w.grad is None


@pytest.mark.parametrize("used", [0, 1])
def test_one_side_of_the_rotation(used: int) -> None:
    sides = leaf(2, 2, 5, 8), leaf(2, 1, 5, 8)
    angles = torch.randn(1, 5, 8)
    rotary(*sides, angles.cos(), angles.sin())[used].square().sum().backward()
    assert sides[1 - used].grad is None
    exact = sides[used].detach().double().requires_grad_()
    half = torch.cat((-exact[..., 4:], exact[..., :4]), -1)
    (exact * angles.double().cos() + half * angles.double().sin()).square().sum().backward()
    torch.testing.assert_close(sides[used].grad.double(), exact.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("used", [0, 1])
def test_one_of_the_norm_and_the_sum(used: int) -> None:
    x, residual, weight = leaf(3, 8), leaf(3, 8), leaf(8)
    add_rms_norm(x, residual, weight, 1e-5)[used].square().sum().backward()
    exact = [t.detach().double().requires_grad_() for t in (x, residual, weight)]
    total = exact[0] + exact[1]
    normed = torch.nn.functional.rms_norm(total, (8,), exact[2], 1e-5)
    (normed, total)[used].square().sum().backward()
    for got, want in zip((x, residual), exact, strict=False):
        torch.testing.assert_close(got.grad.double(), want.grad, rtol=1e-5, atol=1e-5)
    if used == 0:
        torch.testing.assert_close(weight.grad.double(), exact[2].grad, rtol=1e-5, atol=1e-5)
