"""Which tiles of E a chunk's gradients keep, what stands for the others, and who computes what.

C rows of a chunk, D hidden size, V vocabulary, P tiles across it, R tiles of rows, g a token's factor, p its
probabilities. E is unnormalised: with a row's s, ``s E = g p``. A tile counts for

    q = sum over its rows of s^2 (sum over its classes of E^2 - (sum of E)^2 / 256), the target's entry left out

what is left of it without each row's mean, and is kept where q is at least a threshold, or MOST_TARGETS of its rows
have their target in it. In place of row i of every other tile, whose entries sum to m_i, stands m_i times the mean row
of W in the tile, and in dW's rows of that tile s_i m_i x_i over the number of its classes. A target's entry in a tile
that is not kept is added by itself.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowtide.head.kernels.exp_terms import block_of
from lowtide.head.kernels.gemm import ALL, Used, counted_rows, matrix
from lowtide.head.kernels.kept_gemms_hopper import FIELDS, Lists, Shares
from lowtide.kernel_launch import Launcher, blocks_of, multiprocessors, power_of_2

ROWS = tl.constexpr(128)
COLUMNS = tl.constexpr(256)
MOST_TARGETS = tl.constexpr(16)
TILES = tl.constexpr(128)  # across, at a time
STEPS_OF_MEANS = tl.constexpr(256)  # tiles across whose means take as long in E' W as a kept tile


class Targets(NamedTuple):
    """What is known of each row's target [C]."""

    y: Tensor  # int32, -1 where ignored
    s: Tensor  # float32
    rest: Tensor  # float32: what its entry in E lost in rounding
    alone: Tensor  # float32: takes the entry where its tile is not kept, else 0
    lost: Tensor  # float32: takes the entry where its tile is not kept, else ``rest``


@triton.jit
def _home(targets, tile, used, C):  # type: ignore[no-untyped-def]
    """Return the rows of a tile, which of them count, and the tile across that holds each one's target."""
    row = tile * ROWS + tl.arange(0, ROWS)
    y = tl.load(targets.y + row, mask=row < counted_rows(used, C), other=-1)
    return row, y >= 0, tl.where(y >= 0, y // COLUMNS, -1), y


@Launcher
@triton.jit(do_not_specialize=["seed", "C", "P"])
def _find_kept(  # type: ignore[no-untyped-def]
    sums_ptr, squares_ptr, stride, targets, least_ptr, mass_ptr, mass_stride, flags_ptr, dropped_ptr, used, seed, C, P
):  # fmt: skip
    """A program per tile of rows and TILES tiles across."""
    tile = tl.program_id(0)
    row, inside, home, _ = _home(targets, tile, used, C)
    at_row = row.to(tl.int64)
    s = tl.load(targets.s + row, mask=inside, other=0.0)
    at = tl.program_id(1) * TILES + tl.arange(0, TILES)
    mask = inside[:, None] & (at < P)[None, :]
    places = at_row[:, None] * stride + at[None, :]
    squares = tl.load(squares_ptr + places, mask=mask, other=0.0)
    mass = tl.load(sums_ptr + places, mask=mask, other=0.0)
    at_home = tl.sum((home[:, None] == at[None, :]).to(tl.int32), 0)
    varied = squares - mass * (mass * (1.0 / COLUMNS))
    part = s[:, None] * tl.sqrt(tl.where(varied < 0.0, 0.0, varied))  # NaN stays
    q = tl.sum(tl.where((s != 0.0)[:, None], part * part, 0.0), 0)
    least = tl.load(least_ptr)
    some = (at < P) & (tl.max(inside.to(tl.int32), 0) > 0)
    keep = (~(q < least) | (at_home >= MOST_TARGETS)) & some  # NaN is kept
    flag = keep.to(tl.int32)
    times = tl.where(keep, 1.0, 0.0)
    if seed is not None:  # the largest power of two that is no more than the square root of q over the threshold
        halvings = tl.ceil(0.5 * tl.log2(least / tl.maximum(q, least * 2.0**-60)))
        draw = tl.rand(seed, (used.first // ROWS + tile) * P + at)
        drawn = some & ~keep & (draw < tl.exp2(-halvings))
        flag = tl.where(drawn, 1 + halvings.to(tl.int32), flag)
        times = tl.where(drawn, tl.exp2(halvings), times)
    tl.store(flags_ptr + tile * P + at, flag, mask=at < P)
    mass *= 1.0 - times[None, :]
    out = mass_ptr + at_row[:, None] * mass_stride + at[None, :]
    tl.store(out, mass.to(mass_ptr.dtype.element_ty), mask=(row < C)[:, None] & (at < P)[None, :])
    dropped = tl.sum(tl.sum(tl.where((s != 0.0)[:, None], mass * tl.abs(s)[:, None], 0.0), 1), 0)
    tl.store(dropped_ptr + tile * tl.num_programs(1) + tl.program_id(1), dropped)


@triton.jit  # type: ignore[untyped-decorator]
def _list_down(flags_ptr, lists, tile, R, P, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """List the tiles of rows that keep TILES tiles across."""
    at = tile * TILES + tl.arange(0, TILES)
    count = tl.zeros((TILES,), tl.int32)
    for r in range(0, R, BLOCK):
        row = r + tl.arange(0, BLOCK)
        mask = (row < R)[:, None] & (at < P)[None, :]
        keep = (tl.load(flags_ptr + row[:, None] * P + at[None, :], mask=mask, other=0) > 0).to(tl.int32)
        place = count[None, :] + tl.cumsum(keep, 0) - 1
        rows = tl.broadcast_to(row[:, None], (BLOCK, TILES))
        tl.store(lists.down + at[None, :] * R + place, rows, mask=keep > 0)
        count += tl.sum(keep, 0)
    tl.store(lists.down_count + at, count, mask=at < P)


@triton.jit
def _list_across(flags_ptr, lists, e_ptr, e_stride, targets, tile, used, C, P):  # type: ignore[no-untyped-def]
    """List the tiles across that a tile of rows keeps, and take the targets' entries out of the others."""
    count = 0
    for p in range(0, P, TILES):
        at = p + tl.arange(0, TILES)
        keep = (tl.load(flags_ptr + tile * P + at, mask=at < P, other=0) > 0).to(tl.int32)
        tl.store(lists.across + tile * P + count + tl.cumsum(keep, 0) - 1, at, mask=keep > 0)
        count += tl.sum(keep, 0)
    row, inside, home, y = _home(targets, tile, used, C)
    is_kept = tl.load(flags_ptr + tile * P + home, mask=inside, other=1) == 1
    rest = tl.load(targets.rest + row, mask=inside, other=0.0)
    entry = tl.load(e_ptr + row.to(tl.int64) * e_stride + y, mask=inside & ~is_kept, other=0.0).to(tl.float32)
    tl.store(targets.alone + row, tl.where(is_kept, 0.0, entry + rest), mask=row < C)
    tl.store(targets.lost + row, entry + rest, mask=row < C)


@triton.jit  # type: ignore[untyped-decorator]
def _count(flags_ptr, lists, order_ptr, R, P, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Count what each tile of rows keeps, and order them, those that keep least first; return the sum."""
    total = 0
    for r in range(0, R, BLOCK):
        row = r + tl.arange(0, BLOCK)
        count = tl.zeros((BLOCK,), tl.int32)
        for p in range(0, P, TILES):
            at = p + tl.arange(0, TILES)
            mask = (row < R)[:, None] & (at < P)[None, :]
            flags = tl.load(flags_ptr + row[:, None] * P + at[None, :], mask=mask, other=0)
            count += tl.sum((flags > 0).to(tl.int32), 1)
        tl.store(lists.across_count + row, count, mask=row < R)
        total += tl.sum(count, 0)
    tl.debug_barrier()
    for r in range(0, R, BLOCK):
        row = r + tl.arange(0, BLOCK)
        count = tl.load(lists.across_count + row, mask=row < R, other=0)
        rank = tl.zeros((BLOCK,), tl.int32)
        for other in range(0, R, BLOCK):
            at = other + tl.arange(0, BLOCK)
            theirs = tl.load(lists.across_count + at, mask=at < R, other=-1)
            same = (theirs[None, :] == count[:, None]) & (at[None, :] < row[:, None])
            rank += tl.sum((((theirs[None, :] < count[:, None]) & (at < R)[None, :]) | same).to(tl.int32), 1)
        tl.store(order_ptr + rank, row, mask=row < R)
    tl.debug_barrier()
    return total


@triton.jit  # type: ignore[untyped-decorator]
def _share_out(lists, shares, room_ptr, R, P, across, programs, BLOCK: tl.constexpr, STEP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Give every program as much of E' W: see `list_kept`."""
    lane = tl.arange(0, BLOCK)
    means = tl.cdiv(P, STEPS_OF_MEANS)
    tiles = R * across
    load = tl.zeros((BLOCK,), tl.int32)
    last = tl.zeros((BLOCK,), tl.int32)
    own = tl.zeros((BLOCK,), tl.int32)
    last_tile = tl.zeros((BLOCK,), tl.int32)
    for turn in range(tl.cdiv(tiles, programs)):
        tile = turn * programs + tl.where(turn % 2 == 0, lane, programs - 1 - lane)
        mask = (lane < programs) & (tile < tiles)
        row_tile = tl.load(shares.order + tile // across, mask=mask, other=0)
        count = tl.load(lists.across_count + row_tile, mask=mask, other=0)
        load += tl.where(mask, count + means, 0)
        last = tl.where(mask, count, last)
        last_tile = tl.where(mask, tile, last_tile)
        own += mask.to(tl.int32)
    even = tl.cdiv(tl.sum(load, 0), programs)
    given = tl.minimum(tl.maximum(load - even, 0), last)
    spare = tl.where(lane < programs, tl.maximum(even - load, 0), 0)
    given_end = tl.cumsum(given, 0)
    spare_end = tl.cumsum(spare, 0)
    giver = tl.cumsum((given > 0).to(tl.int32), 0) - 1
    taker = tl.cumsum((spare > 0).to(tl.int32), 0) - 1
    tl.store(room_ptr + lane, load)  # what other lanes read
    tl.store(room_ptr + BLOCK + lane, given_end)
    tl.store(room_ptr + 2 * BLOCK + lane, given)
    tl.store(room_ptr + 3 * BLOCK + lane, giver)
    tl.store(room_ptr + 4 * BLOCK + lane, last - given)
    tl.store(room_ptr + 5 * BLOCK + lane, last_tile)
    tl.store(room_ptr + 6 * BLOCK + lane, spare_end)
    tl.store(room_ptr + 7 * BLOCK + lane, spare)
    tl.store(room_ptr + 8 * BLOCK + lane, taker)
    tl.debug_barrier()
    rank = tl.zeros((BLOCK,), tl.int32)  # programs with less of their own are first
    for j in range(0, programs, STEP):
        other = j + tl.arange(0, STEP)
        theirs = tl.load(room_ptr + other, mask=other < programs, other=2147483647)
        same = (theirs[None, :] == load[:, None]) & (other[None, :] < lane[:, None])
        before = (theirs[None, :] < load[:, None]) | same
        rank += tl.sum((before & (other < programs)[None, :]).to(tl.int32), 1)
    tl.store(room_ptr + 9 * BLOCK + lane, rank)
    tl.debug_barrier()
    most = 2147483647
    first_part = tl.full((BLOCK,), most, tl.int32)  # of those that a program takes of others' tiles
    parts = tl.zeros((BLOCK,), tl.int32)
    first_taken = tl.full((BLOCK,), most, tl.int32)  # of those that others take of its last one
    taken = tl.zeros((BLOCK,), tl.int32)
    spare_begin = spare_end - spare
    given_begin = given_end - given
    for j in range(0, programs, STEP):
        other = j + tl.arange(0, STEP)
        mask = other < programs
        end = tl.load(room_ptr + BLOCK + other, mask=mask, other=0)
        begin = end - tl.load(room_ptr + 2 * BLOCK + other, mask=mask, other=0)
        number = tl.load(room_ptr + 3 * BLOCK + other, mask=mask, other=0)
        cut = tl.load(room_ptr + 4 * BLOCK + other, mask=mask, other=0)
        tile = tl.load(room_ptr + 5 * BLOCK + other, mask=mask, other=0)
        program = tl.load(room_ptr + 9 * BLOCK + other, mask=mask, other=0)
        begins = tl.maximum(spare_begin[:, None], begin[None, :])
        ends = tl.minimum(spare_end[:, None], end[None, :])
        has = (ends > begins) & mask[None, :]
        part = taker[:, None] + number[None, :]
        first_part = tl.minimum(first_part, tl.min(tl.where(has, part, most), 1))
        parts += tl.sum(has.to(tl.int32), 1)
        at = shares.parts + part * 4
        tl.store(at, tl.broadcast_to(tile[None, :], (BLOCK, STEP)), mask=has)
        tl.store(at + 1, (cut - begin)[None, :] + begins, mask=has)
        tl.store(at + 2, (cut - begin)[None, :] + ends, mask=has)
        tl.store(at + 3, tl.broadcast_to(program[None, :], (BLOCK, STEP)), mask=has)
        end = tl.load(room_ptr + 6 * BLOCK + other, mask=mask, other=0)
        begin = end - tl.load(room_ptr + 7 * BLOCK + other, mask=mask, other=0)
        number = tl.load(room_ptr + 8 * BLOCK + other, mask=mask, other=0)
        begins = tl.maximum(given_begin[:, None], begin[None, :])
        has = (tl.minimum(given_end[:, None], end[None, :]) > begins) & mask[None, :]
        part = giver[:, None] + number[None, :]
        first_taken = tl.minimum(first_taken, tl.min(tl.where(has, part, most), 1))
        taken += tl.sum(has.to(tl.int32), 1)
    record = shares.records + rank * FIELDS
    mask = lane < programs
    tl.store(record, lane, mask=mask)
    tl.store(record + 1, own, mask=mask)
    tl.store(record + 2, last - given, mask=mask)
    tl.store(record + 3, first_taken, mask=mask)
    tl.store(record + 4, taken, mask=mask)
    tl.store(record + 5, first_part, mask=mask)
    tl.store(record + 6, parts, mask=mask)


@Launcher
@triton.jit(do_not_specialize=["C", "R", "P"])  # type: ignore[untyped-decorator]
def _list_kept(  # type: ignore[no-untyped-def]
    flags_ptr, lists, shares, room_ptr, total_ptr, e_ptr, e_stride, targets, used, C, R, P, across, programs,
    BLOCK: tl.constexpr, STEP: tl.constexpr, ROW_BLOCK: tl.constexpr
):  # fmt: skip
    """The first program shares out; the others list, from both sides."""
    tile = tl.program_id(0) - 1
    if tile < 0:
        total = _count(flags_ptr, lists, shares.order, R, P, ROW_BLOCK)
        tl.store(total_ptr, tl.load(total_ptr) + total)
        tl.store(total_ptr + 1, tl.load(total_ptr + 1) + R * P)
        _share_out(lists, shares, room_ptr, R, P, across, programs, BLOCK, STEP)
    elif tile < R:
        _list_across(flags_ptr, lists, e_ptr, e_stride, targets, tile, used, C, P)
    else:
        _list_down(flags_ptr, lists, tile - R, R, P, ROW_BLOCK)


@Launcher
@triton.jit(do_not_specialize=["C"])
def _multiply_drawn(flags_ptr, e, y_ptr, C, P):  # type: ignore[no-untyped-def]
    """A program per tile: those that were drawn times a power of two, which is exact, without the targets' entries."""
    e_ptr, e_stride, V = e
    flag = tl.load(flags_ptr + tl.program_id(0) * P + tl.program_id(1))
    if flag > 1:
        row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        at = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        mask = (row < C)[:, None] & (at < V)[None, :]
        y = tl.load(y_ptr + row, mask=row < C, other=-1)
        places = e_ptr + row.to(tl.int64)[:, None] * e_stride + at[None, :]
        x = tl.load(places, mask=mask, other=0.0).to(tl.float32) * tl.exp2((flag - 1).to(tl.float32))
        tl.store(places, tl.where(at[None, :] == y[:, None], 0.0, x).to(e_ptr.dtype.element_ty), mask=mask)


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


def lists_for(C: int, P: int, device: torch.device) -> tuple[Lists, Tensor]:
    """Return memory for the lists of C rows, and for the flags [R, P]."""
    R = blocks_of(C, ROWS.value)
    numbers = torch.empty(3 * R * P + R + P, dtype=torch.int32, device=device)
    across, down, flags, more = torch.split(numbers, [R * P, R * P, R * P, R + P])
    return Lists(across.view(R, P), more[:R], down.view(P, R), more[R:]), flags


def shares_for(C: int, device: torch.device) -> tuple[Shares, Tensor]:
    """Return memory for who computes what of C rows, and room to find it."""
    programs, R = multiprocessors(device), blocks_of(C, ROWS.value)
    sizes = [FIELDS.value * programs, 4 * programs, R, 10 * power_of_2(programs)]
    numbers = torch.empty(sum(sizes), dtype=torch.int32, device=device)
    records, parts, order, room = torch.split(numbers, sizes)
    return Shares(records.view(programs, -1), parts.view(programs, 4), order), room


def find_kept(
    sums_CP: Tensor, squares_CP: Tensor, targets: Targets, least: Tensor, mass_CP: Tensor, flags: Tensor,
    dropped: Tensor, used: Used = ALL, seed: int | None = None,
) -> None:  # fmt: skip
    """Flag the tiles that are kept, those of which q is ``least`` (float32 [1]) or more.

    With a ``seed`` another tile stays with a probability of 2^-j, at most the square root of q over ``least``, and is
    flagged 1 + j: see `multiply_drawn`.

    Writes ``mass_CP``, what the other tiles of a row sum to, and ``dropped`` [R, P / TILES], what of g p that is.
    """
    C, P = sums_CP.shape
    _find_kept[(blocks_of(C, ROWS.value), blocks_of(P, TILES.value))](
        sums_CP, squares_CP, sums_CP.stride(0), targets, least, mass_CP, mass_CP.stride(0), flags, dropped, used, seed,
        C, P, num_warps=8,
    )  # fmt: skip


def list_kept(
    flags: Tensor, lists: Lists, shares: Shares, room: Tensor, total: Tensor, e_CV: Tensor, targets: Targets, D: int,
    used: Used = ALL,
) -> None:  # fmt: skip
    """Write the lists, share E' W out, and take the targets' entries in other tiles; add to ``total`` (int32 [2]).

    E' W has R tiles of rows times those of D. Every program gets its share of these, the shortest sums first and back
    and forth over the programs; what it has too much of its last one others take, who have less than the mean.
    """
    P, R = lists.down.shape
    programs = len(shares.records)
    _list_kept[(1 + R + blocks_of(P, TILES.value),)](
        flags, lists, shares, room, total, e_CV, e_CV.stride(0), targets, used, len(e_CV), R, P,
        blocks_of(D, COLUMNS.value), programs, BLOCK=power_of_2(programs), STEP=min(16, power_of_2(programs)),
        ROW_BLOCK=min(32, power_of_2(R)), num_warps=8,
    )  # fmt: skip


def multiply_drawn(flags: Tensor, e_CV: Tensor, targets: Targets) -> None:
    """Multiply the tiles that stay at random by one over their probability."""
    C, P = len(e_CV), blocks_of(e_CV.shape[1], COLUMNS.value)
    _multiply_drawn[(blocks_of(C, ROWS.value), P)](flags, matrix(e_CV), targets.y, C, P, num_warps=8)


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
