"""The operations between the GEMMs of the exponential path: a program per row, over [C, D] or [C], never [C, V].

C rows of a chunk, of which those that are `Used` are computed, D hidden size, V vocabulary, P tiles across it, W
ranks. With r the sum of exp(z_v - R) over the classes other than the target, R the row's reference (the target's logit
t, or where that overflows the highest one), e = exp(t - R), u = z_loss, m the logit scale, g the token's factor; with
own = (1 - a) q_y and spread = a Q / V of label smoothing a and class weights q, which sum to Q (else 1 and 0):

    lse = R + log(r + e)         k = own + spread + 2 u lse         s = m g k / (r + e)
    loss = own (lse - t) + spread lse + u lse^2                     dX = s (E W)
    coefficient at the target = f_y ((spread + 2 u lse) e - own r) / k,     f_y = 1 - (t / softcap)^2

Where each rank holds some of the classes, t is every rank's, and each sends the logsumexp less t of its own classes,
the target left out. A row whose sum left the safe range on this rank gets it from its highest logit, which is found
before the exchange; then no other exchange is needed, whatever the sums come to. A row whose whole sum left it is
finished with E relative to the higher of t and the others' logsumexp.

In all of these ``x_CD`` are hidden states; ``w_VD`` this rank's weight; ``y_C`` (int32) the target's row of it, or
anything beyond where another rank has the class, or -1 where ignored; ``factor_C`` g, float32; ``scaled_CD`` takes s x,
contiguous, and is None where the weight gets no gradient.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from lowtide.head.kernels.elementwise import expm1, log1p
from lowtide.head.kernels.gemm import (
    ALL,
    Used,
    counted_rows,
    finish_logits,
    matrix,
    rows_in_tiles,
    times_slope,
)
from lowtide.kernel_launch import Launcher, power_of_2

MOST = tl.constexpr(2.0**62)  # a sum above it, and its square or its row's s would leave float32's range
LEAST = tl.constexpr(2.0**-100)  # an s below it, with a sum to blame, would leave float32's range
TO_BLAME = tl.constexpr(2.0**8)
# Tiles summed at a time: more than any `block_of(D)`. With equal lengths Triton may take the layout of x's loads for
# these, and with it another order of the sum.
SUMMED = tl.constexpr(2048)


class RowTerms(NamedTuple):
    """What a loss has beside the cross entropy."""

    own: Tensor | None = None  # float32 [C]; None: 1
    spread: Tensor | None = None  # 0-d float32; None: 0
    z_loss: float = 0.0

    def rows(self, part: slice) -> "RowTerms":
        """Return those of some of the rows."""
        return self if self.own is None else self._replace(own=self.own[part])


class Reports(NamedTuple):
    """What is known of each row of a chunk [C], float32 but for the two integers."""

    target_logit: Tensor
    loss: Tensor
    lse: Tensor
    miss: Tensor  # lse - t
    s: Tensor
    rest: Tensor  # what the target's coefficient lost in rounding
    highest: Tensor  # of listed rows what E is measured from
    listed: Tensor  # int32: rows to be done again
    listed_count: Tensor  # int32 [1]: how many


@triton.jit  # type: ignore[untyped-decorator]
def dot(x_ptr, w_ptr, D, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Two rows of length D, in float32."""
    total = tl.zeros((BLOCK,), tl.float32)
    for d in range(0, D, BLOCK):
        at = d + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + at, mask=at < D, other=0.0).to(tl.float32)
        total += x * tl.load(w_ptr + at, mask=at < D, other=0.0).to(tl.float32)
    return tl.sum(total, 0)


@triton.jit  # type: ignore[untyped-decorator]
def scaled_row(x_ptr, out_ptr, s, D, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write s x, and 0 where s is 0, whatever x holds."""
    for d in range(0, D, BLOCK):
        at = d + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + at, mask=at < D, other=0.0).to(tl.float32)
        x = tl.where(s == 0.0, 0.0, x * s)
        tl.store(out_ptr + at, x.to(out_ptr.dtype.element_ty), mask=at < D)


@triton.jit
def _loss_and_gradient(i, t, miss, lse, r, e, g_ptr, transform, terms):  # type: ignore[no-untyped-def]
    """A row's (loss, k, m g k, coefficient at the target), the last two 0 without g.

    Where its two parts cancel, k is a small number in place of 0: the row's gradient is divided by it, and multiplied
    again.
    """
    own = tl.full((), 1.0, tl.float32)
    if terms.own is not None:
        own = tl.load(terms.own + i)
    loss = tl.where(own == 0.0, 0.0, own * miss) + terms.z_loss * lse * lse
    spread = 2.0 * terms.z_loss * lse
    if terms.spread is not None:
        spread += tl.load(terms.spread)
        loss += tl.load(terms.spread) * lse
    k = own + spread
    k = tl.where((k == 0.0) & (own != 0.0), own * 2.0**-24, k)
    weight, c = 0.0, 0.0
    if g_ptr is not None:
        weight = tl.load(g_ptr + i) * k
        if transform.scale is not None:
            weight *= tl.load(transform.scale)
        c = times_slope(tl.where(k == 0.0, 0.0, (spread * e - own * r) / k), t, transform)
    return loss, k, weight, c


@triton.jit
def _out_of_range(r, t):  # type: ignore[no-untyped-def]
    """Whether a sum relative to t left the range in which all of this is safe."""
    return ~(r <= MOST) | ~(tl.abs(t) < float("inf"))


@triton.jit  # type: ignore[untyped-decorator]
def _zero_row(row_ptr, V, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write zeros: an ignored row whose logits are NaN."""
    for v in range(0, V, BLOCK):
        at = v + tl.arange(0, BLOCK)
        tl.store(row_ptr + at, tl.zeros((BLOCK,), row_ptr.dtype.element_ty), mask=at < V)


@triton.jit
def _sum_of_tiles(sum_ptr, P):  # type: ignore[no-untyped-def]
    """A row's sum from what its tiles left, in one order wherever it is called: see `SUMMED`."""
    sums = tl.zeros((SUMMED,), tl.float32)
    for p in range(0, P, SUMMED):
        at = p + tl.arange(0, SUMMED)
        sums += tl.load(sum_ptr + at, mask=at < P, other=0.0)
    return tl.sum(sums, 0)


@triton.jit
def _finite(t):  # type: ignore[no-untyped-def]
    """What ranks measure a row's sum from: the target's logit, 0 where that is no number."""
    return tl.where(tl.abs(t) < float("inf"), t, 0.0)


@triton.jit  # type: ignore[untyped-decorator]
def _row(rows, end, SHIFTED: tl.constexpr):  # type: ignore[no-untyped-def]
    """A program's row and whether there is one: of the first, or of those that are listed."""
    i = tl.program_id(0).to(tl.int64)
    here = i < end
    if SHIFTED:
        here = i < tl.load(rows.listed_count)
        i = tl.load(rows.listed + i, mask=here, other=0).to(tl.int64)
    return i, here


@triton.jit
def _list(rows, i, reference):  # type: ignore[no-untyped-def]
    """Put a row on the list of those to be done again."""
    tl.store(rows.highest + i, reference)
    slot = tl.atomic_add(rows.listed_count, 1)
    tl.store(rows.listed + slot, i.to(tl.int32))


@Launcher
@triton.jit(do_not_specialize=["C"])  # type: ignore[untyped-decorator]
def target_logits(  # type: ignore[no-untyped-def]
    x, w, y_ptr, t_ptr, count_ptr, used, transform, C, width, BLOCK: tl.constexpr
):
    """Write each row's target logit, cap and all, 0 where its class is elsewhere or it is ignored; 0 to the count."""
    x_ptr, x_stride, D = x
    w_ptr, w_stride, _ = w
    i = tl.program_id(0).to(tl.int64)
    if i == 0:
        tl.store(count_ptr, 0)
    y = tl.where(i < counted_rows(used, C), tl.load(y_ptr + i).to(tl.int64), -1)
    x = x_ptr + i * x_stride
    if (y < 0) | (y >= width):
        tl.store(t_ptr + i, 0.0)
    else:
        tl.store(t_ptr + i, finish_logits(dot(x, w_ptr + y * w_stride, D, BLOCK), y, width, transform))


@Launcher
@triton.jit(do_not_specialize=["C"])  # type: ignore[untyped-decorator]
def sum_rows(sums, y_ptr, e, sent_ptr, rows, used, C, SHIFTED: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write what this rank sends of its classes but the target: each row's logsumexp less t, -inf where ignored.

    Rows whose sums [C, P] left the safe range here go on the list, which is empty before, and where E is stored ignored
    rows that are no numbers become 0. SHIFTED: the listed rows alone get a new logsumexp, from sums relative to their
    highest logit.
    """
    sum_ptr, sum_stride, P = sums
    e_ptr, e_stride, V = e
    i, alive = _row(rows, C, SHIFTED)
    if alive:
        r = _sum_of_tiles(sum_ptr + i * sum_stride, P)
        t = tl.load(rows.target_logit + i)
        if SHIFTED:
            tl.store(sent_ptr + i, (tl.load(rows.highest + i) - _finite(t)) + tl.log(r))
        else:
            kept = tl.load(y_ptr + i) >= 0
            tl.store(sent_ptr + i, tl.where(kept, tl.log(r), float("-inf")))
            if kept:
                if _out_of_range(r, t):
                    _list(rows, i, t)
            elif (r != 0.0) & (i < rows_in_tiles(used, C)):  # noqa: SIM102 (decided when run, the other when compiled)
                if e_ptr is not None:
                    _zero_row(e_ptr + i * e_stride, V, BLOCK)


@Launcher
@triton.jit(do_not_specialize=["C"])  # type: ignore[untyped-decorator]
def finish_rows(  # type: ignore[no-untyped-def]
    sums, y_ptr, g_ptr, x, scaled_ptr, e, rows, used, transform, terms, C, RANKS: tl.constexpr,
    SHIFTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Turn sums into losses and, where factors are given, finish E and what the gradients' GEMMs need.

    That is E's entry at the target, what it lost in rounding, s and s x. Rows whose sums left the safe range go on the
    list, which is empty before. ``sums`` are the GEMM's [C, P], or [C, W] what every rank has from `sum_rows`, with
    RANKS a power of two from W on, else 0; ``rows`` hold the target's logit, and take the results. E is given with
    factors, where this rank has classes. SHIFTED: the listed rows alone are done, relative to their ``highest``.
    """
    sum_ptr, sum_stride, parts = sums
    x_ptr, x_stride, D = x
    e_ptr, e_stride, V = e
    i, alive = _row(rows, rows_in_tiles(used, C), SHIFTED)
    if not SHIFTED:  # noqa: SIM102 (decided when compiled, the other when run)
        if ~alive:
            tl.store(rows.loss + i, 0.0)
            tl.store(rows.lse + i, 0.0)
            tl.store(rows.miss + i, 0.0)
    if alive:
        y = tl.load(y_ptr + i).to(tl.int64)
        kept = y >= 0
        t = tl.load(rows.target_logit + i)
        reference = t
        if SHIFTED:
            reference = tl.load(rows.highest + i)
        if RANKS:
            rank = tl.arange(0, RANKS)
            of_each = tl.load(sum_ptr + rank * C + i, mask=rank < parts, other=float("-inf"))
            others = tl.max(of_each, 0)
            if others != float("-inf"):  # the logsumexp of all classes but the target, less t
                others += tl.log(tl.sum(tl.exp(of_each - others), 0))
            r = tl.exp(others + (_finite(t) - reference))
        else:
            r = _sum_of_tiles(sum_ptr + i * sum_stride, parts)
        if SHIFTED:
            e_y = tl.exp(t - reference)
            more = tl.log(r + e_y)
            miss = (reference - t) + more
            lse = reference + more
        else:
            e_y = 1.0
            miss = log1p(r)
            lse = t + miss
        loss, k, weight, c = _loss_and_gradient(i, t, miss, lse, r, e_y, g_ptr, transform, terms)
        tl.store(rows.loss + i, tl.where(kept, loss, 0.0))
        tl.store(rows.lse + i, tl.where(kept, lse, 0.0))
        tl.store(rows.miss + i, tl.where(kept, miss, 0.0))
        wrong = _out_of_range(r, t)
        if g_ptr is not None:
            s = tl.where(kept & (k != 0.0), weight / (r + e_y), 0.0)
            wrong = wrong | ((r > TO_BLAME) & (tl.abs(s) < LEAST) & (weight != 0.0))
            tl.store(rows.s + i, s)
            if e_ptr is None:
                tl.store(rows.rest + i, 0.0)
            else:
                stored = c.to(e_ptr.dtype.element_ty)
                row = e_ptr + i * e_stride
                here = kept & (y < V)
                if here:
                    tl.store(row + y, stored)
                if not RANKS:  # noqa: SIM102 (decided when compiled, the other when run)
                    if ~kept & (r != 0.0):
                        _zero_row(row, V, BLOCK)
                tl.store(rows.rest + i, tl.where(here, c - stored.to(tl.float32), 0.0))
            if scaled_ptr is not None:
                scaled_row(x_ptr + i * x_stride, scaled_ptr + i * D, s, D, BLOCK)
        if not SHIFTED:  # noqa: SIM102 (decided when compiled, the other when run)
            if kept & wrong:
                if RANKS:
                    reference = tl.maximum(t, _finite(t) + others)
                _list(rows, i, reference)


@Launcher
@triton.jit(do_not_specialize=["C"])  # type: ignore[untyped-decorator]
def prepare_rows(  # type: ignore[no-untyped-def]
    lse_ptr, miss_ptr, y_ptr, g_ptr, x, scaled_ptr, numbers_ptr, used, transform, terms, C, width, BLOCK: tl.constexpr
):  # fmt: skip
    """From known lse and lse - t, write what E is recomputed with, so that s and s x are exact.

    Four numbers of each row [4, C], float32: the reference of the exponentials, E's entry at the target, s (a power of
    two, the rest of it is put into E), and what the entry loses in rounding where it is one of this rank's classes.
    """
    x_ptr, x_stride, D = x
    i = tl.program_id(0).to(tl.int64)
    if i >= rows_in_tiles(used, C):
        return
    y = tl.load(y_ptr + i).to(tl.int64)
    lse = tl.load(lse_ptr + i)
    miss = tl.load(miss_ptr + i)
    _, k, weight, c = _loss_and_gradient(
        i, lse - miss, miss, lse, -expm1(-miss), tl.exp(-miss), g_ptr, transform, terms
    )
    counts = (y >= 0) & (k != 0.0)
    weight = tl.where(counts, weight, 0.0)
    power = (weight.to(tl.int32, bitcast=True) & -0x800000).to(tl.float32, bitcast=True)  # sign and exponent
    power = tl.where(tl.abs(power) < float("inf"), power, weight)
    part = tl.where((power == 0.0) | (power == weight), 1.0, weight / power)
    c = tl.where(counts, c * part, 0.0)
    at = numbers_ptr + i
    tl.store(at, lse - tl.log(part))
    tl.store(at + C, c)
    tl.store(at + 2 * C, power)
    tl.store(at + 3 * C, tl.where(y < width, c - c.to(x_ptr.dtype.element_ty).to(tl.float32), 0.0))
    if scaled_ptr is not None:
        scaled_row(x_ptr + i * x_stride, scaled_ptr + i * D, power, D, BLOCK)


@Launcher
@triton.jit(do_not_specialize=["C"])  # type: ignore[untyped-decorator]
def _add_column_sums(e, s_ptr, out_ptr, used, C, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """out_v += sum_i s_i E_iv, in the order of the rows."""
    C = counted_rows(used, C)
    e_ptr, e_stride, V = e
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for c in range(0, C, ROWS):
        row = c + tl.arange(0, ROWS)
        inside = (row < C)[:, None] & (column < V)[None, :]
        s = tl.load(s_ptr + row, mask=row < C, other=0.0)[:, None]
        block = tl.load(e_ptr + row.to(tl.int64)[:, None] * e_stride + column[None, :], mask=inside, other=0.0)
        total += tl.where(s == 0.0, 0.0, block.to(tl.float32) * s)
    out = tl.sum(total, 0) + tl.load(out_ptr + column, mask=column < V, other=0.0)
    tl.store(out_ptr + column, out, mask=column < V)


@Launcher
@triton.jit(do_not_specialize=["first_class", "C"])  # type: ignore[untyped-decorator]
def _finish_input_grad(  # type: ignore[no-untyped-def]
    product_ptr, out_ptr, to_ptr, w, s_ptr, targets, used, C, first_class, V, D, BLOCK: tl.constexpr
):
    """dX = s (E W + sum_k what the k-th target's entry lost in rounding * w_k)."""
    y_ptr, y_stride, rest_ptr, K = targets
    w_ptr, w_stride, _ = w
    i = tl.program_id(0).to(tl.int64)
    to = i
    if to_ptr is not None:
        to = tl.load(to_ptr + i)
    out_ptr += to * D
    counts = i < counted_rows(used, C)  # otherwise the product was not computed, and the row is 0
    s = tl.where(counts, tl.load(s_ptr + i), 0.0)
    end = tl.where(counts, D, 0)
    for d in range(0, D, BLOCK):
        at = d + tl.arange(0, BLOCK)
        grad = tl.load(product_ptr + i * D + at, mask=at < end, other=0.0)
        for k in range(K):
            y = tl.load(y_ptr + i * y_stride + k).to(tl.int64) - first_class
            here = counts & (y >= 0) & (y < V)
            rest = tl.where(here, tl.load(rest_ptr + i * K + k), 0.0)
            w_row = w_ptr + tl.where(here, y, 0) * w_stride
            extent = tl.where(rest == 0.0, 0, D)  # where nothing was lost infinity times 0 would be NaN
            grad += rest * tl.load(w_row + at, mask=at < extent, other=0.0).to(tl.float32)
        grad = tl.where(s == 0.0, 0.0, grad * s)
        tl.store(out_ptr + at, grad.to(out_ptr.dtype.element_ty), mask=at < D)


def add_column_sums(e_CV: Tensor, s_C: Tensor, out_V: Tensor, used: Used = ALL) -> None:
    """Add ``sum_i s_i E_iv`` to ``out_V``, float32."""
    C, V = e_CV.shape
    _add_column_sums[(triton.cdiv(V, 128),)](matrix(e_CV), s_C, out_V, used, C, ROWS=32, COLUMNS=128, num_warps=4)


def finish_input_grad(
    product_CD: Tensor, out_CD: Tensor, w_VD: Tensor, s_C: Tensor, y_CK: Tensor, rest_CK: Tensor, first_class: int = 0,
    to_C: Tensor | None = None, used: Used = ALL,
) -> None:  # fmt: skip
    """Write dX, or this rank's part of it, into ``out_CD`` (contiguous) from ``product_CD = E W`` (float32).

    With ``to_C`` (int64) each row goes to its place in ``out``, which may have more. Rows that are not `Used` are 0.

    What the targets' entries lost in rounding, [C] or [C, K] and contiguous, is added where ``w_VD``, of the classes
    from ``first_class`` on, has theirs. Where a row is ignored s is 0.
    """
    (C, D), V = product_CD.shape, len(w_VD)
    K = (rest_CK.shape[1] if rest_CK.dim() > 1 else 1) if V else 0  # there may be room for more rows
    _finish_input_grad[(C,)](
        product_CD, out_CD, to_C, matrix(w_VD), s_C, (y_CK, y_CK.stride(0), rest_CK, K), used, C, first_class, V, D,
        BLOCK=block_of(D), num_warps=4,
    )  # fmt: skip


def block_of(D: int) -> int:
    """Return how many numbers of a row of D a program takes at a time."""
    return min(1024, max(64, power_of_2(D)))
