"""Dot products with rows of the weight that each token lists, and the gradients of these: no pass over the vocabulary.

N tokens, D hidden size, V vocabulary, P pairs of a token and a class, those of a token one after another. What is read
is gathered: P rows of the weight in `score` and in `input_grad`, P rows of hidden states in `weight_grad`. Programs of
the same columns run side by side, so that what they gather is a few columns of a matrix, which the L2 cache holds.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowtide.kernel_launch import Launcher, blocks_of, power_of_2


class Tiles(NamedTuple):
    """Sizes of tiles: pairs and columns that a program loads at once, columns of its part of a row, warps."""

    pairs: int
    columns: int
    slice: int
    warps: int


SCORE, INPUT_GRAD, WEIGHT_GRAD = Tiles(32, 128, 128, 4), Tiles(4, 512, 512, 4), Tiles(2, 1024, 1024, 4)
RUN = 256  # pairs of one class whose sum is a part of its own
MOST_PARTS = 4096
_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@triton.jit
def _pairs_of(i, starts_ptr, K):  # type: ignore[no-untyped-def]
    """Where a token's pairs begin and end."""
    if starts_ptr is None:
        first = i * K
        last = first + K
    else:
        first = tl.load(starts_ptr + i)
        last = tl.load(starts_ptr + i + 1)
    return first, last


@triton.jit
def _row_of(ids, w):  # type: ignore[no-untyped-def]
    """The rows of classes in this rank's weight, negative where there is none."""
    _, _, _, first, rows = w
    v = ids.to(tl.int64) - first
    return tl.where(v < rows, v, -1)


def _weight(w_VD: Tensor, first: int) -> tuple[Tensor, int, int, int, int]:
    """Return a weight as kernels take it: its strides, its first class and how many classes it has."""
    return w_VD, w_VD.stride(0), w_VD.stride(1), first, len(w_VD)


@Launcher
@triton.jit  # type: ignore[untyped-decorator]
def _score(  # type: ignore[no-untyped-def]
    x_ptr, x_row, w, ids_ptr, starts_ptr, out_ptr, P, K, D, PAIRS: tl.constexpr, COLUMNS: tl.constexpr,
    SLICE: tl.constexpr,
):  # fmt: skip
    """Slice s of the dot products of token i: out[s, p] = sum_d x_id w_vd, d in the slice, v the class of pair p."""
    w_ptr, w_row, w_column, _, _ = w
    i, part = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    first, last = _pairs_of(i, starts_ptr, K)
    for p in range(first, last, PAIRS):
        at = p + tl.arange(0, PAIRS)
        inside = at < last
        v = _row_of(tl.load(ids_ptr + at, mask=inside, other=-1), w)
        total = tl.zeros((PAIRS, COLUMNS), tl.float32)
        for d in range(0, SLICE, COLUMNS):
            column = part * SLICE + d + tl.arange(0, COLUMNS)
            x = tl.load(x_ptr + i * x_row + column, mask=column < D, other=0.0)
            rows = w_ptr + v[:, None] * w_row + column[None, :] * w_column
            tile = tl.load(rows, mask=(v >= 0)[:, None] & (column < D)[None, :], other=0.0).to(x.dtype)
            # 0 for no class, even if x is NaN there
            total += tl.where((v >= 0)[:, None], tile.to(tl.float32) * x.to(tl.float32)[None, :], 0.0)
        tl.store(out_ptr + part * P + at, tl.sum(total, 1), mask=inside)


def score(
    x_ND: Tensor, w_VD: Tensor, ids_P: Tensor, starts: Tensor | None, K: int, *, first: int = 0, most: int = 10**6,
    tiles: Tiles = SCORE,
) -> Tensor:  # fmt: skip
    """Return the pairs' dot products as sums over slices of a row [S, P], float32, to be added up: ``most`` of them.

    0 where there is no such row, and none is read. ``ids_P`` are int32, contiguous, and count from ``first``;
    ``starts`` [N + 1] int64 says where each token's begin, None: each has K. The rows of ``w_VD``, of any strides, are
    rounded to the dtype of ``x_ND``, whose rows are contiguous.
    """
    (N, D), P, width = x_ND.shape, len(ids_P), tiles.slice
    while blocks_of(D, width) > most:
        width *= 2
    slices = max(1, blocks_of(D, width))
    out = x_ND.new_empty(slices, P, dtype=torch.float32) if D else x_ND.new_zeros(slices, P, dtype=torch.float32)
    if N and P and D:
        _score[(N, slices)](
            x_ND, x_ND.stride(0), _weight(w_VD, first), ids_P, starts, out, P, K, D, PAIRS=tiles.pairs,
            COLUMNS=min(tiles.columns, max(16, power_of_2(D))), SLICE=width, num_warps=tiles.warps,
        )  # fmt: skip
    return out


@Launcher
@triton.jit  # type: ignore[untyped-decorator]
def _input_grad(  # type: ignore[no-untyped-def]
    c_ptr, w, ids_ptr, starts_ptr, out_ptr, K, D, LIKE: tl.constexpr, PAIRS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """out[i, d] = sum over the pairs of token i of c w_vd."""
    w_ptr, w_row, w_column, _, _ = w
    i = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    first, last = _pairs_of(i, starts_ptr, K)
    total = tl.zeros((PAIRS, COLUMNS), tl.float32)
    for p in range(first, last, PAIRS):
        at = p + tl.arange(0, PAIRS)
        c = tl.load(c_ptr + at, mask=at < last, other=0.0)
        v = _row_of(tl.load(ids_ptr + at, mask=at < last, other=-1), w)
        counts = c != 0.0  # else nothing is read
        rows = w_ptr + v[:, None] * w_row + column[None, :] * w_column
        tile = tl.load(rows, mask=(counts & (v >= 0))[:, None] & (column < D)[None, :], other=0.0)
        if LIKE is not None:
            tile = tile.to(LIKE)
        total += tl.where(counts[:, None], c[:, None] * tile.to(tl.float32), 0.0)
    tl.store(out_ptr + i * D + column, tl.sum(total, 0).to(out_ptr.dtype.element_ty), mask=column < D)


def input_grad(
    c_P: Tensor, w_VD: Tensor, ids_P: Tensor, starts: Tensor | None, K: int, out_ND: Tensor, dtype: torch.dtype, *,
    first: int = 0, tiles: Tiles = INPUT_GRAD,
) -> None:  # fmt: skip
    """Write the sum of each token's rows of the weight, times ``c_P`` (float32), into ``out_ND``, contiguous.

    The rows are rounded to ``dtype``; where c is 0 none is read, and one that is not here counts as 0. ``ids_P`` are as
    in `score`.
    """
    N, D = out_ND.shape
    if not len(c_P):
        out_ND.zero_()
    elif out_ND.numel():
        columns = min(tiles.columns, max(16, power_of_2(D)))
        like = None if w_VD.dtype == dtype else _TYPES[dtype]
        _input_grad[(N, blocks_of(D, columns))](
            c_P, _weight(w_VD, first), ids_P, starts, out_ND, K, D, LIKE=like, PAIRS=tiles.pairs, COLUMNS=columns,
            num_warps=tiles.warps,
        )  # fmt: skip


class Sorted(NamedTuple):
    """Pairs in the order of their classes, those of one class in the order of their tokens; negative classes first."""

    ids: Tensor  # int32 [P]
    token: Tensor  # int32 [P]
    place: Tensor  # int32 [P]: which pair it is among all
    c: Tensor  # float32 [P], of the pairs as they are: what a token's hidden states are multiplied with
    first: int = 0  # the class of the first row here


@triton.jit  # type: ignore[untyped-decorator]
def _add_pairs(total, of_bias, first, last, x_ptr, x_row, pairs, column, D, PAIRS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Add pairs' hidden states times c to ``total`` [PAIRS, COLUMNS], and c to ``of_bias`` [PAIRS]."""
    for p in range(first, last, PAIRS):
        at = p + tl.arange(0, PAIRS)
        place = tl.load(pairs.place + at, mask=at < last, other=0)
        c = tl.load(pairs.c + place, mask=at < last, other=0.0)
        i = tl.load(pairs.token + at, mask=at < last, other=0).to(tl.int64)
        counts = c != 0.0
        mask = counts[:, None] & (column < D)[None, :]
        x = tl.load(x_ptr + i[:, None] * x_row + column[None, :], mask=mask, other=0.0)
        total += tl.where(mask, c[:, None] * x.to(tl.float32), 0.0)
        of_bias += c
    return total, of_bias


@Launcher
@triton.jit  # type: ignore[untyped-decorator]
def _sum_runs(  # type: ignore[no-untyped-def]
    x_ptr, x_row, pairs, parts_ptr, bias_ptr, V, D, RUN: tl.constexpr, PAIRS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Of pairs from t RUN to (t + 1) RUN, where all are of one class, the sum of hidden states times c."""
    t = tl.program_id(0).to(tl.int64)
    first = t * RUN
    v = tl.load(pairs.ids + first)
    here = (v >= pairs.first) & (v < pairs.first + V)
    if here & (tl.load(pairs.ids + first + RUN - 1) == v):
        column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
        total, of_bias = tl.zeros((PAIRS, COLUMNS), tl.float32), tl.zeros((PAIRS,), tl.float32)
        total, of_bias = _add_pairs(total, of_bias, first, first + RUN, x_ptr, x_row, pairs, column, D, PAIRS)
        tl.store(parts_ptr + t * D + column, tl.sum(total, 0), mask=column < D)
        if tl.program_id(1) == 0:
            tl.store(bias_ptr + t, tl.sum(of_bias, 0))


@Launcher
@triton.jit  # type: ignore[untyped-decorator]
def _sum_classes(  # type: ignore[no-untyped-def]
    x_ptr, x_row, pairs, starts_ptr, parts, slot_ptr, out_ptr, bias_ptr, R, D, RUN: tl.constexpr, ADD: tl.constexpr,
    PAIRS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The rows of the weight's gradient: of each class the pairs before its whole runs, these, and those after them."""
    parts_ptr, parts_bias_ptr = parts
    v = tl.program_id(0).to(tl.int64)
    first, last = tl.load(starts_ptr + v), tl.load(starts_ptr + v + 1)
    slot = v
    if slot_ptr is not None:
        slot = tl.load(slot_ptr + v)
    writes = last > first
    if not ADD:
        writes = (slot < R) | (last > first)  # zeros too
    if writes:
        column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
        total, of_bias = tl.zeros((PAIRS, COLUMNS), tl.float32), tl.zeros((PAIRS,), tl.float32)
        run, end = (first + RUN - 1) // RUN, last // RUN
        whole = end > run
        total, of_bias = _add_pairs(
            total, of_bias, first, tl.where(whole, run * RUN, last), x_ptr, x_row, pairs, column, D, PAIRS
        )
        after = tl.where(whole, end * RUN, last)
        total, of_bias = _add_pairs(total, of_bias, after, last, x_ptr, x_row, pairs, column, D, PAIRS)
        row, db = tl.sum(total, 0), tl.sum(of_bias, 0)
        for t in range(run, end):
            row += tl.load(parts_ptr + t * D + column, mask=column < D, other=0.0)
            db += tl.load(parts_bias_ptr + t)
        out = out_ptr + slot * D + column
        if ADD:
            row += tl.load(out, mask=column < D, other=0.0).to(tl.float32)
        tl.store(out, row.to(out_ptr.dtype.element_ty), mask=column < D)
        if bias_ptr is not None:  # noqa: SIM102
            if tl.program_id(1) == 0:
                if ADD:
                    db += tl.load(bias_ptr + v)
                tl.store(bias_ptr + v, db)


def run_length(P: int) -> int:
    """Return how many pairs of one class are summed as a part: more where there are many, so that parts stay few."""
    return max(RUN, power_of_2(blocks_of(P, MOST_PARTS)))


def weight_grad(
    x_ND: Tensor, pairs: Sorted, starts_V: Tensor, slot_V: Tensor | None, out_RD: Tensor, bias_V: Tensor | None, *,
    add: bool, tiles: Tiles = WEIGHT_GRAD, run: int | None = None,
) -> None:  # fmt: skip
    """Write of each class the sum of its tokens' hidden states times c into ``out_RD``, and of c into ``bias_V``.

    Pairs ``starts_V[v]`` to ``starts_V[v + 1]`` (int64) are those of class v. ``slot_V`` (int64) is the row of a class
    in ``out_RD``, those with pairs first, no two the same; None: row v. What is beyond its rows is left out, and rows
    without pairs are 0. With ``add`` sums are added to what is there. The order of all sums is of the pairs alone.
    """
    D, P, V = out_RD.shape[1], len(pairs.ids), len(starts_V) - 1
    run = run_length(P) if run is None else run
    columns = min(tiles.columns, max(16, power_of_2(D)))
    room = x_ND.new_empty((P // run) * (D + 1), dtype=torch.float32)
    parts, of_bias = room[: (P // run) * D], room[(P // run) * D :]
    if not V:
        return
    grid = max(1, blocks_of(D, columns))  # of no columns the bias's sums are still wanted
    constants = {"RUN": run, "PAIRS": tiles.pairs, "COLUMNS": columns, "num_warps": tiles.warps}
    if P // run:
        _sum_runs[(P // run, grid)](x_ND, x_ND.stride(0), pairs, parts, of_bias, V, D, **constants)
    _sum_classes[(V, grid)](
        x_ND, x_ND.stride(0), pairs, starts_V, (parts, of_bias), slot_V, out_RD, bias_V, len(out_RD), D, ADD=add,
        **constants,
    )  # fmt: skip
