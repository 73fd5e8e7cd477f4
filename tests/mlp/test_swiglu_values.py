"""swiglu_mlp against float64 from its definition: no dtype errs more than plain PyTorch in the same dtype."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lowtide import swiglu_mlp
from lowtide.mlp import elementwise
from mlp.calls import call, in_float64, plain_mlp
from support import every_pair, mlp, mlp_oracle, mlp_slack, relative_error

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
LEVELS_AND_TILES = list(itertools.product((0, 1), (None, 1, 4)))


def everything(y: Tensor, leaves: list[Any], upstream: Tensor) -> list[Tensor]:
    return [y.detach(), *torch.autograd.grad(y, [t for t in leaves if t is not None], upstream.to(y.dtype))]


@every_pair(
    dtype=DTYPES,
    activation=["silu", "gelu_tanh"],
    bias=[True, False],
    shape=[((), 7, 5), ((1,), 3, 1), ((2, 5), 7, 11), ((3, 1, 13), 33, 70)],
)
def test_values_and_gradients(dtype: torch.dtype, activation: str, bias: bool, shape: Any) -> None:
    torch.manual_seed(0)
    leaves = mlp(*shape, dtype=dtype, bias=bias)
    true = in_float64(leaves)
    upstream = torch.randn(leaves[0].shape, dtype=torch.float64).to(dtype)
    expected = everything(mlp_oracle(true, activation), true, upstream)
    plain = everything(plain_mlp(leaves, activation), leaves, upstream)
    for level, tile in LEVELS_AND_TILES:
        y = call(leaves, activation=activation, checkpoint_level=level, tile_tokens=tile)
        assert y.dtype == dtype
        assert y.shape == leaves[0].shape
        for got, p, e in zip(everything(y, leaves, upstream), plain, expected, strict=True):
            assert got.dtype == dtype
            assert relative_error(got, e) <= 1.3 * relative_error(p, e) + mlp_slack(dtype, leaves)


def test_no_tokens() -> None:
    for level, tile in LEVELS_AND_TILES:
        leaves = mlp((2, 0), 7, 11)
        y = call(leaves, checkpoint_level=level, tile_tokens=tile)
        assert y.shape == (2, 0, 7)
        y.sum().backward()
        assert leaves[0].grad.shape == (2, 0, 7)
        assert all(torch.equal(t.grad, torch.zeros_like(t)) for t in leaves[1:])


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_gates_of_any_size(activation: str, dtype: torch.dtype) -> None:
    """Far out the activation is its argument or 0, and its derivative 1 or 0: no overflow on the way."""
    a = torch.tensor([-1e30, -1e13, -3e4, -90.0, -20.0, -5.0, 0.0, 5.0, 20.0, 90.0, 3e4, 1e13, 1e30], dtype=dtype)
    one = torch.ones(1, 1, dtype=dtype)
    for level in (0, 1):
        x = torch.stack((a, torch.ones_like(a)), 1).requires_grad_()
        first, second = torch.tensor([[1.0, 0.0]], dtype=dtype), torch.tensor([[0.0, 1.0]], dtype=dtype)
        down = torch.cat((one, 0 * one), 0)
        y = swiglu_mlp(x, first, second, down, activation=activation, checkpoint_level=level)
        (grad,) = torch.autograd.grad(y[:, 0].sum(), x)
        exact = a.detach().double().clamp(-1e4, 1e4).requires_grad_()
        act = F.silu(exact) if activation == "silu" else F.gelu(exact, approximate="tanh")
        (slope,) = torch.autograd.grad(act.sum(), exact)
        inside = a.abs() < 1e4
        tolerance = {"rtol": 4 * torch.finfo(dtype).eps, "atol": 1e-30}
        # PyTorch's own tanh cancels where GELU is about -1e-6
        tolerance |= {"atol": 1e-5} if activation == "gelu_tanh" else {}
        torch.testing.assert_close(y[inside, 0].double(), act[inside], **tolerance)
        torch.testing.assert_close(grad[:, 0].double(), slope, **tolerance)
        torch.testing.assert_close(y[~inside, 0], a[~inside].clamp(min=0))


def test_a_poisoned_token_stays_its_own() -> None:
    leaves = mlp((2, 9), 7, 11)
    with torch.no_grad():
        leaves[0][1, 3] = torch.nan
    for level, tile in LEVELS_AND_TILES:
        y = call(leaves, checkpoint_level=level, tile_tokens=tile)
        (dx,) = torch.autograd.grad(y, leaves[0], torch.randn(y.shape))
        for rows in (y, dx):
            assert rows[1, 3].isnan().all()
            assert rows.isnan().sum() == 7


@pytest.mark.parametrize("kind", ["transposed", "every second", "expanded rows", "expanded columns", "sliced"])
def test_strides(kind: str) -> None:
    x, *rest = mlp((6, 8), 6, 10, dtype=torch.float64)
    strided = {
        "transposed": lambda: x.detach().transpose(0, 2).contiguous().transpose(0, 2),
        "every second": lambda: torch.randn(6, 8, 12, dtype=torch.float64)[..., ::2],
        "expanded rows": lambda: torch.randn(6, dtype=torch.float64).expand(6, 8, 6),
        "expanded columns": lambda: torch.randn(6, 8, 1, dtype=torch.float64).expand(6, 8, 6),
        "sliced": lambda: torch.randn(6, 20, 9, dtype=torch.float64)[:, 3:11, 1:7],
    }[kind]()
    strided.requires_grad_()
    weights = [t.detach().T.contiguous().T.requires_grad_() if t.dim() == 2 else t for t in rest]
    weights[0] = torch.randn(20, 12, dtype=torch.float64)[::2, ::2].requires_grad_()
    leaves = [strided, *weights]
    copies = [t.detach().contiguous().clone().requires_grad_() for t in leaves]
    for upstream in (
        torch.randn(8, 6, 6).transpose(0, 1).double(),
        torch.ones((), dtype=torch.float64).expand(6, 8, 6),
    ):
        expected = everything(mlp_oracle(copies), copies, upstream)
        for level, tile in LEVELS_AND_TILES:
            got = everything(call(leaves, checkpoint_level=level, tile_tokens=tile), leaves, upstream)
            torch.testing.assert_close(got, expected)


def test_pieces_of_rows_are_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    leaves = mlp(13, 7, 11, dtype=torch.float64)
    upstream = torch.randn(13, 7)
    whole = everything(call(leaves), leaves, upstream)
    monkeypatch.setattr(elementwise, "PIECE", 25)
    # vector units take the ends of rows in another way
    torch.testing.assert_close(everything(call(leaves), leaves, upstream), whole, rtol=1e-14, atol=1e-14)


def test_tiles_sum_narrow_gradients_in_float32() -> None:
    """As near to float64 as without tiles, over several draws: of one, an error may be small by chance."""
    squares = torch.zeros(2, 5)
    for _ in range(8):
        leaves = mlp(512, 16, 24, dtype=torch.bfloat16, bias=False)
        true = in_float64(leaves)
        upstream = torch.randn(512, 16).bfloat16()
        expected = everything(mlp_oracle(true), true, upstream)
        errors = [
            [relative_error(g, e) for g, e in zip(everything(y, leaves, upstream), expected, strict=True)]
            for y in (call(leaves), call(leaves, tile_tokens=2))
        ]
        squares += torch.tensor(errors) ** 2
    whole, tiled = squares.sqrt()
    assert torch.all(tiled < 1.2 * whole), (tiled, whole)
