"""Two sides' float32 logits of a chunk, turned into each row's divergence and, in the student's place, its gradient.

C rows of the chunk, V the student's vocabulary, U the teacher's. One program a row reads both sides twice for the
divergence (logsumexps, then the divergence itself), and once for the gradient. s and t are the student's and the
teacher's probabilities, a and b their logarithms, x = a - b. `divergence_terms` has the same in plain PyTorch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowtide.head.divergence_terms import Kind, RowNumbers
from lowtide.head.kernels.elementary import log1p
from lowtide.head.kernels.launch import Launcher
from lowtide.head.kernels.row_softmax import FP16_TOP, OUT_DTYPE, PAD, Gradient, power_of_two_above, scaled_columns

LONGEST_BLOCK = 2048  # columns of each side at a time: with two sides and three sums, what registers hold
TINY = tl.constexpr(2.0**-126)  # float32's smallest normal number
NEAR = tl.constexpr(0.5)  # |x| below which a side is measured by the other: there the direct terms would cancel


@triton.jit
def _side(row_ptr, at, n, bias_ptr, scale):  # type: ignore[no-untyped-def]
    """One side's logits in columns ``at``; from n on, -inf."""
    return tl.where(at < n, scaled_columns(row_ptr, at, n, bias_ptr, scale), float("-inf"))


@triton.jit
def _add_exponentials(z, highest, total):  # type: ignore[no-untyped-def]
    """The highest logit so far, and the sums of exp(z - highest), with one more block."""
    so_far = highest
    highest = tl.maximum(so_far, tl.max(z, 0))
    shift = tl.where(highest == float("-inf"), 0.0, highest)  # no class so far is possible: no NaN yet
    return highest, total * tl.exp(so_far - shift) + tl.exp(z - shift)


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


@triton.jit
def _above_mixture(a, b, s, t, beta):  # type: ignore[no-untyped-def]
    """a - log m and b - log m, for m = beta t + (1 - beta) s."""
    m = s + beta * (t - s)
    log_m = tl.log(tl.where(m < TINY, TINY, m))
    x = a - b
    near = tl.abs(x) < NEAR
    of_student = -log1p(tl.where(near, beta * (_curve(x) - x), 0.0))  # of m / s - 1
    return tl.where(near, of_student, a - log_m), tl.where(near, of_student - x, b - log_m)


@triton.jit
def _signs(x):  # type: ignore[no-untyped-def]
    """1, 0 or -1, or NaN."""
    return tl.where(x > 0.0, 1.0, tl.where(x < 0.0, -1.0, x))


@Launcher
@triton.jit  # type: ignore[untyped-decorator]
def _pair_rows(  # type: ignore[no-untyped-def]
    z_ptr, pads_per_row, V, teacher_ptr, teacher_pads_per_row, U, kept_ptr, bias_ptr, teacher_bias_ptr, scale_ptr, beta,
    value_ptr, lse_ptr, other_lse_ptr, pivot_ptr, KIND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """See `pair_rows`. A row that is not kept is one of no columns: nothing of it is read."""
    row = tl.program_id(0).to(tl.int64)
    row_ptr = z_ptr + row * pads_per_row * PAD
    other_ptr = teacher_ptr + row * teacher_pads_per_row * PAD
    beta = tl.cast(beta, tl.float32)
    n, k = V, U
    if kept_ptr is not None:
        kept = tl.load(kept_ptr + row)
        n, k = tl.where(kept, V, 0), tl.where(kept, U, 0)
    scale = tl.full((), 1.0, tl.float32)
    if scale_ptr is not None:
        scale = tl.load(scale_ptr)
    width = tl.maximum(n, k)

    top, other_top = tl.full((), float("-inf"), tl.float32), tl.full((), float("-inf"), tl.float32)
    total, other_total = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for start in range(0, width, BLOCK):
        at = start + tl.arange(0, BLOCK)
        z, other = _side(row_ptr, at, n, bias_ptr, scale), _side(other_ptr, at, k, teacher_bias_ptr, scale)
        top, total = _add_exponentials(z, top, total)
        other_top, other_total = _add_exponentials(other, other_top, other_total)
    log_total, other_log_total = tl.log(tl.sum(total, 0)), tl.log(tl.sum(other_total, 0))

    value, pivot, mass = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for start in range(0, width, BLOCK):
        at = start + tl.arange(0, BLOCK)
        # not z - lse, which would round as lse does
        a = (_side(row_ptr, at, n, bias_ptr, scale) - top) - log_total
        b = (_side(other_ptr, at, k, teacher_bias_ptr, scale) - other_top) - other_log_total
        s, t = tl.exp(a), tl.exp(b)
        if KIND == "forward_kl":
            value += _kl_terms(t, s, b - a)
        elif KIND == "reverse_kl":
            value += _kl_terms(s, t, a - b)
            pivot += _times(s, a - b)
        elif KIND == "jsd":
            of_student, of_teacher = _above_mixture(a, b, s, t, beta)
            from_student = _times(s, of_student)
            pivot += from_student
            value += (1.0 - beta) * from_student + beta * _times(t, of_teacher)
        else:
            value += 0.5 * tl.abs(s - t)
            pivot += s * _signs(s - t)
        if KIND != "forward_kl":
            mass += s

    found = tl.sum(value, 0)
    center = 0.0
    if KIND != "forward_kl":
        center = tl.sum(pivot, 0) / tl.sum(mass, 0)
    counts = width > 0
    tl.store(value_ptr + row, tl.where(counts, tl.where(found < 0.0, 0.0, found), 0.0))  # a maximum would lose NaN
    tl.store(pivot_ptr + row, tl.where(counts, center, 0.0))
    # top - top: NaN where no class is possible, or one is certain
    tl.store(lse_ptr + row, tl.where(counts, top + log_total + (top - top), 0.0))
    other_lse = other_top + other_log_total + (other_top - other_top)
    tl.store(other_lse_ptr + row, tl.where(counts, other_lse, 0.0))


@Launcher
@triton.jit  # type: ignore[untyped-decorator]
def _pair_gradient(  # type: ignore[no-untyped-def]
    z_ptr, pads_per_row, V, teacher_ptr, teacher_pads_per_row, U, kept_ptr, bias_ptr, teacher_bias_ptr, scale_ptr, beta,
    lse_ptr, other_lse_ptr, pivot_ptr, factor_ptr, lift_ptr,
    KIND: tl.constexpr, OUT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """See `pair_gradient_`."""
    row = tl.program_id(0).to(tl.int64)
    row_ptr = z_ptr + row * pads_per_row * PAD
    other_ptr = teacher_ptr + row * teacher_pads_per_row * PAD
    out_ptr = row_ptr.to(tl.pointer_type(OUT))
    beta = tl.cast(beta, tl.float32)
    n, k = V, U
    if kept_ptr is not None:
        kept = tl.load(kept_ptr + row)
        n, k = tl.where(kept, V, 0), tl.where(kept, U, 0)
    scale = tl.full((), 1.0, tl.float32)
    if scale_ptr is not None:
        scale = tl.load(scale_ptr)
    lse, other_lse, pivot = tl.load(lse_ptr + row), tl.load(other_lse_ptr + row), tl.load(pivot_ptr + row)
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
    for start in range(0, V, BLOCK):
        at = start + tl.arange(0, BLOCK)
        a = _side(row_ptr, at, n, bias_ptr, scale) - lse
        b = _side(other_ptr, at, k, teacher_bias_ptr, scale) - other_lse
        s, t = tl.exp(a), tl.exp(b)
        if KIND == "forward_kl":
            g = s - t
        elif KIND == "reverse_kl":
            g = s * (tl.where(s == 0.0, 0.0, a - b) - pivot)
        elif KIND == "jsd":
            of_student, _ = _above_mixture(a, b, s, t, beta)
            g = s * (tl.where(s == 0.0, 0.0, of_student) - pivot)
        else:
            g = s * (_signs(s - t) - pivot)
        g = tl.where(at < n, g * factor, 0.0)
        # As in row_softmax: what is written here may still be to be read by another thread, of this block's columns
        # or, if narrow, of an earlier block's.
        tl.debug_barrier()
        tl.store(out_ptr + at, g.to(OUT), mask=at < tl.cdiv(V, PAD) * PAD)


def pair_rows(
    z_CV: Tensor,
    teacher_CU: Tensor,
    kind: Kind,
    *,
    bias_V: Tensor | None = None,
    teacher_bias_U: Tensor | None = None,
    scale: Tensor | None = None,
    kept_C: Tensor | None = None,
    longest_block: int = LONGEST_BLOCK,
) -> RowNumbers:
    """Return each row's divergence from both sides' products ``x @ w.T``, as `divergence_terms.dense_rows` defines it.

    Logits are ``(product + bias) * scale``; classes that one side lacks have probability 0 there. A row that holds NaN,
    or +inf, or nothing but -inf, on either side, comes out as NaN. The products are left as they are, and nothing of
    their size is allocated.

    Args:
        z_CV: The student's, float32 [C, V], the row stride a multiple of 8. What lies between V and the next multiple
            of 8 may be anything, and is read.
        teacher_CU: The teacher's, likewise.
        kind: Which divergence.
        bias_V: The student's, float32 [V].
        teacher_bias_U: The teacher's, float32 [U].
        scale: 1 / temperature, a float32 scalar tensor above 0. None: 1.
        kept_C: bool [C]; rows where it is False are not read, and all of their numbers are 0. None: all are kept.
        longest_block: Columns handled at a time, a power of two from 8.
    """
    C = _check(z_CV, teacher_CU, bias_V, teacher_bias_U, kept_C)
    rows = RowNumbers(*(torch.empty(C, dtype=torch.float32, device=z_CV.device) for _ in RowNumbers._fields))
    if C == 0:
        return rows
    block = _block(max(z_CV.shape[1], teacher_CU.shape[1]), longest_block)
    _pair_rows[(C,)](
        *_sides(z_CV, teacher_CU), kept_C, bias_V, teacher_bias_U, scale, float(kind.beta), *rows, KIND=kind.name,
        BLOCK=block, num_warps=_warps(block),
    )  # fmt: skip
    return rows


def pair_gradient_(
    z_CV: Tensor,
    teacher_CU: Tensor,
    rows: RowNumbers,
    kind: Kind,
    *,
    gradient: Gradient,
    bias_V: Tensor | None = None,
    teacher_bias_U: Tensor | None = None,
    scale: Tensor | None = None,
    kept_C: Tensor | None = None,
    factor_C: Tensor | None = None,
    lift_C: Tensor | None = None,
    longest_block: int = LONGEST_BLOCK,
) -> None:
    """Turn the student's products, in place, into the gradient of ``sum(factor * value)`` with respect to them.

    That is ``scale`` times what `divergence_terms.dense_gradient_` defines. What lies between V and the next multiple
    of 8 becomes 0. The arguments that `pair_rows` has too mean the same here; rows that are not kept become 0.

    Args:
        z_CV: See `pair_rows`. Overwritten.
        teacher_CU: See `pair_rows`.
        rows: From `pair_rows`; the values are not used.
        kind: Which divergence.
        gradient: ``"wide"``: float32, in place of ``z_CV``. ``"bfloat16"``, ``"float16"``: narrowed, over the first
            half of each row's own bytes: ``z_CV.view(dtype)[:, :V]``.
        bias_V: See `pair_rows`.
        teacher_bias_U: See `pair_rows`.
        scale: See `pair_rows`.
        kept_C: See `pair_rows`.
        factor_C: float32 [C], multiplied with a wide gradient. A narrow one never is: see `schedules.run_chunks`.
        lift_C: float32 [C], required with and only with ``"float16"``: takes what each row is still to be multiplied
            with. It is a power of two such that the row's values in memory are at most 2**14.
        longest_block: See `pair_rows`.
    """
    C = _check(z_CV, teacher_CU, bias_V, teacher_bias_U, kept_C, factor_C, *rows[1:])
    assert (lift_C is not None) == (gradient == "float16")
    assert factor_C is None or gradient == "wide"
    if C == 0:
        return
    block = _block(z_CV.shape[1], longest_block)
    _pair_gradient[(C,)](
        *_sides(z_CV, teacher_CU), kept_C, bias_V, teacher_bias_U, scale, float(kind.beta), *rows[1:], factor_C, lift_C,
        KIND=kind.name, OUT=OUT_DTYPE[gradient], BLOCK=block, num_warps=_warps(block),
    )  # fmt: skip


def _check(z_CV: Tensor, teacher_CU: Tensor, *vectors: Tensor | None) -> int:
    """Return C. The kernels read rows and vectors as they lie in memory, whatever strides say."""
    for side in (z_CV, teacher_CU):
        assert side.dtype == torch.float32
        assert side.stride(0) % PAD.value == 0
        assert side.stride(1) == 1 or side.shape[1] == 1
    assert z_CV.shape[0] == teacher_CU.shape[0]
    assert all(x is None or x.is_contiguous() for x in vectors)
    return z_CV.shape[0]


def _sides(z_CV: Tensor, teacher_CU: Tensor) -> tuple[Tensor | int, ...]:
    """Return each side as the kernels take it: rows, the pads each spans, and columns."""
    return tuple(x for side in (z_CV, teacher_CU) for x in (side, side.stride(0) // PAD.value, side.shape[1]))


def _block(columns: int, longest: int) -> int:
    power: int = triton.next_power_of_2(columns)
    return min(max(power, 8), longest)


def _warps(block: int) -> int:
    return max(1, min(8, block // 256))
