"""Lists of the tiles of E that are kept, from both sides, and each program's share of the products over them.

C rows of a chunk, D hidden size, P tiles across the vocabulary, R tiles of rows. Flags [R, P] say which are kept: see
`choice`. `gemms_hopper` reads the lists.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowtide.head.kernels.exp_logits import Listed
from lowtide.head.kernels.gemm import ALL, Used, matrix
from lowtide.kernel_launch import Launcher, blocks_of, multiprocessors, power_of_2
from lowtide.skip.kernels.choice import COLUMNS, ROWS, TILES, Targets, entries_of, home_of
from lowtide.skip.kernels.gemms_hopper import FIELDS, Lists, Shares

STEPS_OF_MEANS = tl.constexpr(256)  # tiles across whose means take as long in E' W as a kept tile


@triton.jit  # type: ignore[untyped-decorator]
def _list_down(flags_ptr, lists, tile, R, P, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """List the tiles of rows that keep TILES tiles across."""
    at = tile * TILES + tl.arange(0, TILES)
    count = tl.zeros((TILES,), tl.int32)
    for r in range(0, R, BLOCK):
        row = r + tl.arange(0, BLOCK)
        mask = (row < R)[:, None] & (at < P)[None, :]
        keep = tl.load(flags_ptr + row[:, None] * P + at[None, :], mask=mask, other=0)
        place = count[None, :] + tl.cumsum(keep, 0) - 1
        rows = tl.broadcast_to(row[:, None], (BLOCK, TILES))
        tl.store(lists.down + at[None, :] * R + place, rows, mask=keep > 0)
        count += tl.sum(keep, 0)
    tl.store(lists.down_count + at, count, mask=at < P)


@triton.jit
def _list_across(flags_ptr, lists, e, targets, tile, used, C, P):  # type: ignore[no-untyped-def]
    """List the tiles across that a tile of rows keeps, and take the targets' entries out of the others."""
    count = 0
    for p in range(0, P, TILES):
        at = p + tl.arange(0, TILES)
        keep = tl.load(flags_ptr + tile * P + at, mask=at < P, other=0)
        tl.store(lists.across + tile * P + count + tl.cumsum(keep, 0) - 1, at, mask=keep > 0)
        count += tl.sum(keep, 0)
    row, inside, home, y = home_of(targets, tile, used, C)
    is_kept = tl.load(flags_ptr + tile * P + home, mask=inside, other=1) == 1
    rest = tl.load(targets.rest + row, mask=inside, other=0.0)
    entry = entries_of(targets, e, row, y, inside & ~is_kept)
    tl.store(targets.alone + row, tl.where(is_kept, 0.0, entry), mask=row < C)
    tl.store(targets.lost + row, tl.where(is_kept, rest, entry), mask=row < C)


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
            count += tl.sum(tl.load(flags_ptr + row[:, None] * P + at[None, :], mask=mask, other=0), 1)
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
    flags_ptr, lists, shares, room_ptr, total_ptr, e, targets, used, C, R, P, across, programs,
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
        _list_across(flags_ptr, lists, e, targets, tile, used, C, P)
    else:
        _list_down(flags_ptr, lists, tile - R, R, P, ROW_BLOCK)


@Launcher
@triton.jit  # type: ignore[untyped-decorator]
def _list_tiles(down_ptr, count_ptr, tiles_ptr, number_ptr, R, P, BLOCK: tl.constexpr, STEP: tl.constexpr):  # type: ignore[no-untyped-def]
    """A program per tile across: after those of the tiles before it."""
    p = tl.program_id(0)
    before = tl.zeros((STEP,), tl.int32)
    for first in range(0, p, STEP):
        at = first + tl.arange(0, STEP)
        before += tl.load(count_ptr + at, mask=at < p, other=0)
    begin = tl.sum(before, 0)
    count = tl.load(count_ptr + p)
    for r in range(0, count, BLOCK):
        at = r + tl.arange(0, BLOCK)
        row_tile = tl.load(down_ptr + p * R + at, mask=at < count, other=0)
        tl.store(tiles_ptr + begin + at, (row_tile << 16) + p, mask=at < count)
    if p == P - 1:
        tl.store(number_ptr, begin + count)


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
        flags, lists, shares, room, total, matrix(e_CV), targets, used, len(e_CV), R, P,
        blocks_of(D, COLUMNS.value), programs, BLOCK=power_of_2(programs), STEP=min(16, power_of_2(programs)),
        ROW_BLOCK=min(32, power_of_2(R)), num_warps=8,
    )  # fmt: skip


def list_tiles(lists: Lists) -> Listed:
    """Return the tiles that are kept, as the exponentials' GEMM takes them; the host does not learn how many."""
    P, R = lists.down.shape
    listed = Listed(lists.down.new_empty(P * R), lists.down.new_empty(1))
    _list_tiles[(P,)](lists.down, lists.down_count, *listed, R, P, BLOCK=min(128, power_of_2(R)), STEP=256, num_warps=4)
    return listed
