"""What stands behind the GEMM of `stats_logits.tile_stats`: a program a row, over [C, P], [C, D] or [C, K].

C rows of a chunk, D hidden size, V vocabulary, P tiles across it, K targets a row. With M the highest logit and R the
sum of exp(z - M) over the other classes, H that of exp(z - M) (z - M), S that of exp(z - M)**2:

    lse = M + log1p(R)    entropy = log1p(R) - H / (1 + R)    sum p^2 = (1 + S) / (1 + R)^2    log p_y = t - lse

Where one rank has all classes, `finish_stats` turns the tiles' sums into these. Where the vocabulary is sharded, each
rank brings its tiles' sums to those about its own highest logit, and all ranks' are merged as tiles are:

    tile_stats(x, w, sums, id)                                               this rank's classes
    shard_stats(sums, id, x, w, told, first_class=..., y_CK=...)             told [F, C] of this rank
    told_WFC = ranks.gather(told)                                            one exchange
    merge_stats(told_WFC, out, V, y_CK=...)                                  the same numbers on every rank
    merge_highest(ranks.gather(shard_highest(...)), values, ids)             of `stats_topk`
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowtide.head.kernels.elementary import log1p, tanh
from lowtide.head.kernels.exp_rows import block_of
from lowtide.head.kernels.exp_terms import dot
from lowtide.head.kernels.gemm import PLAIN, LogitTransform, matrix
from lowtide.head.kernels.stats_logits import FLOOR
from lowtide.kernel_launch import Launcher, power_of_2


class RowStats(NamedTuple):
    """Numbers of each row [C], float32 but for ``top``, or the upstream gradients of these; None where not wanted."""

    lse: Tensor | None = None
    top: Tensor | None = None  # int64: the highest class
    top_logprob: Tensor | None = None
    logprob: Tensor | None = None  # [C, K], of the targets
    entropy: Tensor | None = None
    sum_sq_prob: Tensor | None = None
    mean: Tensor | None = None  # of the logits

    def rows(self, part: slice) -> "RowStats":
        """Return those of some of the rows."""
        return RowStats(*(None if x is None else x[part] for x in self))


class Parts(NamedTuple):
    """A row's sums over parts of its classes, tiles or ranks: see `stats_logits.tile_stats`."""

    sums: Tensor  # float32: top, rest and, where they are there, heat, squares, total
    id: Tensor  # int32, of the highest logit in each part
    P: int  # parts
    plane: int  # strides, from one sum to the next,
    row: int
    part: int


@triton.jit  # type: ignore[untyped-decorator]
def _merged(parts, i, V, HEAT: tl.constexpr, SQUARES: tl.constexpr, TOTAL: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Row i's sums over all parts, about the highest logit of all: top, its class, rest, heat, squares, total."""
    p = tl.arange(0, WIDTH)
    inside = p < parts.P
    at = parts.sums + i * parts.row + p * parts.part
    ids = tl.load(parts.id + i * parts.row + p * parts.part, mask=inside, other=V)
    tops = tl.load(at, mask=inside, other=float("-inf"))
    top = tl.max(tops, 0)
    top_id = tl.min(tl.where(tops == top, ids, V), 0)
    winner = tl.min(tl.where(tops == top, p, WIDTH), 0)
    below = tops - tl.where(top == float("-inf"), 0.0, top)
    weight = tl.exp(below)
    own = tl.where(p == winner, 0.0, 1.0)  # each other part's highest class is one of the rest
    at += parts.plane
    in_part = tl.load(at, mask=inside, other=0.0) + own
    rest = tl.sum(tl.where(inside, weight * in_part, 0.0), 0)
    heat, squares, total = rest, rest, rest
    if HEAT:
        at += parts.plane
        terms = weight * (tl.load(at, mask=inside, other=0.0) + tl.maximum(below, FLOOR) * in_part)
        heat = tl.sum(tl.where(inside & (weight > 0.0), terms, 0.0), 0)
    if SQUARES:
        at += parts.plane
        terms = weight * weight * (tl.load(at, mask=inside, other=0.0) + own)
        squares = tl.sum(tl.where(inside, terms, 0.0), 0)
    if TOTAL:
        at += parts.plane
        total = tl.sum(tl.load(at, mask=inside, other=0.0), 0)
    return top, top_id, rest, heat, squares, total


@triton.jit  # type: ignore[untyped-decorator]
def _logit(x_ptr, w, y, transform, D, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """One row's logit of the class in row y of the weight."""
    w_ptr, w_stride = w
    t = dot(x_ptr, w_ptr + y * w_stride, D, BLOCK)
    if transform.bias_V is not None:
        t += tl.load(transform.bias_V + y)
    if transform.scale is not None:
        t *= tl.load(transform.scale)
    if transform.softcap is not None:
        t = transform.softcap * tanh(t / transform.softcap)
    return t


@Launcher
@triton.jit  # type: ignore[untyped-decorator]
def _shard_stats(  # type: ignore[no-untyped-def]
    parts, x, w, y_ptr, told, transform, shard, D, K, ASKED: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """See `shard_stats`."""
    x_ptr, x_stride = x
    told_ptr, id_ptr, plane = told
    first_class, V = shard
    HEAT: tl.constexpr = ASKED[0]
    SQUARES: tl.constexpr = ASKED[1]
    TOTAL: tl.constexpr = ASKED[2]
    i = tl.program_id(0).to(tl.int64)
    top, top_id, rest, heat, squares, total = _merged(parts, i, V, HEAT, SQUARES, TOTAL, WIDTH)
    out = told_ptr + i
    tl.store(id_ptr + i, first_class + top_id)
    tl.store(out, top)
    out += plane
    tl.store(out, rest)
    if HEAT:
        out += plane
        tl.store(out, heat)
    if SQUARES:
        out += plane
        tl.store(out, squares)
    if TOTAL:
        out += plane
        tl.store(out, total)
    out += plane  # the class has its place here
    for k in range(K):
        out += plane
        y = tl.load(y_ptr + i * K + k).to(tl.int64) - first_class
        here = (y >= 0) & (y < V)
        t = _logit(x_ptr + i * x_stride, w, tl.where(here, y, 0), transform, D, BLOCK)
        tl.store(out, tl.where(here, t, 0.0))


@Launcher
@triton.jit  # type: ignore[untyped-decorator]
def _finish_stats(  # type: ignore[no-untyped-def]
    parts, out, targets, x, w, transform, D, V, K, BLOCK: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """See `finish_stats` and `merge_stats`: a target's logit is the sum of what the ranks have of it, or computed."""
    y_ptr, logit_ptr = targets
    HEAT: tl.constexpr = out.entropy is not None
    SQUARES: tl.constexpr = out.sum_sq_prob is not None
    TOTAL: tl.constexpr = out.mean is not None
    i = tl.program_id(0).to(tl.int64)
    highest, top_id, rest, heat, squares, total = _merged(parts, i, V, HEAT, SQUARES, TOTAL, WIDTH)
    rest += highest - highest  # NaN where that is not finite
    spread = log1p(rest)
    tl.store(out.lse + i, tl.where(tl.abs(highest) == float("inf"), highest, highest + spread))
    tl.store(out.top + i, tl.minimum(top_id, V - 1).to(tl.int64))
    tl.store(out.top_logprob + i, -spread)
    if HEAT:
        tl.store(out.entropy + i, spread - heat / (1.0 + rest))
    if SQUARES:
        tl.store(out.sum_sq_prob + i, (1.0 + squares) / ((1.0 + rest) * (1.0 + rest)))
    if TOTAL:
        tl.store(out.mean + i, total / V)
    for k in range(K):
        y = tl.load(y_ptr + i * K + k).to(tl.int64)
        if logit_ptr is None:
            x_ptr, x_stride = x
            t = _logit(x_ptr + i * x_stride, w, y, transform, D, BLOCK)
        else:
            p = tl.arange(0, WIDTH)
            at = logit_ptr + k * parts.plane + i * parts.row + p * parts.part
            t = tl.sum(tl.load(at, mask=p < parts.P, other=0.0), 0)
        tl.store(out.logprob + i * K + k, tl.where(y == top_id, -spread, (t - highest) - spread))


def finish_stats(
    sums_FCP: Tensor,
    id_CP: Tensor,
    x_CD: Tensor,
    w_VD: Tensor,
    out: RowStats,
    *,
    y_CK: Tensor | None = None,
    transform: LogitTransform = PLAIN,
) -> None:
    """Turn tiles' sums into the numbers of each row, where this rank has all classes.

    Args:
        sums_FCP: From `tile_stats`, with the sums that ``out`` needs: heat for the entropy, squares for sum_sq_prob,
            total for the mean.
        id_CP: From `tile_stats`.
        x_CD: Hidden states.
        w_VD: Weight.
        out: Takes the numbers; those before ``logprob`` must be there, and with ``y_CK`` that too, contiguous.
        y_CK: Classes, int64, contiguous, all of them valid; or None.
        transform: What makes logits of the products.
    """
    (C, D), K = x_CD.shape, 0 if y_CK is None else y_CK.shape[1]
    parts = Parts(sums_FCP, id_CP, sums_FCP.shape[2], *sums_FCP.stride())
    _finish_stats[(C,)](
        parts, out, (y_CK, None), matrix(x_CD), matrix(w_VD), transform, D, w_VD.shape[0], K, BLOCK=block_of(D),
        WIDTH=power_of_2(parts.P), num_warps=4,
    )  # fmt: skip


def told_stats(F: int, C: int, K: int, device: torch.device) -> Tensor:
    """Return room for what a rank tells the others in `shard_stats`: its F sums, the class, K targets' logits."""
    return torch.empty(F + 1 + K, C, dtype=torch.float32, device=device)


def shard_stats(
    sums_FCP: Tensor,
    id_CP: Tensor,
    x_CD: Tensor,
    w_VD: Tensor,
    told_FC: Tensor,
    *,
    asked: tuple[bool, bool, bool],
    first_class: int,
    y_CK: Tensor | None = None,
    transform: LogitTransform = PLAIN,
) -> None:
    """Turn tiles' sums into what this rank tells the others of its classes; `merge_stats` goes on from there.

    Args:
        sums_FCP: From `tile_stats`.
        id_CP: From `tile_stats`.
        x_CD: Hidden states.
        w_VD: This rank's rows of the weight; there may be none.
        told_FC: From `told_stats`: takes this rank's sums about its own highest logit, the class of that among all
            classes (the bits of an int32), and the logits of the targets that are here, 0 for the others.
        asked: Whether heat, squares and total are among the sums.
        first_class: Class of ``w_VD``'s first row.
        y_CK: Classes among all of them, int64, contiguous, all of them valid; or None.
        transform: What makes logits of the products.
    """
    (C, D), V, F = x_CD.shape, w_VD.shape[0], len(sums_FCP)
    if not V:
        told_FC.zero_()
        told_FC[0] = -torch.inf
        return
    parts = Parts(sums_FCP, id_CP, sums_FCP.shape[2], *sums_FCP.stride())
    told = (told_FC, told_FC[F].view(torch.int32), told_FC.stride(0))
    _shard_stats[(C,)](
        parts, matrix(x_CD), matrix(w_VD), y_CK, told, transform, (first_class, V), D, len(told_FC) - F - 1,
        ASKED=asked, BLOCK=block_of(D), WIDTH=power_of_2(parts.P), num_warps=4,
    )  # fmt: skip


def merge_stats(told_WFC: Tensor, out: RowStats, V: int, *, y_CK: Tensor | None = None) -> None:
    """Turn every rank's from `shard_stats` into the numbers of each row (see `finish_stats`), the same on every rank.

    V counts the classes of all ranks.
    """
    K = 0 if y_CK is None else y_CK.shape[1]
    F, C = told_WFC.shape[1] - K - 1, told_WFC.shape[2]
    rank, plane, row = told_WFC.stride()
    parts = Parts(told_WFC, told_WFC.view(torch.int32)[:, F:], len(told_WFC), plane, row, rank)
    _finish_stats[(C,)](
        parts, out, (y_CK, told_WFC[:, F + 1 :]), (None, 0), (None, 0), PLAIN, 0, V, K, BLOCK=1,
        WIDTH=power_of_2(parts.P), num_warps=1,
    )  # fmt: skip
