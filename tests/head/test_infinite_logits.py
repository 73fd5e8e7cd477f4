"""Rows whose logits are infinite: their logsumexp is PyTorch's."""

from __future__ import annotations

import pytest
import torch

from lowtide import linear_token_stats
from lowtide.head.terms.statistics import lse_of, row_sums


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_logsumexp(dtype: torch.dtype) -> None:
    x, w = torch.randn(4, 8).to(dtype), torch.randn(11, 8).to(dtype)
    for fill, places in ((-torch.inf, slice(None)), (-torch.inf, slice(3, None)), (torch.inf, 2), (torch.nan, 4)):
        b = torch.zeros(11, dtype=dtype)
        b[places] = fill
        z = torch.nn.functional.linear(x.double(), w.double(), b.double())
        lse = linear_token_stats(x, w, want=("lse",), linear_bias=b).lse
        torch.testing.assert_close(lse.double(), z.logsumexp(-1), equal_nan=True, rtol=1e-5, atol=1e-5)


def test_infinite_rows_beside_others() -> None:
    z = torch.randn(5, 33)
    z[0], z[1, 4], z[2, 7] = -torch.inf, torch.inf, torch.nan
    z[3, 1:] = -torch.inf
    torch.testing.assert_close(lse_of(row_sums(z.clone(), 8)), z.logsumexp(1), equal_nan=True)
