"""The kernel that puts the gradient of a piece of logits in its place: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

import itertools

import pytest
import torch

pytest.importorskip("triton")
from lowtide.head.kernels.logit_grad import COLUMNS, ROWS_PER_PROGRAM, bias_sums, put_logit_grad

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = [(0, 5), (1, 1), (17, COLUMNS + 3), (ROWS_PER_PROGRAM, 7), (ROWS_PER_PROGRAM + 1, 2 * COLUMNS)]


@pytest.mark.parametrize(("C", "V"), SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("scaled", "summed"), list(itertools.product([False, True], repeat=2)))
@pytest.mark.parametrize("form", ["contiguous", "a column for all", "transposed", "one number"])
def test_scaled_and_summed(C: int, V: int, dtype: torch.dtype, scaled: bool, summed: bool, form: str) -> None:
    g = {
        "contiguous": torch.randn(C, V),
        "a column for all": torch.randn(C, 1).expand(C, V),
        "transposed": torch.randn(V, C).T,
        "one number": torch.randn(()).expand(C, V),
    }[form].to(DEVICE)
    scale = torch.tensor(0.7, device=DEVICE) if scaled else None
    held = torch.full((C, 2 * V + 8), 5.0, dtype=dtype, device=DEVICE)
    sums = bias_sums(C + 2, V, torch.device(DEVICE)) + 1 if summed else None
    put_logit_grad(g, scale, held[:, 4 : V + 4], sums)
    expected = g if scale is None else g * scale
    cut = 2**-7 if DEVICE == "cpu" and dtype == torch.bfloat16 else 0  # the interpreter cuts off where a GPU rounds
    torch.testing.assert_close(held[:, 4 : V + 4], expected.to(dtype), rtol=cut, atol=0)
    assert (held[:, :4] == 5).all()
    assert (held[:, V + 4 :] == 5).all()
    if sums is not None:
        torch.testing.assert_close((sums - 1).sum(0), expected.sum(0), rtol=1e-5, atol=1e-4)


def test_poison_stays_in_its_column() -> None:
    g = torch.randn(40, 600, device=DEVICE)
    g[3, 7], g[39, 599] = torch.nan, torch.inf
    out, sums = torch.empty_like(g, dtype=torch.bfloat16), bias_sums(40, 600, g.device)
    put_logit_grad(g, None, out, sums)
    assert torch.equal((~sums.isfinite()).any(0).nonzero()[:, 0].cpu(), torch.tensor([7, 599]))
    assert torch.equal((~out.isfinite()).nonzero().cpu(), torch.tensor([[3, 7], [39, 599]]))
