"""The GEMM that leaves exponentials instead of logits: E = exp(x W^T - reference), and its row sums.

C rows of a chunk, D hidden size, V vocabulary, P tiles across the vocabulary. The epilogue works on the float32
accumulators: bias, scale and cap, the exponential, its sum before it is rounded. No pass over [C, V] is left.

Two kernels: `exp_logits` for a whole chunk, through TMA descriptors and persistent; `shifted_exp_logits` for the few
rows whose exponentials overflow beside their target's logit, whose number only the device knows.
"""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from lowtide.head.kernels.configs import GemmConfig
from lowtide.head.kernels.elementary import tanh
from lowtide.head.kernels.launch import Launcher

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit  # type: ignore[untyped-decorator]
def tile_at(tile, C, V, ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the tile's place, (row tile, column tile): groups of GROUP row tiles share W in cache, rows go first."""
    row_tiles = tl.cdiv(C, ROWS)
    width = GROUP * tl.cdiv(V, COLUMNS)
    first = (tile // width) * GROUP
    height = min(row_tiles - first, GROUP)
    return first + (tile % width) % height, (tile % width) // height


@triton.jit  # type: ignore[untyped-decorator]
def tile_logits(x_d, w_d, row, column, steps, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return a tile of x W^T, float32, through descriptors; what lies outside of either counts as zeros."""
    z = tl.zeros((ROWS, COLUMNS), tl.float32)
    for k in range(steps):
        z = tl.dot(x_d.load([row, k * DEPTH]), w_d.load([column, k * DEPTH]).T, z)
    return z


@triton.jit  # type: ignore[untyped-decorator]
def gathered_logits(  # type: ignore[no-untyped-def]
    x_ptr, x_stride, rows, listed, w_ptr, w_stride, columns, V, D, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    """Return x W^T, float32, of any ``rows`` (int64) of x, where ``listed``, and any ``columns`` below V."""
    inside = columns < V
    z = tl.zeros((ROWS, COLUMNS), tl.float32)
    for k in range(0, D, DEPTH):
        d = k + tl.arange(0, DEPTH)
        x = tl.load(x_ptr + rows[:, None] * x_stride + d[None, :], mask=listed[:, None] & (d < D)[None, :], other=0.0)
        w = tl.load(
            w_ptr + columns.to(tl.int64)[None, :] * w_stride + d[:, None], mask=inside[None, :] & (d < D)[:, None],
            other=0.0,
        )  # fmt: skip
        z = tl.dot(x, w, z)
    return z


@triton.jit  # type: ignore[untyped-decorator]
def halves(z, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return a tile's left and right half of the columns: finished one after the other, they need fewer registers."""
    return tl.split(tl.permute(tl.reshape(z, (ROWS, 2, COLUMNS // 2)), (0, 2, 1)))


@triton.jit  # type: ignore[untyped-decorator]
def finish_logits(z, column, V, bias_ptr, scale_ptr, cap, BIAS: tl.constexpr, SCALE: tl.constexpr, CAP: tl.constexpr):  # type: ignore[no-untyped-def]
    """cap * tanh((z + bias) * scale / cap), each part where it is asked for."""
    if BIAS:
        z += tl.load(bias_ptr + column, mask=column < V, other=0.0)[None, :]
    if SCALE:
        z *= tl.load(scale_ptr)
    if CAP:
        z = cap * tanh(z / cap)
    return z


@triton.jit  # type: ignore[untyped-decorator]
def _epilogue(  # type: ignore[no-untyped-def]
    z, e_d, row, column, y, reference, coefficient, bound, V, bias_ptr, scale_ptr, cap, START: tl.constexpr,
    WIDTH: tl.constexpr, BIAS: tl.constexpr, SCALE: tl.constexpr, CAP: tl.constexpr, COEFFICIENT: tl.constexpr,
    BOUND: tl.constexpr, SUM: tl.constexpr, STORE: tl.constexpr,
):  # fmt: skip
    """Turn accumulators [rows, WIDTH] into E, store it, and return its row sums."""
    at = START + tl.arange(0, WIDTH)  # within the tile, as y and bound are
    z = finish_logits(z, column + at, V, bias_ptr, scale_ptr, cap, BIAS, SCALE, CAP)
    e = tl.exp2(z * LOG2E - reference[:, None])
    is_target = at[None, :] == y[:, None]
    if CAP and STORE:
        stored = e * (1.0 - (z / cap) * (z / cap))
    else:
        stored = e
    if COEFFICIENT:
        stored = tl.where(is_target, coefficient[:, None], stored)
    else:
        stored = tl.where(is_target, 0.0, stored)
    e = tl.where(is_target, 0.0, e)
    if BOUND:
        e = tl.where(at[None, :] < bound[:, None], e, 0.0)
        stored = tl.where(at[None, :] < bound[:, None], stored, 0.0)
    if STORE:
        e_d.store([row, column + START], stored.to(e_d.dtype))
    total = tl.zeros((z.shape[0],), tl.float32)
    if SUM:
        total = tl.sum(e, 1)
    return total


@Launcher
@triton.jit(do_not_specialize=["C", "first_class"])  # type: ignore[untyped-decorator]
def _exp_logits(  # type: ignore[no-untyped-def]
    x_d, w_d, e_d, reference_ptr, y_ptr, coefficient_ptr, sum_ptr, bias_ptr, scale_ptr, cap, C, V, D,
    sum_stride, first_class, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,
    PROGRAMS: tl.constexpr, PIECES: tl.constexpr, BIAS: tl.constexpr, SCALE: tl.constexpr, CAP: tl.constexpr,
    COEFFICIENT: tl.constexpr, BOUND: tl.constexpr, SUM: tl.constexpr, STORE: tl.constexpr,
):  # fmt: skip
    """Persistent: each program takes every PROGRAMS-th tile, in groups of GROUP row tiles that share W in cache."""
    steps = tl.cdiv(D, DEPTH)
    for tile in tl.range(tl.program_id(0), tl.cdiv(C, ROWS) * tl.cdiv(V, COLUMNS), PROGRAMS, flatten=True):
        row_tile, p = tile_at(tile, C, V, ROWS, COLUMNS, GROUP)
        row, column = row_tile * ROWS, p * COLUMNS
        z = tile_logits(x_d, w_d, row, column, steps, ROWS, COLUMNS, DEPTH)
        rows = row + tl.arange(0, ROWS)
        y = tl.load(y_ptr + rows, mask=rows < C, other=-1)
        kept = y >= 0
        reference = tl.load(reference_ptr + rows, mask=rows < C, other=0.0) * LOG2E
        reference = tl.where(kept, reference, float("inf"))
        coefficient = reference
        if COEFFICIENT:
            coefficient = tl.load(coefficient_ptr + rows, mask=rows < C, other=0.0)
        bound = tl.where(kept, V - column, 0)
        y -= first_class + column
        if PIECES == 1:
            total = _epilogue(
                z, e_d, row, column, y, reference, coefficient, bound, V, bias_ptr, scale_ptr, cap, 0, COLUMNS,
                BIAS, SCALE, CAP, COEFFICIENT, BOUND, SUM, STORE,
            )  # fmt: skip
        else:
            HALF: tl.constexpr = COLUMNS // 2
            left, right = halves(z, ROWS, COLUMNS)
            total = _epilogue(
                left, e_d, row, column, y, reference, coefficient, bound, V, bias_ptr, scale_ptr, cap, 0, HALF,
                BIAS, SCALE, CAP, COEFFICIENT, BOUND, SUM, STORE,
            )  # fmt: skip
            total += _epilogue(
                right, e_d, row, column, y, reference, coefficient, bound, V, bias_ptr, scale_ptr, cap, HALF, HALF,
                BIAS, SCALE, CAP, COEFFICIENT, BOUND, SUM, STORE,
            )  # fmt: skip
        if SUM:
            tl.store(sum_ptr + rows.to(tl.int64) * sum_stride + p, total, mask=rows < C)


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
    x_ptr, w_ptr, e_ptr, list_ptr, count_ptr, highest_ptr, y_ptr, sum_ptr, bias_ptr, scale_ptr, cap, V,
    D, x_stride, w_stride, e_stride, sum_stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    PROGRAMS: tl.constexpr, BIAS: tl.constexpr, SCALE: tl.constexpr, CAP: tl.constexpr,
    STORE: tl.constexpr, FIND_HIGHEST: tl.constexpr,
):  # fmt: skip
    """The rows of the list alone: first their highest logits (FIND_HIGHEST), then E and its sums relative to them."""
    count = tl.load(count_ptr)
    row_tiles = tl.cdiv(count, ROWS)
    column_tiles = tl.cdiv(V, COLUMNS)
    for tile in range(tl.program_id(0), row_tiles * column_tiles, PROGRAMS):
        slots = (tile % row_tiles) * ROWS + tl.arange(0, ROWS)
        p = tile // row_tiles
        listed = slots < count
        rows = tl.load(list_ptr + slots, mask=listed, other=0).to(tl.int64)
        columns = p * COLUMNS + tl.arange(0, COLUMNS)
        inside = columns < V
        z = gathered_logits(x_ptr, x_stride, rows, listed, w_ptr, w_stride, columns, V, D, ROWS, COLUMNS, DEPTH)
        z = finish_logits(z, columns, V, bias_ptr, scale_ptr, cap, BIAS, SCALE, CAP)
        if FIND_HIGHEST:
            highest = tl.max(tl.where(inside[None, :], z, float("-inf")), 1)
            tl.atomic_max(highest_ptr + rows, to_ordered(highest), mask=listed)
        else:
            reference = from_ordered(tl.load(highest_ptr + rows, mask=listed, other=0))
            y = tl.load(y_ptr + rows, mask=listed, other=-1)
            e = tl.exp2((z - reference[:, None]) * LOG2E)
            e = tl.where((columns[None, :] == y[:, None]) | ~inside[None, :], 0.0, e)
            if STORE:
                stored = e
                if CAP:
                    stored = tl.where(e == 0, 0.0, e * (1.0 - (z / cap) * (z / cap)))
                tl.store(
                    e_ptr + rows[:, None] * e_stride + columns[None, :],
                    stored.to(e_ptr.dtype.element_ty),
                    mask=listed[:, None] & inside[None, :],
                )
            tl.store(sum_ptr + rows * sum_stride + p, tl.sum(e, 1), mask=listed)


def tiles_across(V: int, config: GemmConfig) -> int:
    """Return P, the row sums that each row gets."""
    return -(-V // config.columns)


def exp_logits(
    x_CD: Tensor,
    w_VD: Tensor,
    reference_C: Tensor,
    y_C: Tensor,
    config: GemmConfig,
    programs: int,
    *,
    bias_V: Tensor | None = None,
    scale: Tensor | None = None,
    softcap: float | None = None,
    e_CV: Tensor | None = None,
    sum_CP: Tensor | None = None,
    coefficient_C: Tensor | None = None,
    first_class: int = 0,
) -> None:
    """Write ``E = exp(z - reference)``, times ``1 - (z / softcap)**2`` with a cap, and its sums.

    ``z = softcap * tanh((x @ w.T + bias) * scale / softcap)``. At the target E is 0, or ``coefficient`` where given.
    Rows of ignored tokens are 0, unless their logits are not finite and ``coefficient`` is None: then they may be NaN.

    Args:
        x_CD: Hidden states, rows of 16-byte stride, unit stride within.
        w_VD: Weight, the same.
        reference_C: float32.
        y_C: int32 classes, counted as ``first_class`` and on; -1 for ignored tokens.
        config: Tile sizes.
        programs: How many programs run: one for each multiprocessor.
        bias_V: float32, or None.
        scale: 0-d float32 on the device, or None.
        softcap: Above 0, or None.
        e_CV: Takes E, rows of 16-byte stride; None: only sums are wanted.
        sum_CP: float32, unit stride within rows; takes each tile's row sums of exp(z - reference), target left out.
        coefficient_C: float32, what E holds at the target.
        first_class: Class of ``w_VD``'s first row.
    """
    C, D = x_CD.shape
    V = w_VD.shape[0]
    nothing = reference_C
    sums = nothing if sum_CP is None else sum_CP
    out = x_CD if e_CV is None else e_CV  # a descriptor is needed even where nothing is stored
    _exp_logits[(programs * config.per_multiprocessor,)](
        descriptor(x_CD, C, D, config.rows, config.depth),
        descriptor(w_VD, V, D, config.columns, config.depth),
        descriptor(out, C, D if e_CV is None else V, config.rows, config.columns // config.pieces),
        reference_C, y_C, nothing if coefficient_C is None else coefficient_C, sums,
        nothing if bias_V is None else bias_V,
        nothing if scale is None else scale, 1.0 if softcap is None else softcap, C, V, D, sums.stride(0), first_class,
        ROWS=config.rows, COLUMNS=config.columns, DEPTH=config.depth, GROUP=config.group,
        PROGRAMS=programs * config.per_multiprocessor, PIECES=config.pieces, BIAS=bias_V is not None,
        SCALE=scale is not None, CAP=softcap is not None, COEFFICIENT=coefficient_C is not None,
        BOUND=V % config.columns != 0 or coefficient_C is not None, SUM=sum_CP is not None,
        STORE=e_CV is not None, num_stages=config.stages, num_warps=config.warps,
    )  # fmt: skip


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
    bias_V: Tensor | None = None,
    scale: Tensor | None = None,
    softcap: float | None = None,
    e_CV: Tensor | None = None,
    find_highest: tuple[bool, ...] = (True, False),
) -> None:
    """Do again, relative to their highest logit, the rows whose numbers stand in ``list_C[:count]``.

    Costs two launches that end at once where there are none. Rows come out the same wherever they stand in the list.

    Args:
        x_CD: As in `exp_logits`; so are the others that are not named here.
        w_VD: See there.
        list_C: int32 row numbers.
        count: int32 [1], how many.
        highest_C: int32 [C], of listed rows holding ``to_ordered`` of the target's logit; takes the highest one's.
        y_C: See there.
        config: See there; only the tile's width and depth are taken.
        programs: See there.
        sum_CP: See there.
        bias_V: See there.
        scale: See there.
        softcap: See there.
        e_CV: See there.
        find_highest: The passes: True to find the highest logits, False to build E and its sums relative to what
            ``highest_C`` holds.
    """
    D = x_CD.shape[1]
    V = w_VD.shape[0]
    for is_search in find_highest:
        _shifted_exp_logits[(programs,)](
            x_CD, w_VD, x_CD if e_CV is None else e_CV, list_C, count, highest_C, y_C, sum_CP,
            sum_CP if bias_V is None else bias_V,
            sum_CP if scale is None else scale, 1.0 if softcap is None else softcap, V, D, x_CD.stride(0),
            w_VD.stride(0), 0 if e_CV is None else e_CV.stride(0), sum_CP.stride(0), ROWS=min(64, config.rows),
            COLUMNS=config.columns, DEPTH=min(64, config.depth), PROGRAMS=programs, BIAS=bias_V is not None,
            SCALE=scale is not None, CAP=softcap is not None, STORE=e_CV is not None,
            FIND_HIGHEST=is_search, num_stages=3, num_warps=8,
        )  # fmt: skip


def descriptor(x: Tensor, rows: int, columns: int, block_rows: int, block_columns: int) -> Any:
    """Return what TMA needs to know of ``x`` to copy blocks of it."""
    return TensorDescriptor(x, [rows, columns], [x.stride(0), 1], [block_rows, block_columns])


@cache
def multiprocessors(device: torch.device) -> int:
    """Return how many multiprocessors ``device`` has; 2 in Triton's interpreter, which has none."""
    if device.type != "cuda":
        return 2
    return torch.cuda.get_device_properties(device).multi_processor_count
