"""Which tiles of E a chunk's gradients keep, and what stands for the others; `lists` says who computes what.

C rows of a chunk, D hidden size, V vocabulary, P tiles across it, R tiles of rows, g a token's factor, p its
probabilities. E is unnormalised: with a row's s, ``s E = g p``. A tile counts for

    q = sum over its rows of s^2 (sum over its classes of E^2 - (sum of E)^2 / 256), the target's entry left out

(256, or the number of classes in the last one), what is left of it without each row's mean. In place of row i of a tile
that is left out, whose entries sum to m_i, stands m_i times the mean row of W in the tile, and in dW's rows of that
tile s_i m_i x_i over the number of its classes. A target's entry in such a tile is added by itself.

So the gradient of the logits loses as much, squared, as the q of these tiles sum to. As many are left out, the smallest
first, as this sum allows: it is at most a^2 times the squared norm of the chunk's gradient. Tiles are counted by q in
BINS, eight to each power of two, of which all stay or none. A tile with the targets of MOST_TARGETS of its rows or more
stays in any case.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from lowtide.head.kernels import hopper
from lowtide.head.kernels.exp_terms import block_of
from lowtide.head.kernels.gemm import ALL, Used, counted_rows, matrix
from lowtide.kernel_launch import Launcher, blocks_of

ROWS = tl.constexpr(2 * hopper.ROWS.value)
COLUMNS = tl.constexpr(hopper.COLUMNS.value)
MOST_TARGETS = tl.constexpr(16)
TILES = tl.constexpr(128)  # across, at a time
BINS = tl.constexpr(2040)  # of positive numbers, by the first bits of a float32: those below infinity
BIN_BITS = tl.constexpr(20)  # that numbers of a bin differ in
VANISHES = tl.constexpr(2.0**-126)  # well above what ROWS x TILES squares can lose below the least float32


class Targets(NamedTuple):
    """What is known of each row's target [C]."""

    y: Tensor  # int32, -1 where ignored
    s: Tensor  # float32
    rest: Tensor  # float32: what its entry in E lost in rounding
    entry: Tensor | None = None  # float32: its entry in E, unrounded, where E does not exist yet
    alone: Tensor | None = None  # float32: takes the entry where its tile is not kept, else 0
    lost: Tensor | None = None  # float32: takes the entry where its tile is not kept, else ``rest``


class Choice(NamedTuple):
    """What `find_kept` writes of a chunk."""

    flags: Tensor  # int32 [R P]: 1 where a tile is kept, 0 where it is left out
    mass_CP: Tensor  # what a row sums to in the tiles that are left out
    sums: Tensor  # float32 [3, R, P / TILES]: g p that is in this mass; squares of what is lost of s E, and of s E


@triton.jit
def home_of(targets, tile, used, C):  # type: ignore[no-untyped-def]
    """Return the rows of a tile, which of them count, and the tile across that holds each one's target."""
    row = tile * ROWS + tl.arange(0, ROWS)
    y = tl.load(targets.y + row, mask=row < counted_rows(used, C), other=-1)
    return row, y >= 0, tl.where(y >= 0, y // COLUMNS, -1), y


@triton.jit
def classes_in(at, V):  # type: ignore[no-untyped-def]
    """Return how many classes are in tiles across: the last one may have fewer. Beyond it 1, to divide by."""
    return tl.minimum(tl.maximum(V - at * COLUMNS, 1), COLUMNS).to(tl.float32)


@triton.jit
def entries_of(targets, e, row, y, mask):  # type: ignore[no-untyped-def]
    """Return the targets' entries in E, before they were rounded; 0 outside of the mask."""
    e_ptr, e_stride, _ = e
    if targets.entry is None:
        entry = tl.load(e_ptr + row.to(tl.int64) * e_stride + y, mask=mask, other=0.0).to(tl.float32)
        entry += tl.load(targets.rest + row, mask=mask, other=0.0)
    else:
        entry = tl.load(targets.entry + row, mask=mask, other=0.0)
    return entry


@Launcher
@triton.jit(do_not_specialize=["C", "P"])
def _weigh_tiles(  # type: ignore[no-untyped-def]
    sums_ptr, squares_ptr, stride, e, targets, q_ptr, bins_ptr, whole_ptr, used, C, P
):
    """A program per tile of rows and TILES tiles across: q, and how many have as much.

    It is infinite where a tile stays in any case, and negative where no row has a gradient.
    """
    tile = tl.program_id(0)
    row, inside, home, y = home_of(targets, tile, used, C)
    s = tl.load(targets.s + row, mask=inside, other=0.0)
    at = tl.program_id(1) * TILES + tl.arange(0, TILES)
    mask = inside[:, None] & (at < P)[None, :]
    places = row.to(tl.int64)[:, None] * stride + at[None, :]
    squares = tl.load(squares_ptr + places, mask=mask, other=0.0)
    mass = tl.load(sums_ptr + places, mask=mask, other=0.0)
    whole = s[:, None] * tl.sqrt(squares)
    whole = tl.sum(tl.sum(tl.where((s != 0.0)[:, None], whole * whole, 0.0), 1), 0)
    of_targets = entries_of(targets, e, row, y, inside & (home // TILES == tl.program_id(1)) & (s != 0.0)) * s
    whole += tl.sum(of_targets * of_targets, 0)
    tl.store(whole_ptr + tile * tl.num_programs(1) + tl.program_id(1), whole)
    varied = squares - mass * (mass / classes_in(at, e[2])[None, :])
    part = s[:, None] * tl.sqrt(tl.where(varied < 0.0, 0.0, varied))  # NaN stays
    q = tl.sum(tl.where((s != 0.0)[:, None], part * part, 0.0), 0)
    at_home = tl.sum(((home[:, None] == at[None, :]) & (s != 0.0)[:, None]).to(tl.int32), 0)
    q = tl.where(at_home >= MOST_TARGETS, float("inf"), q)
    q = tl.where(tl.max((s != 0.0).to(tl.int32), 0) > 0, q, -1.0)
    tl.store(q_ptr + tile * P + at, q, mask=at < P)
    counts = (q > 0.0) & (q < float("inf"))
    tl.atomic_add(bins_ptr + (q.to(tl.int32, bitcast=True) >> BIN_BITS), 1, mask=counts & (at < P), sem="relaxed")


@triton.jit
def _least_kept(bins_ptr, whole_ptr, programs, accepted_ptr):  # type: ignore[no-untyped-def]
    """Return the q from which tiles stay: 0, so that all do, where the gradient is no number or too small to square."""
    whole = tl.zeros((TILES,), tl.float32)
    for first in range(0, programs, TILES):
        at = first + tl.arange(0, TILES)
        whole += tl.load(whole_ptr + at, mask=at < programs, other=0.0)
    accepted = tl.load(accepted_ptr)
    allowed = accepted * accepted * tl.sum(whole, 0)
    bin = tl.arange(0, 2048)
    number = tl.load(bins_ptr + bin, mask=bin < BINS, other=0).to(tl.float32)
    end = (tl.minimum(bin + 1, BINS - 1) << BIN_BITS).to(tl.float32, bitcast=True)  # finite
    squared = allowed > programs * VANISHES  # else what rows lose may have vanished from q
    allowed = tl.where(squared & (allowed < float("inf")), allowed, -1.0)
    lost = tl.cumsum(tl.where(number > 0.0, number * end, 0.0), 0)
    fits = (lost <= allowed) & (bin < BINS)
    return (tl.sum(fits.to(tl.int32), 0) << BIN_BITS).to(tl.float32, bitcast=True)


@Launcher
@triton.jit(do_not_specialize=["C", "P"])
def _find_kept(  # type: ignore[no-untyped-def]
    sums_ptr, stride, q_ptr, bins_ptr, accepted_ptr, targets, choice, mass_stride, used, C, P
):
    """A program per tile of rows and TILES tiles across."""
    tile = tl.program_id(0)
    programs = tl.num_programs(0) * tl.num_programs(1)
    least = _least_kept(bins_ptr, choice.sums + 2 * programs, programs, accepted_ptr)
    row, inside, _, _ = home_of(targets, tile, used, C)
    at_row = row.to(tl.int64)
    s = tl.load(targets.s + row, mask=inside, other=0.0)
    at = tl.program_id(1) * TILES + tl.arange(0, TILES)
    places = at_row[:, None] * stride + at[None, :]
    mass = tl.load(sums_ptr + places, mask=inside[:, None] & (at < P)[None, :], other=0.0)
    q = tl.load(q_ptr + tile * P + at, mask=at < P, other=-1.0)
    some = ~(q < 0.0)
    keep = ~(q < least) & some  # NaN is kept
    tl.store(choice.flags + tile * P + at, keep.to(tl.int32), mask=at < P)
    lost = tl.sum(tl.where(keep | ~some, 0.0, q), 0)
    mass = tl.where(keep[None, :], 0.0, mass)
    out = choice.mass_CP + at_row[:, None] * mass_stride + at[None, :]
    tl.store(out, mass.to(choice.mass_CP.dtype.element_ty), mask=(row < C)[:, None] & (at < P)[None, :])
    dropped = tl.sum(tl.sum(tl.where((s != 0.0)[:, None], mass * tl.abs(s)[:, None], 0.0), 1), 0)
    sums = choice.sums + tile * tl.num_programs(1) + tl.program_id(1)
    tl.store(sums, dropped)
    tl.store(sums + programs, lost)


@Launcher
@triton.jit(do_not_specialize=["C"])  # type: ignore[untyped-decorator]
def _add_targets(y_ptr, alone_ptr, scaled_ptr, out_ptr, used, C, D, BLOCK: tl.constexpr, STEP: tl.constexpr):  # type: ignore[no-untyped-def]
    """A program per row and part of D; the first row of each class does all."""
    i = tl.program_id(0)
    rows = counted_rows(used, C)
    y = tl.where(i < rows, tl.load(y_ptr + i), -1)
    before = tl.load(y_ptr + tl.maximum(i - 1, 0))
    if (y >= 0) & ((i == 0) | (before != y)):
        at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        total = tl.zeros((BLOCK,), tl.float32)
        any_alone = 0.0
        row = i
        same = 1
        while same > 0:
            rows_at = row + tl.arange(0, STEP)
            is_same = (rows_at < rows) & (tl.load(y_ptr + rows_at, mask=rows_at < rows, other=-1) == y)
            c = tl.load(alone_ptr + rows_at, mask=is_same, other=0.0)
            largest = tl.max(tl.abs(c), 0)
            if largest != 0.0:
                x_at = scaled_ptr + rows_at.to(tl.int64)[:, None] * D + at[None, :]
                x = tl.load(x_at, mask=(c != 0.0)[:, None] & (at < D)[None, :], other=0.0).to(tl.float32)
                total += tl.sum(x * c[:, None], 0)
            any_alone = tl.maximum(any_alone, largest)
            row += STEP
            same = tl.min(is_same.to(tl.int32), 0)
        if any_alone != 0.0:
            out = out_ptr + y.to(tl.int64) * D + at
            total += tl.load(out, mask=at < D, other=0.0).to(tl.float32)
            tl.store(out, total.to(out_ptr.dtype.element_ty), mask=at < D)


@Launcher
@triton.jit  # type: ignore[untyped-decorator]
def _put_in_order(w, order_ptr, out_ptr, mean_ptr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """A program per tile of classes and part of D."""
    w_ptr, w_stride, D = w
    p = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    V = tl.load(order_ptr)
    for part in tl.static_range(4):
        v = p * COLUMNS + part * (COLUMNS // 4) + tl.arange(0, COLUMNS // 4)
        own = tl.load(order_ptr + 1 + v, mask=v < V, other=0).to(tl.int64)
        mask = (v < V)[:, None] & (at < D)[None, :]
        x = tl.load(w_ptr + own[:, None] * w_stride + at[None, :], mask=mask, other=0.0)
        tl.store(out_ptr + v.to(tl.int64)[:, None] * D + at[None, :], x, mask=mask)
        total += tl.sum(x.to(tl.float32), 0)
    n = tl.minimum(V - p * COLUMNS, COLUMNS)
    tl.store(mean_ptr + p * D + at, (total / n).to(mean_ptr.dtype.element_ty), mask=at < D)


@Launcher
@triton.jit  # type: ignore[untyped-decorator]
def _put_back(sum_ptr, shared_ptr, order_ptr, out_ptr, D, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """A program per class: its row of the sum and what its tile shares, to its own place."""
    v = tl.program_id(0)
    V = tl.load(order_ptr)
    own = tl.load(order_ptr + 1 + v).to(tl.int64)
    p = v // COLUMNS
    share = 1.0 / tl.minimum(V - p * COLUMNS, COLUMNS).to(tl.float32)
    for d in range(0, D, BLOCK):
        at = d + tl.arange(0, BLOCK)
        x = tl.load(sum_ptr + v.to(tl.int64) * D + at, mask=at < D, other=0.0).to(tl.float32)
        x += tl.load(shared_ptr + p * D + at, mask=at < D, other=0.0) * share
        tl.store(out_ptr + own * D + at, x.to(out_ptr.dtype.element_ty), mask=at < D)


def find_kept(
    sums_CP: Tensor, squares_CP: Tensor, e_CV: Tensor, targets: Targets, accepted: Tensor, choice: Choice,
    used: Used = ALL,
) -> None:  # fmt: skip
    """Choose the tiles that are kept: the others lose at most ``accepted`` (float32 [1]) of the chunk's gradient.

    Of E the targets' entries are read, where ``targets`` do not have them.
    """
    C, P = sums_CP.shape
    grid = (blocks_of(C, ROWS.value), blocks_of(P, TILES.value))
    q, bins = sums_CP.new_empty(grid[0] * P), choice.flags.new_zeros(BINS.value)
    _weigh_tiles[grid](
        sums_CP, squares_CP, sums_CP.stride(0), matrix(e_CV), targets, q, bins, choice.sums[2], used, C, P, num_warps=8
    )
    _find_kept[grid](
        sums_CP, sums_CP.stride(0), q, bins, accepted, targets, choice, choice.mass_CP.stride(0), used, C, P,
        num_warps=8,
    )  # fmt: skip


def add_targets(targets: Targets, scaled_CD: Tensor, out_VD: Tensor, used: Used = ALL) -> None:
    """Add the targets' entries that stand alone to dW; rows of one class lie together."""
    C, D = scaled_CD.shape
    block = block_of(D)
    _add_targets[(C, blocks_of(D, block))](
        targets.y, targets.alone, scaled_CD, out_VD, used, C, D, BLOCK=block, STEP=8, num_warps=4
    )


def put_in_order(w_VD: Tensor, order: Tensor, out_VD: Tensor, mean_PD: Tensor) -> None:
    """Write the rows of W in order, and the mean row of each tile; ``order`` (int32) is V, and the classes in order."""
    P, D = mean_PD.shape
    rows = w_VD if w_VD.stride(1) == 1 else w_VD.contiguous()
    _put_in_order[(P, blocks_of(D, 64))](matrix(rows), order, out_VD, mean_PD, BLOCK=64, num_warps=4)


def put_back(sum_VD: Tensor, shared_PD: Tensor, order: Tensor, out_VD: Tensor) -> None:
    """Write dW in the classes' own order, with what each tile's rows share (float32: the sum of them)."""
    V, D = sum_VD.shape
    _put_back[(V,)](sum_VD, shared_PD, order, out_VD, D, BLOCK=block_of(D), num_warps=4)
