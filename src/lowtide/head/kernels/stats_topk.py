"""The k highest logits of each row, from the output of `stats_logits.tile_stats`: at most k tiles contain them.

C rows of a chunk, D hidden size, V vocabulary, P tiles across it; k highest logits, in T = min(k, P) tiles. The tiles
whose own highest logits are the T highest hold the k highest of all. These tiles' logits are recomputed: pairs
of row and tile in the order of the tiles, so that rows share a tile of the weight.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowtide.head.kernels.configs import GemmConfig
from lowtide.head.kernels.gemm import PLAIN, LogitTransform, finish_logits, gathered_logits, matrix
from lowtide.head.kernels.stats_logits import Sums
from lowtide.kernel_launch import Launcher, power_of_2

ROWS = tl.constexpr(128)  # pairs of one tile at a time
SHARES = tl.constexpr(8)  # programs among which the pairs of one tile are divided
NOTHING = tl.constexpr(2**31 - 1)  # stands for the class of a number that cannot be chosen


@Launcher
@triton.jit(do_not_specialize=["first_class"])  # type: ignore[untyped-decorator]
def _select_highest(  # type: ignore[no-untyped-def]
    z, tile_ptr, ids, value_ptr, first_class, COLUMNS: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """A program a row: the highest, k times. Of equal ones the one of the lowest class; NaN is above all numbers.

    Without tiles the numbers' classes are their places, else they are in tiles of COLUMNS classes.
    """
    z_ptr, z_stride, n = z
    id_ptr, id_stride, k = ids
    i = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, WIDTH)
    inside = at < n
    z = tl.load(z_ptr + i * z_stride + at, mask=inside, other=float("-inf"))
    label = at
    if tile_ptr is not None:
        tile = tl.load(tile_ptr + i * (n // COLUMNS) + at // COLUMNS, mask=inside, other=0)
        label = tile * COLUMNS + at % COLUMNS
    label = tl.where(inside, label, NOTHING)
    key = tl.where(z == z, z, float("inf"))
    for j in range(k):
        highest = tl.max(key, 0)
        chosen = tl.min(tl.where(key == highest, label, NOTHING), 0)
        is_chosen = label == chosen
        if value_ptr is not None:
            tl.store(value_ptr + i * id_stride + j, tl.sum(tl.where(is_chosen, z, 0.0), 0))
        tl.store(id_ptr + i * id_stride + j, (first_class + chosen).to(id_ptr.dtype.element_ty))
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
    x_CD: Tensor, w_VD: Tensor, tiles: Sums, config: GemmConfig, values_Ck: Tensor, ids_Ck: Tensor,
    first_class: int = 0, transform: LogitTransform = PLAIN,
) -> None:  # fmt: skip
    """Write each row's k highest logits, in descending order.

    ``tiles`` are from `stats_logits.tile_stats`; ``values_Ck`` (float32) and ``ids_Ck`` (integers), of equal strides,
    take the logits and their classes, of equal logits the lowest class first; ``w_VD``'s first row is ``first_class``.
    """
    C, P, k, columns = len(x_CD), tiles.P, values_Ck.shape[1], config.columns
    T = min(k, P)
    tile_CT = torch.empty(C, T, dtype=torch.int32, device=x_CD.device)
    _select(tiles.top[:C], None, tile_CT, None)
    # in the order of the tiles, and within one in that of the rows: sorting is stable
    tile_of_pair, order = torch.sort(tile_CT.view(-1), stable=True)
    begin = torch.searchsorted(tile_of_pair, torch.arange(P + 1, dtype=torch.int32, device=x_CD.device), out_int32=True)
    logits = torch.empty(C, T * columns, dtype=torch.float32, device=x_CD.device)
    _pair_logits[(P, SHARES.value)](
        matrix(x_CD)[:2], matrix(w_VD)[:2], order, begin, logits, transform, *w_VD.shape, T, COLUMNS=columns,
        num_stages=3, num_warps=8,
    )  # fmt: skip
    _select(logits, tile_CT, ids_Ck, values_Ck, columns, first_class)


def _select(
    z_Cn: Tensor, tile_CT: Tensor | None, ids_Ck: Tensor, values_Ck: Tensor | None, columns: int = 1, first: int = 0
) -> None:
    width = power_of_2(z_Cn.shape[1])
    _select_highest[(len(z_Cn),)](
        matrix(z_Cn), tile_CT, matrix(ids_Ck), values_Ck, first, COLUMNS=columns, WIDTH=width,
        num_warps=4 if width <= 2048 else 8 if width <= 8192 else 16,
    )  # fmt: skip


def shard_highest(
    x_CD: Tensor, w_VD: Tensor, tiles: Sums, config: GemmConfig, k: int, first_class: int,
    transform: LogitTransform = PLAIN,
) -> Tensor:  # fmt: skip
    """Return what this rank sends the others of its k highest logits [2, C, k]: these, and their classes' int32 bits.

    The arguments are `highest_logits`'s. Where a rank has fewer than k classes the rest are -inf of no class.
    """
    here = min(k, len(w_VD))
    told_2Ck = x_CD.new_full((2, len(x_CD), k), -torch.inf, dtype=torch.float32)
    ids = told_2Ck[1].view(torch.int32).fill_(NOTHING.value)
    if here:
        highest_logits(x_CD, w_VD, tiles, config, told_2Ck[0, :, :here], ids[:, :here], first_class, transform)
    return told_2Ck


def merge_highest(told_W2Ck: Tensor, values_Ck: Tensor, ids_Ck: Tensor) -> None:
    """Write the k highest of all ranks' logits from `shard_highest`, in the order of `highest_logits`."""
    values_Cn, ids_Cn = told_W2Ck.permute(1, 2, 0, 3).flatten(2).contiguous()
    _select(values_Cn, ids_Cn.view(torch.int32), ids_Ck, values_Ck)
