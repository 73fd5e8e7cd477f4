"""The GEMM that stores exponentials instead of logits: E = exp(x W^T - reference), its row sums, and statistics of z.

C rows of a chunk, D hidden size, V vocabulary, P tiles across the vocabulary. The epilogue works on the float32
accumulators: bias, scale and cap, the exponential, its sum before it is rounded. No pass over [C, V] is left.

Two kernels: `exp_tile` for a whole chunk, `shifted_exp_logits` for the few rows whose exponentials overflow beside
their target's logit, whose number only the device knows.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from lowtide.head.kernels import gemm
from lowtide.head.kernels.gemm import (
    LN2,
    LOG2E,
    NO_LOGIT,
    LogitTransform,
    finish_logits,
    gathered_logits,
    halves,
    matrix,
    times_slope,
)
from lowtide.kernel_launch import Launcher, multiprocessors

FLOOR = tl.constexpr(-1e4)  # a log-probability whose probability is 0: stands for -inf, which times 0 would be NaN


class ExpRows(NamedTuple):
    """What the kernels read and write for each row."""

    reference: Tensor  # [C] float32
    y: Tensor  # [C] int32: classes, counted as ``first_class`` and on; -1 for ignored tokens
    coefficient: Tensor | None = None  # [C] float32: what E holds at the target; None: 0
    first_class: int = 0  # that of W's first row
    sums: Tensor | None = None  # [C, P] float32: takes each tile's row sums of exp(z - reference), the target left out
    sum_stride: int = 0  # not a matrix: Triton 3.6 loses a stride of 1 in a record within a record
    squares: Tensor | None = None  # as sums, of the squares of E as it is stored
    masses: Tensor | None = None  # and of its entries, where a cap makes them others than exp(z - reference)
    # Of statistics, as sums: the tile's highest logit, its class (int32), and over the tile's other classes the sums of
    # e = exp(z - top), of e (z - top) and of e^2; over all of them that of z. None: not wanted.
    top: Tensor | None = None
    top_id: Tensor | None = None
    rest: Tensor | None = None
    heat: Tensor | None = None
    top_squares: Tensor | None = None
    total: Tensor | None = None


class Listed(NamedTuple):
    """Tiles [128, 256] of a chunk, int32, those of one tile across the vocabulary beside each other."""

    tiles: Tensor  # [R * P]: 2^16 times the tile of rows, plus the tile across
    number: Tensor  # [1]


@triton.jit
def _put_sums(of_row, rows, p, e_sum, squares, mass, inside):  # type: ignore[no-untyped-def]
    """Write a tile's row sums: those that are wanted."""
    at = rows.to(tl.int64) * of_row.sum_stride + p
    if of_row.sums is not None:
        tl.store(of_row.sums + at, e_sum, mask=inside)
    if of_row.squares is not None:
        tl.store(of_row.squares + at, squares, mask=inside)
    if of_row.masses is not None:
        tl.store(of_row.masses + at, mass, mask=inside)


@triton.jit
def exponential(z, reference, transform):  # type: ignore[no-untyped-def]
    """exp(z - reference), and z - reference in bits; ``reference`` is in bits. Only a bias makes a logit -inf.

    Or so low that its rounding in ``reference``, which the fused multiply-add does not have, overflows the exponential.
    """
    below = tl.fma(z, LOG2E, -reference[:, None])
    if transform.bias_V is not None:
        below = tl.maximum(below, FLOOR, propagate_nan=tl.PropagateNan.ALL)
        below = tl.minimum(below, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return tl.exp2(below), below


@triton.jit
def _half_sums(z, at, reference, top_id, sums, transform):  # type: ignore[no-untyped-def]
    """Sums over half of a tile's logits but its highest one: of e = exp(z - top), of e (z - top) and of e^2."""
    e, below = exponential(z, reference, transform)
    e = tl.where(at[None, :] == top_id[:, None], 0.0, e)
    rest = tl.sum(e, 1)
    heat, squares = rest, rest
    if sums.heat is not None:
        heat = tl.sum(e * below, 1) * LN2
    if sums.top_squares is not None:
        squares = tl.sum(e * e, 1)
    return rest, heat, squares


@triton.jit  # type: ignore[untyped-decorator]
def _put_stats(z, row, p, C, V, sums, transform, BOUND: tl.constexpr, CONFIG: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write a tile's statistics.

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
    rest, heat, squares = _half_sums(left, at_left, reference, top_id, sums, transform)
    more_rest, more_heat, more_squares = _half_sums(right, at_right, reference, top_id, sums, transform)
    rows = row + tl.arange(0, CONFIG.rows)
    at = rows.to(tl.int64) * sums.sum_stride + p
    inside = rows < C
    tl.store(sums.top + at, top, mask=inside)
    tl.store(sums.top_id + at, top_id, mask=inside)
    tl.store(sums.rest + at, rest + more_rest, mask=inside)
    if sums.heat is not None:
        tl.store(sums.heat + at, heat + more_heat, mask=inside)
    if sums.top_squares is not None:
        tl.store(sums.top_squares + at, squares + more_squares, mask=inside)
    if sums.total is not None:
        tl.store(sums.total + at, total, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def exp_tile(z, row, p, C, V, e_d, rows, transform, BOUND: tl.constexpr, CONFIG: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write ``E = exp(z - reference)`` of a tile, times ``1 - (z / softcap)**2`` with a cap, and what `ExpRows` want.

    An epilogue of `gemm.gemm_tiles`, a half at a time; without ``e_d`` only sums are wanted. Rows of ignored tokens are
    0, unless their logits are not finite and there is no coefficient: then they may be NaN.
    """
    WIDTH: tl.constexpr = CONFIG.columns // 2
    column = p * CONFIG.columns
    at = row + tl.arange(0, CONFIG.rows)
    inside = at < C
    y = tl.load(rows.y + at, mask=inside, other=-1)
    kept = y >= 0
    reference = tl.load(rows.reference + at, mask=inside, other=0.0) * LOG2E
    reference = tl.where(kept, reference, float("inf"))
    coefficient = tl.zeros_like(reference)
    if rows.coefficient is not None:
        coefficient = tl.load(rows.coefficient + at, mask=inside, other=0.0)
    bound = tl.where(kept, V - column, 0)
    y -= rows.first_class + column
    total = tl.zeros_like(reference)
    squared = total
    mass = total
    pieces = halves(z, CONFIG)
    for i in tl.static_range(2):
        v = i * WIDTH + tl.arange(0, WIDTH)  # within the tile, as y and bound are
        logits = finish_logits(pieces[i], column + v, V, transform)
        e = tl.exp2(tl.fma(logits, LOG2E, -reference[:, None]))
        is_target = v[None, :] == y[:, None]
        stored = tl.where(is_target, coefficient[:, None], times_slope(e, logits, transform))
        e = tl.where(is_target, 0.0, e)
        if BOUND or rows.coefficient is not None:
            e = tl.where(v[None, :] < bound[:, None], e, 0.0)
            stored = tl.where(v[None, :] < bound[:, None], stored, 0.0)
        if e_d is not None:
            e_d.store([row, column + i * WIDTH], stored.to(e_d.dtype))
        total += tl.sum(e, 1)
        squared += tl.sum(stored * stored, 1)
        mass += tl.sum(stored, 1)
    _put_sums(rows, at, p, total, squared, mass, inside)
    if rows.top is not None:
        _put_stats(z, row, p, C, V, rows, transform, BOUND, CONFIG)


@Launcher
@triton.jit  # type: ignore[untyped-decorator]
def _shifted_exp_logits(  # type: ignore[no-untyped-def]
    x, w, out, of_row, list_ptr, count_ptr, transform, V, D, CONFIG: tl.constexpr, PROGRAMS: tl.constexpr,
    FIND_HIGHEST: tl.constexpr,
):  # fmt: skip
    ROWS: tl.constexpr = min(64, CONFIG.rows)
    COLUMNS: tl.constexpr = CONFIG.columns
    DEPTH: tl.constexpr = min(64, CONFIG.depth)
    e_ptr, e_stride = out
    count = tl.load(count_ptr)
    row_tiles = tl.cdiv(count, ROWS)
    column_tiles = tl.cdiv(V, COLUMNS)
    for tile in range(tl.program_id(0), row_tiles * column_tiles, PROGRAMS):
        slots = (tile % row_tiles) * ROWS + tl.arange(0, ROWS)
        p = tile // row_tiles
        valid = slots < count
        rows = tl.load(list_ptr + slots, mask=valid, other=0).to(tl.int64)
        columns = p * COLUMNS + tl.arange(0, COLUMNS)
        inside = columns < V
        z = gathered_logits(x, rows, valid, w, columns, V, D, ROWS, COLUMNS, DEPTH)
        z = finish_logits(z, columns, V, transform)
        if FIND_HIGHEST:
            highest = tl.max(tl.where(inside[None, :], z, float("-inf")), 1)
            tl.atomic_max(of_row.reference + rows, highest, mask=valid)  # the order of writes does not matter
        else:
            reference = tl.load(of_row.reference + rows, mask=valid, other=0.0)
            y = tl.load(of_row.y + rows, mask=valid, other=-1)
            e = tl.exp2((z - reference[:, None]) * LOG2E)
            left_out = (columns[None, :] == y[:, None]) | ~inside[None, :]
            stored = tl.where(left_out, 0.0, times_slope(e, z, transform))
            e = tl.where(left_out, 0.0, e)
            if e_ptr is not None:
                at = e_ptr + rows[:, None] * e_stride + columns[None, :]
                tl.store(at, stored.to(e_ptr.dtype.element_ty), mask=valid[:, None] & inside[None, :])
            _put_sums(of_row, rows, p, tl.sum(e, 1), tl.sum(stored * stored, 1), tl.sum(stored, 1), valid)


def shifted_exp_logits(
    x_CD: Tensor, w_VD: Tensor, e_CV: Tensor | None, rows: ExpRows, listed: tuple[Tensor, Tensor],
    transform: LogitTransform, *, find_highest: tuple[bool, ...] = (True, False),
) -> None:  # fmt: skip
    """Recompute, relative to their highest logit, the rows whose numbers are ``listed``: a list, and how long it is.

    Costs two launches that end at once if there are none. Results do not depend on the order of the list.
    Of the tile sizes, width and depth are taken. The list and its length [1] are int32. The reference of listed rows
    holds the target's logit, and takes the highest one's. ``find_highest`` are the passes: True to find the highest
    logits, False to build E and its sums relative to what the reference holds.
    """
    programs = multiprocessors(x_CD.device)
    for is_search in find_highest:
        _shifted_exp_logits[(programs,)](
            *(matrix(x)[:2] for x in (x_CD, w_VD, e_CV)), rows, *listed, transform, *w_VD.shape, CONFIG=gemm.CONFIG,
            PROGRAMS=programs, FIND_HIGHEST=is_search, num_stages=3, num_warps=8,
        )  # fmt: skip
