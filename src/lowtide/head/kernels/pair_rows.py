"""Two sides' float32 logits of a chunk, turned into each row's divergence and the gradient of it by the student's.

C rows of the chunk, V the student's vocabulary, U the teacher's. One program a row reads both sides once for their
logsumexps, once for the divergence, and once for the gradient; with the KLs, whose gradients wait for no sum over the
divergence's terms, the last two are one. Where other ranks hold classes too, a launch each: these sums are merged in
between. s and t are the student's and the teacher's probabilities, a and b their logarithms, x = a - b.
`terms/dense` has the same in plain PyTorch.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowtide.head.kernels.elementary import tanh
from lowtide.head.kernels.pair_terms import above_mixture, gradient_terms, kl_terms, signs, times
from lowtide.head.kernels.row_softmax import FP16_TOP, PAD, power_of_two_above, scaled_columns, tanh_slope
from lowtide.kernel_launch import Launcher

# columns of each side that a program holds at a time, and a warp of it: the fastest on one H100 for rows of 128256
LONGEST_BLOCK = {"forward_kl": 2048, "reverse_kl": 1024, "jsd": 2048, "tv": 2048}
COLUMNS_A_WARP = {"forward_kl": 256, "reverse_kl": 256, "jsd": 128, "tv": 128}
LOWEST = tl.constexpr(-3.4028235e38)  # float32's lowest finite number
_OUT = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


class Side(NamedTuple):
    """One side's products ``x @ w.T``, whose logits are ``softcap * tanh((z + bias) * scale / softcap)``."""

    z_CV: Tensor  # float32; what lies between V and the next multiple of 8 may be anything, and is read
    pads: int  # the row stride, in multiples of 8
    V: int
    bias_V: Tensor | None = None  # float32
    scale: Tensor | None = None  # a float32 scalar above 0; None: 1
    softcap: Tensor | None = None  # likewise; None: not capped

    @classmethod
    def of(cls, z_CV: Tensor, *options: Tensor | None) -> "Side":
        """Return it from products [C, V], and bias, scale and soft cap."""
        _check_rows(z_CV)
        assert z_CV.dtype == torch.float32
        return cls(z_CV, z_CV.stride(0) // PAD.value, z_CV.shape[1], *options)


class Pair(NamedTuple):
    """Both sides of a divergence, see `terms/dense`. Classes that one side lacks have probability 0 there."""

    student: Side
    teacher: Side
    kind: str
    beta: float = 0.5
    kept_C: Tensor | None = None  # bool; rows where it is False are not read, and become 0. None: all are kept
    longest_block: int | None = None  # columns handled at a time, a power of two from 8; None: what is fast


@triton.jit
def _number(ptr):  # type: ignore[no-untyped-def]
    """A scalar, 1 where there is none."""
    x = tl.full((), 1.0, tl.float32)
    if ptr is not None:
        x = tl.load(ptr)
    return x


@triton.jit
def _logits(side, row_ptr, at, n, scale, softcap):  # type: ignore[no-untyped-def]
    """One side's logits in columns ``at``; from n on, -inf."""
    z = scaled_columns(row_ptr, at, n, side.bias_V, scale)
    if side.softcap is not None:
        z = softcap * tanh(z / softcap)
    return tl.where(at < n, z, float("-inf"))


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
def _put(out_ptr, at, n, g, factor, side, row_ptr, scale, softcap, OUT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store a block of a row's gradient, 0 from n to the end of V's last PAD."""
    if side.softcap is not None:
        factor *= tanh_slope(scaled_columns(row_ptr, at, n, side.bias_V, scale) / softcap)
    g = tl.where(at < n, g * factor, 0.0)
    if tl.float32 == OUT:  # in place of the logits, of which this block's may still be to be read by another thread
        tl.debug_barrier()
    tl.store(out_ptr + at, g.to(OUT), mask=at < tl.cdiv(side.V, PAD) * PAD)


@Launcher
@triton.jit  # type: ignore[untyped-decorator]
def _pair(  # type: ignore[no-untyped-def]
    student, teacher, kept_ptr, beta, numbers, out, KIND: tl.constexpr, KNOWN: tl.constexpr, OUT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """See the functions below. A row that is not kept is one of no columns: it is not read.

    With KNOWN the logsumexps are read, else computed and, where there is room for them, stored.
    """
    value_ptr, lse_ptr, other_lse_ptr, pivot_ptr, mass_ptr = numbers
    out_ptr, out_pads, factor_ptr, lift_ptr = out
    VALUES: tl.constexpr = value_ptr is not None
    BOTH: tl.constexpr = OUT is not None and VALUES and (KIND == "forward_kl" or KIND == "reverse_kl")
    MEAN: tl.constexpr = BOTH and KIND == "reverse_kl"
    row = tl.program_id(0).to(tl.int64)
    row_ptr = student.z_CV + row * student.pads * PAD
    other_ptr = teacher.z_CV + row * teacher.pads * PAD
    if OUT is not None:
        out_ptr += row * out_pads * PAD
    beta = tl.cast(beta, tl.float32)  # under inductor a float argument comes as float64
    scale, softcap = _number(student.scale), _number(student.softcap)
    other_scale, other_softcap = _number(teacher.scale), _number(teacher.softcap)
    n, k = student.V, teacher.V
    if kept_ptr is not None:
        kept = tl.load(kept_ptr + row)
        n, k = tl.where(kept, n, 0), tl.where(kept, k, 0)
    width = tl.maximum(n, k)
    counts = width > 0
    mean_gap = 0.0
    pivot = 0.0

    if KNOWN:
        top, other_top = tl.load(lse_ptr + row), tl.load(other_lse_ptr + row)
        log_total, other_log_total = 0.0, 0.0
        if not VALUES:
            pivot = tl.load(pivot_ptr + row)
    else:
        tops, other_tops = tl.full((BLOCK,), LOWEST, tl.float32), tl.full((BLOCK,), LOWEST, tl.float32)
        totals, other_totals = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
        gaps, lacking = tl.zeros((BLOCK,), tl.float32), tl.full((BLOCK,), LOWEST, tl.float32)
        for start in range(0, width, BLOCK):
            at = start + tl.arange(0, BLOCK)
            z = _logits(student, row_ptr, at, n, scale, softcap)
            other = _logits(teacher, other_ptr, at, k, other_scale, other_softcap)
            tops, totals, e, higher = _add_exponential(z, tops, totals)
            other_tops, other_totals, _, _ = _add_exponential(other, other_tops, other_totals)
            if MEAN:  # of z - other over s, from which alone the gradient's pivot follows
                gap = tl.where((z == float("-inf")) | (other == float("-inf")), 0.0, z - other)
                gaps = tl.where(higher, gaps * e + gap, gaps + e * gap)
                lacking = tl.where((other == float("-inf")) & (z > lacking), z, lacking)
        top, log_total, total = _log_sum(tops, totals)
        other_top, other_log_total, other_total = _log_sum(other_tops, other_totals)
        if MEAN:
            mean_gap = tl.sum(gaps * tl.exp(tops - top), 0) / total
            impossible = tl.max(lacking, 0)  # the student's highest logit where the teacher has no class
            mean_gap = tl.where(tl.exp((impossible - top) - log_total) > 0.0, float("inf"), mean_gap)
            mean_gap += 0.0 * other_log_total  # NaN where that is
            pivot = mean_gap - ((top - other_top) + (log_total - other_log_total))
        if lse_ptr is not None:  # top - top: NaN where one is certain
            lse, other_lse = top + log_total + (top - top), other_top + other_log_total + (other_top - other_top)
            if not VALUES:  # of these classes only: that none of them is possible may be
                lse = tl.where(total == 0.0, float("-inf"), lse)
                other_lse = tl.where(other_total == 0.0, float("-inf"), other_lse)
            tl.store(lse_ptr + row, tl.where(counts | (not VALUES), lse, 0.0))
            tl.store(other_lse_ptr + row, tl.where(counts | (not VALUES), other_lse, 0.0))

    factor = 1.0
    if BOTH:
        factor = _row_factor(factor_ptr, lift_ptr, row, pivot, beta, scale, KIND)
    if VALUES:
        value, mass = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
        pivots = tl.zeros((BLOCK,), tl.float32)
        extent = width
        if BOTH:
            extent = tl.maximum(width, student.V)
        last = tl.cdiv(extent, BLOCK) * BLOCK - BLOCK
        for start in range(0, extent, BLOCK):
            at = last - start + tl.arange(0, BLOCK)  # from the end: what was read last is still in cache
            z = _logits(student, row_ptr, at, n, scale, softcap)
            other = _logits(teacher, other_ptr, at, k, other_scale, other_softcap)
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
                _put(out_ptr, at, n, g, factor, student, row_ptr, scale, softcap, OUT)
        found = tl.sum(value, 0)
        if mass_ptr is not None:  # what other ranks' classes have is still to be added
            tl.store(value_ptr + row, found)
            tl.store(pivot_ptr + row, tl.sum(pivots, 0))
            tl.store(mass_ptr + row, tl.sum(mass, 0))
        else:
            if KIND != "forward_kl" and not MEAN:
                pivot = tl.sum(pivots, 0) / tl.sum(mass, 0)
            found = tl.where(found < 0.0, 0.0, found)  # a maximum would lose NaN
            tl.store(value_ptr + row, tl.where(counts, found, 0.0))
            if pivot_ptr is not None:
                tl.store(pivot_ptr + row, tl.where(counts, pivot, 0.0))

    if OUT is not None and not BOTH:
        factor = _row_factor(factor_ptr, lift_ptr, row, pivot, beta, scale, KIND)
        for start in range(0, student.V, BLOCK):
            at = start + tl.arange(0, BLOCK)
            z = _logits(student, row_ptr, at, n, scale, softcap)
            other = _logits(teacher, other_ptr, at, k, other_scale, other_softcap)
            a, b = (z - top) - log_total, (other - other_top) - other_log_total
            g = gradient_terms(a, b, tl.exp(a), tl.exp(b), pivot, beta, KIND)
            _put(out_ptr, at, n, g, factor, student, row_ptr, scale, softcap, OUT)


def pair_rows(pair: Pair) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return each row's divergence [C], both logsumexps and the pivot of its gradient, as `terms/dense` has them.

    A row that holds NaN, or +inf, or nothing but -inf, on either side, comes out as NaN. The products are left as they
    are, and nothing of their size is allocated.
    """
    value, lse, other_lse, pivot = (_room(pair)[0] for _ in range(4))  # an operator returns no views of one memory
    _launch(pair, (value, lse, other_lse, pivot, None))
    return value, lse, other_lse, pivot


def pair_logsumexps(pair: Pair) -> Tensor:
    """Return both sides' logsumexps [2, C] of these classes, some of all: -inf where none of them is possible."""
    both = _room(pair, 2)
    _launch(pair, (None, *both.unbind(), None, None))
    return both


def pair_sums(pair: Pair, both_lse: Tensor) -> Tensor:
    """Return what these classes add to each row's divergence, to its pivot's numerator and to its denominator [3, C].

    Args:
        pair: Both sides' products.
        both_lse: The logsumexps [2, C] over all classes.
    """
    value, pivot, mass = (sums := _room(pair, 3)).unbind()
    _launch(pair, (value, *both_lse.unbind(), pivot, mass), known=True)
    return sums


def pair_gradient(
    pair: Pair,
    out_CV: Tensor,
    known: tuple[Tensor, Tensor, Tensor] | None = None,
    *,
    factor_C: Tensor | None = None,
    lift_C: Tensor | None = None,
) -> Tensor | None:
    """Write the gradient of ``sum(factor * value)`` with respect to the student's products.

    What lies between V and the next multiple of 8 becomes 0.

    Args:
        pair: Both sides' products.
        out_CV: Takes the gradient: [C, V] in float32, which may be the student's products themselves, or in bfloat16 or
            float16, which shares no memory with them; the row stride a multiple of 8.
        known: Both logsumexps and the pivot from `pair_rows`; None: they are computed on the way.
        factor_C: float32 [C], multiplied with a float32 gradient. A narrow one never is, as its range is not enough.
        lift_C: float32 [C], required with and only with float16: takes what each row is still to be multiplied with.
            It is a power of two such that the row's values in memory are at most 2**14.

    Returns:
        Tensor | None: Each row's divergence [C] as from `pair_rows`, where nothing was known.
    """
    assert out_CV.shape == pair.student.z_CV.shape
    assert (lift_C is not None) == (out_CV.dtype == torch.float16)
    assert factor_C is None or out_CV.dtype == torch.float32
    _check_rows(out_CV)
    value = None if known is not None else _room(pair)[0]
    numbers = (value, None, None, None, None) if known is None else (None, *known, None)
    _launch(pair, numbers, (out_CV, out_CV.stride(0) // PAD.value, factor_C, lift_C), known=known is not None)
    return value


def _room(pair: Pair, numbers: int = 1) -> Tensor:
    z_CV = pair.student.z_CV
    return z_CV.new_empty(numbers, z_CV.shape[0])


def _check_rows(x_CV: Tensor) -> None:
    """The kernel reads rows as they lie in memory, whatever strides say."""
    assert x_CV.stride(0) % PAD.value == 0
    assert x_CV.stride(1) == 1 or x_CV.shape[1] == 1


def _launch(
    pair: Pair,
    numbers: tuple[Tensor | None, ...],
    out: tuple[Tensor | None, int, Tensor | None, Tensor | None] = (None, 0, None, None),
    *,
    known: bool = False,
) -> None:
    student, teacher, kind, beta, kept_C, longest = pair
    C = student.z_CV.shape[0]
    assert teacher.z_CV.shape[0] == C
    assert all(x is None or x.is_contiguous() for x in (student.bias_V, teacher.bias_V, kept_C, out[2], *numbers))
    if not C:
        return
    columns = student.V if numbers[0] is None and known else max(student.V, teacher.V)
    block = min(max(triton.next_power_of_2(columns), 8), longest or LONGEST_BLOCK[kind])
    _pair[(C,)](
        student, teacher, kept_C, float(beta), numbers, out, KIND=kind, KNOWN=known,
        OUT=None if out[0] is None else _OUT[out[0].dtype], BLOCK=block,
        num_warps=max(1, min(16, block // COLUMNS_A_WARP[kind])),
    )  # fmt: skip
