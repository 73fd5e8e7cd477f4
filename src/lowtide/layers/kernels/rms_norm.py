"""RMS normalisation of rows, with or without a residual sum before it: one pass forward, one pass backward.

N rows, D columns, P programs of the backward pass.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowtide.kernel_launch import Launcher, blocks_of, multiprocessors, power_of_2

LONGEST = 32768  # columns: a row lies in the registers of one program
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


def _tile(D: int) -> dict[str, int]:
    block = power_of_2(D)
    rows = max(1, TILE // block)
    return {"ROWS": rows, "BLOCK": block, "num_warps": min(16, max(4, rows * block // 512))}


def normalize_rows(
    x_ND: Tensor,
    weight_D: Tensor,
    eps: float,
    offset: float,
    *,
    round_first: bool,
    residual_ND: Tensor | None,
    out_ND: Tensor,
    sum_ND: Tensor | None,
    rstd_N: Tensor,
) -> None:
    """Write ``x * rstd * (weight + offset)`` with ``rstd = 1 / sqrt(mean(x**2) + eps)`` of each row, in float32.

    Args:
        x_ND: float32, bfloat16 or float16; rows of any stride, columns contiguous; D up to `LONGEST`.
        weight_D: Of the same dtypes.
        eps: Added to the mean square.
        offset: Added to the weight.
        round_first: Round ``x * rstd`` to x's dtype before the weight.
        residual_ND: Added to x first, or None. The sum, rounded to the dtype of ``sum_ND``, is what is normalised.
        out_ND: For the result, contiguous.
        sum_ND: For the sum with ``residual_ND``; contiguous.
        rstd_N: float32, for the factors.
    """
    N, D = x_ND.shape
    tile = _tile(D)
    _forward[(blocks_of(N, tile["ROWS"]),)](
        x_ND, x_ND.stride(0), residual_ND, 0 if residual_ND is None else residual_ND.stride(0), sum_ND, weight_D,
        out_ND, rstd_N, N, D, float(eps), float(offset), ROUND=round_first, **tile,
    )  # fmt: skip


def normalize_rows_backward(
    g_ND: Tensor,
    x_ND: Tensor,
    weight_D: Tensor,
    rstd_N: Tensor,
    offset: float,
    *,
    g_sum_ND: Tensor | None,
    dx_ND: Tensor | None,
    dw_D: Tensor | None,
) -> None:
    """Write the gradients of `normalize_rows`, with n = x * rstd and h = g * (weight + offset):

        dx = rstd (h - n mean(n h)) + g_sum          dw = sum over rows of g n

    Sums are float32, in a fixed order: each of P programs sums its own rows, then the P partial sums are added.

    Args:
        g_ND: Gradient of the result, rows of any stride.
        x_ND: The rows that were normalised.
        weight_D: As in forward.
        rstd_N: Forward's factors.
        offset: As in forward.
        g_sum_ND: Gradient of the sum itself, or None.
        dx_ND: For the rows' gradient, contiguous; None: not needed.
        dw_D: For the weight's gradient; None: not needed.
    """
    N, D = x_ND.shape
    tile = _tile(D)
    blocks = blocks_of(N, tile["ROWS"])
    programs = min(blocks, PROGRAMS_PER_MULTIPROCESSOR * multiprocessors(x_ND.device))
    partial = None if dw_D is None else torch.empty((programs, D), dtype=torch.float32, device=x_ND.device)
    _backward[(programs,)](
        g_ND, g_ND.stride(0), g_sum_ND, 0 if g_sum_ND is None else g_sum_ND.stride(0), x_ND, x_ND.stride(0), weight_D,
        rstd_N, dx_ND, partial, N, D, float(offset), **tile,
    )  # fmt: skip
    if partial is not None and dw_D is not None:
        dw_D.copy_(partial.sum(0))
