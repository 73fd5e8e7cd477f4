"""The kernel that scales a stored gradient, in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
from lowtide.head.kernels.scale import BLOCK, scale_

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("n", [0, 1, 37, BLOCK, 2 * BLOCK + 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
@pytest.mark.parametrize("value", [1.0, 0.0, -2.5, 1 / 3, float("inf"), float("nan")])
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # the interpreter multiplies in NumPy
def test_product_in_place(n: int, dtype: torch.dtype, value: float) -> None:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    whole = torch.randn(n + 8, device=DEVICE).to(dtype)
    before = whole.clone()
    factor = torch.tensor(value, dtype=wide, device=DEVICE)
    scale_(whole[4 : n + 4], factor)
    expected = (before[4 : n + 4].to(wide) * factor).to(dtype)
    torch.testing.assert_close(whole[4 : n + 4], expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(whole[:4], before[:4])
    assert torch.equal(whole[n + 4 :], before[n + 4 :])
