"""The kernels that say which tiles of the softmax are kept and who computes what, in Triton's interpreter."""

import math
import random
from collections import defaultdict

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from lowtide.skip import choice
from lowtide.skip.kernels import lists as listing
from lowtide.skip.kernels import ordered
from skip.emulated import units

ROWS, COLUMNS = 128, 256


def some_flags(R: int, P: int, kind: int, share: float) -> Tensor:
    """Return which tiles are kept: anywhere, unlike numbers in each row, nearly all in few rows, or some columns."""
    drawn = torch.rand(R, P)
    if kind == 0:
        return drawn < share
    if kind == 1:
        return drawn < torch.rand(R, 1) * share
    if kind == 2:
        return drawn < (torch.arange(R)[:, None] <= R // 10) * 0.95 + 0.01
    return (torch.arange(P) < P * share).expand(R, P).clone()


@pytest.mark.parametrize("seed", range(8))
def test_lists_and_shares(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists in order from both sides; every step of E' W is computed once, by programs that have as many."""
    chosen = random.Random(seed)
    R = chosen.choice([1, 2, 7, 33, chosen.randrange(1, 200)])
    P = chosen.choice([1, 2, 127, 129, chosen.randrange(1, 1100)])
    across, programs = chosen.choice([1, 3, 16, chosen.randrange(1, 33)]), chosen.choice([132, 132, 7, 2, 1])
    monkeypatch.setattr(listing, "multiprocessors", lambda device: programs)
    D = across * COLUMNS - chosen.randrange(COLUMNS)
    keep = some_flags(R, P, seed % 4, chosen.choice([0, 0.02, 0.3, 1]))
    total = torch.zeros(2, dtype=torch.int32)
    lists = listing.list_kept(keep.int(), D, total)
    listed = listing.list_tiles(keep.int())
    assert int(listed.number) == keep.sum()
    places = keep.t().nonzero()
    assert torch.equal(listed.tiles[: len(places)].long(), (places[:, 1] << 16) + places[:, 0])

    counts = keep.sum(1).tolist()
    assert total.tolist() == [sum(counts), R * P]
    for side, of_side, flagged in ((lists.across, lists.across_count, keep), (lists.down, lists.down_count, keep.T)):
        assert of_side.tolist() == flagged.sum(1).tolist()
        for listed, number, row in zip(side, of_side, flagged, strict=True):
            assert torch.equal(listed[:number].long(), row.nonzero()[:, 0])

    means, computed, given = -(-P // COLUMNS), defaultdict[int, list[range]](list), dict[int, int]()
    for program, tile, steps, (start, length, share) in units(lists, across, means):
        assert steps
        assert length == counts[tile // across] + means
        computed[tile].append(steps)
        if steps.stop < length:
            assert program not in given
            assert tile == lists.ranges[program, 1], "a part for another program is computed first"
            given[program] = tile
        else:
            assert all(given.pop(other) == tile for other in range(start // share, program))
    assert not given
    assert sorted(computed) == list(range(R * across))
    most = -(-sum(number + means for number in counts) * across // programs)
    for tile, parts in computed.items():
        assert [step for part in parts for step in part] == list(range(counts[tile // across] + means))
        assert max(map(len, parts)) <= most


@pytest.mark.parametrize("accepted", [0.05, 0.3])
def test_which_tiles_are_kept(accepted: float) -> None:
    """The largest, and those with targets, so that the others lose no more: as many as can be left out."""
    C, P, short = 200, 60, 100
    V = P * COLUMNS - short
    sums, squares, s = torch.rand(C, P), torch.rand(C, P) * torch.logspace(0, -9, P), torch.randn(C)
    sums *= squares.sqrt()
    squares[:, -1] *= 1e8
    y = torch.cat((torch.full((30,), 12 * COLUMNS + 3), torch.randint(2 * COLUMNS, V // 2, (C - 30,)))).int()
    y[40::7], s[41::5], squares[41::5] = -1, 0, torch.nan
    sizes = choice.sizes_of_tiles(V, torch.device("cpu"))
    assert sizes.tolist() == [COLUMNS] * (P - 1) + [COLUMNS - short]
    valid, entry = y >= 0, torch.randn(C)
    counts = valid & (s != 0)
    part = (s[:, None].square() * (squares - sums.square() / sizes).clamp(min=0)).where(counts[:, None], 0)
    q = torch.stack([part[:ROWS].sum(0), part[ROWS:].sum(0)])
    whole = (s.square() * (squares.sum(1) + entry.square())).where(counts, 0).sum()
    home = torch.stack(
        [torch.bincount(at.clamp(min=0) // COLUMNS, at >= 0, P) for at in y.where(counts, -1).split(ROWS)]
    )
    mass = torch.full((C, P), torch.nan)
    kept, (dropped, lost, of_all) = choice.choose(sums, squares, y, s, entry, sizes, torch.tensor([accepted]), mass)
    assert 0 < kept.sum() < kept.numel()
    assert kept[home > 0].all()
    others = q[home == 0]
    left_out = ~kept[home == 0]
    assert others[left_out].max() < others[~left_out].min()
    assert 0 < lost <= accepted**2 * whole * (1 + 1e-5)
    assert lost + others[~left_out].min() > accepted**2 * whole * (1 - 1e-5)
    torch.testing.assert_close((lost, of_all), (others[left_out].sum(), whole))
    of_row = (~kept).repeat_interleave(ROWS, 0)[:C]
    assert torch.equal(mass, sums.where(valid[:, None] & of_row, 0))
    torch.testing.assert_close(dropped, (mass * s.abs()[:, None]).sum())


@pytest.mark.parametrize("lies", ["rows", "columns"])
def test_order_and_back(lies: str) -> None:
    """A weight is put in order, whatever its strides, and a gradient back, with what a tile's rows share."""
    V, D, P = 600, 70, 3
    w = torch.randn(V, D) if lies == "rows" else torch.randn(D, V).T
    classes = torch.randperm(V)
    order = torch.cat((torch.tensor([V]), classes)).int()
    in_order, mean, shared, back = torch.empty(V, D), torch.empty(P, D), torch.randn(P, D), torch.empty(V, D)
    ordered.put_in_order(w, order, in_order, mean)
    assert torch.equal(in_order, w[classes])
    assert torch.allclose(mean, torch.stack([tile.mean(0) for tile in in_order.split(COLUMNS)]), atol=1e-6)
    ordered.put_back(in_order, shared, order, back)
    sizes = [len(tile) for tile in in_order.split(COLUMNS)]
    share = torch.cat([(shared[p] / n).expand(n, D) for p, n in enumerate(sizes)])
    assert torch.allclose(back[classes], w[classes] + share, atol=1e-6)
    assert math.isclose(sum(sizes), V)
