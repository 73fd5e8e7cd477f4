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
from lowtide.kernel_launch import Launcher

ROWS = tl.constexpr(128)  # pairs of one tile at a time
SHARES = tl.constexpr(8)  # programs among which the pairs of one tile are divided


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
    x_CD: Tensor, w_VD: Tensor, tiles: Sums, config: GemmConfig, k: int, transform: LogitTransform = PLAIN
) -> tuple[Tensor, Tensor]:
    """Return each row's k highest logits [C, k] in descending order, float32, and their rows of ``w_VD``, int64.

    ``tiles`` are from `stats_logits.tile_stats`.
    """
    (C, V), P, columns = (len(x_CD), len(w_VD)), tiles.P, config.columns
    T = min(k, P)
    tile_CT = tiles.top[:C].topk(T).indices
    # in the order of the tiles, and within one in that of the rows: sorting is stable
    tile_of_pair, order = torch.sort(tile_CT.view(-1).int(), stable=True)
    begin = torch.searchsorted(tile_of_pair, torch.arange(P + 1, dtype=torch.int32, device=x_CD.device), out_int32=True)
    logits = torch.empty(C, T * columns, dtype=torch.float32, device=x_CD.device)
    _pair_logits[(P, SHARES.value)](
        matrix(x_CD)[:2], matrix(w_VD)[:2], order, begin, logits, transform, *w_VD.shape, T, COLUMNS=columns,
        num_stages=3, num_warps=8,
    )  # fmt: skip
    values_Ck, at = logits.topk(k)
    ids_Ck = tile_CT.gather(1, at // columns) * columns + at % columns
    return values_Ck, ids_Ck.clamp_(max=V - 1)  # where too few are possible, it may be a place beyond
