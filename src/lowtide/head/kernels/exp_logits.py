"""The GEMM that stores exponentials instead of logits: E = exp(x W^T - reference), and its row sums.

C rows of a chunk, D hidden size, V vocabulary, P tiles across the vocabulary. The epilogue works on the float32
accumulators: bias, scale and cap, the exponential, its sum before it is rounded. No pass over [C, V] is left.

Two kernels: `exp_tile` for a whole chunk, `shifted_exp_logits` for the few rows whose exponentials overflow beside
their target's logit, whose number only the device knows.
"""

from collections.abc import Iterable
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from lowtide.head.kernels import gemm
from lowtide.head.kernels.gemm import (
    LOG2E,
    LogitTransform,
    finish_logits,
    gathered_logits,
    halves,
    matrix,
)
from lowtide.kernel_launch import Launcher, multiprocessors


class ExpRows(NamedTuple):
    """What the kernels read and write for each row."""

    reference: Tensor  # [C] float32
    y: Tensor  # [C] int32: classes, counted as ``first_class`` and on; -1 for ignored tokens
    coefficient: Tensor | None  # [C] float32: what E holds at the target; None: 0
    sums: Tensor | None  # [C, P] float32: takes each tile's row sums of exp(z - reference), the target left out
    sum_stride: int  # not a matrix: Triton 3.6 loses a stride of 1 in a record within a record
    first_class: int  # that of W's first row
    squares: Tensor | None = None  # as sums, of the squares of E as it is stored
    masses: Tensor | None = None  # and of its entries, where a cap makes them others than exp(z - reference)

    @classmethod
    def of(
        cls, reference_C: Tensor, y_C: Tensor, sums: Tensor | None, coefficient_C: Tensor | None = None,
        first: int = 0, stored: Iterable[Tensor] = (),
    ) -> "ExpRows":  # fmt: skip
        """Return the record of these; ``stored``: squares, or squares and masses, of the sums' stride."""
        return cls(reference_C, y_C, coefficient_C, *matrix(sums)[:2], first, *stored)


class Listed(NamedTuple):
    """Tiles [128, 256] of a chunk, int32, those of one tile across the vocabulary beside each other."""

    tiles: Tensor  # [R * P]: 2^16 times the tile of rows, plus the tile across
    number: Tensor  # [1]


@triton.jit  # type: ignore[untyped-decorator]
def exp_tile(z, row, p, C, V, e_d, rows, transform, BOUND: tl.constexpr, CONFIG: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write ``E = exp(z - reference)`` of a tile, times ``1 - (z / softcap)**2`` with a cap, and its row sums.

    An epilogue of `gemm.gemm_tiles`, with `ExpRows`, a half at a time; without ``e_d`` only
    sums are wanted. Rows of ignored tokens are 0, unless their logits are not finite and there is no coefficient: then
    they may be NaN.
    """
    WIDTH: tl.constexpr = CONFIG.columns // 2
    column = p * CONFIG.columns
    at = row + tl.arange(0, CONFIG.rows)
    inside = at < C
    y = tl.load(rows.y + at, mask=inside, other=-1)
    kept = y >= 0
    reference = tl.load(rows.reference + at, mask=inside, other=0.0) * LOG2E
    reference = tl.where(kept, reference, float("inf"))
    if rows.coefficient is not None:
        coefficient = tl.load(rows.coefficient + at, mask=inside, other=0.0)
    bound = tl.where(kept, V - column, 0)
    y -= rows.first_class + column
    total = tl.zeros_like(reference)
    squared = tl.zeros_like(reference)
    mass = tl.zeros_like(reference)
    pieces = halves(z, CONFIG)
    for i in tl.static_range(2):
        v = i * WIDTH + tl.arange(0, WIDTH)  # within the tile, as y and bound are
        logits = finish_logits(pieces[i], column + v, V, transform)
        e = tl.exp2(logits * LOG2E - reference[:, None])
        is_target = v[None, :] == y[:, None]
        stored = e
        if transform.softcap is not None:
            stored = e * (1.0 - (logits / transform.softcap) * (logits / transform.softcap))
        if rows.coefficient is not None:
            stored = tl.where(is_target, coefficient[:, None], stored)
        else:
            stored = tl.where(is_target, 0.0, stored)
        e = tl.where(is_target, 0.0, e)
        if BOUND or rows.coefficient is not None:
            e = tl.where(v[None, :] < bound[:, None], e, 0.0)
            stored = tl.where(v[None, :] < bound[:, None], stored, 0.0)
        if e_d is not None:
            e_d.store([row, column + i * WIDTH], stored.to(e_d.dtype))
        if rows.sums is not None:
            total = tl.sum(e, 1) if i == 0 else total + tl.sum(e, 1)
        if rows.squares is not None:
            squared += tl.sum(stored * stored, 1)
        if rows.masses is not None:
            mass += tl.sum(stored, 1)
    if rows.sums is not None:
        tl.store(rows.sums + at.to(tl.int64) * rows.sum_stride + p, total, mask=inside)
    if rows.squares is not None:
        tl.store(rows.squares + at.to(tl.int64) * rows.sum_stride + p, squared, mask=inside)
    if rows.masses is not None:
        tl.store(rows.masses + at.to(tl.int64) * rows.sum_stride + p, mass, mask=inside)


@triton.jit
def to_ordered(f):  # type: ignore[no-untyped-def]
    """Map float32 to int32 so that the order stays: an integer maximum does not depend on the order of writes."""
    i = f.to(tl.int32, bitcast=True)
    return tl.where(i < 0, i ^ 0x7FFFFFFF, i)


@triton.jit
def from_ordered(i):  # type: ignore[no-untyped-def]
    """Undo `to_ordered`."""
    return tl.where(i < 0, i ^ 0x7FFFFFFF, i).to(tl.float32, bitcast=True)


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
            tl.atomic_max(of_row.reference + rows, to_ordered(highest), mask=valid)
        else:
            reference = from_ordered(tl.load(of_row.reference + rows, mask=valid, other=0))
            y = tl.load(of_row.y + rows, mask=valid, other=-1)
            e = tl.exp2((z - reference[:, None]) * LOG2E)
            e = tl.where((columns[None, :] == y[:, None]) | ~inside[None, :], 0.0, e)
            stored = e
            if transform.softcap is not None:
                slope = 1.0 - (z / transform.softcap) * (z / transform.softcap)
                stored = tl.where(e == 0, 0.0, e * slope)
            if e_ptr is not None:
                at = e_ptr + rows[:, None] * e_stride + columns[None, :]
                tl.store(at, stored.to(e_ptr.dtype.element_ty), mask=valid[:, None] & inside[None, :])
            tl.store(of_row.sums + rows * of_row.sum_stride + p, tl.sum(e, 1), mask=valid)
            if of_row.squares is not None:
                tl.store(of_row.squares + rows * of_row.sum_stride + p, tl.sum(stored * stored, 1), mask=valid)
            if of_row.masses is not None:
                tl.store(of_row.masses + rows * of_row.sum_stride + p, tl.sum(stored, 1), mask=valid)


def shifted_exp_logits(
    x_CD: Tensor, w_VD: Tensor, e_CV: Tensor | None, rows: ExpRows, listed: tuple[Tensor, Tensor],
    transform: LogitTransform, *, find_highest: tuple[bool, ...] = (True, False),
) -> None:  # fmt: skip
    """Recompute, relative to their highest logit, the rows whose numbers are ``listed``: a list, and how long it is.

    Costs two launches that end at once if there are none. Results do not depend on the order of the list.
    Of the tile sizes, width and depth are taken. The list and its length [1] are int32; so is here the reference, of
    listed rows holding `to_ordered` of the target's logit, which takes the highest one's. ``find_highest`` are the
    passes: True to find the highest logits, False to build E and its sums relative to what the reference holds.
    """
    programs = multiprocessors(x_CD.device)
    for is_search in find_highest:
        _shifted_exp_logits[(programs,)](
            *(matrix(x)[:2] for x in (x_CD, w_VD, e_CV)), rows, *listed, transform, *w_VD.shape, CONFIG=gemm.CONFIG,
            PROGRAMS=programs, FIND_HIGHEST=is_search, num_stages=3, num_warps=8,
        )  # fmt: skip
