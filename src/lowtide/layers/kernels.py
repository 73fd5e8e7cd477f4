"""Triton kernels of norms and rotations, one pass forward and one pass backward each. Imported where they run.

N rows, D columns, a row in one program's registers; each of a norm's P programs of backward leaves one row of partial
sums. B batch, T positions, H heads of queries or keys, d size of a head, of which the first r are rotated.
"""

import triton
import triton.language as tl

from lowtide.kernel_launch import Launcher


@Launcher
@triton.jit(do_not_specialize=["N", "eps", "offset"])  # type: ignore[untyped-decorator]
def rms_norm(  # type: ignore[no-untyped-def]
    x_ptr, x_stride, residual_ptr, residual_stride, sum_ptr, weight_ptr, out_ptr, rstd_ptr, N, D, eps, offset,
    ROUND: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Normalise ROWS rows, or their sum with the residual, which is rounded to its dtype and stored first."""
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
def rms_norm_backward(  # type: ignore[no-untyped-def]
    g_ptr, g_stride, g_sum_ptr, g_sum_stride, x_ptr, x_stride, weight_ptr, rstd_ptr, dx_ptr, partial_ptr, N, D, offset,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the gradient of rows, and the partial sums of the weight's, of every P-th tile of ROWS rows."""
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


@triton.jit  # type: ignore[untyped-decorator]
def _heads(  # type: ignore[no-untyped-def]
    x_ptr, x_stride_h, out_ptr, out_stride_h, H, half, d, apart, out_apart, cos_1, cos_2, sin_1, sin_2,
    STEP: tl.constexpr, OUT_STEP: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
    INVERSE: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """Rotate all heads of one token, HEADS at a time: pairs of values that are ``apart``, each STEP after the last.

    In the results they are ``out_apart``, each OUT_STEP after the last. With LAST a head's last values are rotated.
    """
    column = tl.arange(0, HALF)
    rotated = d - 2 * half if LAST else 0  # where these values begin, and where the others begin and end
    others = 0 if LAST else 2 * half
    end = d - 2 * half if LAST else d
    for start in range(0, H, HEADS):
        head = (start + tl.arange(0, HEADS)).to(tl.int64)  # heads can be T * d values apart
        inside = (head < H)[:, None] & (column < half)[None, :]
        x_at = x_ptr + rotated + head[:, None] * x_stride_h + column[None, :] * STEP
        out_at = out_ptr + rotated + head[:, None] * out_stride_h + column[None, :] * OUT_STEP
        first = tl.load(x_at, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(x_at + apart, mask=inside, other=0.0).to(tl.float32)
        if INVERSE:
            one = first * cos_1 + second * sin_2
            two = second * cos_2 - first * sin_1
        else:
            one = first * cos_1 - second * sin_1
            two = second * cos_2 + first * sin_2
        tl.store(out_at, one.to(out_ptr.dtype.element_ty), mask=inside)
        tl.store(out_at + out_apart, two.to(out_ptr.dtype.element_ty), mask=inside)
        if REST:
            rest = others + tl.arange(0, REST)
            within = (head < H)[:, None] & (rest < end)[None, :]
            kept = tl.load(x_ptr + head[:, None] * x_stride_h + rest[None, :], mask=within, other=0.0)
            kept = kept.to(out_ptr.dtype.element_ty)
            tl.store(out_ptr + head[:, None] * out_stride_h + rest[None, :], kept, mask=within)


@Launcher
@triton.jit  # type: ignore[untyped-decorator]
def rotary(  # type: ignore[no-untyped-def]
    q_ptr, q_stride_b, q_stride_h, q_stride_t, k_ptr, k_stride_b, k_stride_h, k_stride_t,
    q_out_ptr, q_out_stride_b, q_out_stride_h, q_out_stride_t, k_out_ptr, k_out_stride_b, k_out_stride_h,
    k_out_stride_t, cos_ptr, cos_stride_b, cos_stride_t, sin_ptr, sin_stride_b, sin_stride_t, T, Hq, Hk, half, d,
    apart, out_apart, table_apart, STEP: tl.constexpr, OUT_STEP: tl.constexpr, TABLE_STEP: tl.constexpr,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr, INVERSE: tl.constexpr,
    BACKWARDS: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """Rotate all heads of the queries and of the keys of one token."""
    token = tl.program_id(0).to(tl.int64)
    b, t = token // T, token % T
    column = tl.arange(0, HALF)
    within = column < half
    cos_at = cos_ptr + b * cos_stride_b + t * cos_stride_t + column * TABLE_STEP
    sin_at = sin_ptr + b * sin_stride_b + t * sin_stride_t + column * TABLE_STEP
    cos_1 = tl.load(cos_at, mask=within, other=0.0).to(tl.float32)[None, :]
    cos_2 = tl.load(cos_at + table_apart, mask=within, other=0.0).to(tl.float32)[None, :]
    sin_1 = tl.load(sin_at, mask=within, other=0.0).to(tl.float32)[None, :]
    sin_2 = tl.load(sin_at + table_apart, mask=within, other=0.0).to(tl.float32)[None, :]
    if BACKWARDS:
        sin_1, sin_2 = -sin_1, -sin_2
    _heads(
        q_ptr + b * q_stride_b + t * q_stride_t, q_stride_h, q_out_ptr + b * q_out_stride_b + t * q_out_stride_t,
        q_out_stride_h, Hq, half, d, apart, out_apart, cos_1, cos_2, sin_1, sin_2, STEP, OUT_STEP, Q_HEADS, HALF, REST,
        INVERSE, LAST,
    )  # fmt: skip
    _heads(
        k_ptr + b * k_stride_b + t * k_stride_t, k_stride_h, k_out_ptr + b * k_out_stride_b + t * k_out_stride_t,
        k_out_stride_h, Hk, half, d, apart, out_apart, cos_1, cos_2, sin_1, sin_2, STEP, OUT_STEP, K_HEADS, HALF, REST,
        INVERSE, LAST,
    )  # fmt: skip
