"""The kernels over rows that pairs list, in tiles larger and smaller: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from head.kernels.rows import DEVICE, DTYPE, NAN, apart
from lowtide.head.kernels.support_rows import Sorted, Tiles, input_grad, run_length, score, weight_grad
from support import relative_error

N, D, V = 13, 41, 30
SMALL, LARGE = Tiles(pairs=2, columns=16, slice=32, warps=1), Tiles(pairs=16, columns=64, slice=128, warps=4)
NEAR = 1e-6 if torch.float32 == DTYPE else 1e-3
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter computes in NumPy


def pairs(K: int, ragged: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return ids, a third of them none, each one's token, and where tokens' ids begin if these are not K each."""
    g = torch.Generator().manual_seed(K)
    ids = torch.randint(0, V // 2, (N, K), generator=g)  # the other half is in no set
    ids[torch.rand(N, K, generator=g) < 0.3] = -1
    ids[:, 0] = 3  # a class of every token
    if not ragged:
        return ids.view(-1).int().to(DEVICE), torch.arange(N, device=DEVICE).repeat_interleave(K), None
    lengths = torch.randint(0, K + 1, (N,), generator=g)
    lengths[2] = 0
    token = torch.arange(N).repeat_interleave(lengths)
    starts = torch.cat((lengths.new_zeros(1), lengths.cumsum(0)))
    flat = torch.cat([row[:n] for row, n in zip(ids, lengths.tolist(), strict=True)])
    return flat.int().to(DEVICE), token.to(DEVICE), starts.to(DEVICE)


@pytest.mark.parametrize("tiles", [SMALL, LARGE])
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("K", [1, 7, 20])
def test_products_with_listed_rows(K: int, ragged: bool, tiles: Tiles) -> None:
    ids, token, starts = pairs(K, ragged)
    x, w = apart(torch.randn(N, D)), apart(torch.randn(V, D))
    listed = ids[ids >= 0].long().unique()
    others = torch.ones(V, dtype=torch.bool, device=DEVICE)
    others[listed] = False
    w[others] = NAN
    rows = w[ids.long().clamp(min=0)].double().nan_to_num() * (ids >= 0)[:, None]
    got = score(x, w, ids, starts, K, tiles=tiles).sum(0)
    want = (rows * x[token].double()).sum(1)
    assert relative_error(got, want) < NEAR
    assert (got[ids < 0] == 0).all()
    whole = score(x, w, ids, starts, K, most=1, tiles=tiles)
    assert whole.shape == (1, len(ids))  # a float32 of each pair
    assert relative_error(whole[0], want) < NEAR
    here = (ids >= 10) & (ids < 20)  # a shard's
    assert torch.equal(score(x, w[10:20], ids, starts, K, first=10, tiles=tiles).sum(0), got.where(here, 0))
    c = torch.randn(len(ids), device=DEVICE)
    c[ids < 0] = 0
    dx = torch.full((N, D), NAN, dtype=DTYPE, device=DEVICE)
    input_grad(c, w, ids, starts, K, dx, DTYPE, tiles=tiles)
    exact = torch.zeros(N, D, dtype=torch.float64, device=DEVICE).index_add_(0, token, c[:, None] * rows)
    assert relative_error(dx, exact) < max(NEAR, 2 * torch.finfo(DTYPE).eps)


@pytest.mark.parametrize("tiles", [SMALL, LARGE])
@pytest.mark.parametrize("run", [2, 8, None])
@pytest.mark.parametrize("compact", [False, True])
def test_sums_of_classes(run: int | None, compact: bool, tiles: Tiles) -> None:
    """A frequent class has several whole runs; the order of sums is of the pairs alone."""
    ids, token, _ = pairs(9, ragged=False)
    x, c = apart(torch.randn(N, D)), torch.randn(len(ids), device=DEVICE)
    x[5] = NAN  # to which nothing flows back
    c[(token == 5) | (ids < 0)] = 0
    order = ids.sort(stable=True).indices
    in_order = Sorted(ids[order], token[order].int(), order.int(), c)
    starts = torch.searchsorted(in_order.ids, torch.arange(V + 1, dtype=torch.int32, device=DEVICE))
    listed = ids[ids >= 0].long().unique()
    unlisted = torch.ones(V, dtype=torch.bool, device=DEVICE)
    unlisted[listed] = False
    slot = torch.zeros(V, dtype=torch.int64, device=DEVICE)
    slot[torch.cat((listed, unlisted.nonzero()[:, 0]))] = torch.arange(V, device=DEVICE)
    slots, size = (slot, len(listed) + 2) if compact else (None, V)  # two rows more than there are classes
    out = torch.full((size, D), NAN, device=DEVICE)
    bias = torch.zeros(V, device=DEVICE)
    per_pair = c[:, None].double() * x[token].double().nan_to_num()
    exact = torch.zeros(V, D, dtype=torch.float64, device=DEVICE)
    exact.index_add_(0, ids.long().clamp(min=0), per_pair)
    for times in (1, 2):
        weight_grad(x, in_order, starts, slots, out, bias, add=times > 1, tiles=tiles, run=run)
        want = times * (exact[listed] if compact else exact)
        assert relative_error(out[: len(want)], want) < 1e-6
        assert (out[len(want) :] == 0).all()
        of_bias = torch.zeros(V, dtype=torch.float64, device=DEVICE).index_add_(0, ids.long().clamp(min=0), c.double())
        assert relative_error(bias, times * of_bias) < 1e-6
    assert compact or (out[unlisted] == 0).all()


def test_parts_stay_few() -> None:
    assert run_length(0) == run_length(10**6) == 256
    assert [P // run_length(P) <= 4096 for P in (10**6, 2**24, 10**8)] == [True] * 3
