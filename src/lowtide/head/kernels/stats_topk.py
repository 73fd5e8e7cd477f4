"""The k highest logits of each row, from what `stats_logits.tile_stats` leaves: no more than k tiles can hold them.

C rows of a chunk, D hidden size, V vocabulary, P tiles across it, COLUMNS wide; k highest logits, in T = min(k, P)
tiles. The tiles whose own highest logits are the T highest hold the k highest of all. Their logits are computed once
more, [C, T COLUMNS] of them: pairs of row and tile in the order of the tiles, so that rows share a tile of the weight.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowtide.head.kernels.gemm import PLAIN, LogitTransform, finish_logits, gathered_logits, matrix
from lowtide.kernel_launch import Launcher

ROWS = tl.constexpr(128)  # pairs of one tile at a time
SHARES = tl.constexpr(8)  # programs among which the pairs of one tile are divided
NOTHING = tl.constexpr(2**31 - 1)  # stands for the class of a number that cannot be chosen


@Launcher
@triton.jit  # type: ignore[untyped-decorator]
def _select_highest(  # type: ignore[no-untyped-def]
    z_ptr, stride, tile_ptr, id_ptr, value_ptr, n, k, COLUMNS: tl.constexpr, TILED: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """A program a row: the highest, k times. Of equal ones the one of the lowest class; NaN is above all numbers."""
    i = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, WIDTH)
    inside = at < n
    z = tl.load(z_ptr + i * stride + at, mask=inside, other=float("-inf"))
    label = at
    if TILED:
        tile = tl.load(tile_ptr + i * (n // COLUMNS) + at // COLUMNS, mask=inside, other=0)
        label = tile * COLUMNS + at % COLUMNS
    label = tl.where(inside, label, NOTHING)
    key = tl.where(z == z, z, float("inf"))
    for j in range(k):
        highest = tl.max(key, 0)
        chosen = tl.min(tl.where(key == highest, label, NOTHING), 0)
        is_chosen = label == chosen
        if TILED:
            tl.store(value_ptr + i * k + j, tl.sum(tl.where(is_chosen, z, 0.0), 0))
        tl.store(id_ptr + i * k + j, chosen.to(id_ptr.dtype.element_ty))
        key = tl.where(is_chosen, float("-inf"), key)
        label = tl.where(is_chosen, NOTHING, label)


@Launcher
@triton.jit  # type: ignore[untyped-decorator]
def _pair_logits(x, w, order_ptr, begin_ptr, out_ptr, transform, V, D, T, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The logits of the pairs of one tile; -inf beyond V."""
    p = tl.program_id(0)
    begin = tl.load(begin_ptr + p)
    end = tl.load(begin_ptr + p + 1)
    columns = p * COLUMNS + tl.arange(0, COLUMNS)
    for first in range(begin + tl.program_id(1) * ROWS, end, SHARES * ROWS):
        slots = first + tl.arange(0, ROWS)
        listed = slots < end
        pair = tl.load(order_ptr + slots, mask=listed, other=0)
        z = gathered_logits(x, pair // T, listed, w, columns, V, D, ROWS, COLUMNS, 64)
        z = finish_logits(z, columns, V, transform)
        z = tl.where((columns < V)[None, :], z, float("-inf"))
        tl.store(out_ptr + pair[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :], z, mask=listed[:, None])


def highest_logits(
    x_CD: Tensor,
    w_VD: Tensor,
    top_CP: Tensor,
    columns: int,
    values_Ck: Tensor,
    ids_Ck: Tensor,
    *,
    transform: LogitTransform = PLAIN,
) -> None:
    """Write each row's k highest logits, in descending order.

    ``top_CP`` (float32, contiguous) are the highest logits of tiles ``columns`` wide; ``values_Ck`` (float32) and
    ``ids_Ck`` (int64), contiguous, take the logits and their classes, of equal logits the lowest class first.
    """
    C, D = x_CD.shape
    P, k = top_CP.shape[1], values_Ck.shape[1]
    T = min(k, P)
    tile_CT = torch.empty(C, T, dtype=torch.int32, device=x_CD.device)
    _launch_selection(top_CP, tile_CT, tile_CT, top_CP, columns, tiled=False)
    # in the order of the tiles, and within one in that of the rows: sorting is stable
    tile_of_pair, order = torch.sort(tile_CT.view(-1), stable=True)
    begin = torch.searchsorted(tile_of_pair, torch.arange(P + 1, dtype=torch.int32, device=x_CD.device), out_int32=True)
    logits = torch.empty(C, T * columns, dtype=torch.float32, device=x_CD.device)
    _pair_logits[(P, SHARES.value)](
        matrix(x_CD), matrix(w_VD), order, begin, logits, transform, w_VD.shape[0], D, T, COLUMNS=columns,
        num_stages=3, num_warps=8,
    )  # fmt: skip
    _launch_selection(logits, tile_CT, ids_Ck, values_Ck, columns, tiled=True)


def _launch_selection(
    z_Cn: Tensor, tile_CT: Tensor, ids_Ck: Tensor, values_Ck: Tensor, columns: int, *, tiled: bool
) -> None:
    C, n = z_Cn.shape
    width = triton.next_power_of_2(n)
    _select_highest[(C,)](
        z_Cn, z_Cn.stride(0), tile_CT, ids_Ck, values_Ck, n, ids_Ck.shape[1], COLUMNS=columns, TILED=tiled, WIDTH=width,
        num_warps=4 if width <= 2048 else 8 if width <= 8192 else 16,
    )  # fmt: skip


def shard_highest(
    x_CD: Tensor,
    w_VD: Tensor,
    top_CP: Tensor,
    columns: int,
    k: int,
    first_class: int,
    transform: LogitTransform = PLAIN,
) -> Tensor:
    """Return what this rank tells the others of its k highest logits [2, C, k]: these, and their classes' int32 bits.

    The arguments are `highest_logits`'s; classes count from ``first_class`` on. Where a rank has fewer than k classes
    the rest are -inf of no class.
    """
    C, here = len(x_CD), min(k, len(w_VD))
    told_2Ck = x_CD.new_full((2, C, k), -torch.inf, dtype=torch.float32)
    told_ids = told_2Ck[1].view(torch.int32).fill_(NOTHING.value)
    if here:
        values, ids = x_CD.new_empty(C, here, dtype=torch.float32), x_CD.new_empty(C, here, dtype=torch.int64)
        highest_logits(x_CD, w_VD, top_CP, columns, values, ids, transform=transform)
        told_2Ck[0, :, :here], told_ids[:, :here] = values, (ids + first_class).int()
    return told_2Ck


def merge_highest(told_W2Ck: Tensor, values_Ck: Tensor, ids_Ck: Tensor) -> None:
    """Write the k highest of all ranks' logits from `shard_highest`, in the order of `highest_logits`."""
    several_2Cn = told_W2Ck.permute(1, 2, 0, 3).flatten(2).contiguous()
    ids, order = several_2Cn[1].view(torch.int32).sort(dim=1, stable=True)
    values = several_2Cn[0].gather(1, order).sort(dim=1, descending=True, stable=True)
    k = values_Ck.shape[1]
    values_Ck.copy_(values.values[:, :k])
    ids_Ck.copy_(ids.gather(1, values.indices[:, :k]))
