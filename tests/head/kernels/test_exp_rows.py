"""What stands between the GEMMs of the exponential path, and all of it together, against float64 autograd."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from head.kernels.rows import DEVICE, DTYPE, INF, NAN, POISON, UNIT, apart, ordered, rounded
from lowtide.head.kernels.exp_rows import (
    Reports,
    finish_rows,
    prepare_rows,
)
from lowtide.head.kernels.exp_terms import RowTerms, finish_input_grad
from support import assert_near

WITH_CAP = ("linear_bias", "logit_scale", "softcap", "weight", "z_loss")
WITH_SMOOTHING = ("linear_bias", "logit_scale", "weight", "label_smoothing", "z_loss")
SETS = {"plain": (), "cap": WITH_CAP, "smoothing": WITH_SMOOTHING}
each_set = pytest.mark.parametrize("names", SETS.values(), ids=SETS)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter computes in NumPy


def options(V: int, names: tuple[str, ...]) -> dict[str, Any]:
    """Return arguments of `oracle`, exact in few bits; a class weight in four is 0."""
    g = torch.Generator().manual_seed(1)
    bias = (torch.randint(-8, 9, (V,), generator=g) / 8).to(DEVICE)
    q = (torch.randint(0, 4, (V,), generator=g) / 2).to(DEVICE)
    values = {
        "linear_bias": bias, "logit_scale": torch.tensor(-0.5, device=DEVICE), "softcap": 4.0, "weight": q,
        "label_smoothing": 0.3, "z_loss": 0.02,
    }  # fmt: skip
    return {name: values[name] for name in names}


def row_terms(w: Tensor, kwargs: dict[str, Any]) -> RowTerms:
    V = len(w)
    q, bias, smoothing = kwargs.get("weight"), kwargs.get("linear_bias"), kwargs.get("label_smoothing", 0.0)
    weights = torch.ones(V, device=DEVICE) if q is None else q
    uniform_bias = torch.zeros((), device=DEVICE) if bias is None else weights @ bias
    return RowTerms(
        vocab=V,
        bias_V=bias,
        scale=kwargs.get("logit_scale"),
        softcap=kwargs.get("softcap"),
        class_weight=q,
        total_class_weight=None if q is None else q.sum(),
        smoothing=smoothing,
        z_loss=kwargs.get("z_loss", 0.0),
        uniform_D=weights @ w.float() if smoothing else None,
        uniform_bias=uniform_bias if smoothing else None,
    )


def blank(C: int) -> Reports:
    """Return reports of poison, and an empty list."""
    integers = {"highest": 12345, "listed": 0}
    numbers = {
        name: torch.full((C,), integers[name], dtype=torch.int32, device=DEVICE)
        if name in integers
        else torch.full((C,), POISON, device=DEVICE)
        for name in Reports._fields
        if name != "listed_count"
    }
    return Reports(**numbers, listed_count=torch.zeros(1, dtype=torch.int32, device=DEVICE))


def listed(rows: Reports) -> list[int]:
    return sorted(rows.listed[: int(rows.listed_count)].tolist())


class Batch(NamedTuple):
    x: Tensor
    w: Tensor
    y: Tensor
    g: Tensor


def batch(C: int, V: int, D: int) -> Batch:
    """Return random operands on a grid, so that float32 logits are exact, large ones too, until a cap bends them."""
    g = torch.Generator().manual_seed(C * V + D)
    x = torch.randint(-8, 9, (C, D), generator=g) / 8
    w = torch.randint(-8, 9, (V, D), generator=g) / 8
    y = torch.randint(0, V, (C,), generator=g, dtype=torch.int32)
    y[0], y[-1] = 0, V - 1
    factor = torch.randn(C, generator=g) / 16
    return Batch(apart(x), apart(w), y.to(DEVICE), factor.to(DEVICE))


def of_targets(z_CV: Tensor, y_C: Tensor) -> Tensor:
    return z_CV.gather(1, y_C.clamp(min=0).long()[:, None])[:, 0]


class Finished(NamedTuple):
    rows: Reports
    e: Tensor
    scaled: Tensor


def finish(
    b: Batch, t: Tensor, r: Tensor, kwargs: dict[str, Any], *, uniform: Tensor | None = None, P: int = 5,
    gradient: bool = True, dtype: torch.dtype = DTYPE,
) -> Finished:  # fmt: skip
    """Finish rows of target logits t and sums r, split in P parts; E is poison before, and is looked at around."""
    (C, D), V = b.x.shape, len(b.w)
    share = torch.arange(1, P + 1, device=DEVICE, dtype=torch.float64)
    room_of_sums = torch.full((C, P + 2), NAN, device=DEVICE)
    room_of_sums[:, :P] = r.double()[:, None] * (share / share.sum()) if P > 1 else r[:, None]
    rows = blank(C)
    rows.target_logit.copy_(t)
    if uniform is not None:
        rows.uniform_logit.copy_(uniform)
    room = torch.full((C + 2, V + 11), POISON, dtype=dtype, device=DEVICE)
    scaled = torch.full((C + 2, D), POISON, dtype=b.x.dtype, device=DEVICE)
    finish_rows(
        room_of_sums[:, :P], b.x, b.y, b.g if gradient else None, rows, row_terms(b.w, kwargs),
        e_CV=room[1:-1, :V] if gradient else None, scaled_CD=scaled[1:-1] if gradient else None,
    )  # fmt: skip
    for buffer in (room, scaled):
        assert (buffer[[0, -1]] == POISON).all()
    assert (room[:, V:] == POISON).all()
    return Finished(rows, room[1:-1, :V], scaled[1:-1])


@pytest.mark.parametrize("r", [0.0, 1e-38, 1e-20, 1e-9, 6e-8, 1e-3, 2.0**40, 2.0**62])
def test_confident_and_lost_tokens_keep_their_relative_precision(r: float) -> None:
    b = batch(2, 37, UNIT)._replace(g=torch.tensor([1.0, -0.25], device=DEVICE))
    sums = torch.full((2,), r, device=DEVICE)
    got = finish(b, torch.tensor([3.0, -20.0], device=DEVICE), sums, {}, dtype=torch.float32, P=1)
    torch.testing.assert_close(got.rows.loss.double(), sums.double().log1p(), rtol=3e-6, atol=0)
    assert torch.equal(of_targets(got.e, b.y), -sums)
    torch.testing.assert_close(got.rows.s.double(), b.g.double() / (1 + sums.double()), rtol=1e-6, atol=0)
    assert listed(got.rows) == []


BAD = 2.0**62 * (1 + 2**-23)
TINY = 2.0**-93  # a factor that with r = 300 leaves an s below 2**-100
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
@pytest.mark.parametrize("first", [0, 1])
def test_rows_to_be_done_again(first: int, gradient: bool) -> None:
    """Among ignored rows, which never are, whatever their sums."""
    ignored = [(INF, 0.0, 1.0, False, False), (NAN, 0.0, NAN, False, False), (0.0, 0.0, TINY, False, False)]
    cases = (ignored + LISTED) if first else (LISTED + ignored)
    C = len(cases)
    b = batch(C, 37, UNIT)
    b.y[: 3 if first else C] = -1 if first else b.y[:C]
    if not first:
        b.y[-3:] = -1
    numbers = [torch.tensor(column, device=DEVICE) for column in list(zip(*cases, strict=True))[:3]]
    r, t, g = numbers
    got = finish(b._replace(g=g), t, r, {}, P=1, gradient=gradient)
    want = [i for i, case in enumerate(cases) if case[3 if gradient else 4]]
    assert listed(got.rows) == want
    assert torch.equal(got.rows.highest[want], ordered(t)[want])
    others = [i for i in range(C) if i not in want]
    assert (got.rows.highest[others] == 12345).all()
    assert (got.rows.loss[b.y < 0] == 0).all()


@each_set
def test_ignored_rows_are_zero_whatever_they_hold(names: tuple[str, ...]) -> None:
    C, V = 6, 150
    b, kwargs = batch(C, V, 5 * UNIT), options(V, names)
    b.y[[1, 2, 3]] = -1
    b.x[1] = NAN
    b.x[2] = INF
    b.g[[1, 2, 3]] = torch.tensor([NAN, 7.0, 7.0], device=DEVICE)
    r = torch.tensor([1.0, NAN, INF, 0.0, 2.0, 3.0], device=DEVICE)
    zero = torch.zeros(C, device=DEVICE)
    got = finish(b, zero, r, kwargs, uniform=zero, P=1)
    assert (got.e[[1, 2]] == 0).all()  # of not a number
    assert (got.e[3] == POISON).all()  # the GEMM left 0
    for value in (got.rows.loss, got.rows.lse, got.rows.miss, got.rows.s, got.rows.rest, got.scaled):
        assert (value[[1, 2, 3]] == 0).all()
        if value is not got.rows.rest:
            assert (value[[0, 4, 5]] != POISON).all()


@each_set
def test_what_the_target_loses_in_rounding_is_known(names: tuple[str, ...]) -> None:
    """E in bfloat16: its entry and the rest add up to what a wide E holds."""
    b, kwargs = batch(9, 37, 5 * UNIT), options(37, names)
    b.y[4] = -1
    t = torch.linspace(-2, 2, 9, device=DEVICE)
    r = torch.linspace(0.1, 40, 9, device=DEVICE)
    narrow = finish(b, t, r, kwargs, uniform=t, dtype=torch.bfloat16)
    wide = finish(b, t, r, kwargs, uniform=t, dtype=torch.float32)
    kept = b.y >= 0
    whole = of_targets(narrow.e.float(), b.y) + narrow.rows.rest
    assert torch.equal(whole[kept], of_targets(wide.e, b.y)[kept])
    assert (wide.rows.rest == 0).all()
    assert narrow.rows.rest.abs().max() > 1e-4


class Prepared(NamedTuple):
    reference: Tensor
    coefficient: Tensor
    s: Tensor
    rest: Tensor
    scaled: Tensor


def prepare(b: Batch, lse: Tensor, miss: Tensor, kwargs: dict[str, Any], *, scaled: bool = True) -> Prepared:
    C, D = b.x.shape
    numbers = torch.full((4, C), POISON, device=DEVICE)
    room = torch.full((C + 2, D), POISON, dtype=b.x.dtype, device=DEVICE)
    prepare_rows(
        lse.float(), miss.float(), b.x, b.y, b.g, row_terms(b.w, kwargs), len(b.w), numbers,
        scaled_CD=room[1:-1] if scaled else None,
    )  # fmt: skip
    assert (room[[0, -1]] == POISON).all()
    return Prepared(*numbers, room[1:-1])


def test_prepared_rows_in_bfloat16_know_what_the_target_loses() -> None:
    b = batch(9, 37, 5 * UNIT)
    b = b._replace(x=b.x.bfloat16())
    miss = torch.linspace(0.01, 5, 9, device=DEVICE)
    got = prepare(b, miss - 1, miss, {"z_loss": 0.1})
    c = got.coefficient
    assert torch.equal(got.rest, c - rounded(c, torch.bfloat16).float())
    assert got.rest.abs().max() > 1e-4
    assert torch.equal(got.scaled.double(), got.s.double()[:, None] * b.x.double())


@pytest.mark.parametrize("miss", [0.0, 1e-30, 1e-10, 6e-8, 1e-3, 100.0, 5000.0, INF])
def test_prepared_targets_keep_their_relative_precision(miss: float) -> None:
    b = batch(4, 37, UNIT)._replace(g=torch.tensor([1.0, -0.75, 3e-20, -1e30], device=DEVICE))
    got = prepare(b, torch.zeros(4, device=DEVICE), torch.full((4,), miss, device=DEVICE), {})
    want = b.g.double() * torch.tensor(-miss, dtype=torch.float64, device=DEVICE).expm1()
    torch.testing.assert_close(got.s.double() * got.coefficient.double(), want, rtol=1e-6, atol=0)
    assert ((got.reference <= 0) & (got.reference > -0.6932)).all()


@pytest.mark.parametrize(
    "names", [(), ("logit_scale",), ("label_smoothing",), ("label_smoothing", "logit_scale", "weight")]
)
@pytest.mark.parametrize("D", [UNIT, 1100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_input_gradients(dtype: torch.dtype, D: int, names: tuple[str, ...]) -> None:
    C, V = 6, 37
    b, kwargs = batch(C, V, D), options(V, names)
    terms, rows = row_terms(b.w, kwargs), blank(C)
    g = torch.Generator().manual_seed(0)
    rows.s.copy_(torch.randn(C, generator=g))
    rows.rest.copy_(torch.randn(C, generator=g))
    product = torch.randn(C, D, generator=g).to(DEVICE)
    s, rest = rows.s.double()[:, None], rows.rest.double()[:, None]
    rows.s[2:4] = 0  # ignored, and of a class of no weight: products that are not used
    s[2:4], rest[4] = 0, 0
    product[2:4] = torch.tensor([[NAN], [INF]])
    b.y[2], b.g[2], b.y[4] = -1, NAN, V  # the last is another rank's: what its entry lost is added there
    out = torch.full((C + 2, D), POISON, dtype=dtype, device=DEVICE)
    finish_input_grad(product, out[1:-1], b.w, rows.s, b.y, rows.rest, even=terms.even(b.g))
    want = (s * (product.double() + rest * b.w.double()[b.y.clamp(0, V - 1).long()])).where(s != 0, 0)
    if terms.uniform_D is not None:
        m = kwargs.get("logit_scale", torch.ones((), device=DEVICE)).double()
        want -= m * b.g.double()[:, None] * terms.smoothing / V * terms.uniform_D.double()
    want[2] = 0
    near = 1e-6 if dtype == torch.float32 else 2**-7
    assert_near(out[1:-1], want, near)
    assert (out[3] == 0).all()
    assert (out[[0, -1]] == POISON).all()


def test_sums_that_are_too_large_only_together() -> None:
    """Each rank's is in range, their sum is not: finished from their logarithms."""
    b = batch(3, 37, UNIT)
    b = b._replace(g=torch.ones(3, device=DEVICE))
    t, each = torch.tensor([1.0, -2.0, 0.5], device=DEVICE), 2.0**91
    told = torch.stack([torch.stack((torch.full((3,), each, device=DEVICE), t + torch.tensor(each).log()))] * 3)
    rows, e = blank(3), torch.zeros(3, 37, dtype=DTYPE, device=DEVICE)
    rows.target_logit.copy_(t)
    scaled = torch.zeros_like(b.x)
    for shifted in (False, True):
        finish_rows(
            told, b.x, b.y, b.g, rows, row_terms(b.w, {})._replace(vocab=111), e_CV=e, scaled_CD=scaled, shifted=shifted
        )
    assert listed(rows) == [0, 1, 2]
    want = torch.tensor(3 * each, dtype=torch.float64).log()
    torch.testing.assert_close(rows.loss.double(), want.expand(3), rtol=1e-6, atol=0)
    torch.testing.assert_close(rows.s, torch.ones_like(rows.s))  # E is relative to the whole row
