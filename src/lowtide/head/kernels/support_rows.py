"""Dot products with rows of the weight that each token lists, and the gradients of these: no pass over the vocabulary.

n tokens, K ids of a set, P = n K pairs of a token and a row, D hidden size, V rows of the weight here. What is read is
gathered: P rows of the weight in `score` and in `input_grad`, P rows of hidden states in `weight_grad`. Programs of the
same columns run side by side, so that what they gather is a few columns of a matrix, which the L2 cache holds.
`support` has the same in plain PyTorch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowtide.head.kernels.logit_rows import OUT
from lowtide.kernel_launch import Launcher, blocks_of, power_of_2

SCORE, INPUT_GRAD, WEIGHT_GRAD = (32, 128), (4, 512), (2, 1024)  # pairs and columns that a program loads at once
RUN = 256  # pairs of one class that are summed by a program of their own
MOST_RUNS = 4096


def _tile(most: tuple[int, int], D: int) -> tuple[int, dict[str, int]]:
    """Return the number of programs across D, and the size of their tiles."""
    columns = min(most[1], max(16, power_of_2(D)))
    return blocks_of(D, columns), {"PAIRS": most[0], "COLUMNS": columns}


@Launcher
@triton.jit  # type: ignore[untyped-decorator]
def _score(  # type: ignore[no-untyped-def]
    x_ptr, x_row, w_ptr, w_row, w_column, rows_ptr, out_ptr, P, K, D, PAIRS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Slice s of the dot products of token i: out[s, p] = sum_d x_id w_vd, d in the slice, v the row of pair p."""
    i, part = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    column = part * COLUMNS + tl.arange(0, COLUMNS)
    x = tl.load(x_ptr + i * x_row + column, mask=column < D, other=0.0)
    for k in range(0, K, PAIRS):
        at = k + tl.arange(0, PAIRS)
        v = tl.load(rows_ptr + i * K + at, mask=at < K, other=-1).to(tl.int64)
        rows = w_ptr + v[:, None] * w_row + column[None, :] * w_column
        tile = tl.load(rows, mask=(v >= 0)[:, None] & (column < D)[None, :], other=0.0).to(x.dtype)
        # 0 of no row, even if x is NaN there
        product = tl.where((v >= 0)[:, None], tile.to(tl.float32) * x.to(tl.float32)[None, :], 0.0)
        tl.store(out_ptr + part * P + i * K + at, tl.sum(product, 1), mask=at < K)


def score(x_nD: Tensor, w_VD: Tensor, rows_nK: Tensor) -> Tensor:
    """Return each listed row's dot product with its token's hidden state [n, K], float32; 0 where a row is negative.

    ``rows_nK`` are int32, contiguous. The rows of ``w_VD``, of any strides, are rounded to the dtype of ``x_nD``, whose
    rows are contiguous.
    """
    (n, D), K = x_nD.shape, rows_nK.shape[1]
    parts, tile = _tile(SCORE, D)
    out = x_nD.new_empty(parts, n, K, dtype=torch.float32)
    if out.numel():
        of_w = w_VD, w_VD.stride(0), w_VD.stride(1)
        _score[(n, parts)](x_nD, x_nD.stride(0), *of_w, rows_nK, out, n * K, K, D, **tile)
    return out.sum(0)


@Launcher
@triton.jit  # type: ignore[untyped-decorator]
def _input_grad(  # type: ignore[no-untyped-def]
    c_ptr, w_ptr, w_row, w_column, rows_ptr, out_ptr, K, D, LIKE: tl.constexpr, PAIRS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """out[i, d] = sum over the pairs of token i of c w_vd."""
    i = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((PAIRS, COLUMNS), tl.float32)
    for k in range(0, K, PAIRS):
        at = k + tl.arange(0, PAIRS)
        c = tl.load(c_ptr + i * K + at, mask=at < K, other=0.0)
        v = tl.load(rows_ptr + i * K + at, mask=at < K, other=-1).to(tl.int64)
        counts = c != 0.0  # else nothing is read
        rows = w_ptr + v[:, None] * w_row + column[None, :] * w_column
        tile = tl.load(rows, mask=(counts & (v >= 0))[:, None] & (column < D)[None, :], other=0.0)
        total += tl.where(counts[:, None], c[:, None] * tile.to(LIKE).to(tl.float32), 0.0)
    tl.store(out_ptr + i * D + column, tl.sum(total, 0).to(out_ptr.dtype.element_ty), mask=column < D)


def input_grad(c_nK: Tensor, w_VD: Tensor, rows_nK: Tensor, out_nD: Tensor, dtype: torch.dtype) -> None:
    """Write the sum of each token's rows, rounded to ``dtype``, times ``c_nK`` (float32) into ``out_nD``, contiguous.

    Where c is 0 no row is read, and a negative one counts as 0. ``rows_nK`` are as in `score`.
    """
    (n, D), K = out_nD.shape, rows_nK.shape[1]
    parts, tile = _tile(INPUT_GRAD, D)
    if out_nD.numel():
        of_w = w_VD, w_VD.stride(0), w_VD.stride(1)
        _input_grad[(n, parts)](c_nK, *of_w, rows_nK, out_nD, K, D, LIKE=OUT[dtype], **tile)


@triton.jit  # type: ignore[untyped-decorator]
def _add_pairs(total, first, last, order_ptr, c_ptr, x_ptr, x_row, column, K, D, PAIRS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Add the hidden states of pairs from ``first`` to ``last``, times c, to ``total`` [PAIRS, COLUMNS]."""
    for p in range(first, last, PAIRS):
        at = p + tl.arange(0, PAIRS)
        pair = tl.load(order_ptr + at, mask=at < last, other=0)
        c = tl.load(c_ptr + pair, mask=at < last, other=0.0)
        mask = (c != 0.0)[:, None] & (column < D)[None, :]
        x = tl.load(x_ptr + (pair // K)[:, None] * x_row + column[None, :], mask=mask, other=0.0)
        total += tl.where(mask, c[:, None] * x.to(tl.float32), 0.0)
    return total


@Launcher
@triton.jit  # type: ignore[untyped-decorator]
def _sum_runs(  # type: ignore[no-untyped-def]
    x_ptr, x_row, sorted_ptr, order_ptr, c_ptr, runs_ptr, K, D, RUN: tl.constexpr, PAIRS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Of the sorted pairs from t RUN to (t + 1) RUN, where all are of one class, the sum of hidden states times c."""
    t = tl.program_id(0).to(tl.int64)
    first = t * RUN
    v = tl.load(sorted_ptr + first)
    if (v >= 0) & (tl.load(sorted_ptr + first + RUN - 1) == v):
        column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
        total = tl.zeros((PAIRS, COLUMNS), tl.float32)
        total = _add_pairs(total, first, first + RUN, order_ptr, c_ptr, x_ptr, x_row, column, K, D, PAIRS)
        tl.store(runs_ptr + t * D + column, tl.sum(total, 0), mask=column < D)


@Launcher
@triton.jit  # type: ignore[untyped-decorator]
def _sum_classes(  # type: ignore[no-untyped-def]
    x_ptr, x_row, starts_ptr, order_ptr, c_ptr, runs_ptr, out_ptr, K, D, RUN: tl.constexpr, PAIRS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """The rows of the weight's gradient: of each class the pairs before its whole runs, these, and those after them."""
    v = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    first, last = tl.load(starts_ptr + v), tl.load(starts_ptr + v + 1)
    run, end = (first + RUN - 1) // RUN, last // RUN
    total = tl.zeros((PAIRS, COLUMNS), tl.float32)
    before = tl.where(end > run, run * RUN, last)
    total = _add_pairs(total, first, before, order_ptr, c_ptr, x_ptr, x_row, column, K, D, PAIRS)
    after = tl.where(end > run, end * RUN, last)
    total = _add_pairs(total, after, last, order_ptr, c_ptr, x_ptr, x_row, column, K, D, PAIRS)
    row = tl.sum(total, 0)
    for t in range(run, end):
        row += tl.load(runs_ptr + t * D + column, mask=column < D, other=0.0)
    tl.store(out_ptr + v * D + column, row.to(out_ptr.dtype.element_ty), mask=column < D)


def weight_grad(c_NK: Tensor, x_ND: Tensor, rows_NK: Tensor, out_VD: Tensor) -> None:
    """Write the sum of each row's hidden states times ``c_NK`` (float32) into ``out_VD``, contiguous.

    One stable sort of all pairs by row fixes the order of each sum. A row that very many tokens list is summed in runs
    of pairs, by as many programs: of longer runs where there are many pairs, so that runs stay few.
    """
    (V, D), P, K = out_VD.shape, rows_NK.numel(), rows_NK.shape[1]
    if not out_VD.numel():
        return
    in_order, order = rows_NK.view(-1).sort(stable=True)
    starts = torch.searchsorted(in_order, torch.arange(V + 1, dtype=torch.int32, device=in_order.device))
    run, (parts, tile) = max(RUN, power_of_2(blocks_of(P, MOST_RUNS))), _tile(WEIGHT_GRAD, D)
    runs, of_x = x_ND.new_empty(P // run, D, dtype=torch.float32), (x_ND, x_ND.stride(0))
    if len(runs):
        _sum_runs[(len(runs), parts)](*of_x, in_order, order, c_NK, runs, K, D, RUN=run, **tile)
    _sum_classes[(V, parts)](*of_x, starts, order, c_NK, runs, out_VD, K, D, RUN=run, **tile)
