"""The kernels that say which tiles of the softmax are kept and who computes what, in Triton's interpreter."""

import math
import random
import subprocess
import sys
from collections import defaultdict

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from lowtide.skip.kernels import choice as tiles
from lowtide.skip.kernels import lists as listing
from lowtide.skip.kernels.choice import Choice, Targets
from skip.emulated import units

ROWS, COLUMNS = 128, 256
CPU = torch.device("cpu")


def targets_of(y: Tensor, s: Tensor | None = None) -> Targets:
    rest, alone, lost = torch.zeros(3, len(y))
    return Targets(y, torch.ones(len(y)) if s is None else s, rest, None, alone, lost)


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


@pytest.mark.parametrize("seed", range(24))
def test_lists_and_shares(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists in order from both sides; every step of E' W is computed once, by programs that have as many."""
    chosen = random.Random(seed)
    R = chosen.choice([1, 2, 7, 33, chosen.randrange(1, 200)])
    P = chosen.choice([1, 2, 127, 129, chosen.randrange(1, 1100)])
    across, programs = chosen.choice([1, 3, 16, chosen.randrange(1, 33)]), chosen.choice([132, 132, 7, 2, 1])
    monkeypatch.setattr(listing, "multiprocessors", lambda device: programs)
    C, D = R * ROWS - chosen.randrange(ROWS), across * COLUMNS - chosen.randrange(COLUMNS)
    keep = some_flags(R, P, seed % 4, chosen.choice([0, 0.02, 0.3, 1]))
    lists, flags = listing.lists_for(C, P, CPU)
    for x in lists:
        x.fill_(-7)
    flags.copy_(keep.int().flatten())
    total, y = torch.zeros(2, dtype=torch.int32), torch.full((C,), -1, dtype=torch.int32)
    listing.list_kept(flags, lists, total, torch.zeros(C, 1), targets_of(y), D)

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


def fewest_lost(q: Tensor, allowed: float) -> float:
    """Return the q from which tiles stay, so that the smaller ones lose no more than ``allowed``."""
    some, least = q[(q > 0) & q.isfinite()].double().sort().values, 0.0
    ends = torch.tensor([math.ldexp(8 + n, exponent - 3) for exponent in range(-60, 100) for n in range(1, 9)]).double()
    rounded = ends[torch.searchsorted(ends, some, right=True)]
    for end in ends.tolist():
        if float(rounded[some < end].sum()) > allowed:
            break
        least = end
    return least


@pytest.mark.parametrize("accepted", [0.05, 0.3])
def test_which_tiles_are_kept(accepted: float) -> None:
    """The largest, and those with many targets, so that the others lose no more."""
    C, P, short = 200, 15, 100
    V = P * COLUMNS - short
    sums, squares, s = torch.rand(C, P), torch.rand(C, P) * torch.logspace(0, -9, P), torch.randn(C)
    sums *= squares.sqrt()
    squares[:, -1] *= 1e8
    y = torch.randint(V, (C,), dtype=torch.int32)
    y[:30], y[::7], s[::5], squares[::5] = 12 * COLUMNS + 3, -1, 0, torch.nan
    targets, e = targets_of(y, s), torch.randn(C, V)
    targets.rest.copy_(torch.randn(C))
    valid = y >= 0
    counts, width = valid & (s != 0), torch.full((P,), COLUMNS).index_fill(0, torch.tensor(P - 1), COLUMNS - short)
    varied = (squares - sums.square() / width).clamp(min=0)
    part = (s[:, None].square() * varied).where(counts[:, None], 0)
    q = torch.stack([part[:ROWS].sum(0), part[ROWS:].sum(0)])
    own = s * (e.gather(1, y.clamp(min=0)[:, None].long())[:, 0] + targets.rest)
    whole = (s[:, None].square() * squares).sum(1).where(counts, 0) + own.square().where(counts, 0)
    at_home = y.where(counts, -1).split(ROWS)
    home = torch.stack([torch.bincount(one[one >= 0] // COLUMNS, minlength=P) for one in at_home])
    choice = Choice(torch.empty(2 * P, dtype=torch.int32), torch.empty(C, P), torch.empty(3, 2))
    flags, mass, (dropped, lost, of_all) = choice
    allowed = accepted**2 * float(whole.sum())

    def find(targets: Targets) -> None:
        tiles.find_kept(sums, squares, e, targets, torch.tensor([accepted]), choice)

    least = fewest_lost(q.where(home < 16, torch.inf), allowed)
    kept = (q >= least) | (home >= 16)
    assert 0 < kept.sum() < kept.numel()
    find(targets)
    assert torch.equal(flags.view(2, P), kept.int())
    of_row = (~kept).repeat_interleave(ROWS, 0)[:C]
    assert torch.equal(mass, sums.where(valid[:, None], 0) * of_row)
    each = (mass * s.abs()[:, None]).sum(1)
    assert torch.allclose(dropped, torch.stack([each[:ROWS].sum(), each[ROWS:].sum()]))
    assert torch.allclose(lost, (q * ~kept).sum(1))
    assert 0 < lost.sum() <= allowed
    assert torch.allclose(of_all, torch.stack([whole[:ROWS].sum(), whole[ROWS:].sum()]))
    find(targets._replace(entry=own / s))
    assert torch.allclose(of_all, torch.stack([whole[:ROWS].sum(), whole[ROWS:].sum()]))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter computes in NumPy
@pytest.mark.parametrize("s", [0.0, 1e-24, torch.nan, torch.inf])
def test_gradients_that_say_nothing(s: float) -> None:
    """Where they are too small to be squared, or no numbers, all tiles stay, and where there are none no tile does."""
    C, P = 140, 5
    y = torch.randint(P * COLUMNS, (C,), dtype=torch.int32)
    targets, squares = targets_of(y, torch.full((C,), s)), torch.rand(C, P)
    choice = Choice(torch.empty(2 * P, dtype=torch.int32), torch.empty(C, P), torch.empty(3, 2))
    e, sums = torch.rand(C, P * COLUMNS), torch.rand(C, P)
    y[:30] = 7  # of as many as otherwise keep a tile
    tiles.find_kept(sums, squares, e, targets, torch.tensor([0.5]), choice)
    assert torch.equal(choice.flags, torch.full_like(choice.flags, s != 0))
    assert torch.equal(choice.mass_CP, sums * (s == 0))
    assert not choice.sums[1].any()


@pytest.mark.parametrize("s", [1e-16, 1e-19, 1e-20, 1e-21])
def test_gradients_too_small_to_be_squared(s: float) -> None:
    """What rows lose, squared, may vanish in float32 where their targets' entries do not: it counts nevertheless."""
    C, P, accepted = 140, 130, 1e-3
    targets = targets_of(torch.arange(C, dtype=torch.int32) * COLUMNS, torch.full((C,), s))
    targets = targets._replace(entry=torch.ones(C))
    choice = Choice(torch.empty(2 * P, dtype=torch.int32), torch.empty(C, P), torch.empty(3, 4))
    squares = torch.full((C, P), 3e-8)
    tiles.find_kept(torch.zeros(C, P), squares, torch.zeros(C, P * COLUMNS), targets, torch.tensor([accepted]), choice)
    left_out = (choice.flags.view(2, P) == 0).repeat_interleave(ROWS, 0)[:C]
    whole = C + squares.double().sum()
    assert (squares.double() * left_out).sum() <= accepted**2 * whole
    assert s < 1e-17 or left_out.any()


def test_targets_in_other_tiles() -> None:
    """Their entries stand alone: each class's are added to its row of dW."""
    C, V, D = 140, 700, 8
    e, y = torch.randn(C, V), torch.randint(V, (C,), dtype=torch.int32).sort().values
    y[-9:] = -1
    flags = torch.tensor([[1, 0, 1], [0, 1, 0]], dtype=torch.int32)
    targets = targets_of(y)
    targets.rest.copy_(torch.randn(C))
    lists, _ = listing.lists_for(C, 3, CPU)
    listing.list_kept(flags.flatten(), lists, torch.zeros(2, dtype=torch.int32), e, targets, D)
    valid, home = y >= 0, y.clamp(min=0).long()
    own = e.gather(1, home[:, None])[:, 0] + targets.rest
    is_kept = flags.repeat_interleave(ROWS, 0)[:C].gather(1, home[:, None] // COLUMNS)[:, 0] == 1
    assert torch.equal(targets.alone[valid], own.where(~is_kept, 0)[valid])
    assert torch.equal(targets.lost[valid], torch.where(is_kept, targets.rest, own)[valid])
    assert not targets.alone[~valid].any()

    scaled, out = torch.randn(C, D), torch.randn(V, D)
    added = torch.zeros(V, D).index_add_(0, home, targets.alone[:, None] * scaled) + out
    tiles.add_targets(targets, scaled, out)
    assert torch.allclose(out, added, atol=1e-6)


@pytest.mark.parametrize("lies", ["rows", "columns"])
def test_order_and_back(lies: str) -> None:
    """A weight is put in order, whatever its strides, and a gradient back, with what a tile's rows share."""
    V, D, P = 600, 70, 3
    w = torch.randn(V, D) if lies == "rows" else torch.randn(D, V).T
    classes = torch.randperm(V)
    order = torch.cat((torch.tensor([V]), classes)).int()
    ordered, mean, shared, back = torch.empty(V, D), torch.empty(P, D), torch.randn(P, D), torch.empty(V, D)
    tiles.put_in_order(w, order, ordered, mean)
    assert torch.equal(ordered, w[classes])
    assert torch.allclose(mean, torch.stack([tile.mean(0) for tile in ordered.split(COLUMNS)]), atol=1e-6)
    tiles.put_back(ordered, shared, order, back)
    sizes = [len(tile) for tile in ordered.split(COLUMNS)]
    share = torch.cat([(shared[p] / n).expand(n, D) for p, n in enumerate(sizes)])
    assert torch.allclose(back[classes], w[classes] + share, atol=1e-6)
    assert math.isclose(sum(sizes), V)


def test_triton_without_gluon() -> None:
    """The exponential path runs on other GPUs with a Triton that lacks what Hopper's own kernels are written in."""
    code = """
import importlib.abc, sys

class No(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.startswith("triton.experimental.gluon"):
            raise ImportError("no Gluon")

import triton
for name in [name for name in sys.modules if name.startswith("triton.experimental")]:
    del sys.modules[name]
if hasattr(triton, "experimental"):
    del triton.experimental
sys.meta_path.insert(0, No())
import lowtide.head.exponentials.losses
from lowtide.head.kernels.hopper import GLUON_ERROR
assert "no Gluon" in GLUON_ERROR, GLUON_ERROR
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
