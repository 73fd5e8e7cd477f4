"""Kernels from a chunk's float32 logits to each token's loss and, written over the logits, its gradient.

C rows of the chunk, V vocabulary. One program a row reads it once for the loss and once more for the gradient.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowtide.head.kernels.elementary import log1p, tanh
from lowtide.head.kernels.gemm import PLAIN, LogitTransform
from lowtide.kernel_launch import Launcher, power_of_2

PAD = tl.constexpr(8)  # float32 values: rows are whole numbers of 32 bytes long
FP16_TOP = tl.constexpr(2.0**14)  # where a row's largest fp16 value is put at most, a factor of four below the largest
LOWEST = tl.constexpr(-3.4028235e38)  # float32's lowest finite number
LONGEST_BLOCK = 4096
OUT = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def number(ptr):  # type: ignore[no-untyped-def]
    """A scalar, 1 where there is none."""
    x = tl.full((), 1.0, tl.float32)
    if ptr is not None:
        x = tl.load(ptr)
    return x


@triton.jit
def row_logits(row_ptr, at, n, transform, scale, softcap):  # type: ignore[no-untyped-def]
    """A row's (z + bias) * scale in columns ``at``, and these capped; from n on anything.

    Nothing is read beyond n rounded up to PAD: a mask in PADs keeps the load wide.
    """
    z = tl.load(row_ptr + at, mask=at < tl.cdiv(n, PAD) * PAD, other=0.0)
    if transform.bias_V is not None:
        z += tl.load(transform.bias_V + at, mask=at < n, other=0.0)
    z *= scale
    capped = z
    if transform.softcap is not None:
        capped = softcap * tanh(z / softcap)
    return z, capped


@triton.jit
def add_exponentials(z, top, total):  # type: ignore[no-untyped-def]
    """Each column's highest logit so far, its sum of exp(z - top), and how the sum is to be scaled, with one more.

    Nothing here goes across columns: a maximum over a block would make all warps wait for each other in each.
    """
    e = tl.exp(-tl.abs(z - top))
    higher = z > top
    return tl.where(higher, z, top), tl.where(higher, total * e + 1.0, total + e), e, higher


@triton.jit
def log_sum(top, total):  # type: ignore[no-untyped-def]
    """A row's highest logit, and the logarithm of its sum of exp(z - highest): NaN where no class is possible."""
    highest = tl.max(top, 0)
    whole = tl.sum(total * tl.exp(top - highest), 0)
    return highest, tl.log(tl.where(whole > 0.0, whole, float("nan"))), whole


@triton.jit
def row_factor(bound, row, scale, factor_ptr, lift_ptr):  # type: ignore[no-untyped-def]
    """What a row's gradient is multiplied with. In fp16, where none is above ``bound``, its lift is stored."""
    factor = 1.0
    if lift_ptr is not None:
        bound *= tl.abs(scale)
        bound = tl.where((bound > 2.0**-100) & (bound < 2.0**100), bound, 1.0)  # else 0, infinite or NaN
        factor = FP16_TOP / bound
        tl.store(lift_ptr + row, bound / FP16_TOP)
    if factor_ptr is not None:
        factor = tl.load(factor_ptr + row)
    return factor * scale


@triton.jit  # type: ignore[untyped-decorator]
def put_gradient(out_ptr, at, n, V, g, z, transform, softcap, IN_PLACE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store a block of a row's gradient by what `row_logits` caps, 0 from n to the end of V's last PAD."""
    if transform.softcap is not None:
        e = tl.exp(-2.0 * tl.abs(z / softcap))
        g *= 4.0 * e / ((1.0 + e) * (1.0 + e))  # 1 - tanh**2, which would cancel where the cap is reached
    g = tl.where(at < n, g, 0.0)
    if IN_PLACE:
        # What is written here may still be to be read by another thread: narrow values lie where wide ones of this
        # block (the first) or of an earlier one (any other) were. All reads up to here come first.
        tl.debug_barrier()
    tl.store(out_ptr + at, g.to(out_ptr.dtype.element_ty), mask=at < tl.cdiv(V, PAD) * PAD)


@Launcher
@triton.jit  # type: ignore[untyped-decorator]
def _softmax_rows(  # type: ignore[no-untyped-def]
    z_ptr, pads_per_row, V, rows, transform, terms, out, SMOOTHED: tl.constexpr, OUT: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """See `softmax_rows`. An ignored row is one of no columns (n = 0): nothing of it is read."""
    target_ptr, unit_ptr, kept_ptr = rows
    class_weight_ptr, total_class_weight_ptr, label_smoothing, z_loss, largest_class_weight_ptr = terms
    loss_ptr, factor_ptr, lift_ptr = out
    row = tl.program_id(0).to(tl.int64)
    row_ptr = z_ptr + row * pads_per_row * PAD
    y, unit = tl.load(target_ptr + row).to(tl.int32), tl.load(unit_ptr + row)
    n = V
    if kept_ptr is not None:
        n = tl.where(tl.load(kept_ptr + row), V, 0)
    scale, softcap = number(transform.scale), transform.softcap
    q_y = 1.0
    Q = V * 1.0
    if class_weight_ptr is not None:
        q_y = tl.load(class_weight_ptr + y)
        Q = tl.load(total_class_weight_ptr)

    _, t = row_logits(row_ptr, y, n, transform, scale, softcap)
    t = tl.where(unit == unit, t, unit)
    pivot = tl.where(tl.abs(t) < float("inf"), t, 0.0)  # sums of z - t do not cancel where logits share an offset
    tops = tl.full((BLOCK,), LOWEST, tl.float32)
    totals = tl.zeros((BLOCK,), tl.float32)  # of exp(z - top), without the target's
    weighted = tl.zeros((BLOCK,), tl.float32)  # of q (z - pivot)
    for start in range(0, n, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x, z = row_logits(row_ptr, at, n, transform, scale, softcap)
        if SMOOTHED:
            above = z - pivot
            if class_weight_ptr is not None:
                above *= tl.load(class_weight_ptr + at, mask=at < n, other=0.0)
            weighted += tl.where(at < n, above, 0.0)
        z = tl.where((at < n) & (at != y), z, float("-inf"))
        tops, totals, _e, _higher = add_exponentials(z, tops, totals)

    highest = tl.maximum(t, tl.max(tops, 0))
    e_t, e_others = tl.exp(t - highest), tl.sum(totals * tl.exp(tops - highest), 0)
    total = e_t + e_others
    lse = highest + tl.log(total)
    share = (1.0 - label_smoothing) * q_y
    odds = e_others / e_t
    nll = tl.where(odds <= 1.0, log1p(odds), (highest - t) + tl.log(total))
    loss = share * nll + z_loss * lse * lse
    if SMOOTHED:
        loss += label_smoothing / V * (Q * nll - tl.sum(weighted, 0))
    tl.store(loss_ptr + row, tl.where(n > 0, loss, 0.0))

    if OUT is not None:
        rest = label_smoothing / V * Q + 2.0 * z_loss * lse
        even = label_smoothing / V
        largest = tl.maximum(tl.abs(share + rest), tl.maximum(tl.abs(share), tl.abs(rest)))
        if SMOOTHED:
            heaviest = 1.0
            if largest_class_weight_ptr is not None:
                heaviest = tl.load(largest_class_weight_ptr)
            largest += even * heaviest
        factor = row_factor(largest, row, scale, factor_ptr, lift_ptr)
        at_target = (rest * (e_t / total) - share * (e_others / total) - even * q_y) * factor
        k = (share + rest) * factor / total  # with exp(z - highest): z - lse would round as lse does
        even *= factor
        out_ptr = row_ptr.to(tl.pointer_type(OUT))
        for start in range(0, V, BLOCK):
            at = start + tl.arange(0, BLOCK)
            x, z = row_logits(row_ptr, at, n, transform, scale, softcap)
            g = k * tl.exp(z - highest)
            if SMOOTHED:
                if class_weight_ptr is not None:
                    g -= even * tl.load(class_weight_ptr + at, mask=at < n, other=0.0)
                else:
                    g -= even
            g = tl.where(at == y, at_target, g)
            put_gradient(out_ptr, at, n, V, g, x, transform, softcap, True)


def softmax_rows(
    z_CV: Tensor,  # float32
    target_C: Tensor,  # int64, from 0 to V - 1 in every row
    unit_C: Tensor,  # float32: NaN where the target was no class, and so are loss and gradient; else not used
    kept_C: Tensor | None = None,  # bool: rows where it is False are not read, and become 0
    *,
    transform: LogitTransform = PLAIN,
    terms: tuple[Tensor | None, Tensor | None, float, float] = (None, None, 0.0, 0.0),  # q and Q, a and u
    gradient: torch.dtype | None = None,  # None: rows are read once, and left as they are
    factor_C: Tensor | None = None,  # float32, multiplied with a wide gradient; a narrow one never is
    longest_block: int = LONGEST_BLOCK,  # columns handled at a time, a power of two from 8
) -> tuple[Tensor, Tensor | None]:
    """Turn products ``x @ w.T`` into each row's loss and, in their place, the loss's gradient with respect to them.

    With z = ``softcap * tanh((x @ w.T + bias) * m / softcap)``, m = logit_scale, p the softmax of z, y the target,
    q class weights (else 1) and Q their sum, a = label_smoothing, u = z_loss, f_v = 1 - (z_v / softcap)**2 (else 1):

        loss = (1 - a) q_y (lse - z_y) + (a / V) (Q lse - sum_v q_v z_v) + u lse**2
        gradient_v = m f_v (k p_v - (1 - a) q_y [v = y] - (a / V) q_v),     k = (1 - a) q_y + a Q / V + 2 u lse

    Neither loses precision for confident tokens or large logits. NaN and infinities are returned as by
    `torch.log_softmax`, and stay in their row. Nothing of the size of ``z_CV`` is allocated: a narrow gradient lies
    over the first half of each row's own bytes, ``z_CV.view(dtype)[:, :V]``; what is between V and the next multiple of
    8, of which row strides are multiples, may be anything, and becomes 0 with it. Of a float16 gradient the second
    result is what each row is still to be multiplied with [C], such that values in memory are at most 2**14.
    """
    C, V = z_CV.shape
    class_weight_V, _, label_smoothing, _ = terms
    assert z_CV.dtype == torch.float32
    assert z_CV.stride(0) % PAD.value == 0
    assert factor_C is None or gradient == torch.float32
    loss_C = torch.empty_like(unit_C)
    lift_C = torch.empty_like(unit_C) if gradient == torch.float16 else None
    if C == 0:
        return loss_C, lift_C
    largest = None
    if lift_C is not None and label_smoothing and class_weight_V is not None:
        largest = torch.linalg.vector_norm(class_weight_V, torch.inf)
    block = min(max(power_of_2(V), PAD.value), longest_block)
    _softmax_rows[(C,)](
        z_CV, z_CV.stride(0) // PAD.value, V, (target_C, unit_C, kept_C), transform, (*terms, largest),
        (loss_C, factor_C, lift_C), SMOOTHED=label_smoothing != 0, OUT=None if gradient is None else OUT[gradient],
        BLOCK=block, num_warps=max(1, min(8, block // 512)),
    )  # fmt: skip
    return loss_C, lift_C
