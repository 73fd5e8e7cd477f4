"""Elementary functions beside float64, in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
import triton
import triton.language as tl

from lowtide.head.kernels import elementary

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INF, NAN = torch.inf, torch.nan
TINY = [0.0, 1.2e-38, 1e-30, 1e-20, 3e-8, 5.9e-8, 6e-8, 1.2e-7, 1e-7, 1e-6, 1e-5, 1e-3, 0.1, 0.19, 0.21, 0.7, 1.0, 1.7]
HUGE = [3.0, 8.0, 9.5, 16.0, 80.0, 87.0, 103.0, 105.0, 1e3, 1e10, 2.0**64, 3.4e38, INF, NAN]

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter computes in NumPy


@triton.jit  # type: ignore[untyped-decorator]
def _each(x_ptr, out_ptr, WHICH: tl.constexpr, N: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, N)
    x = tl.load(x_ptr + at)
    if WHICH == "tanh":
        out = elementary.tanh(x)
    elif WHICH == "log1p":
        out = elementary.log1p(x)
    else:
        out = elementary.expm1(x)
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


def test_log1p_of_what_takes_from_one() -> None:
    x = -torch.cat((torch.logspace(-12, -1, 31, device=DEVICE), torch.tensor([0.5], device=DEVICE)))
    out = torch.zeros_like(x)
    _each[(1,)](x, out, WHICH="log1p", N=len(x))
    torch.testing.assert_close(out.double(), x.double().log1p(), rtol=5e-7, atol=0)
