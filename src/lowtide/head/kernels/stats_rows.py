"""What stands behind the GEMM of `stats_logits.tile_stats`: a program a row, over [C, P] or [C, D].

C rows of a chunk, D hidden size, V vocabulary, P tiles across it, K targets a row. With M the highest logit and R the
sum of exp(z - M) over the other classes, H that of exp(z - M) (z - M), S that of exp(z - M)**2:

    lse = M + log1p(R)    entropy = log1p(R) - H / (1 + R)    sum p^2 = (1 + S) / (1 + R)^2    log p_y = t - lse

Where the vocabulary is sharded, each rank brings its tiles' sums to those about its own highest logit, and all ranks'
are merged as tiles are:

    tile_stats(x, w, tiles)                                                  this rank's classes
    merge_stats(tiles, Sums.of(told[..., None]), V_r, first_class=..., ...)  told [F, C] of this rank
    told_WFC = ranks.gather(told)                                            one exchange
    merge_stats(Sums.of(told_WFC.permute(1, 2, 0)), out, V, y_CK=...)        the same numbers on every rank
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowtide.head.kernels.elementary import log1p
from lowtide.head.kernels.exp_rows import block_of
from lowtide.head.kernels.exp_terms import dot
from lowtide.head.kernels.gemm import PLAIN, LogitTransform, finish_logits, matrix
from lowtide.head.kernels.stats_logits import FLOOR, Sums
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


@triton.jit  # type: ignore[untyped-decorator]
def _merged(parts, i, V, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Row i's sums over all parts, about the highest logit of all: top, its class, rest, heat, squares, total."""
    p = tl.arange(0, WIDTH)
    inside = p < parts.P
    at = i * parts.row + p * parts.part
    ids = tl.load(parts.id + at, mask=inside, other=V)
    tops = tl.load(parts.top + at, mask=inside, other=float("-inf"))
    top = tl.max(tops, 0)
    top_id = tl.min(tl.where(tops == top, ids, V), 0)
    winner = tl.min(tl.where(tops == top, p, WIDTH), 0)
    below = tops - tl.where(top == float("-inf"), 0.0, top)
    weight = tl.exp(below)
    own = tl.where(p == winner, 0.0, 1.0)  # each other part's highest class is one of the rest
    in_part = tl.load(parts.rest + at, mask=inside, other=0.0) + own
    rest = tl.sum(tl.where(inside, weight * in_part, 0.0), 0)
    heat, squares, total = rest, rest, rest
    if parts.heat is not None:
        terms = weight * (tl.load(parts.heat + at, mask=inside, other=0.0) + tl.maximum(below, FLOOR) * in_part)
        heat = tl.sum(tl.where(inside & (weight > 0.0), terms, 0.0), 0)
    if parts.squares is not None:
        terms = weight * weight * (tl.load(parts.squares + at, mask=inside, other=0.0) + own)
        squares = tl.sum(tl.where(inside, terms, 0.0), 0)
    if parts.total is not None:
        total = tl.sum(tl.load(parts.total + at, mask=inside, other=0.0), 0)
    return top, top_id, rest, heat, squares, total


@Launcher
@triton.jit  # type: ignore[untyped-decorator]
def _merge_stats(  # type: ignore[no-untyped-def]
    parts, out, told, y_ptr, operands, transform, first_class, V, K, BLOCK: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """See `merge_stats`: either ``out`` or ``told`` is written."""
    x_ptr, x_stride, w_ptr, w_stride, D = operands
    i = tl.program_id(0).to(tl.int64)
    top, top_id, rest, heat, squares, total = _merged(parts, i, V, WIDTH)
    if told is not None:
        at = i * told.row
        tl.store(told.id + at, first_class + top_id)
        tl.store(told.top + at, top)
        tl.store(told.rest + at, rest)
        if told.heat is not None:
            tl.store(told.heat + at, heat)
        if told.squares is not None:
            tl.store(told.squares + at, squares)
        if told.total is not None:
            tl.store(told.total + at, total)
    else:
        rest += top - top  # NaN where that is not finite
        spread = log1p(rest)
        tl.store(out.lse + i, tl.where(tl.abs(top) == float("inf"), top, top + spread))
        tl.store(out.top + i, tl.minimum(top_id, V - 1).to(tl.int64))
        tl.store(out.top_logprob + i, -spread)
        if out.entropy is not None:
            tl.store(out.entropy + i, spread - heat / (1.0 + rest))
        if out.sum_sq_prob is not None:
            tl.store(out.sum_sq_prob + i, (1.0 + squares) / ((1.0 + rest) * (1.0 + rest)))
        if out.mean is not None:
            tl.store(out.mean + i, total / V)
    for k in range(K):
        y = tl.load(y_ptr + i * K + k).to(tl.int64)
        if told is not None:
            y -= first_class
            here = (y >= 0) & (y < V)
            y = tl.where(here, y, 0)
        if parts.logit is None:
            t = finish_logits(dot(x_ptr + i * x_stride, w_ptr + y * w_stride, D, BLOCK), y, V, transform)
        else:  # the sum of what the parts have of it
            p = tl.arange(0, WIDTH)
            at = parts.logit + k * parts.plane + i * parts.row + p * parts.part
            t = tl.sum(tl.load(at, mask=p < parts.P, other=0.0), 0)
        if told is not None:
            tl.store(told.logit + k * told.plane + i * told.row, tl.where(here, t, 0.0))
        else:
            tl.store(out.logprob + i * K + k, tl.where(y == top_id, -spread, (t - top) - spread))


def merge_stats(
    parts: Sums,
    out: RowStats | Sums,
    V: int,
    y_CK: Tensor,
    x_CD: Tensor | None = None,
    w_VD: Tensor | None = None,
    *,
    transform: LogitTransform = PLAIN,
    first_class: int = 0,
) -> None:
    """Turn sums over tiles or ranks into the numbers of each row, or into sums of one part: what a rank tells others.

    Args:
        parts: From `stats_logits.tile_stats`, or what all ranks told, with the sums that ``out`` needs: heat for the
            entropy, squares for sum_sq_prob, total for the mean.
        out: Takes the numbers; those before ``logprob`` must be there, and with targets that too, contiguous. Or takes
            the sums, the class of the highest logit among all, and the logits of the targets that are here.
        V: Classes of all parts; there may be none of a rank's own.
        y_CK: Target classes among all of them, int64, contiguous, all of them valid.
        x_CD: Hidden states, where ``parts`` lack the targets' logits.
        w_VD: This rank's weight, likewise.
        transform: What makes logits of the products.
        first_class: Class of ``w_VD``'s first row.
    """
    (C, K), D = y_CK.shape, 1 if x_CD is None else x_CD.shape[1]
    numbers, told = (out, None) if isinstance(out, RowStats) else (None, out)
    if told is not None and not V:
        told.top.fill_(-torch.inf)  # the others are 0
        return
    _merge_stats[(C,)](
        parts, numbers, told, y_CK, (*matrix(x_CD), *matrix(w_VD), D), transform, first_class, V, K, BLOCK=block_of(D),
        WIDTH=power_of_2(parts.P), num_warps=1 if x_CD is None else 4,
    )  # fmt: skip
