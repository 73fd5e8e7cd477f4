"""What all functions of the layers promise of their gradients: who gets one, again, checkpointed, compiled, refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lowtide.errors import UnsupportedError
from lowtide.layers import add_rms_norm, rms_norm, rotary

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # the interpreter computes in NumPy
    pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning"),  # torch's own forward mode, and dynamo
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]


@dataclass(frozen=True)
class Function:
    """A function of tensors of these shapes (T: any length), the first ``trained`` of which get gradients."""

    call: Callable[..., Any]
    shapes: Callable[[int], list[tuple[int, ...]]]
    trained: int
    instead: str

    def leaves(self, T: int = 3) -> list[Tensor]:
        g = torch.Generator().manual_seed(T)
        shapes = self.shapes(T)
        return [torch.randn(*s, generator=g).requires_grad_(i < self.trained) for i, s in enumerate(shapes)]

    def loss(self, *tensors: Tensor) -> Tensor:
        out = self.call(*tensors)
        outs = out if isinstance(out, tuple) else (out, out)
        return (outs[0].square().sum(1) * outs[1].sum(1)).sum()


STOCK = r"rms_norm: expected reverse-mode.*torch\.nn\.functional\.rms_norm"
FUNCTIONS = {
    "rms_norm": Function(lambda x, w: rms_norm(x, w, 1e-5, offset=1.0), lambda T: [(2, T, 24), (24,)], 2, STOCK),
    "add_rms_norm": Function(
        lambda x, r, w: add_rms_norm(x, r, w, 1e-5), lambda T: [(2, T, 24), (2, T, 24), (24,)], 3, STOCK
    ),
    "rotary": Function(
        rotary, lambda T: [(2, 3, T, 8), (2, 2, T, 8), (1, T, 6), (1, T, 6)], 2,
        r"rotary: expected reverse-mode.*rotate_half",
    ),
}  # fmt: skip


@pytest.fixture(params=FUNCTIONS)
def function(request: pytest.FixtureRequest) -> Function:
    return FUNCTIONS[request.param]


def test_only_what_needs_a_gradient_gets_one(way: str, function: Function) -> None:
    whole = function.leaves()
    expected = torch.autograd.grad(function.loss(*whole), whole[: function.trained])
    for needs in product((True, False), repeat=function.trained):
        tensors = [t.detach().requires_grad_(need) for t, need in zip(whole, (*needs, False, False), strict=False)]
        loss = function.loss(*tensors)
        assert loss.requires_grad == any(needs)
        if any(needs):
            loss.backward()
        for tensor, need, e in zip(tensors, needs, expected, strict=False):
            assert (tensor.grad is not None) == need
            if tensor.grad is not None:
                torch.testing.assert_close(tensor.grad, e)


def test_again_and_checkpointed_it_is_bitwise_the_same(way: str, function: Function) -> None:
    tensors = function.leaves(65)
    trained = tensors[: function.trained]
    loss = function.loss(*tensors)
    first = torch.autograd.grad(loss, trained, retain_graph=True)
    again = torch.autograd.grad(loss, trained)
    recomputed = torch.autograd.grad(checkpoint(function.loss, *tensors, use_reentrant=False), trained)
    for a, b, c in zip(first, again, recomputed, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)


def test_second_derivative_is_an_error(way: str, function: Function) -> None:
    tensors = function.leaves()
    (dx,) = torch.autograd.grad(function.loss(*tensors), tensors[0], create_graph=True)
    with pytest.raises(UnsupportedError, match="second derivative"):
        dx.sum().backward()


def test_transforms_and_forward_mode_are_errors_that_name_the_way_out(way: str, function: Function) -> None:
    """A kernel sees numbers alone: the derivative of a tensor that carries one would be lost in silence."""
    stock = [t.detach() for t in function.leaves()]
    with pytest.raises(UnsupportedError, match=function.instead):
        torch.func.vmap(lambda x: function.call(x, *stock[1:]))(stock[0][None])
    for i, tensor in enumerate(stock):
        with torch.autograd.forward_ad.dual_level():
            tensors = list(stock)
            tensors[i] = torch.autograd.forward_ad.make_dual(tensor, torch.ones_like(tensor))
            with pytest.raises(UnsupportedError, match="forward-mode"):
                function.call(*tensors)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiles_whole_and_for_any_length(backend: str, function: Function) -> None:
    compiled = torch.compile(function.loss, backend=backend, fullgraph=True, dynamic=True)
    for T in (5, 9):
        tensors = function.leaves(T)
        got, want = (torch.autograd.grad(f(*tensors), tensors[: function.trained]) for f in (compiled, function.loss))
        torch.testing.assert_close(got, want)


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


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
