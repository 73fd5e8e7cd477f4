"""The kernels over rows that tokens list, in tiles larger and smaller: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from head.kernels.rows import DEVICE, DTYPE, NAN, apart
from lowtide.head.kernels.support_rows import Tiles, input_grad, score, weight_grad
from support import relative_error

N, D, V = 13, 41, 30
SMALL, LARGE = Tiles(pairs=2, columns=16, warps=1), Tiles(pairs=16, columns=64, warps=4)
NEAR = 1e-6 if torch.float32 == DTYPE else 1e-3
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter computes in NumPy


def listed_rows(K: int) -> Tensor:
    """Return rows [N, K], a third of them none; the first is the same of every token, half of all are in no set."""
    g = torch.Generator().manual_seed(K)
    rows = torch.randint(0, V // 2, (N, K), generator=g)
    rows[torch.rand(N, K, generator=g) < 0.3] = -1
    rows[:, 0] = 3
    return rows.int().to(DEVICE)


@pytest.mark.parametrize("tiles", [SMALL, LARGE])
@pytest.mark.parametrize("K", [1, 7, 20])
def test_products_with_listed_rows(K: int, tiles: Tiles) -> None:
    rows = listed_rows(K)
    x, w = apart(torch.randn(N, D)), apart(torch.randn(V, D))
    others = torch.ones(V, dtype=torch.bool, device=DEVICE)
    others[rows[rows >= 0].long().unique()] = False
    w[others] = NAN
    listed = w[rows.long().clamp(min=0)].double().nan_to_num() * (rows >= 0)[..., None]
    z = score(x, w, rows, tiles=tiles)
    assert relative_error(z, (listed * x[:, None].double()).sum(2)) < NEAR
    assert (z[rows < 0] == 0).all()
    c = torch.randn(N, K, device=DEVICE)
    c[rows < 0] = 0
    dx = torch.full((N, D), NAN, dtype=DTYPE, device=DEVICE)
    input_grad(c, w, rows, dx, DTYPE, tiles=tiles)
    exact = (c[..., None].double() * listed).sum(1)
    assert relative_error(dx, exact) < max(NEAR, 2 * torch.finfo(DTYPE).eps)


@pytest.mark.parametrize("tiles", [SMALL, LARGE])
@pytest.mark.parametrize("run", [2, 8, None])
def test_sums_of_classes(run: int | None, tiles: Tiles) -> None:
    """A frequent class has several whole runs."""
    rows = listed_rows(9)
    x, c = apart(torch.randn(N, D)), torch.randn(N, 9, device=DEVICE)
    x[5] = NAN  # to which nothing flows back
    c[5], c[rows < 0] = 0, 0
    out = torch.full((V, D), NAN, device=DEVICE)
    weight_grad(c, x, rows, out, tiles=tiles, run=run)
    per_pair = (c[..., None].double() * x[:, None].double().nan_to_num()).view(-1, D)
    exact = torch.zeros(V, D, dtype=torch.float64, device=DEVICE)
    exact.index_add_(0, rows.view(-1).long().clamp(min=0), per_pair)
    assert relative_error(out, exact) < 1e-6
    assert (out[V // 2 :] == 0).all()
