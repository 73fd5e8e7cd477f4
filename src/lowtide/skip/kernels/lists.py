"""Lists of the tiles of E that are kept, from both sides, and each program's share of the steps of E' W.

C rows of a chunk, D hidden size, P tiles across the vocabulary, R tiles of rows. Flags [R, P] say which are kept: see
`skip.choice`. `gemms_hopper` reads the lists.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowtide.head.kernels.exp_logits import Listed
from lowtide.kernel_launch import Launcher, blocks_of, multiprocessors, power_of_2
from lowtide.skip.kernels.gemms_hopper import Lists
from lowtide.skip.kernels.ordered import COLUMNS

TILES = tl.constexpr(128)  # across, at a time


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
def _list_across(flags_ptr, lists, tile, P):  # type: ignore[no-untyped-def]
    """List the tiles across that a tile of rows keeps."""
    count = 0
    for p in range(0, P, TILES):
        at = p + tl.arange(0, TILES)
        keep = tl.load(flags_ptr + tile * P + at, mask=at < P, other=0)
        tl.store(lists.across + tile * P + count + tl.cumsum(keep, 0) - 1, at, mask=keep > 0)
        count += tl.sum(keep, 0)


@triton.jit  # type: ignore[untyped-decorator]
def _share_out(flags_ptr, lists, total_ptr, R, P, across, programs, BLOCK: tl.constexpr, ROW_BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Count what each tile of rows keeps, and give every program as many steps of E' W: see `gemms_hopper`."""
    means = tl.cdiv(P, COLUMNS)
    steps = 0
    kept = 0
    for r in range(0, R, ROW_BLOCK):
        row = r + tl.arange(0, ROW_BLOCK)
        count = tl.zeros((ROW_BLOCK,), tl.int32)
        for p in range(0, P, TILES):
            at = p + tl.arange(0, TILES)
            mask = (row < R)[:, None] & (at < P)[None, :]
            count += tl.sum(tl.load(flags_ptr + row[:, None] * P + at[None, :], mask=mask, other=0), 1)
        tl.store(lists.across_count + row, count, mask=row < R)
        of_row = tl.where(row < R, (count + means) * across, 0)
        tl.store(lists.starts + row, steps + tl.cumsum(of_row, 0) - of_row, mask=row < R)
        steps += tl.sum(of_row, 0)
        kept += tl.sum(count, 0)
    tl.store(lists.starts + R, steps)
    tl.store(total_ptr, tl.load(total_ptr) + kept)
    tl.store(total_ptr + 1, tl.load(total_ptr + 1) + R * P)
    tl.debug_barrier()
    program = tl.arange(0, BLOCK)
    begin = program * tl.cdiv(steps, programs)
    end = tl.minimum(begin + tl.cdiv(steps, programs), steps)
    for side in tl.static_range(2):
        step = begin if side == 0 else end - 1
        row = tl.zeros((BLOCK,), tl.int32)
        for r in range(R):
            row += (tl.load(lists.starts + r + 1) <= step).to(tl.int32)
        length = tl.load(lists.across_count + row, mask=row < R, other=0) + means
        within = (step - tl.load(lists.starts + row)) // length
        tl.store(lists.ranges + 2 * program + side, row * across + within, mask=program < programs)


@Launcher
@triton.jit(do_not_specialize=["R", "P"])  # type: ignore[untyped-decorator]
def _list_kept(  # type: ignore[no-untyped-def]
    flags_ptr, lists, total_ptr, R, P, across, programs, BLOCK: tl.constexpr, ROW_BLOCK: tl.constexpr
):
    """The first program shares out; the others list, from both sides."""
    tile = tl.program_id(0) - 1
    if tile < 0:
        _share_out(flags_ptr, lists, total_ptr, R, P, across, programs, BLOCK, ROW_BLOCK)
    elif tile < R:
        _list_across(flags_ptr, lists, tile, P)
    else:
        _list_down(flags_ptr, lists, tile - R, R, P, ROW_BLOCK)


def list_kept(flags: Tensor, D: int, total: Tensor) -> Lists:
    """Return the lists of the tiles whose ``flags`` (int32 [R, P]) are 1, and who computes what of E' W.

    Add how many are kept, and how many there are, to ``total`` (int32 [2]).
    """
    (R, P), programs = flags.shape, multiprocessors(flags.device)
    sizes = [R * P, R, R * P, P, R + 1, 2 * programs]
    across, across_count, down, down_count, starts, ranges = torch.split(flags.new_empty(sum(sizes)), sizes)
    lists = Lists(across.view(R, P), across_count, down.view(P, R), down_count, starts, ranges.view(-1, 2))
    _list_kept[(1 + R + blocks_of(P, TILES.value),)](
        flags, lists, total, R, P, blocks_of(D, COLUMNS.value), programs, BLOCK=power_of_2(programs),
        ROW_BLOCK=min(32, power_of_2(R)), num_warps=8,
    )  # fmt: skip
    return lists


def list_tiles(flags: Tensor) -> Listed:
    """Return the tiles that are kept, as the exponentials' GEMM takes them; the host does not learn how many."""
    kept, R = flags.t().flatten(), len(flags)
    place = kept.sort(descending=True, stable=True).indices
    return Listed(((place % R << 16) + place // R).int(), kept.sum(dtype=torch.int32).view(1))
