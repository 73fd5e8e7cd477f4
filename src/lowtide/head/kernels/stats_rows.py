"""The operations after the GEMMs of `stats_logits`: a program per row, over [C, P], [C, D] or [C, K].

C rows of a chunk, D hidden size, V vocabulary, P tiles across it, K targets a row. Classes count among those of all
ranks.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from lowtide.head.kernels.elementary import expm1, log1p
from lowtide.head.kernels.exp_terms import block_of, dot, scaled_row
from lowtide.head.kernels.gemm import (
    ALL,
    PLAIN,
    LogitTransform,
    Used,
    counted_rows,
    finish_logits,
    matrix,
    rows_in_tiles,
)
from lowtide.head.kernels.stats_logits import FLOOR, Entries, Sums
from lowtide.kernel_launch import Launcher, power_of_2


class RowStats(NamedTuple):
    """Numbers of each row [C], float32 but for ``argmax``, or the upstream gradients of these; None: not wanted."""

    lse: Tensor | None = None
    argmax: Tensor | None = None  # int64: the highest class
    top_logprob: Tensor | None = None  # of that
    logprob: Tensor | None = None  # [C, K], of the targets
    entropy: Tensor | None = None
    sum_sq_prob: Tensor | None = None
    mean_logit: Tensor | None = None
    highest: Tensor | None = None  # logit

    def rows(self, part: slice) -> "RowStats":
        """Return those of some of the rows."""
        return RowStats(*(None if x is None else x[part] for x in self))


@Launcher
@triton.jit(do_not_specialize=["C", "first_class"])  # type: ignore[untyped-decorator]
def _merge_stats(  # type: ignore[no-untyped-def]
    tiles, out, y_ptr, x, w, used, transform, first_class, C, V, K, vocab, BLOCK: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """See `merge_stats`: sums about the highest logit of all tiles."""
    x_ptr, x_stride, D = x
    w_ptr, w_stride, _ = w
    i = tl.program_id(0).to(tl.int64)
    if i >= counted_rows(used, C):
        return
    p = tl.arange(0, WIDTH)
    inside = p < tiles.P
    at = i * tiles.row + p
    ids = tl.load(tiles.id + at, mask=inside, other=V)
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
    tl.store(out.top_logprob + i, -spread)
    if out.highest is not None:
        tl.store(out.highest + i, top)
    if tiles.heat is not None:
        terms = weight * (tl.load(tiles.heat + at, mask=inside, other=0.0) + tl.maximum(below, FLOOR) * in_tile)
        heat = tl.sum(tl.where(inside & (weight > 0.0), terms, 0.0), 0)
        tl.store(out.entropy + i, spread - heat / (1.0 + rest))
    if tiles.squares is not None:
        terms = weight * weight * (tl.load(tiles.squares + at, mask=inside, other=0.0) + own)
        squares = tl.sum(tl.where(inside, terms, 0.0), 0)
        tl.store(out.sum_sq_prob + i, (1.0 + squares) / ((1.0 + rest) * (1.0 + rest)))
    if tiles.total is not None:
        tl.store(out.mean_logit + i, tl.sum(tl.load(tiles.total + at, mask=inside, other=0.0), 0) / vocab)
    if y_ptr is not None:
        for k in range(K):
            y = tl.load(y_ptr + i * K + k).to(tl.int64) - first_class
            here = (y >= 0) & (y < V)
            row = w_ptr + tl.where(here, y, 0) * w_stride
            t = finish_logits(dot(x_ptr + i * x_stride, row, D, BLOCK), tl.where(here, y, 0), V, transform)
            logprob = tl.where(y == top_id, -spread, (t - top) - spread)
            tl.store(out.logprob + i * K + k, tl.where(here, logprob, float("-inf")))


def merge_stats(
    tiles: Sums, out: RowStats, y_CK: Tensor, x_CD: Tensor, w_VD: Tensor, *, transform: LogitTransform = PLAIN,
    first_class: int = 0, vocab: int, used: Used = ALL,
) -> None:  # fmt: skip
    """Turn sums over tiles into the numbers of each row.

    With M the highest logit and over the other classes R the sum of exp(z - M), H of exp(z - M) (z - M), S of
    exp(z - M)**2:

        lse = M + log1p(R)    entropy = log1p(R) - H / (1 + R)   sum p^2 = (1 + S) / (1 + R)^2    log p_y = t - lse

    ``tiles`` have the sums that ``out`` needs: heat for the entropy, squares for sum_sq_prob, total for the mean.
    ``out``, contiguous, has at least lse, argmax and top_logprob, and with targets logprob. Where the vocabulary is
    sharded, all are of this rank's classes, ``first_class`` and on, only the mean is a part of that of all ``vocab``:
    `terms.statistics.merged` puts every rank's together. ``y_CK`` are int64, contiguous and valid; a target of another
    rank has log-probability -inf. Rows that are not `Used` are left as they are.
    """
    C, K = y_CK.shape
    _merge_stats[(C,)](
        tiles, out, y_CK if K else None, matrix(x_CD), matrix(w_VD), used, transform, first_class, C, len(w_VD), K,
        vocab,
        BLOCK=block_of(x_CD.shape[1]), WIDTH=power_of_2(tiles.P), num_warps=4,
    )  # fmt: skip


@Launcher
@triton.jit(do_not_specialize=["C"])  # type: ignore[untyped-decorator]
def _prepare_stats(  # type: ignore[no-untyped-def]
    known, upstream, y_ptr, x, scaled_ptr, entries, used, transform, C, V, K, CLASSES: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    x_ptr, x_stride, D = x
    i = tl.program_id(0).to(tl.int64)
    if i >= rows_in_tiles(used, C):
        return
    k = tl.arange(0, CLASSES)  # the highest class, and the targets
    is_target = (k > 0) & (k <= K)
    of_target = i * K + k - 1
    zero = tl.full((), 0.0, tl.float32)
    h, a, even, entropy = zero, zero, zero, zero
    y = tl.where(k == 0, tl.load(known.argmax + i).to(tl.int32), -1)
    logprob = tl.where(k == 0, tl.load(known.top_logprob + i), 0.0)
    g = tl.zeros((CLASSES,), tl.float32)
    if upstream.logprob is not None:
        y = tl.load(y_ptr + of_target, mask=is_target, other=y)
        logprob = tl.load(known.logprob + of_target, mask=is_target, other=logprob)
        g = tl.load(upstream.logprob + of_target, mask=is_target, other=0.0)
    if upstream.entropy is not None:
        h = tl.load(upstream.entropy + i)
        entropy = tl.load(known.entropy + i)
    if upstream.lse is not None:
        a = tl.load(upstream.lse + i)
    if upstream.mean_logit is not None:
        even = tl.load(upstream.mean_logit + i) / V
    largest = tl.maximum(tl.maximum(tl.max(tl.abs(g), 0), tl.abs(h)), tl.maximum(tl.abs(a), tl.abs(even)))
    largest += tl.sum(g - g, 0) + (h - h) + (a - a) + (even - even)  # NaN where one of them is no number
    scale = zero + 1.0
    if transform.scale is not None:
        scale = tl.load(transform.scale)
        largest *= tl.abs(scale)
    s = (largest.to(tl.int32, bitcast=True) & -0x800000).to(tl.float32, bitcast=True)  # the power of two below it
    s = tl.where(s < float("inf"), s, largest)
    share = scale / tl.where(s == 0.0, 1.0, s)
    g, h, a, even = g * share, h * share, a * share, even * share
    of_targets = tl.sum(g, 0)
    lse = tl.load(known.lse + i)
    tl.store(entries.s + i, s)
    tl.store(entries.lse + i, lse)
    tl.store(entries.slope + i, a - of_targets - h * entropy)
    if entries.heat is not None:
        tl.store(entries.heat + i, h)
    if entries.even is not None:
        tl.store(entries.even + i, even)
    same = y[:, None] == y[None, :]
    own = tl.sum(tl.where(same, g[None, :], 0.0), 1)
    last = tl.max(tl.where(same, k[None, :], 0), 1)  # each class once: where it stands last, so a target if it is one
    p = tl.exp(logprob)  # the class's own targets' part without cancellation: 1 - p = -expm1(logprob)
    entry = p * (a - h * (tl.maximum(logprob, FLOOR) + entropy)) + even
    entry += -own * expm1(logprob) - (of_targets - own) * p
    if transform.softcap is not None:
        z = (logprob + lse) / transform.softcap
        entry *= 1.0 - z * z
    place = tl.where(s == 0.0, -1, tl.where(last == k, y, -1))
    row = i * (K + 1) + k
    tl.store(entries.id + row, place, mask=k <= K)
    tl.store(entries.entry + row, entry, mask=k <= K)
    if upstream.logprob is not None:
        rest = entry - entry.to(x_ptr.dtype.element_ty).to(tl.float32)
        tl.store(entries.rest + of_target, tl.where(place < 0, 0.0, rest), mask=is_target)
    if scaled_ptr is not None:
        scaled_row(x_ptr + i * x_stride, scaled_ptr + i * D, s, D, BLOCK)


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
    tl.store(g_ptr + i * g_stride + column - first_class, entry.to(g_ptr.dtype.element_ty), mask=here)


def prepare_stats(
    known: RowStats, upstream: RowStats, y_CK: Tensor | None, x_CD: Tensor, entries: Entries, V: int, *,
    transform: LogitTransform = PLAIN, scaled_CD: Tensor | None = None, used: Used = ALL,
) -> None:  # fmt: skip
    """From what forward found and the upstream gradients, write what `gradient_tile` and the functions below take.

    ``upstream`` holds any of logprob (0 where ignored), entropy, lse and mean_logit; ``known`` what has one of
    these, and lse, argmax and top_logprob; ``y_CK`` (int32) targets, -1 where ignored, None and K 0 without logprob.
    All are contiguous. V counts all ranks' classes. ``scaled_CD`` takes s x, where the weight gets a gradient.
    """
    (C, D), K = x_CD.shape, entries.rest.shape[1]
    _prepare_stats[(C,)](
        known, upstream, y_CK, matrix(x_CD), scaled_CD, entries, used, transform, C, V, K,
        CLASSES=power_of_2(1 + K), BLOCK=block_of(D), num_warps=4,
    )  # fmt: skip


def put_entries(g_CV: Tensor, entries: Entries, first_class: int, used: Used = ALL) -> None:
    """Write those entries into ``g_CV`` whose classes are its columns, counted as ``first_class`` and on."""
    WIDTH = power_of_2(entries.id.shape[1])
    C = len(g_CV)
    _put_entries[(C,)](matrix(g_CV), matrix(entries.id), entries.entry, used, first_class, C, WIDTH=WIDTH, num_warps=1)
