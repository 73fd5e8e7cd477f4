"""Rotary position embedding of queries and keys by one kernel, forward and backward.

B batch, T positions, H heads of queries or keys, d size of a head, of which the first r are rotated.
"""

import triton
import triton.language as tl
from torch import Tensor

from lowtide.kernel_launch import Launcher, power_of_2
from lowtide.layers.pairs import Pairs

TILE = 1024  # values of half a tile


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
def _rotary(  # type: ignore[no-untyped-def]
    q_ptr, q_stride_b, q_stride_h, q_stride_t, k_ptr, k_stride_b, k_stride_h, k_stride_t,
    q_out_ptr, q_out_stride_b, q_out_stride_h, q_out_stride_t, k_out_ptr, k_out_stride_b, k_out_stride_h,
    k_out_stride_t, cos_ptr, cos_stride_b, cos_stride_t, sin_ptr, sin_stride_b, sin_stride_t, T, Hq, Hk, half, d,
    apart, out_apart, table_apart, STEP: tl.constexpr, OUT_STEP: tl.constexpr, TABLE_STEP: tl.constexpr,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr, INVERSE: tl.constexpr,
    BACKWARDS: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
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


def rotate_heads(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, into: tuple[Tensor, Tensor], pairs: Pairs, inverse: bool
) -> None:
    """Write queries and keys rotated into two tensors, or by the ``inverse``, as gradients are, computed in float32.

    q [B, Hq, T, d], k [B, Hk, T, d], and the results in their shapes: strided, a head's values contiguous. cos and sin
    [B or 1, T, r], r even and at most d, or the r / 2 of short tables; the last axis contiguous.
    """
    B, Hq, T, d = q.shape
    q_out, k_out = into
    count = pairs.count(cos.shape[-1])
    (step, apart), (out_step, out_apart), (table_step, table_apart) = pairs.places(count, inverse=inverse)
    r, half = 2 * count, power_of_2(count)
    heads = max(1, TILE // half)
    per_batch = [0 if table.shape[0] == 1 else table.stride(0) for table in (cos, sin)]
    _rotary[(B * T,)](
        q, *q.stride()[:3], k, *k.stride()[:3], q_out, *q_out.stride()[:3], k_out, *k_out.stride()[:3],
        cos, per_batch[0], cos.stride(1), sin, per_batch[1], sin.stride(1), T, Hq, k.shape[1], count, d,
        apart, out_apart, table_apart, STEP=step, OUT_STEP=out_step, TABLE_STEP=table_step,
        Q_HEADS=min(heads, power_of_2(Hq)), K_HEADS=min(heads, max(1, power_of_2(k.shape[1]))), HALF=half,
        REST=0 if r == d else power_of_2(d - r), INVERSE=inverse, BACKWARDS=pairs.backwards,
        LAST=pairs.last, num_warps=4,
    )  # fmt: skip
