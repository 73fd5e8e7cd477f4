"""Two GEMMs that store no logits: a row's statistics, tile by tile, and their gradient, in bfloat16.

C rows of a chunk, D hidden size, V vocabulary, P tiles across the vocabulary, K targets a row. Each tile measures its
rows from their highest logit in it, so that nothing overflows, and leaves that logit's own exponential, 1, out of the
sums: where the model is sure, what is left keeps its digits.
"""

from collections.abc import Collection
from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowtide.head.kernels.gemm import LOG2E, finish_logits, halves

LN2 = tl.constexpr(0.6931471805599453)
FLOOR = tl.constexpr(-1e4)  # a log-probability whose probability is 0: stands for -inf, which times 0 would be NaN
NO_LOGIT = tl.constexpr(-1e30)  # stands beyond V; its exponential times it is 0


class Sums(NamedTuple):
    """A row's sums over the tiles of its classes [C, P]: float32, None if not requested."""

    top: Tensor  # the highest logit
    id: Tensor  # int32: its class
    rest: Tensor  # over the tile's other classes, of exp(z - top),
    heat: Tensor | None  # of exp(z - top) (z - top),
    squares: Tensor | None  # and of exp(z - top)^2
    total: Tensor | None  # of all z
    P: int
    row: int  # stride

    @classmethod
    def of(cls, planes_FCP: Tensor, asked: Collection[str]) -> "Sums":
        """Return as many of them as there are planes, those beyond ``rest`` that are ``asked`` for among them."""
        top, top_id, rest, *others = planes_FCP
        heat, squares, total = (others.pop(0) if name in asked else None for name in ("heat", "squares", "total"))
        return cls(top, top_id.view(torch.int32), rest, heat, squares, total, planes_FCP.shape[2], planes_FCP.stride(1))


class Entries(NamedTuple):
    """The parts of the logits' gradient, float32: numbers [C], and classes whose gradient is their own."""

    s: Tensor  # a power of two, by which the gradient is divided; 0: nothing flows back
    lse: Tensor
    slope: Tensor
    heat: Tensor | None  # None where no row has one
    even: Tensor | None
    id: Tensor  # [C, 1 + K] int32: the highest class, and the targets, a class of a row once; -1: nothing stands here
    entry: Tensor  # [C, 1 + K]
    rest: Tensor  # [C, K]: what the targets' entries lose in rounding

    @classmethod
    def empty(cls, C: int, K: int, device: torch.device, *, heat: bool, even: bool) -> "Entries":
        """Return room for C rows of K targets."""
        new = partial(torch.empty, dtype=torch.float32, device=device)
        s, lse, slope, of_heat, of_even, *_ = new(5, C)
        ids = torch.empty(C, 1 + K, dtype=torch.int32, device=device)
        return cls(s, lse, slope, of_heat if heat else None, of_even if even else None, ids, new(C, 1 + K), new(C, K))


@triton.jit
def _exponential(z, reference, transform):  # type: ignore[no-untyped-def]
    """exp(z - reference), and z - reference in bits; ``reference`` is in bits. Only a bias makes a logit -inf.

    Or so low that its rounding in ``reference``, which the fused multiply-add does not have, overflows the exponential.
    """
    below = z * LOG2E - reference[:, None]
    if transform.bias_V is not None:
        below = tl.maximum(below, FLOOR, propagate_nan=tl.PropagateNan.ALL)
        below = tl.minimum(below, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return tl.exp2(below), below


@triton.jit
def _piece_sums(z, at, reference, top_id, sums, transform):  # type: ignore[no-untyped-def]
    """Sums over some of a tile's logits but its highest one: of e = exp(z - top), of e (z - top) and of e^2."""
    e, below = _exponential(z, reference, transform)
    e = tl.where(at[None, :] == top_id[:, None], 0.0, e)
    rest = tl.sum(e, 1)
    heat, squares = rest, rest
    if sums.heat is not None:
        heat = tl.sum(e * below, 1) * LN2
    if sums.squares is not None:
        squares = tl.sum(e * e, 1)
    return rest, heat, squares


@triton.jit  # type: ignore[untyped-decorator]
def tile_stats(z, row, p, C, V, _out_d, sums, transform, BOUND: tl.constexpr, CONFIG: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write a tile's `Sums`, an epilogue of `gemm.gemm_tiles`.

    Half a tile at a time, since the exponentials of a whole one do not fit the registers beside its logits.
    """
    HALF: tl.constexpr = CONFIG.columns // 2
    left, right = halves(z, CONFIG)
    at_left = p * CONFIG.columns + tl.arange(0, HALF)
    at_right = at_left + HALF
    left = finish_logits(left, at_left, V, transform)
    right = finish_logits(right, at_right, V, transform)
    total = tl.sum(left, 1) + tl.sum(right, 1)  # beyond V logits are 0: no weight, no bias
    if BOUND:
        left = tl.where((at_left < V)[None, :], left, NO_LOGIT)
        right = tl.where((at_right < V)[None, :], right, NO_LOGIT)
    top = tl.maximum(tl.max(left, 1), tl.max(right, 1))
    top_id = tl.minimum(
        tl.min(tl.where(left == top[:, None], at_left[None, :], V), 1),
        tl.min(tl.where(right == top[:, None], at_right[None, :], V), 1),
    )
    reference = tl.where(top == float("-inf"), 0.0, top * LOG2E)
    rest, heat, squares = _piece_sums(left, at_left, reference, top_id, sums, transform)
    more_rest, more_heat, more_squares = _piece_sums(right, at_right, reference, top_id, sums, transform)
    rows = row + tl.arange(0, CONFIG.rows)
    at = rows.to(tl.int64) * sums.row + p
    inside = rows < C
    tl.store(sums.top + at, top, mask=inside)
    tl.store(sums.id + at, top_id, mask=inside)
    tl.store(sums.rest + at, rest + more_rest, mask=inside)
    if sums.heat is not None:
        tl.store(sums.heat + at, heat + more_heat, mask=inside)
    if sums.squares is not None:
        tl.store(sums.squares + at, squares + more_squares, mask=inside)
    if sums.total is not None:
        tl.store(sums.total + at, total, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def gradient_tile(z, row, p, C, V, g_d, of_row, transform, _bound: tl.constexpr, CONFIG: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write ``f_v (p_v (slope - heat (z_v - lse)) + even)``, p = exp(z - lse), f_v = 1 - (z_v / softcap)**2 with a cap.

    An epilogue of `gemm.gemm_tiles`, with `Entries`, a half at a time. In rows whose s is 0,
    zeros. Targets and the highest class are as the others: see `stats_rows.put_entries`.
    """
    WIDTH: tl.constexpr = CONFIG.columns // 2
    column = p * CONFIG.columns
    rows = row + tl.arange(0, CONFIG.rows)
    inside = rows < C
    alive = tl.load(of_row.s + rows, mask=inside, other=0.0) != 0.0
    lse = tl.load(of_row.lse + rows, mask=inside, other=0.0) * LOG2E
    slope = tl.load(of_row.slope + rows, mask=inside, other=0.0)
    if of_row.heat is not None:
        heat = tl.load(of_row.heat + rows, mask=inside, other=0.0) * LN2
    if of_row.even is not None:
        even = tl.load(of_row.even + rows, mask=inside, other=0.0)
    pieces = halves(z, CONFIG)
    for i in tl.static_range(2):
        logits = finish_logits(pieces[i], column + i * WIDTH + tl.arange(0, WIDTH), V, transform)
        gradient, below = _exponential(logits, lse, transform)
        if of_row.heat is not None:
            gradient *= slope[:, None] - heat[:, None] * below
        else:
            gradient *= slope[:, None]
        if of_row.even is not None:
            gradient += even[:, None]
        if transform.softcap is not None:
            gradient *= 1.0 - (logits / transform.softcap) * (logits / transform.softcap)
        gradient = tl.where(alive[:, None], gradient, 0.0)
        g_d.store([row, column + i * WIDTH], gradient.to(g_d.dtype))
