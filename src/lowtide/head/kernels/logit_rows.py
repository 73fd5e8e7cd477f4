"""Kernels over rows of a chunk's float32 logits, one side's to the loss, two sides' to their divergence.

C rows of the chunk, V vocabulary; of two sides V the student's and U the teacher's. One program a row.

`softmax_rows` reads it once for the loss and once more for the gradient. `pair_rows` reads both sides once for their
logsumexps, once for the divergence, and once for the gradient; with the KLs, whose gradients wait for no sum over the
divergence's terms, the last two are one. s and t are the student's and the teacher's probabilities, a and b their
logarithms. `terms/divergence` has the same in plain PyTorch.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowtide.head.kernels.elementwise import log1p, log1p_near, tanh
from lowtide.head.kernels.gemm import PLAIN, LogitTransform
from lowtide.kernel_launch import Launcher, power_of_2

PAD = tl.constexpr(8)  # float32 values: rows are whole numbers of 32 bytes long
FP16_TOP = tl.constexpr(2.0**14)  # where a row's largest fp16 value is put at most, a factor of four below the largest
LOWEST = tl.constexpr(-3.4028235e38)  # float32's lowest finite number
LONGEST_BLOCK = 4096
OUT = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
# columns of each side that a program holds at a time, and a warp of it: the fastest on one H100 for rows of 128256
PAIR_BLOCK = {"forward_kl": 2048, "reverse_kl": 1024, "jsd": 2048, "tv": 2048}
COLUMNS_A_WARP = {"forward_kl": 256, "reverse_kl": 256, "jsd": 128, "tv": 128}
TINY = tl.constexpr(2.0**-126)  # float32's smallest normal number
NEAR = tl.constexpr(0.5)  # |a - b| below which a side is measured by the other: there the direct terms would cancel


@triton.jit
def number(ptr):  # type: ignore[no-untyped-def]
    """A scalar, 1 where there is none."""
    x = tl.full((), 1.0, tl.float32)
    if ptr is not None:
        x = tl.load(ptr)
    return x


@triton.jit
def row_logits(side, at):  # type: ignore[no-untyped-def]
    """A row's logits in columns ``at``, -inf from n on.

    Nothing is read beyond n rounded up to PAD: a mask in PADs keeps the load wide.
    """
    row_ptr, n, transform, scale, softcap = side
    z = tl.load(row_ptr + at, mask=at < tl.cdiv(n, PAD) * PAD, other=0.0)
    if transform.bias_V is not None:
        z += tl.load(transform.bias_V + at, mask=at < n, other=0.0)
    z *= scale
    if transform.softcap is not None:
        z = softcap * tanh(z / softcap)
    return tl.where(at < n, z, float("-inf"))


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
def put_gradient(out_ptr, at, V, g, z, side, IN_PLACE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store a block of a row's gradient by what is capped, z after it; 0 from n to the end of V's last PAD."""
    _ptr, n, transform, _scale, softcap = side
    if transform.softcap is not None:
        g *= 1.0 - (z / softcap) * (z / softcap)
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
    target_ptr, kept_ptr = rows
    class_weight_ptr, total_class_weight_ptr, label_smoothing, z_loss = terms
    loss_ptr, factor_ptr, lift_ptr = out
    row = tl.program_id(0).to(tl.int64)
    row_ptr = z_ptr + row * pads_per_row * PAD
    y = tl.load(target_ptr + row).to(tl.int32)
    n = V
    if kept_ptr is not None:
        n = tl.where(tl.load(kept_ptr + row), V, 0)
    scale = number(transform.scale)
    side = row_ptr, n, transform, scale, transform.softcap
    q_y = 1.0
    Q = V * 1.0
    if class_weight_ptr is not None:
        q_y = tl.load(class_weight_ptr + y)
        Q = tl.load(total_class_weight_ptr)

    t = row_logits(side, y)
    pivot = tl.where(tl.abs(t) < float("inf"), t, 0.0)  # sums of z - t do not cancel where logits share an offset
    tops = tl.full((BLOCK,), LOWEST, tl.float32)
    totals = tl.zeros((BLOCK,), tl.float32)  # of exp(z - top), without the target's
    weighted = tl.zeros((BLOCK,), tl.float32)  # of q (z - pivot)
    for start in range(0, n, BLOCK):
        at = start + tl.arange(0, BLOCK)
        z = row_logits(side, at)
        if SMOOTHED:
            above = z - pivot
            if class_weight_ptr is not None:
                above *= tl.load(class_weight_ptr + at, mask=at < n, other=0.0)
            weighted += tl.where(at < n, above, 0.0)
        tops, totals, _e, _higher = add_exponentials(tl.where(at != y, z, float("-inf")), tops, totals)

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
        largest = tl.abs(share) + tl.abs(rest) + tl.abs(even * Q)  # no class weight is above their sum
        factor = row_factor(largest, row, scale, factor_ptr, lift_ptr)
        at_target = (rest * (e_t / total) - share * (e_others / total) - even * q_y) * factor
        k = (share + rest) * factor / total  # with exp(z - highest): z - lse would round as lse does
        even *= factor
        out_ptr = row_ptr.to(tl.pointer_type(OUT))
        for start in range(0, V, BLOCK):
            at = start + tl.arange(0, BLOCK)
            z = row_logits(side, at)
            g = k * tl.exp(z - highest)
            if SMOOTHED:
                if class_weight_ptr is not None:
                    g -= even * tl.load(class_weight_ptr + at, mask=at < n, other=0.0)
                else:
                    g -= even
            g = tl.where(at == y, at_target, g)
            put_gradient(out_ptr, at, V, g, z, side, True)


def softmax_rows(
    z_CV: Tensor,  # float32
    target_C: Tensor,  # int64, from 0 to V - 1 in every row
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
    assert z_CV.dtype == torch.float32
    assert factor_C is None or gradient == torch.float32
    loss_C = z_CV.new_empty(C)
    lift_C = z_CV.new_empty(C) if gradient == torch.float16 else None
    if C == 0:
        return loss_C, lift_C
    block = min(max(power_of_2(V), PAD.value), longest_block)
    _softmax_rows[(C,)](
        *_rows(z_CV), (target_C, kept_C), transform, terms,
        (loss_C, factor_C, lift_C), SMOOTHED=terms[2] != 0, OUT=None if gradient is None else OUT[gradient],
        BLOCK=block, num_warps=max(1, min(8, block // 512)),
    )  # fmt: skip
    return loss_C, lift_C


@triton.jit
def _times(p, x):  # type: ignore[no-untyped-def]
    """p x, with 0 inf = 0."""
    return tl.where(p == 0.0, 0.0, p * x)


@triton.jit
def _curve(x):  # type: ignore[no-untyped-def]
    """exp(-x) - 1 + x of |x| < NEAR, by its series."""
    high = 1.0 / 5040.0 - x * (1.0 / 40320.0 - x * (1.0 / 362880.0))
    return x * x * (0.5 - x * (1.0 / 6.0 - x * (1.0 / 24.0 - x * (1.0 / 120.0 - x * (1.0 / 720.0 - x * high)))))


@triton.jit
def _kl_terms(p, q, x):  # type: ignore[no-untyped-def]
    """p x + q - p for x = log p - log q, never negative but for rounding; q and p sum to the same over a row."""
    return tl.where(tl.abs(x) < NEAR, p * _curve(x), _times(p, x) + q - p)


@triton.jit  # type: ignore[untyped-decorator]
def _terms(student, teacher, norms, at, beta, pivot, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of classes ``at`` what they add to the divergence, to its pivot's numerator and denominator, and the gradient.

    That is ``s (x - pivot)``, of the forward KL s - t. The last are the student's logits.
    """
    z, other = row_logits(student, at), row_logits(teacher, at)
    top, log_total, other_top, other_log_total = norms
    a, b = (z - top) - log_total, (other - other_top) - other_log_total  # not z - lse, which would round as lse does
    s, t = tl.exp(a), tl.exp(b)
    if KIND == "forward_kl":
        value, c, g = _kl_terms(t, s, b - a), -t, s - t
    elif KIND == "reverse_kl":
        value, c, x = _kl_terms(s, t, a - b), _times(s, a - b), tl.where(s == 0.0, 0.0, a - b)
    elif KIND == "jsd":
        m = s + beta * (t - s)
        log_m = tl.log(tl.where(m < TINY, TINY, m))
        near = tl.abs(a - b) < NEAR
        below = log1p_near(tl.where(near, beta * (_curve(a - b) - (a - b)), 0.0))  # log(m / s)
        x = (1.0 - beta) * tl.where(s == 0.0, 0.0, tl.where(near, -below, a - log_m))
        c = s * x
        value = c + beta * _times(t, tl.where(near, -below - (a - b), b - log_m))
    else:
        x = 0.5 * (s - t)
        value = tl.abs(x)
        x = tl.where(x > 0.0, 0.5, tl.where(x < 0.0, -0.5, x))  # NaN of NaN
        c = s * x
    if KIND != "forward_kl":
        g = s * (x - pivot)
    return value, c, s, g, z


@Launcher
@triton.jit  # type: ignore[untyped-decorator]
def _pair(  # type: ignore[no-untyped-def]
    student, teacher, transform, other_transform, kept_ptr, beta, numbers, out, KIND: tl.constexpr, BLOCK: tl.constexpr
):
    """See `pair_rows`. A row that is not kept is one of no columns: it is not read."""
    row_ptr, pads, V = student
    other_ptr, other_pads, U = teacher
    value_ptr, lse_ptr, other_lse_ptr, pivot_ptr = numbers
    out_ptr, out_pads, factor_ptr, lift_ptr = out
    VALUES: tl.constexpr = value_ptr is not None
    BOTH: tl.constexpr = out_ptr is not None and VALUES and (KIND == "forward_kl" or KIND == "reverse_kl")
    MEAN: tl.constexpr = BOTH and KIND == "reverse_kl"
    row = tl.program_id(0).to(tl.int64)
    row_ptr += row * pads * PAD
    other_ptr += row * other_pads * PAD
    if out_ptr is not None:
        out_ptr += row * out_pads * PAD
        IN_PLACE: tl.constexpr = out_ptr.dtype.element_ty == tl.float32  # in the logits' place
    beta = tl.cast(beta, tl.float32)  # under inductor a float argument comes as float64
    scale = number(transform.scale)
    n, k = V, U
    if kept_ptr is not None:
        kept = tl.load(kept_ptr + row)
        n, k = tl.where(kept, n, 0), tl.where(kept, k, 0)
    width = tl.maximum(n, k)
    counts = width > 0
    side = row_ptr, n, transform, scale, number(transform.softcap)
    other_side = other_ptr, k, other_transform, number(other_transform.scale), number(other_transform.softcap)
    pivot = tl.zeros((), tl.float32)
    zeros, lowest = tl.zeros((BLOCK,), tl.float32), tl.full((BLOCK,), LOWEST, tl.float32)

    if not VALUES:  # they are known
        top, other_top = tl.load(lse_ptr + row), tl.load(other_lse_ptr + row)
        log_total, other_log_total = 0.0, 0.0
        pivot = tl.load(pivot_ptr + row)
    else:
        tops, other_tops = lowest, lowest
        totals, other_totals, gaps = zeros, zeros, zeros
        for start in range(0, width, BLOCK):
            at = start + tl.arange(0, BLOCK)
            z, other = row_logits(side, at), row_logits(other_side, at)
            tops, totals, e, higher = add_exponentials(z, tops, totals)
            other_tops, other_totals, _scale, _below = add_exponentials(other, other_tops, other_totals)
            if MEAN:  # of z - other over s, from which alone the gradient's pivot follows
                gap = tl.where((z == float("-inf")) | (other == float("-inf")), 0.0, z - other)
                gaps = tl.where(higher, gaps * e + gap, gaps + e * gap)
        top, log_total, total = log_sum(tops, totals)
        other_top, other_log_total, _total = log_sum(other_tops, other_totals)
        if MEAN:
            mean_gap = tl.sum(gaps * tl.exp(tops - top), 0) / total
            pivot = mean_gap - ((top - other_top) + (log_total - other_log_total))
        if lse_ptr is not None:  # top - top: NaN where one is certain
            lse, other_lse = top + log_total + (top - top), other_top + other_log_total + (other_top - other_top)
            tl.store(lse_ptr + row, tl.where(counts, lse, 0.0))
            tl.store(other_lse_ptr + row, tl.where(counts, other_lse, 0.0))

    norms = top, log_total, other_top, other_log_total
    if VALUES:
        values, pivots, mass = zeros, zeros, zeros
        extent = width
        if BOTH:
            extent = tl.maximum(width, V)
            factor = row_factor(tl.abs(pivot) + 1.0, row, scale, factor_ptr, lift_ptr)
        last = tl.cdiv(extent, BLOCK) * BLOCK - BLOCK
        for start in range(0, extent, BLOCK):
            at = last - start + tl.arange(0, BLOCK)  # from the end: what was read last is still in cache
            value, c, s, g, z = _terms(side, other_side, norms, at, beta, pivot, KIND)
            values += value
            if KIND != "forward_kl":
                pivots += c
                mass += s
            if BOTH:
                put_gradient(out_ptr, at, V, g * factor, z, side, IN_PLACE)
        found = tl.sum(values, 0)
        if KIND != "forward_kl" and not MEAN:
            pivot = tl.sum(pivots, 0) / tl.sum(mass, 0)
        found = tl.where(found < 0.0, 0.0, found)  # a maximum would lose NaN
        tl.store(value_ptr + row, tl.where(counts, found, 0.0))
        if pivot_ptr is not None:
            tl.store(pivot_ptr + row, tl.where(counts, pivot, 0.0))

    if out_ptr is not None and not BOTH:
        factor = row_factor(tl.abs(pivot) + 1.0, row, scale, factor_ptr, lift_ptr)
        for start in range(0, V, BLOCK):
            at = start + tl.arange(0, BLOCK)
            _value, _c, _s, g, z = _terms(side, other_side, norms, at, beta, pivot, KIND)
            put_gradient(out_ptr, at, V, g * factor, z, side, IN_PLACE)


def pair_rows(
    z_CV: Tensor, t_CU: Tensor, kept_C: Tensor | None, transforms: tuple[LogitTransform, LogitTransform], kind: str,
    beta: float, numbers: Sequence[Tensor | None], out_CV: Tensor | None = None, factor_C: Tensor | None = None,
) -> Tensor | None:  # fmt: skip
    """Write numbers of each row [C], and the gradient of ``sum(factor * value)`` with respect to the student's logits.

    Both sides' logits ``z_CV`` and ``t_CU`` are float32, with row strides that are multiples of 8; the values from the
    last class to the next multiple of 8 may be anything, and are read. Rows where ``kept_C`` (bool) is False are not
    read, and become 0. Scales are above 0, soft caps tensors, ``beta`` the jsd's.

    ``numbers`` are (value, lse, other_lse, pivot), contiguous, None where not wanted, as `terms/divergence` has them;
    without a value the others are known, and read. A row that holds NaN, or +inf, or nothing but -inf, on either side,
    becomes NaN.

    ``out_CV``, of a row stride that is a multiple of 8, is float32 and may be ``z_CV`` itself, or bfloat16 or float16
    and shares no memory with it: then without ``factor_C``, for which its range is not enough. What lies between V and
    the next multiple of 8 becomes 0. Return for a float16 gradient what each row is still to be multiplied with [C],
    such that its values in memory are at most 2**14.
    """
    (C, V), U = z_CV.shape, t_CU.shape[1]
    assert z_CV.dtype == t_CU.dtype == torch.float32
    assert factor_C is None or (out_CV is not None and out_CV.dtype == torch.float32)
    lift_C = z_CV.new_empty(C) if out_CV is not None and out_CV.dtype == torch.float16 else None
    if C:
        out = (None, 0) if out_CV is None else _rows(out_CV)[:2]
        block = min(max(power_of_2(V if numbers[0] is None else max(V, U)), 8), PAIR_BLOCK[kind])
        _pair[(C,)](
            _rows(z_CV), _rows(t_CU), *transforms, kept_C, float(beta), tuple(numbers), (*out, factor_C, lift_C),
            KIND=kind, BLOCK=block, num_warps=max(1, min(16, block // COLUMNS_A_WARP[kind])),
        )  # fmt: skip
    return lift_C


def _rows(x_CV: Tensor) -> tuple[Tensor, int, int]:
    """Return rows as the kernel reads them: as they are in memory, ignoring strides."""
    assert x_CV.stride(0) % PAD.value == 0
    assert x_CV.stride(1) == 1 or x_CV.shape[1] == 1
    return x_CV, x_CV.stride(0) // PAD.value, x_CV.shape[1]
