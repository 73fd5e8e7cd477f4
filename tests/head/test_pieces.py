"""The pieces of float32 matrices: what they add up to, their products against float64, and which tensors are casts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lowtide.head.pieces import RAW, is_cast, most_places, multiply_into, places_of, side_by_side

BF16 = torch.bfloat16


@pytest.fixture(params=["torch", "kernel"])
def split(request: pytest.FixtureRequest) -> Callable[[Tensor, tuple[int, ...], int], Tensor]:
    """`side_by_side` in plain PyTorch, and by its kernel; Triton's interpreter rounds towards zero."""
    if request.param == "torch":
        return side_by_side
    kernel = pytest.importorskip("lowtide.head.kernels.pieces").put_pieces

    def by_kernel(x: Tensor, places: tuple[int, ...], inner: int) -> Tensor:
        x = x.cuda() if torch.cuda.is_available() else x
        sizes = [size * len(places) if axis == inner else size for axis, size in enumerate(x.shape)]
        out = x.new_empty(sizes, dtype=BF16)
        kernel(x, out, places, inner)
        return out.cpu()

    return by_kernel


def numbers(*size: int, seed: int = 0) -> Tensor:
    """Return float32 numbers of many magnitudes."""
    g = torch.Generator().manual_seed(seed)
    return torch.randn(size, generator=g) * 10 ** (3 * torch.randn(size, generator=g))


@pytest.mark.parametrize("inner", [0, 1])
@pytest.mark.parametrize("size", [(5, 33), (1, 1), (3, 1500), (0, 4), (4, 0)])
def test_three_pieces_are_the_number_and_each_is_a_256th(split: Any, size: tuple[int, int], inner: int) -> None:
    x = numbers(*size)
    found = split(x, (0, 1, 2), inner)
    first, second, third = found.view(3, *size) if inner == 0 else found.view(size[0], 3, size[1]).unbind(1)
    assert torch.equal(first.double() + second.double() + third.double(), x.double())
    assert (second.abs().double() <= first.abs().double() * 2**-7).all()
    assert (third.abs().double() <= first.abs().double() * 2**-15).all()


def test_pieces_at_the_ends_of_float32s_range(split: Any) -> None:
    """A number that would round to infinity is split; what is not finite is itself, alone, and 0 in all others."""
    tiny = torch.finfo(torch.float32).tiny
    x = torch.tensor([[3.4028234e38, -3.4e38, 2.0**-100, 0.0, -0.0, float("inf"), -float("inf"), float("nan")]])
    found = split(x, (2, 1, 0, RAW), 0).double()
    assert torch.equal(found[:3, :5].sum(0), x[0, :5].double())
    assert torch.equal(found[3, :7], torch.cat((found[2, :5], x[0, 5:7].double())))
    assert found[3, 7].isnan()
    assert (found[:3, 5:] == 0).all()
    if split is not side_by_side and not torch.cuda.is_available():
        return  # Triton's interpreter has no subnormal bfloat16 numbers
    small = split(torch.tensor([[1.37 * tiny, -1e-40]]), (0, 1, 2), 0).double().sum(0)
    assert (small - torch.tensor([1.37 * tiny, -1e-40]).double()).abs().max() <= 2.0**-133


def test_a_matrix_of_any_strides_is_split(split: Any) -> None:
    x = numbers(6, 10, seed=1)
    for given in (x, x.T, x[:, 2:9], x[:, ::3].contiguous(), x[1:5, 3:]):
        assert torch.equal(side_by_side(given, (1, 0, 2), 1), side_by_side(given.contiguous(), (1, 0, 2), 1))
        rows = given if given.stride(1) == 1 else given.T
        assert torch.equal(split(rows, (1, 0, 2), 0), split(rows.contiguous(), (1, 0, 2), 0))


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("known", [(False, False), (True, False), (False, True), (True, True)])
def test_each_product_that_is_left_out_is_a_power_of_256(n: int, known: tuple[bool, bool]) -> None:
    """The error against float64, in units of the sum of all products' magnitudes; float32's own GEMM beside three."""
    g = torch.Generator().manual_seed(n)
    a, b = torch.randn(40, 500, generator=g), torch.randn(500, 30, generator=g)
    a, b = (x.to(BF16).float() if of else x for x, of in zip((a, b), known, strict=True))
    counts = [1 if of else n for of in known]
    exact, size = a.double() @ b.double(), a.abs().double() @ b.abs().double()
    out = torch.full((40, 30), torch.nan)
    multiply_into(a, b, out, places_of(n, *counts), add=False)
    error = ((out - exact).abs() / size).max()
    of_float32 = (((a @ b) - exact).abs() / size).max()
    left_out = 0.0 if all(known) else 2.0 ** (-8 * n)
    assert error <= left_out + 2 * of_float32
    if n < 3 and not all(known):
        assert error > left_out / 100, "what is left out shows"
    multiply_into(a, b, out, places_of(n, *counts), add=True)
    assert ((out - 2 * exact).abs() / size).max() <= 2 * left_out + 5 * of_float32


def test_as_many_products_as_are_needed() -> None:
    assert [len(places_of(n, n, n).left) for n in (1, 2, 3)] == [most_places(n) for n in (1, 2, 3)] == [1, 3, 6]
    assert len(places_of(3, 1, 3).left) == len(places_of(3, 3, 1).left) == 3
    assert places_of(3, 1, 1) == places_of(1, 1, 1) == ((RAW,), (RAW,))
    for n in (1, 2, 3):
        left, right = places_of(n, n, n)
        orders = [(i % RAW) + (j % RAW) for i, j in zip(left, right, strict=True)]
        assert orders == sorted(orders, reverse=True), "the smallest first"
        assert len(set(zip(left, right, strict=True))) == len(left)


@pytest.mark.parametrize("n", [2, 3])
def test_what_is_not_finite_is_as_a_float32_gemm_has_it(n: int) -> None:
    a, b = numbers(9, 12).clamp(-1e6, 1e6), numbers(12, 8, seed=1).clamp(-1e6, 1e6)
    a[0, 1], a[1, 2], a[2, 3], b[4, 0], b[5, 1] = torch.inf, -torch.inf, torch.nan, torch.inf, torch.nan
    a[3, 4], b[1, 2], b[1, 3] = 0, 0, 1.5  # 0 times infinity; and bfloat16 numbers, whose later pieces are 0
    out = torch.empty(9, 8)
    multiply_into(a, b, out, places_of(n, n, n), add=False)
    exact = a @ b
    strange = ~exact.isfinite()
    assert strange.any()
    assert not strange.all()
    torch.testing.assert_close(out[strange], exact[strange], rtol=0, atol=0, equal_nan=True)
    assert out[~strange].isfinite().all()


def test_no_inner_dimension() -> None:
    out = torch.ones(2, 3)
    multiply_into(torch.empty(2, 0), torch.empty(0, 3), out, places_of(3, 3, 3), add=True)
    assert (out == 1).all()
    multiply_into(torch.empty(2, 0), torch.empty(0, 3), out, places_of(3, 3, 3), add=False)
    assert (out == 0).all()


CASTS: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {  # of a bfloat16 tensor [6, 4] with a graph
    "float": (lambda t: t.float(), True),
    "to": (lambda t: t.to(torch.float32), True),
    "rows": (lambda t: t.float()[torch.tensor([True, False] * 3)], True),
    "a view of it": (lambda t: t.float().view(2, 3, 4)[:, :-1], True),
    "the cast of a view": (lambda t: t.T.float(), True),
    "reshaped": (lambda t: t.view(2, 3, 4).float()[:, :-1].reshape(-1, 4), True),
    "cast there and back": (lambda t: t.float().bfloat16().float(), True),
    "computed since": (lambda t: t.float() * 1.5, False),
    "a sum": (lambda t: t.float() + t.float(), False),
    "of float16": (lambda t: t.half().float(), False),
    "of float64": (lambda t: t.double().float(), False),
    "detached": (lambda t: t.float().detach(), False),
    "cast without a graph": (lambda t: t.detach().float(), False),
    "a leaf": (lambda t: t.detach().float().requires_grad_(), False),
    "still bfloat16": (lambda t: t, False),
}


@pytest.mark.parametrize("leaf", [True, False])
@pytest.mark.parametrize("name", CASTS)
def test_a_cast_is_known_by_its_graph(name: str, leaf: bool) -> None:
    t = torch.randn(6, 4, dtype=BF16, requires_grad=True)
    cast, known = CASTS[name]
    assert is_cast(cast(t if leaf else t * 2)) == known


def test_a_cast_that_was_written_to_is_none() -> None:
    t = torch.randn(6, 4, dtype=BF16, requires_grad=True)
    for write in (lambda x: x.mul_(1.1), lambda x: x[:2].mul_(1.1), lambda x: x.view(-1).add_(0.1)):
        for grad in (True, False):
            x = t.float()
            with torch.set_grad_enabled(grad):
                write(x)
            assert not is_cast(x)
            assert not is_cast(x[1:])
    assert not is_cast(None)
    with torch.inference_mode():
        assert not is_cast(torch.randn(2, 2, dtype=BF16).float())
