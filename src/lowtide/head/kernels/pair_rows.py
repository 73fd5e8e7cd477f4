"""Two sides' float32 logits of a chunk, turned into each row's divergence and the gradient of it by the student's.

C rows of the chunk, V the student's vocabulary, U the teacher's. One program a row reads both sides once for their
logsumexps, once for the divergence, and once for the gradient; with the KLs, whose gradients wait for no sum over the
divergence's terms, the last two are one. s and t are the student's and the teacher's probabilities, a and b their
logarithms, x = a - b. `divergences/terms` has the same in plain PyTorch.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowtide.head.divergences.terms import Kind, RowNumbers
from lowtide.head.kernels.elementary import tanh
from lowtide.head.kernels.launch import Launcher
from lowtide.head.kernels.pair_terms import above_mixture, gradient_terms, kl_terms, signs, times
from lowtide.head.kernels.row_softmax import (
    FP16_TOP,
    OUT_DTYPE,
    PAD,
    Gradient,
    power_of_two_above,
    scaled_columns,
    tanh_slope,
)

# columns of each side that a program holds at a time, and a warp of it: the fastest on one H100 for rows of 128256
LONGEST_BLOCK = {"forward_kl": 2048, "reverse_kl": 1024, "jsd": 2048, "tv": 2048}
COLUMNS_A_WARP = {"forward_kl": 256, "reverse_kl": 256, "jsd": 128, "tv": 128}
LOWEST = tl.constexpr(-3.4028235e38)  # float32's lowest finite number


class Logits(NamedTuple):
    """How logits come of products: ``cap(z + bias) * scale``, ``cap(z) = softcap * tanh(z / softcap)``."""

    bias_V: Tensor | None = None  # float32, the student's
    teacher_bias_U: Tensor | None = None
    scale: Tensor | None = None  # 1 / temperature, a float32 scalar above 0; None: 1
    softcap: float | None = None  # the student's; None: not capped
    teacher_softcap: float | None = None


@triton.jit  # type: ignore[untyped-decorator]
def _side(row_ptr, at, n, bias_ptr, scale, softcap, CAPPED: tl.constexpr):  # type: ignore[no-untyped-def]
    """One side's logits in columns ``at``; from n on, -inf."""
    if CAPPED:
        z = softcap * tanh(scaled_columns(row_ptr, at, n, bias_ptr, 1.0) / softcap) * scale
    else:
        z = scaled_columns(row_ptr, at, n, bias_ptr, scale)
    return tl.where(at < n, z, float("-inf"))


@triton.jit
def _slope(row_ptr, at, n, bias_ptr, softcap):  # type: ignore[no-untyped-def]
    """The derivative of one side's capped logits by its products, but for the scale."""
    return tanh_slope(scaled_columns(row_ptr, at, n, bias_ptr, 1.0) / softcap)


@triton.jit
def _add_exponential(z, top, total):  # type: ignore[no-untyped-def]
    """Each column's highest logit so far, its sum of exp(z - top), and how the sum is to be scaled, with one more.

    Nothing here goes across columns: a maximum over a block would make all warps wait for each other in each.
    """
    e = tl.exp(-tl.abs(z - top))
    higher = z > top
    return tl.where(higher, z, top), tl.where(higher, total * e + 1.0, total + e), e, higher


@triton.jit
def _log_sum(top, total):  # type: ignore[no-untyped-def]
    """A row's highest logit, and the logarithm of its sum of exp(z - highest): NaN where no class is possible."""
    highest = tl.max(top, 0)
    whole = tl.sum(total * tl.exp(top - highest), 0)
    return highest, tl.log(tl.where(whole > 0.0, whole, float("nan"))), whole


@triton.jit  # type: ignore[untyped-decorator]
def _row_factor(factor_ptr, lift_ptr, row, pivot, beta, scale, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """What `gradient_terms` are multiplied with in this row; an fp16 row's lift is stored."""
    factor = 1.0
    if lift_ptr is not None:
        bound = 1.0
        if KIND == "reverse_kl" or KIND == "jsd":
            bound = tl.abs(pivot) + 0.5  # s log(s / t) is at least -t / e, so that one of them is at most pivot + 1 / e
        bound = power_of_two_above(bound * tl.abs(scale))
        factor = FP16_TOP / bound
        tl.store(lift_ptr + row, bound / FP16_TOP)
    if factor_ptr is not None:
        factor = tl.load(factor_ptr + row)
    factor *= scale
    if KIND == "jsd":
        factor *= 1.0 - beta
    elif KIND == "tv":
        factor *= 0.5
    return factor


@triton.jit  # type: ignore[untyped-decorator]
def _put(out_ptr, at, n, V, g, factor, row_ptr, bias_ptr, softcap, CAPPED: tl.constexpr, OUT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store a block of a row's gradient, 0 from n to the end of V's last PAD."""
    if CAPPED:
        factor *= _slope(row_ptr, at, n, bias_ptr, softcap)
    g = tl.where(at < n, g * factor, 0.0)
    if tl.float32 == OUT:  # in place of the logits, of which this block's may still be to be read by another thread
        tl.debug_barrier()
    tl.store(out_ptr + at, g.to(OUT), mask=at < tl.cdiv(V, PAD) * PAD)


@Launcher
@triton.jit  # type: ignore[untyped-decorator]
def _pair_rows(  # type: ignore[no-untyped-def]
    z_ptr, pads_per_row, V, teacher_ptr, teacher_pads_per_row, U, kept_ptr, bias_ptr, teacher_bias_ptr, scale_ptr,
    softcap, teacher_softcap, beta, value_ptr, lse_ptr, other_lse_ptr, pivot_ptr, out_ptr, out_pads_per_row,
    factor_ptr, lift_ptr, KIND: tl.constexpr, CAPPED: tl.constexpr, TEACHER_CAPPED: tl.constexpr, OUT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """See `pair_rows` and `pair_value_and_gradient`. A row that is not kept is one of no columns: it is not read."""
    row = tl.program_id(0).to(tl.int64)
    row_ptr = z_ptr + row * pads_per_row * PAD
    other_ptr = teacher_ptr + row * teacher_pads_per_row * PAD
    beta = tl.cast(beta, tl.float32)  # under inductor a float argument comes as float64
    softcap, teacher_softcap = tl.cast(softcap, tl.float32), tl.cast(teacher_softcap, tl.float32)
    n, k = V, U
    if kept_ptr is not None:
        kept = tl.load(kept_ptr + row)
        n, k = tl.where(kept, V, 0), tl.where(kept, U, 0)
    scale = tl.full((), 1.0, tl.float32)
    if scale_ptr is not None:
        scale = tl.load(scale_ptr)
    width = tl.maximum(n, k)
    BOTH: tl.constexpr = OUT is not None and (KIND == "forward_kl" or KIND == "reverse_kl")
    MEAN: tl.constexpr = BOTH and KIND == "reverse_kl"

    tops, other_tops = tl.full((BLOCK,), LOWEST, tl.float32), tl.full((BLOCK,), LOWEST, tl.float32)
    totals, other_totals = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    gaps, lacking = tl.zeros((BLOCK,), tl.float32), tl.full((BLOCK,), LOWEST, tl.float32)
    for start in range(0, width, BLOCK):
        at = start + tl.arange(0, BLOCK)
        z = _side(row_ptr, at, n, bias_ptr, scale, softcap, CAPPED)
        other = _side(other_ptr, at, k, teacher_bias_ptr, scale, teacher_softcap, TEACHER_CAPPED)
        tops, totals, e, higher = _add_exponential(z, tops, totals)
        other_tops, other_totals, _, _ = _add_exponential(other, other_tops, other_totals)
        if MEAN:  # of z - other over s, from which alone the gradient's pivot follows
            gap = tl.where((z == float("-inf")) | (other == float("-inf")), 0.0, z - other)
            gaps = tl.where(higher, gaps * e + gap, gaps + e * gap)
            lacking = tl.where((other == float("-inf")) & (z > lacking), z, lacking)
    top, log_total, total = _log_sum(tops, totals)
    other_top, other_log_total, _ = _log_sum(other_tops, other_totals)
    mean_gap = 0.0
    pivot = 0.0
    if MEAN:
        mean_gap = tl.sum(gaps * tl.exp(tops - top), 0) / total
        impossible = tl.max(lacking, 0)  # the student's highest logit where the teacher has no class
        mean_gap = tl.where(tl.exp((impossible - top) - log_total) > 0.0, float("inf"), mean_gap)
        mean_gap += 0.0 * other_log_total  # NaN where that is
        pivot = mean_gap - ((top - other_top) + (log_total - other_log_total))
    factor = 1.0
    if BOTH:
        factor = _row_factor(factor_ptr, lift_ptr, row, pivot, beta, scale, KIND)

    value, mass, pivots = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    extent = width
    if BOTH:
        extent = tl.maximum(width, V)
    last = tl.cdiv(extent, BLOCK) * BLOCK - BLOCK
    for start in range(0, extent, BLOCK):
        at = last - start + tl.arange(0, BLOCK)  # from the end: what was read last is still in cache
        z = _side(row_ptr, at, n, bias_ptr, scale, softcap, CAPPED)
        other = _side(other_ptr, at, k, teacher_bias_ptr, scale, teacher_softcap, TEACHER_CAPPED)
        # not z - lse, which would round as lse does
        a, b = (z - top) - log_total, (other - other_top) - other_log_total
        s, t = tl.exp(a), tl.exp(b)
        if KIND == "forward_kl":
            value += kl_terms(t, s, b - a)
        elif KIND == "reverse_kl":
            value += kl_terms(s, t, a - b)
            pivots += times(s, a - b)
        elif KIND == "jsd":
            of_student, of_teacher = above_mixture(a, b, s, t, beta)
            from_student = times(s, of_student)
            pivots += from_student
            value += (1.0 - beta) * from_student + beta * times(t, of_teacher)
        else:
            value += 0.5 * tl.abs(s - t)
            pivots += s * signs(s - t)
        if KIND != "forward_kl":
            mass += s
        if BOTH:
            g = s - t
            if MEAN:
                g = s * (tl.where(s == 0.0, 0.0, z - other) - mean_gap)
            _put(out_ptr + row * out_pads_per_row * PAD, at, n, V, g, factor, row_ptr, bias_ptr, softcap, CAPPED, OUT)

    found = tl.sum(value, 0)
    if KIND != "forward_kl" and not MEAN:
        pivot = tl.sum(pivots, 0) / tl.sum(mass, 0)
    counts = width > 0
    tl.store(value_ptr + row, tl.where(counts, tl.where(found < 0.0, 0.0, found), 0.0))  # a maximum would lose NaN
    if lse_ptr is not None:
        tl.store(pivot_ptr + row, tl.where(counts, pivot, 0.0))
        # top - top: NaN where one is certain
        tl.store(lse_ptr + row, tl.where(counts, top + log_total + (top - top), 0.0))
        other_lse = other_top + other_log_total + (other_top - other_top)
        tl.store(other_lse_ptr + row, tl.where(counts, other_lse, 0.0))

    if OUT is not None and not BOTH:
        factor = _row_factor(factor_ptr, lift_ptr, row, pivot, beta, scale, KIND)
        for start in range(0, V, BLOCK):
            at = start + tl.arange(0, BLOCK)
            z = _side(row_ptr, at, n, bias_ptr, scale, softcap, CAPPED)
            other = _side(other_ptr, at, k, teacher_bias_ptr, scale, teacher_softcap, TEACHER_CAPPED)
            a, b = (z - top) - log_total, (other - other_top) - other_log_total
            g = gradient_terms(a, b, tl.exp(a), tl.exp(b), pivot, beta, KIND)
            _put(out_ptr + row * out_pads_per_row * PAD, at, n, V, g, factor, row_ptr, bias_ptr, softcap, CAPPED, OUT)


@Launcher
@triton.jit  # type: ignore[untyped-decorator]
def _pair_gradient(  # type: ignore[no-untyped-def]
    z_ptr, pads_per_row, V, teacher_ptr, teacher_pads_per_row, U, kept_ptr, bias_ptr, teacher_bias_ptr, scale_ptr,
    softcap, teacher_softcap, beta, lse_ptr, other_lse_ptr, pivot_ptr, out_ptr, out_pads_per_row, factor_ptr, lift_ptr,
    KIND: tl.constexpr, CAPPED: tl.constexpr, TEACHER_CAPPED: tl.constexpr, OUT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """See `pair_gradient`."""
    row = tl.program_id(0).to(tl.int64)
    row_ptr = z_ptr + row * pads_per_row * PAD
    other_ptr = teacher_ptr + row * teacher_pads_per_row * PAD
    beta = tl.cast(beta, tl.float32)
    softcap, teacher_softcap = tl.cast(softcap, tl.float32), tl.cast(teacher_softcap, tl.float32)
    n, k = V, U
    if kept_ptr is not None:
        kept = tl.load(kept_ptr + row)
        n, k = tl.where(kept, V, 0), tl.where(kept, U, 0)
    scale = tl.full((), 1.0, tl.float32)
    if scale_ptr is not None:
        scale = tl.load(scale_ptr)
    lse, other_lse, pivot = tl.load(lse_ptr + row), tl.load(other_lse_ptr + row), tl.load(pivot_ptr + row)
    factor = _row_factor(factor_ptr, lift_ptr, row, pivot, beta, scale, KIND)
    for start in range(0, V, BLOCK):
        at = start + tl.arange(0, BLOCK)
        a = _side(row_ptr, at, n, bias_ptr, scale, softcap, CAPPED) - lse
        b = _side(other_ptr, at, k, teacher_bias_ptr, scale, teacher_softcap, TEACHER_CAPPED) - other_lse
        g = gradient_terms(a, b, tl.exp(a), tl.exp(b), pivot, beta, KIND)
        _put(out_ptr + row * out_pads_per_row * PAD, at, n, V, g, factor, row_ptr, bias_ptr, softcap, CAPPED, OUT)


def pair_rows(
    z_CV: Tensor,
    teacher_CU: Tensor,
    kind: Kind,
    logits: Logits = Logits(),  # noqa: B008  immutable
    *,
    kept_C: Tensor | None = None,
    longest_block: int | None = None,
) -> RowNumbers:
    """Return each row's divergence from both sides' products ``x @ w.T``, as `divergences.terms.dense_rows` defines it.

    Classes that one side lacks have probability 0 there. A row that holds NaN, or +inf, or nothing but -inf, on either
    side, comes out as NaN. The products are left as they are, and nothing of their size is allocated.

    Args:
        z_CV: The student's, float32 [C, V], the row stride a multiple of 8. What lies between V and the next multiple
            of 8 may be anything, and is read.
        teacher_CU: The teacher's, likewise.
        kind: Which divergence.
        logits: How logits come of these.
        kept_C: bool [C]; rows where it is False are not read, and all of their numbers are 0. None: all are kept.
        longest_block: Columns handled at a time, a power of two from 8. None: what is fast.
    """
    C = _check(z_CV, teacher_CU, kept_C, *logits[:2])
    rows = RowNumbers(*(torch.empty(C, dtype=torch.float32, device=z_CV.device) for _ in RowNumbers._fields))
    if C:
        block = _block(max(z_CV.shape[1], teacher_CU.shape[1]), longest_block, kind)
        _pair_rows[(C,)](
            *_sides(z_CV, teacher_CU), kept_C, *_numbers(logits, kind), *rows, None, 0, None, None,
            **_constants(logits, kind), OUT=None, BLOCK=block, num_warps=_warps(block, kind),
        )  # fmt: skip
    return rows


def pair_value_and_gradient(
    z_CV: Tensor,
    teacher_CU: Tensor,
    out_CV: Tensor,
    kind: Kind,
    logits: Logits = Logits(),  # noqa: B008
    *,
    kept_C: Tensor | None = None,
    factor_C: Tensor | None = None,
    lift_C: Tensor | None = None,
    longest_block: int | None = None,
) -> Tensor:
    """Return each row's divergence [C] as `pair_rows` does, and write its gradient as `pair_gradient` does."""
    C = _check(z_CV, teacher_CU, kept_C, *logits[:2], factor_C)
    _check_out(z_CV, out_CV, factor_C, lift_C)
    value = torch.empty(C, dtype=torch.float32, device=z_CV.device)
    if C:
        block = _block(max(z_CV.shape[1], teacher_CU.shape[1]), longest_block, kind)
        _pair_rows[(C,)](
            *_sides(z_CV, teacher_CU), kept_C, *_numbers(logits, kind), value, None, None, None, out_CV,
            out_CV.stride(0) // PAD.value, factor_C, lift_C, **_constants(logits, kind),
            OUT=OUT_DTYPE[_NAMES[out_CV.dtype]], BLOCK=block, num_warps=_warps(block, kind),
        )  # fmt: skip
    return value


def pair_gradient(
    z_CV: Tensor,
    teacher_CU: Tensor,
    out_CV: Tensor,
    rows: RowNumbers,
    kind: Kind,
    logits: Logits = Logits(),  # noqa: B008
    *,
    kept_C: Tensor | None = None,
    factor_C: Tensor | None = None,
    lift_C: Tensor | None = None,
    longest_block: int | None = None,
) -> None:
    """Write the gradient of ``sum(factor * value)`` with respect to the student's products.

    That is what `divergences.terms.dense_gradient_` defines, times the logits' derivative by the products. What lies
    between V and the next multiple of 8 becomes 0. Arguments that `pair_rows` has too mean the same here; rows that are
    not kept become 0.

    Args:
        z_CV: See `pair_rows`.
        teacher_CU: See `pair_rows`.
        out_CV: Takes the gradient: [C, V] in float32, which may be ``z_CV`` itself, or in bfloat16 or float16, which
            shares no memory with it; the row stride a multiple of 8.
        rows: From `pair_rows`; the values are not used.
        kind: Which divergence.
        logits: See `pair_rows`.
        kept_C: See `pair_rows`.
        factor_C: float32 [C], multiplied with a float32 gradient. A narrow one never is: see `schedules.run_chunks`.
        lift_C: float32 [C], required with and only with float16: takes what each row is still to be multiplied with.
            It is a power of two such that the row's values in memory are at most 2**14.
        longest_block: See `pair_rows`.
    """
    C = _check(z_CV, teacher_CU, kept_C, *logits[:2], factor_C, *rows[1:])
    _check_out(z_CV, out_CV, factor_C, lift_C)
    if C:
        block = _block(z_CV.shape[1], longest_block, kind)
        _pair_gradient[(C,)](
            *_sides(z_CV, teacher_CU), kept_C, *_numbers(logits, kind), *rows[1:], out_CV,
            out_CV.stride(0) // PAD.value, factor_C, lift_C, **_constants(logits, kind),
            OUT=OUT_DTYPE[_NAMES[out_CV.dtype]], BLOCK=block, num_warps=_warps(block, kind),
        )  # fmt: skip


_NAMES: dict[torch.dtype, Gradient] = {torch.float32: "wide", torch.bfloat16: "bfloat16", torch.float16: "float16"}


def _check(z_CV: Tensor, teacher_CU: Tensor, *vectors: Tensor | None) -> int:
    """Return C. The kernels read rows and vectors as they lie in memory, whatever strides say."""
    for side in (z_CV, teacher_CU):
        assert side.dtype == torch.float32
        _check_rows(side)
    assert z_CV.shape[0] == teacher_CU.shape[0]
    assert all(x is None or x.is_contiguous() for x in vectors)
    return z_CV.shape[0]


def _check_out(z_CV: Tensor, out_CV: Tensor, factor_C: Tensor | None, lift_C: Tensor | None) -> None:
    assert out_CV.shape == z_CV.shape
    _check_rows(out_CV)
    assert (lift_C is not None) == (out_CV.dtype == torch.float16)
    assert factor_C is None or out_CV.dtype == torch.float32


def _check_rows(side: Tensor) -> None:
    assert side.stride(0) % PAD.value == 0
    assert side.stride(1) == 1 or side.shape[1] == 1


def _sides(z_CV: Tensor, teacher_CU: Tensor) -> tuple[Tensor | int, ...]:
    """Return each side as the kernels take it: rows, the pads each spans, and columns."""
    return tuple(x for side in (z_CV, teacher_CU) for x in (side, side.stride(0) // PAD.value, side.shape[1]))


def _numbers(logits: Logits, kind: Kind) -> tuple[Tensor | float | None, ...]:
    caps = (float(cap or 1.0) for cap in (logits.softcap, logits.teacher_softcap))
    return (logits.bias_V, logits.teacher_bias_U, logits.scale, *caps, float(kind.beta))


def _constants(logits: Logits, kind: Kind) -> dict[str, str | bool]:
    capped = {"CAPPED": logits.softcap is not None, "TEACHER_CAPPED": logits.teacher_softcap is not None}
    return {"KIND": kind.name, **capped}


def _block(columns: int, longest: int | None, kind: Kind) -> int:
    power: int = triton.next_power_of_2(columns)
    return min(max(power, 8), longest or LONGEST_BLOCK[kind.name])


def _warps(block: int, kind: Kind) -> int:
    return max(1, min(16, block // COLUMNS_A_WARP[kind.name]))
