"""What stands between the GEMMs of the exponential path: rows that keep their digits, and rows to be done again.

`contract/test_kernels.py` has the options, and all of it together.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from head.kernels.rows import DEVICE, DTYPE, INF, NAN, POISON, UNIT, apart, ordered, rounded
from lowtide.head.kernels.exp_rows import Reports, RowTerms, finish_rows, prepare_rows
from lowtide.head.kernels.gemm import PLAIN
from promises import promise

pytestmark = [promise("kernels"), pytest.mark.filterwarnings("ignore::RuntimeWarning")]  # the interpreter's NumPy
V = 37


def blank(C: int) -> Reports:
    """Return reports of poison, and an empty list."""
    poison: dict[str, Tensor] = {name: torch.full((C,), POISON, device=DEVICE) for name in Reports._fields}
    poison |= {name: torch.full((C,), 12345, dtype=torch.int32, device=DEVICE) for name in ("highest", "listed")}
    return Reports(**poison | {"listed_count": torch.zeros(1, dtype=torch.int32, device=DEVICE)})


def listed(rows: Reports) -> list[int]:
    return sorted(rows.listed[: int(rows.listed_count)].tolist())


class Batch(NamedTuple):
    x: Tensor
    w: Tensor
    y: Tensor
    g: Tensor


def batch(factors: Tensor, D: int = UNIT) -> Batch:
    """Return operands on a grid, so that float32 logits are exact, and targets, with these factors of the rows."""
    C = len(factors)
    x, w = (torch.randint(-8, 9, (rows, D)) / 8 for rows in (C, V))
    y = torch.randint(0, V, (C,), dtype=torch.int32)
    y[0], y[-1] = 0, V - 1
    return Batch(apart(x), apart(w), y.to(DEVICE), factors.to(DEVICE))


def finish(
    b: Batch, t: Tensor, r: Tensor, *, gradient: bool = True, dtype: torch.dtype = DTYPE
) -> tuple[Reports, Tensor]:
    """Finish rows of target logits t and sums r; E is poison before, and is looked at around."""
    C, D = b.x.shape
    rows = blank(C)
    rows.target_logit.copy_(t)
    room = torch.full((C + 2, V + 11), POISON, dtype=dtype, device=DEVICE)
    scaled = torch.full((C + 2, D), POISON, dtype=b.x.dtype, device=DEVICE)
    finish_rows(
        r[:, None], b.x, b.y, b.g if gradient else None, rows, PLAIN, RowTerms(),
        e_CV=room[1:-1, :V] if gradient else None, scaled_CD=scaled[1:-1] if gradient else None,
    )  # fmt: skip
    for buffer in (room, scaled):
        assert (buffer[[0, -1]] == POISON).all()
    assert (room[:, V:] == POISON).all()
    return rows, room[1:-1, :V]


@pytest.mark.parametrize("r", [0.0, 1e-38, 1e-9, 6e-8, 1e-3, 2.0**62])
def test_sure_and_lost_tokens_keep_their_relative_precision(r: float) -> None:
    b, sums = batch(torch.tensor([1.0, -0.25])), torch.full((2,), r, device=DEVICE)
    rows, e = finish(b, torch.tensor([3.0, -20.0], device=DEVICE), sums, dtype=torch.float32)
    torch.testing.assert_close(rows.loss.double(), sums.double().log1p(), rtol=3e-6, atol=0)
    assert torch.equal(e.gather(1, b.y.long()[:, None])[:, 0], -sums)
    torch.testing.assert_close(rows.s.double(), b.g.double() / (1 + sums.double()), rtol=1e-6, atol=0)
    assert listed(rows) == []


BAD = 2.0**62 * (1 + 2**-23)
TINY = 2.0**-93  # a factor that with r = 300 leaves an s below 2**-100
IGNORED = [(INF, 0.0, 1.0, False, False), (NAN, 0.0, NAN, False, False), (0.0, 0.0, TINY, False, False)]
LISTED = [  # r, t, g, whether the row has to be done again with a gradient, and without
    (1.0, 0.0, 1.0, False, False),
    (2.0**62, 0.0, 1.0, False, False),
    (BAD, 0.0, 1.0, True, True),
    (BAD, 0.0, 0.0, True, True),
    (INF, -3.0, 1.0, True, True),
    (NAN, -3.0, 1.0, True, True),
    (1.0, INF, 1.0, True, True),
    (1.0, -INF, 1.0, True, True),
    (1.0, NAN, 1.0, True, True),
    (300.0, 5.0, TINY, True, False),
    (300.0, 5.0, -TINY, True, False),
    (300.0, 5.0, 300 * TINY, False, False),
    (300.0, 5.0, 0.0, False, False),
    (200.0, 5.0, TINY / 4, False, False),
    (2.0**61, 5.0, 2.0**-40, True, False),
]


@pytest.mark.parametrize("gradient", [True, False])
def test_rows_to_be_done_again(gradient: bool) -> None:
    """Among ignored rows, which never are, whatever their sums."""
    cases = [*LISTED, *IGNORED]
    r, t, g = (torch.tensor(column, device=DEVICE) for column in list(zip(*cases, strict=True))[:3])
    b = batch(g)
    b.y[-3:] = -1
    rows, _ = finish(b, t, r, gradient=gradient)
    want = [i for i, case in enumerate(cases) if case[3 if gradient else 4]]
    assert listed(rows) == want
    assert torch.equal(rows.highest[want], ordered(t)[want])
    assert (rows.highest[[i for i in range(len(cases)) if i not in want]] == 12345).all()
    assert (rows.loss[-3:] == 0).all()


class Prepared(NamedTuple):
    reference: Tensor
    coefficient: Tensor
    s: Tensor
    rest: Tensor
    scaled: Tensor


def prepare(b: Batch, lse: Tensor, miss: Tensor, z_loss: float = 0.0) -> Prepared:
    C, D = b.x.shape
    numbers = torch.full((4, C), POISON, device=DEVICE)
    room = torch.full((C + 2, D), POISON, dtype=b.x.dtype, device=DEVICE)
    prepare_rows(lse, miss, b.x, b.y, b.g, PLAIN, RowTerms(z_loss=z_loss), V, numbers, scaled_CD=room[1:-1])
    assert (room[[0, -1]] == POISON).all()
    return Prepared(*numbers, room[1:-1])


def test_prepared_rows_in_bfloat16_know_what_the_target_loses() -> None:
    b = batch(torch.randn(9) / 16, 5 * UNIT)
    b = b._replace(x=b.x.bfloat16())
    miss = torch.linspace(0.01, 5, 9, device=DEVICE)
    got = prepare(b, miss - 1, miss, 0.1)
    c = got.coefficient
    assert torch.equal(got.rest, c - rounded(c, torch.bfloat16).float())
    assert got.rest.abs().max() > 1e-4
    assert torch.equal(got.scaled.double(), got.s.double()[:, None] * b.x.double())


@pytest.mark.parametrize("miss", [0.0, 1e-30, 6e-8, 1e-3, 100.0, INF])
def test_prepared_targets_keep_their_relative_precision(miss: float) -> None:
    b = batch(torch.tensor([1.0, -0.75, 3e-20, -1e30]))
    got = prepare(b, torch.zeros(4, device=DEVICE), torch.full((4,), miss, device=DEVICE))
    want = b.g.double() * torch.tensor(-miss, dtype=torch.float64, device=DEVICE).expm1()
    torch.testing.assert_close(got.s.double() * got.coefficient.double(), want, rtol=1e-6, atol=0)
    assert ((got.reference <= 0) & (got.reference > -0.6932)).all()
