"""Token statistics from two GEMMs that store no logits: from a row's sums, tile by tile, and its gradient, in bfloat16.

C rows of a chunk, V vocabulary, P tiles across it, K targets a row. Each tile measures its rows from their highest
logit in it, so that nothing overflows, and leaves that logit's own exponential, 1, out of the sums: where the model is
sure, what is left keeps its digits (`exp_logits`). Classes count among those of all ranks.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowtide.head.kernels import gemm
from lowtide.head.kernels.elementwise import log1p
from lowtide.head.kernels.exp_logits import FLOOR, ExpRows, exponential
from lowtide.head.kernels.exp_rows import block_of, dot
from lowtide.head.kernels.gemm import (
    ALL,
    LN2,
    LOG2E,
    PLAIN,
    LogitTransform,
    Used,
    counted_rows,
    finish_logits,
    gathered_logits,
    halves,
    matrix,
    times_slope,
)
from lowtide.kernel_launch import Launcher, power_of_2

ROWS, SHARES = tl.constexpr(128), tl.constexpr(8)  # pairs of one tile at a time; programs that share those of a tile
PLANES = ("top", "top_id", "rest")  # of `ExpRows`, that every call needs
WANTED = {"entropy": "heat", "sum_sq_prob": "top_squares", "mean_logit": "total"}  # statistics: the plane of each


class Gradient(NamedTuple):
    """What the logits' gradient is made of: float32 numbers [C], and classes whose gradient is their own."""

    s: Tensor  # a power of two, by which the gradient is divided; 0: nothing flows back
    lse: Tensor
    slope: Tensor
    heat: Tensor | None  # None where no row has one
    even: Tensor | None
    id: Tensor  # [C, 1 + K] int32: the highest class, and the targets; -1: nothing stands here
    entry: Tensor  # [C, 1 + K], rounded; one value for a class that is there twice
    rest: Tensor  # [C, K]: what the targets' entries have lost by that

    def rows(self, part: slice) -> "Gradient":
        """Return those of some of the rows."""
        return Gradient._make(None if x is None else x[part] for x in self)


def planes_of(sums_FCP: Sequence[Tensor], want: Iterable[str]) -> dict[str, Tensor]:
    """Return the planes of `ExpRows` that statistics need, in this memory: 3 and as many as are wanted, [C, P]."""
    planes = dict(zip((*PLANES, *(WANTED[name] for name in want)), sums_FCP, strict=True))
    return planes | {"top_id": planes["top_id"].view(torch.int32)}


@triton.jit  # type: ignore[untyped-decorator]
def gradient_tile(z, row, p, C, V, g_d, of_row, transform, _bound: tl.constexpr, CONFIG: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write ``f_v (p_v (slope - heat (z_v - lse)) + even)``, p = exp(z - lse), f_v = 1 - (z_v / softcap)**2 with a cap.

    An epilogue of `gemm.gemm_tiles`, with a `Gradient`, a half at a time. In rows whose s is 0, zeros. Targets and the
    highest class are as the others: see `put_entries`.
    """
    WIDTH: tl.constexpr = CONFIG.columns // 2
    column = p * CONFIG.columns
    rows = row + tl.arange(0, CONFIG.rows)
    inside = rows < C
    alive = tl.load(of_row.s + rows, mask=inside, other=0.0) != 0.0
    lse = tl.load(of_row.lse + rows, mask=inside, other=0.0) * LOG2E
    slope = tl.load(of_row.slope + rows, mask=inside, other=0.0)
    if of_row.heat is not None:
        heat = tl.load(of_row.heat + rows, mask=inside, other=0.0) * LN2
    if of_row.even is not None:
        even = tl.load(of_row.even + rows, mask=inside, other=0.0)
    pieces = halves(z, CONFIG)
    for i in tl.static_range(2):
        logits = finish_logits(pieces[i], column + i * WIDTH + tl.arange(0, WIDTH), V, transform)
        gradient, below = exponential(logits, lse, transform)
        if of_row.heat is not None:
            gradient *= slope[:, None] - heat[:, None] * below
        else:
            gradient *= slope[:, None]
        if of_row.even is not None:
            gradient += even[:, None]
        gradient = tl.where(alive[:, None], times_slope(gradient, logits, transform), 0.0)
        g_d.store([row, column + i * WIDTH], gradient.to(g_d.dtype))


class RowStats(NamedTuple):
    """Numbers of each row [C], float32 but for ``argmax``; None: not wanted."""

    lse: Tensor
    argmax: Tensor  # int64: the highest class
    top_logprob: Tensor  # of that
    logprob: Tensor  # [C, K], of the targets
    entropy: Tensor | None = None
    sum_sq_prob: Tensor | None = None
    mean_logit: Tensor | None = None
    highest: Tensor | None = None  # logit


@Launcher
@triton.jit(do_not_specialize=["C", "first_class"])  # type: ignore[untyped-decorator]
def _merge_stats(  # type: ignore[no-untyped-def]
    tiles, out, y_ptr, first, x, w, used, transform, first_class, C, V, K, vocab, BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """See `merge_stats`: sums about the highest logit of all tiles."""
    x_ptr, x_stride, D = x
    w_ptr, w_stride, _ = w
    first_ptr, loss_ptr = first
    i = tl.program_id(0).to(tl.int64)
    if i >= counted_rows(used, C):
        return
    p = tl.arange(0, WIDTH)
    inside = p < tiles.sum_stride
    at = i * tiles.sum_stride + p
    ids = tl.load(tiles.top_id + at, mask=inside, other=V)
    tops = tl.load(tiles.top + at, mask=inside, other=float("-inf"))
    top = tl.max(tops, 0)
    top_id = tl.min(tl.where(tops == top, ids, V), 0)
    winner = tl.min(tl.where(tops == top, p, WIDTH), 0)
    below = tops - tl.where(top == float("-inf"), 0.0, top)
    weight = tl.exp(below)
    own = tl.where(p == winner, 0.0, 1.0)  # each other tile's highest class is one of the rest
    in_tile = tl.load(tiles.rest + at, mask=inside, other=0.0) + own
    rest = tl.sum(tl.where(inside, weight * in_tile, 0.0), 0)
    rest += top - top  # NaN where that is not finite
    spread = log1p(rest)
    tl.store(out.lse + i, tl.where(tl.abs(top) == float("inf"), top, top + spread))
    tl.store(out.argmax + i, first_class + tl.minimum(top_id, V - 1).to(tl.int64))
    y_first = tl.full((), -1, tl.int64)
    of_first = 0.0
    if loss_ptr is not None:
        y_first = tl.load(first_ptr + i).to(tl.int64)
        of_first -= tl.load(loss_ptr + i)
    tl.store(out.top_logprob + i, tl.where(y_first == top_id, of_first, -spread))
    if out.highest is not None:
        tl.store(out.highest + i, top)
    if tiles.heat is not None:
        terms = weight * (tl.load(tiles.heat + at, mask=inside, other=0.0) + tl.maximum(below, FLOOR) * in_tile)
        heat = tl.sum(tl.where(inside & (weight > 0.0), terms, 0.0), 0)
        tl.store(out.entropy + i, spread - heat / (1.0 + rest))
    if tiles.top_squares is not None:
        terms = weight * weight * (tl.load(tiles.top_squares + at, mask=inside, other=0.0) + own)
        squares = tl.sum(tl.where(inside, terms, 0.0), 0)
        tl.store(out.sum_sq_prob + i, (1.0 + squares) / ((1.0 + rest) * (1.0 + rest)))
    if tiles.total is not None:
        tl.store(out.mean_logit + i, tl.sum(tl.load(tiles.total + at, mask=inside, other=0.0), 0) / vocab)
    for k in range(K):
        y = tl.load(y_ptr + i * K + k).to(tl.int64) - first_class
        here = (y >= 0) & (y < V)
        row = w_ptr + tl.where(here, y, 0) * w_stride
        t = finish_logits(dot(x_ptr + i * x_stride, row, D, BLOCK), tl.where(here, y, 0), V, transform)
        logprob = tl.where(y == top_id, -spread, (t - top) - spread)
        logprob = tl.where(here & (y == y_first), of_first, logprob)
        tl.store(out.logprob + i * K + k, tl.where(here, logprob, float("-inf")))


def merge_stats(
    tiles: ExpRows, out: RowStats, y_CK: Tensor, x_CD: Tensor, w_VD: Tensor, *, transform: LogitTransform = PLAIN,
    first_class: int = 0, vocab: int, used: Used = ALL, first: tuple[Tensor | None, Tensor | None] = (None, None),
) -> None:  # fmt: skip
    """Turn sums over tiles into the numbers of each row.

    With M the highest logit and over the other classes R the sum of exp(z - M), H of exp(z - M) (z - M):

        lse = M + log1p(R)        entropy = log1p(R) - H / (1 + R)        log p_y = t - lse

    ``tiles`` have the planes that ``out``, contiguous, needs. Of the ``first`` target, (int32 class or -1 where there
    is none, loss), the log-probability is minus the loss, with its bits. Where the vocabulary is sharded, all are of
    this rank's classes, ``first_class`` and on, only the mean is a part of that of all ``vocab``:
    `terms.statistics.merged` puts every rank's together. ``y_CK`` are int64, contiguous and valid; a target of another
    rank has log-probability -inf.
    Rows that are not `Used` are left as they are.
    """
    (C, K), BLOCK, WIDTH = y_CK.shape, block_of(x_CD.shape[1]), power_of_2(tiles.sum_stride)
    WIDTH *= 1 + (WIDTH == BLOCK)  # or Triton may sum in the layout of x's loads: see `exp_rows.SUMMED`
    _merge_stats[(C,)](
        tiles, out, y_CK, first, matrix(x_CD), matrix(w_VD), used, transform, first_class, C, len(w_VD), K, vocab,
        BLOCK=BLOCK, WIDTH=WIDTH, num_warps=4,
    )  # fmt: skip


@Launcher
@triton.jit(do_not_specialize=["first_class", "C"])  # type: ignore[untyped-decorator]
def _put_entries(g, ids, entry_ptr, used, first_class, C, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    g_ptr, g_stride, columns = g
    id_ptr, _, count = ids
    i = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, WIDTH)
    end = tl.where(i < counted_rows(used, C), count, 0)
    column = tl.load(id_ptr + i * count + k, mask=k < end, other=-1)
    here = (column >= first_class) & (column < first_class + columns)  # no id is below 0 that counts
    entry = tl.load(entry_ptr + i * count + k, mask=here, other=0.0)
    tl.store(g_ptr + i * g_stride + column - first_class, entry, mask=here)


def put_entries(g_CV: Tensor, of_row: Gradient, first_class: int, used: Used = ALL) -> None:
    """Write those entries into ``g_CV`` whose classes are its columns, counted as ``first_class`` and on."""
    WIDTH, C = power_of_2(of_row.id.shape[1]), len(g_CV)
    _put_entries[(C,)](matrix(g_CV), matrix(of_row.id), of_row.entry, used, first_class, C, WIDTH=WIDTH, num_warps=1)


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
    x_CD: Tensor, w_VD: Tensor, top_CP: Tensor, k: int, transform: LogitTransform = PLAIN
) -> tuple[Tensor, Tensor]:
    """Return each row's k highest logits [C, k] in descending order, float32, and their rows of ``w_VD``, int64.

    The T = min(k, P) tiles with the highest maxima contain all k. Their logits are recomputed: pairs of row and tile
    in the order of the tiles, so that rows share a tile of the weight.
    """
    (C, V), P, columns = (len(x_CD), len(w_VD)), top_CP.shape[1], gemm.CONFIG.columns
    T = min(k, P)
    tile_CT = top_CP.topk(T).indices
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
