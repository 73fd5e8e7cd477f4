"""The thin kernels of a sharded vocabulary, its parts one after the other in one process: beside the whole's."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from head.kernels.test_exp_rows import (
    CONFIG,
    DEVICE,
    DTYPE,
    INF,
    NAN,
    NEAR,
    NEAR_GRAD,
    POISON,
    SETS,
    UNIT,
    Batch,
    batch,
    blank,
    each_set,
    listed,
    of_targets,
    options,
    row_terms,
    truth,
    uniform_logits,
    without_target,
)
from lowtide.head.kernels.exp_logits import ExpRows, exp_tile, shifted_exp_logits
from lowtide.head.kernels.exp_rows import Reports, finish_rows, sum_rows
from lowtide.head.kernels.exp_terms import RowTerms
from lowtide.head.kernels.gemm import LogitTransform, gemm_tiles, tiles_across
from support import relative_error

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter computes in NumPy
ELSEWHERE = 2**30


class Part(NamedTuple):
    """A rank's: its classes, what it knows of the rows, E and s x."""

    classes: slice
    y: Tensor
    rows: Reports
    terms: RowTerms
    e: Tensor
    scaled: Tensor
    told: Tensor


def sums_of(b: Batch, classes: slice, z: Tensor, kwargs: dict[str, Any]) -> Part:
    """Do what a rank does before the exchange."""
    (C, D), w = b.x.shape, b.w[classes]
    here = (b.y >= classes.start) & (b.y < classes.stop)
    y = (b.y - classes.start).where(here, ELSEWHERE).where(b.y >= 0, -1).int()
    terms = row_terms(b.w, kwargs)
    own = None if terms.class_weight is None else terms.class_weight[b.y.clamp(min=0).long()]
    terms = terms._replace(
        bias_V=None if terms.bias_V is None else terms.bias_V[classes].contiguous(),
        class_weight=None,
        own_weight=own,
    )
    rows = blank(C)
    rows.target_logit.copy_(of_targets(z, b.y).where(b.y >= 0, 0))
    uniform = uniform_logits(b, z.double(), kwargs)
    if uniform is not None:
        rows.uniform_logit.copy_(uniform)
    V = len(w)
    e = torch.full((C, -(-V // UNIT) * UNIT), POISON, dtype=DTYPE, device=DEVICE)[:, :V]
    sums = torch.full((C, tiles_across(V, CONFIG)), NAN, device=DEVICE)
    transform = LogitTransform(terms.bias_V, terms.scale, terms.softcap)
    gemm_tiles(exp_tile, b.x, w, e, ExpRows.of(rows.target_logit, y, sums), transform, CONFIG)
    told = torch.full((2, C), NAN, device=DEVICE)
    sum_rows(sums, y, rows, told, e_CV=e)
    again = ExpRows.of(rows.highest, y, sums)
    shifted_exp_logits(b.x, w, None, again, (rows.listed, rows.listed_count), transform, CONFIG)
    sum_rows(sums, y, rows, told, shifted=True)
    scaled = torch.full((C, D), POISON, dtype=DTYPE, device=DEVICE)
    return Part(classes, y, rows, terms, e, scaled, told)


def finish_part(b: Batch, part: Part, told: Tensor) -> None:
    """Do what a rank does after it."""
    rows, terms, width = part.rows, part.terms, part.e.shape[1]
    rows.listed_count.zero_()
    for shifted in (False, True):
        finish_rows(told, b.x, part.y, b.g, rows, terms, e_CV=part.e, scaled_CD=part.scaled, shifted=shifted)
        if not shifted:
            sums = torch.full((len(b.y), tiles_across(width, CONFIG)), NAN, device=DEVICE)
            transform = LogitTransform(terms.bias_V, terms.scale, terms.softcap)
            again, listed = ExpRows.of(rows.highest, part.y, sums), (rows.listed, rows.listed_count)
            w = b.w[part.classes]
            shifted_exp_logits(b.x, w, part.e, again, listed, transform, CONFIG, find_highest=(False,))


def in_parts(b: Batch, sizes: list[int], kwargs: dict[str, Any]) -> list[Part]:
    z, parts = truth(b, **kwargs).z.float(), []
    for rank in range(len(sizes)):
        first = sum(sizes[:rank])
        parts.append(sums_of(b, slice(first, first + sizes[rank]), z, kwargs))
    told = torch.stack([part.told for part in parts])
    for part in parts:
        finish_part(b, part, told)
    return parts


def hard_batch(C: int, V: int) -> Batch:
    """Return rows of every kind: ordinary, sure, lost by thousands of nats, ignored, ignored and no number."""
    b = batch(C, V, 5 * UNIT)
    b.x[2::3] *= 256
    b.x[5] = 0
    b.y[3], b.y[4] = -1, -1
    b.x[4] = NAN
    return b


@each_set
def test_parts_are_as_the_whole_in_float64(names: tuple[str, ...]) -> None:
    C, V = 11, 70
    b, kwargs = hard_batch(C, V), options(V, names)
    true = truth(b, **kwargs)
    parts = in_parts(b, [32, 3, 35], kwargs)  # the first one fills its tile
    kept = b.y >= 0
    for part in parts:
        for name in ("loss", "lse", "miss"):  # on every rank, and the same there
            assert torch.equal(getattr(part.rows, name), getattr(parts[0].rows, name))
        assert torch.equal(part.rows.s, parts[0].rows.s)
        assert listed(part.rows) == listed(parts[0].rows)
        assert torch.equal(part.scaled, parts[0].scaled)
    loose = 3e-5 if "label_smoothing" in names else 2 * NEAR
    torch.testing.assert_close(parts[0].rows.loss.double(), true.loss, rtol=loose, atol=loose)
    assert len(listed(parts[0].rows)) > 0 or "softcap" in names
    e = torch.cat([part.e for part in parts], 1).double()
    assert not e[~kept].any()
    dw = e.T @ parts[0].scaled.double()
    a, q, m = (kwargs.get(n, d) for n, d in (("label_smoothing", 0.0), ("weight", 1.0), ("logit_scale", 1.0)))
    x = b.x.double().where(kept[:, None], 0)
    even = (a / V) * (q * torch.ones(V, device=DEVICE)).double()[:, None] * (m * (b.g.double() * kept) @ x)
    assert relative_error(dw - even, true.dw) < 3 * NEAR_GRAD


@pytest.mark.parametrize("names", SETS.values(), ids=SETS)
def test_one_part_finishes_rows_bit_for_bit_as_the_whole(names: tuple[str, ...]) -> None:
    """The arithmetic of both is the same code: rows that are not done again get the same numbers."""
    C, V = 9, 37
    b, kwargs = batch(C, V, 5 * UNIT), options(V, names)
    b.y[4] = -1
    z = truth(b, **kwargs).z.float()
    (part,) = in_parts(b, [V], kwargs)
    assert listed(part.rows) == []
    whole = blank(C)
    whole.target_logit.copy_(of_targets(z, b.y).where(b.y >= 0, 0))
    uniform = uniform_logits(b, z.double(), kwargs)
    if uniform is not None:
        whole.uniform_logit.copy_(uniform)
    e, scaled = torch.zeros_like(part.e), torch.zeros_like(part.scaled)
    sums = part.told[0][:, None].contiguous()
    finish_rows(sums, b.x, b.y, b.g, whole, row_terms(b.w, kwargs), e_CV=e, scaled_CD=scaled)
    for name in ("loss", "lse", "miss", "s", "rest"):
        assert torch.equal(getattr(whole, name), getattr(part.rows, name)), name
    assert torch.equal(scaled, part.scaled)
    kept = b.y >= 0
    assert torch.equal(of_targets(e, b.y)[kept], of_targets(part.e, b.y)[kept])


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


def test_a_target_without_a_chance() -> None:
    """A bias of -inf at the target: the loss is inf, as in plain PyTorch, and other rows are as they were."""
    b, kwargs = batch(4, 37, 5 * UNIT), options(37, ("linear_bias",))
    b.y[1] = 20
    b.y[2] = 5
    kwargs["linear_bias"][20] = -INF
    parts = in_parts(b, [18, 19], kwargs)
    others = without_target(truth(b, **kwargs).z, b.y).logsumexp(1)
    for part in parts:
        assert listed(part.rows) == [1]
        assert part.rows.loss[1] == INF
        torch.testing.assert_close(part.rows.lse[1].double(), others[1], rtol=1e-6, atol=0)
        assert part.rows.loss[[0, 2, 3]].isfinite().all()
