"""RMS normalisation of rows, with or without a residual sum before it: one pass forward, one pass backward.

N rows, D columns, P programs of the backward pass.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowtide.kernel_launch import Launcher, blocks_of, multiprocessors, power_of_2

TILE = 2048  # values of a tile: short rows are taken several at a time
PROGRAMS_PER_MULTIPROCESSOR = 4  # of the backward pass: each leaves one row of partial sums


@Launcher
@triton.jit(do_not_specialize=["N", "eps", "offset"])  # type: ignore[untyped-decorator]
def _forward(  # type: ignore[no-untyped-def]
    x_ptr, x_stride, residual_ptr, residual_stride, sum_ptr, weight_ptr, out_ptr, rstd_ptr, N, D, eps, offset,
    ROUND: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < N)[:, None] & (column < D)[None, :]
    x = tl.load(x_ptr + row[:, None] * x_stride + column[None, :], mask=inside, other=0.0)
    here = row[:, None] * D + column[None, :]
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + row[:, None] * residual_stride + column[None, :], mask=inside, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + here, x, mask=inside)
    wide = x.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(wide * wide, 1) / D + eps)
    tl.store(rstd_ptr + row, rstd, mask=row < N)
    normed = wide * rstd[:, None]
    if ROUND:
        normed = normed.to(x.dtype).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=column < D, other=0.0).to(tl.float32) + offset
    tl.store(out_ptr + here, (normed * weight[None, :]).to(out_ptr.dtype.element_ty), mask=inside)


@Launcher
@triton.jit(do_not_specialize=["N", "offset"])  # type: ignore[untyped-decorator]
def _backward(  # type: ignore[no-untyped-def]
    g_ptr, g_stride, g_sum_ptr, g_sum_stride, x_ptr, x_stride, weight_ptr, rstd_ptr, dx_ptr, partial_ptr, N, D, offset,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK)
    weight = tl.load(weight_ptr + column, mask=column < D, other=0.0).to(tl.float32) + offset
    dw = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(tl.program_id(0) * ROWS, N, tl.num_programs(0) * ROWS):
        row = start + tl.arange(0, ROWS).to(tl.int64)
        inside = (row < N)[:, None] & (column < D)[None, :]
        g = tl.load(g_ptr + row[:, None] * g_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + row[:, None] * x_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row, mask=row < N, other=0.0)[:, None]
        normed = x * rstd
        if partial_ptr is not None:
            dw += g * normed
        if dx_ptr is not None:
            g *= weight[None, :]
            dx = rstd * (g - normed * (tl.sum(g * normed, 1) / D)[:, None])
            if g_sum_ptr is not None:
                at = row[:, None] * g_sum_stride + column[None, :]
                dx += tl.load(g_sum_ptr + at, mask=inside, other=0.0).to(tl.float32)
            tl.store(dx_ptr + row[:, None] * D + column[None, :], dx.to(dx_ptr.dtype.element_ty), mask=inside)
    if partial_ptr is not None:
        tl.store(partial_ptr + tl.program_id(0) * D + column, tl.sum(dw, 0), mask=column < D)


@cache
def _tile(D: int) -> dict[str, int]:
    block = power_of_2(D)
    rows = max(1, TILE // block)
    return {"ROWS": rows, "BLOCK": block, "num_warps": min(16, max(4, rows * block // 512))}


def normalize_rows(
    x_ND: Tensor,
    residual_ND: Tensor | None,
    weight_D: Tensor,
    eps: float,
    offset: float,
    *,
    round_first: bool,
    into: tuple[Tensor, Tensor | None, Tensor],
) -> None:
    """Write ``x * rstd * (weight + offset)`` with ``rstd = 1 / sqrt(mean(x**2) + eps)`` of each row, in float32.

    A residual is added to x first; the sum, rounded to its dtype, is what is normalised. ``round_first`` rounds
    ``x * rstd`` to x's dtype before the weight. All float32, bfloat16 or float16; x and residual contiguous [..., D],
    or rows [N, D] of any stride with contiguous columns. A row lies in one program's registers. ``into``: the result
    and the sum, contiguous, and rstd [N] in float32.
    """
    out_ND, sum_ND, rstd_N = into
    N, D = len(rstd_N), len(weight_D)
    tile = _tile(D)
    _forward[(blocks_of(N, tile["ROWS"]),)](
        x_ND, _stride(x_ND, D), residual_ND, _stride(residual_ND, D), sum_ND, weight_D,
        out_ND, rstd_N, N, D, float(eps), float(offset), ROUND=round_first, **tile,
    )  # fmt: skip


def _stride(x_ND: Tensor | None, D: int) -> int:
    """Return how many values lie between the beginnings of two rows."""
    return 0 if x_ND is None else D if x_ND.is_contiguous() else x_ND.stride(0)


def normalize_rows_backward(
    g_ND: Tensor,
    g_sum_ND: Tensor | None,
    x_ND: Tensor,
    weight_D: Tensor,
    rstd_N: Tensor,
    offset: float,
    *,
    into: tuple[Tensor | None, Tensor | None],
) -> None:
    """Write the gradients of `normalize_rows`, with n = x * rstd and h = g * (weight + offset):

        dx = rstd (h - n mean(n h)) + g_sum          dw = sum over rows of g n

    Sums are float32, in a fixed order: each of P programs sums its own rows, then the P partial sums are added. x are
    the rows that were normalised, g and g_sum the gradients of the result and of the sum itself, laid out as in
    `normalize_rows`. ``into``: dx, contiguous, and dw; None: not needed.
    """
    N, D = len(rstd_N), len(weight_D)
    dx_ND, dw_D = into
    tile = _tile(D)
    blocks = blocks_of(N, tile["ROWS"])
    programs = min(blocks, PROGRAMS_PER_MULTIPROCESSOR * multiprocessors(x_ND.device))
    partial = None if dw_D is None else torch.empty((programs, D), dtype=torch.float32, device=x_ND.device)
    _backward[(programs,)](
        g_ND, _stride(g_ND, D), g_sum_ND, _stride(g_sum_ND, D), x_ND, _stride(x_ND, D), weight_D, rstd_N,
        dx_ND, partial, N, D, float(offset), **tile,
    )  # fmt: skip
    if partial is not None and dw_D is not None:
        dw_D.copy_(partial.sum(0))
