"""The GEMM that leaves exponentials instead of logits: E = exp(x W^T - reference), and its row sums.

C rows of a chunk, D hidden size, V vocabulary, P tiles across the vocabulary. The epilogue works on the float32
accumulators: bias, scale and cap, the exponential, its sum before it is rounded. No pass over [C, V] is left.

Two kernels: `exp_logits` for a whole chunk, `shifted_exp_logits` for the few rows whose exponentials overflow beside
their target's logit, whose number only the device knows.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from lowtide.head.kernels.configs import GemmConfig
from lowtide.head.kernels.gemm import (
    LOG2E,
    PLAIN,
    LogitTransform,
    finish_logits,
    gathered_logits,
    gemm_tiles,
    halves,
    matrix,
)
from lowtide.kernel_launch import Launcher


class ExpRows(NamedTuple):
    """What `exp_logits` reads and writes for each row."""

    reference: Tensor  # [C] float32
    y: Tensor  # [C] int32
    coefficient: Tensor | None  # [C] float32
    sums: Tensor | None  # [C, P] float32
    sum_stride: int  # not a matrix: Triton 3.6 loses a stride of 1 in a record within a record
    first_class: int


@triton.jit  # type: ignore[untyped-decorator]
def _exp_piece(  # type: ignore[no-untyped-def]
    z, row, column, of_row, V, e_d, rows, transform, BOUND: tl.constexpr, START: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """Turn accumulators [rows, WIDTH] into E, store it, and return its row sums."""
    y, reference, coefficient, bound = of_row
    at = START + tl.arange(0, WIDTH)  # within the tile, as y and bound are
    z = finish_logits(z, column + at, V, transform)
    e = tl.exp2(z * LOG2E - reference[:, None])
    is_target = at[None, :] == y[:, None]
    if transform.softcap is not None and e_d is not None:
        stored = e * (1.0 - (z / transform.softcap) * (z / transform.softcap))
    else:
        stored = e
    if rows.coefficient is not None:
        stored = tl.where(is_target, coefficient[:, None], stored)
    else:
        stored = tl.where(is_target, 0.0, stored)
    e = tl.where(is_target, 0.0, e)
    if BOUND:
        e = tl.where(at[None, :] < bound[:, None], e, 0.0)
        stored = tl.where(at[None, :] < bound[:, None], stored, 0.0)
    if e_d is not None:
        e_d.store([row, column + START], stored.to(e_d.dtype))
    total = tl.zeros((z.shape[0],), tl.float32)
    if rows.sums is not None:
        total = tl.sum(e, 1)
    return total


@triton.jit  # type: ignore[untyped-decorator]
def _exp_tile(z, row, p, C, V, e_d, rows, transform, BOUND: tl.constexpr, CONFIG: tl.constexpr):  # type: ignore[no-untyped-def]
    """Finish a tile, a half at a time where it is stored so."""
    COLUMNS: tl.constexpr = CONFIG.columns
    WIDTH: tl.constexpr = CONFIG.columns // CONFIG.pieces
    column = p * COLUMNS
    at = row + tl.arange(0, CONFIG.rows)
    inside = at < C
    y = tl.load(rows.y + at, mask=inside, other=-1)
    kept = y >= 0
    reference = tl.load(rows.reference + at, mask=inside, other=0.0) * LOG2E
    reference = tl.where(kept, reference, float("inf"))
    coefficient = reference
    if rows.coefficient is not None:
        coefficient = tl.load(rows.coefficient + at, mask=inside, other=0.0)
    bound = tl.where(kept, V - column, 0)
    y -= rows.first_class + column
    of_row = (y, reference, coefficient, bound)
    if CONFIG.pieces == 1:
        total = _exp_piece(z, row, column, of_row, V, e_d, rows, transform, BOUND, 0, WIDTH)
    else:
        left, right = halves(z, CONFIG.rows, COLUMNS)
        total = _exp_piece(left, row, column, of_row, V, e_d, rows, transform, BOUND, 0, WIDTH)
        total += _exp_piece(right, row, column, of_row, V, e_d, rows, transform, BOUND, WIDTH, WIDTH)
    if rows.sums is not None:
        tl.store(rows.sums + at.to(tl.int64) * rows.sum_stride + p, total, mask=inside)


@triton.jit
def to_ordered(f):  # type: ignore[no-untyped-def]
    """Map float32 to int32 so that the order stays: an integer maximum is the same whoever comes first."""
    i = f.to(tl.int32, bitcast=True)
    return tl.where(i < 0, i ^ 0x7FFFFFFF, i)


@triton.jit
def from_ordered(i):  # type: ignore[no-untyped-def]
    """Undo `to_ordered`."""
    return tl.where(i < 0, i ^ 0x7FFFFFFF, i).to(tl.float32, bitcast=True)


@Launcher
@triton.jit  # type: ignore[untyped-decorator]
def _shifted_exp_logits(  # type: ignore[no-untyped-def]
    x, w, e, listed, y_ptr, sums, transform, V, CONFIG: tl.constexpr, PROGRAMS: tl.constexpr,
    FIND_HIGHEST: tl.constexpr,
):  # fmt: skip
    """The rows of the list alone: first their highest logits (FIND_HIGHEST), then E and its sums relative to them."""
    ROWS: tl.constexpr = min(64, CONFIG.rows)
    COLUMNS: tl.constexpr = CONFIG.columns
    DEPTH: tl.constexpr = min(64, CONFIG.depth)
    list_ptr, count_ptr, highest_ptr = listed
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
        z = gathered_logits(x, rows, valid, w, columns, V, ROWS, COLUMNS, DEPTH)
        z = finish_logits(z, columns, V, transform)
        if FIND_HIGHEST:
            highest = tl.max(tl.where(inside[None, :], z, float("-inf")), 1)
            tl.atomic_max(highest_ptr + rows, to_ordered(highest), mask=valid)
        else:
            reference = from_ordered(tl.load(highest_ptr + rows, mask=valid, other=0))
            y = tl.load(y_ptr + rows, mask=valid, other=-1)
            own = tl.exp2((z - reference[:, None]) * LOG2E)
            own = tl.where((columns[None, :] == y[:, None]) | ~inside[None, :], 0.0, own)
            if e.base is not None:
                stored = own
                if transform.softcap is not None:
                    slope = 1.0 - (z / transform.softcap) * (z / transform.softcap)
                    stored = tl.where(own == 0, 0.0, own * slope)
                tl.store(
                    e.base + rows[:, None] * e.stride + columns[None, :],
                    stored.to(e.base.dtype.element_ty),
                    mask=valid[:, None] & inside[None, :],
                )
            tl.store(sums.base + rows * sums.stride + p, tl.sum(own, 1), mask=valid)


def exp_logits(
    x_CD: Tensor,
    w_VD: Tensor,
    reference_C: Tensor,
    y_C: Tensor,
    config: GemmConfig,
    programs: int,
    *,
    transform: LogitTransform = PLAIN,
    e_CV: Tensor | None = None,
    sum_CP: Tensor | None = None,
    coefficient_C: Tensor | None = None,
    first_class: int = 0,
) -> None:
    """Write ``E = exp(z - reference)``, times ``1 - (z / softcap)**2`` with a cap, and its sums.

    At the target E is 0, or ``coefficient`` where given. Rows of ignored tokens are 0, unless their logits are not
    finite and ``coefficient`` is None: then they may be NaN. ``y_C`` (int32) are counted as ``first_class``, that of
    ``w_VD``'s first row, and on; -1 for ignored tokens. ``e_CV`` takes E, in rows of 16-byte stride, if wanted,
    and ``sum_CP``, of unit stride within rows, each tile's row sums of exp(z - reference), the target left out.
    """
    rows = ExpRows(reference_C, y_C, coefficient_C, *matrix(sum_CP)[:2], first_class)
    asked = coefficient_C is not None
    gemm_tiles(_exp_tile, x_CD, w_VD, e_CV, rows, transform, config, programs, asked=asked)


def shifted_exp_logits(
    x_CD: Tensor,
    w_VD: Tensor,
    list_C: Tensor,
    count: Tensor,
    highest_C: Tensor,
    y_C: Tensor,
    config: GemmConfig,
    programs: int,
    *,
    sum_CP: Tensor,
    transform: LogitTransform = PLAIN,
    e_CV: Tensor | None = None,
    find_highest: tuple[bool, ...] = (True, False),
) -> None:
    """Recompute, relative to their highest logit, the rows whose numbers stand in ``list_C[:count]``.

    Costs two launches that end at once where there are none. Rows come out the same wherever they stand in the list.
    The other arguments are as in `exp_logits`; of the tile sizes, width and depth are taken. ``list_C`` and ``count``
    [1] are int32; so is ``highest_C``, of listed rows holding `to_ordered` of the target's logit, which takes the
    highest one's. ``find_highest`` are the passes: True to find the highest logits, False to build E and its sums
    relative to what ``highest_C`` holds.
    """
    for is_search in find_highest:
        _shifted_exp_logits[(programs,)](
            matrix(x_CD), matrix(w_VD), matrix(e_CV), (list_C, count, highest_C), y_C, matrix(sum_CP), transform,
            w_VD.shape[0], CONFIG=config, PROGRAMS=programs, FIND_HIGHEST=is_search, num_stages=3,
            num_warps=8,
        )  # fmt: skip
