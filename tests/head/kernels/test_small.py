"""The small kernels: elementary functions, tokens that count, logits' gradients, what scales stored ones.

On a GPU, or in Triton's interpreter.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
import triton
import triton.language as tl

from head.kernels.rows import DEVICE, INF, NAN
from lowtide.head.kernels.elementwise import SCALE_BLOCK, SELECT_BLOCK, expm1, log1p, scale_, select, tanh
from promises import promise
from support import every_pair

CLASSES = 50
pytestmark = [promise("kernels"), pytest.mark.filterwarnings("ignore::RuntimeWarning")]  # the interpreter's NumPy
TINY = [0.0, 1.2e-38, 1e-30, 1e-20, 3e-8, 5.9e-8, 6e-8, 1.2e-7, 1e-7, 1e-6, 1e-5, 1e-3, 0.1, 0.19, 0.21, 0.7, 1.0, 1.7]
HUGE = [3.0, 8.0, 9.5, 16.0, 80.0, 87.0, 103.0, 105.0, 1e3, 1e10, 2.0**64, 3.4e38, INF, NAN]


@triton.jit  # type: ignore[untyped-decorator]
def _each(x_ptr, out_ptr, WHICH: tl.constexpr, N: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, N)
    x = tl.load(x_ptr + at)
    if WHICH == "tanh":
        out = tanh(x)
    elif WHICH == "log1p":
        out = log1p(x)
    else:
        out = expm1(x)
    tl.store(out_ptr + at, out)


@pytest.mark.parametrize(("which", "sign"), [("tanh", 1), ("tanh", -1), ("log1p", 1), ("expm1", -1)])
def test_relative_precision(which: str, sign: int) -> None:
    x = sign * torch.tensor(TINY + HUGE, device=DEVICE)
    out = torch.zeros_like(x)
    _each[(1,)](x, out, WHICH=which, N=len(x))
    want = getattr(x.double(), which)()
    torch.testing.assert_close(out.double(), want, rtol=1.5e-6, atol=0, equal_nan=True)
    if which == "tanh":
        assert out.nan_to_num().abs().max() == 1


@every_pair(
    N=[0, 1, 37, SELECT_BLOCK, 2 * SELECT_BLOCK + 1],
    token_weights=[False, True],
    ignore_index=[-100, 3, 2**40],
)
def test_tokens_that_count(N: int, token_weights: bool, ignore_index: int) -> None:
    target = torch.randint(0, CLASSES, (N,), device=DEVICE)
    target[::5] = ignore_index
    target[1::7] = CLASSES  # no class
    target[2::11] = -1
    weight = torch.rand(N, device=DEVICE) if token_weights else None
    chosen = select(target, CLASSES, ignore_index, weight)
    y, unit, numbers = chosen

    kept = target != ignore_index
    is_class = (target >= 0) & (target < CLASSES)
    inside = target.where(is_class, 0)
    expected = torch.ones(N, device=DEVICE) if weight is None else weight
    assert y.dtype == torch.int32
    assert torch.equal(y.long(), inside.where(kept, -1))
    torch.testing.assert_close(unit, expected.where(is_class, torch.nan).where(kept, 0), rtol=0, atol=0, equal_nan=True)
    order = kept.logical_not().to(torch.uint8).argsort(stable=True)
    of_valid = chosen.valid_first()
    for got, want in zip(of_valid, (y[order], unit[order], order, kept.sum().view(1)), strict=True):
        assert torch.equal(got.nan_to_num(), want.to(got.dtype).nan_to_num())
    assert numbers.sum() == kept.sum()


@every_pair(
    n=[0, 1, 37, SCALE_BLOCK, 2 * SCALE_BLOCK + 1],
    dtype=[torch.float32, torch.float16, torch.float64],
    value=[1.0, 0.0, -2.5, 1 / 3, INF, NAN],
)
def test_a_stored_gradient_is_scaled_in_place(n: int, dtype: torch.dtype, value: float) -> None:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    whole = torch.randn(n + 8, device=DEVICE).to(dtype)
    before = whole.clone()
    factor = torch.tensor(value, dtype=wide, device=DEVICE)
    scale_(whole[4 : n + 4], factor)
    expected = (before[4 : n + 4].to(wide) * factor).to(dtype)
    torch.testing.assert_close(whole[4 : n + 4], expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(whole[:4], before[:4])
    assert torch.equal(whole[n + 4 :], before[n + 4 :])
