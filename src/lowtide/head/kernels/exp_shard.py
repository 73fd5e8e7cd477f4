"""`kernels.exp_rows` where each rank holds a part of the vocabulary: a program a row, before and after the exchange.

C rows, W ranks. The target's logit t is every rank's. Each tells the others two numbers a row of its own classes, the
target left out: the sum of exp(z_v - t), and its logarithm plus t, their logsumexp. Rows whose sum left the safe range
on this rank get the second from their highest logit, which is found before the exchange; then no other is needed,
whatever the sums come to. The formulas are those of `exp_rows`, and E is of this rank's classes: its entry at the
target is on the rank that has it.

Rows whose whole sum left the safe range are finished from the logsumexps, with E relative to the whole row's:
e = exp(t - lse), r = 1 - e.
"""

import triton
import triton.language as tl
from torch import Tensor

from lowtide.head.kernels.elementary import expm1, log1p
from lowtide.head.kernels.exp_logits import from_ordered, to_ordered
from lowtide.head.kernels.exp_rows import Reports, RowTerms, block_of
from lowtide.head.kernels.exp_terms import (
    out_of_range,
    row_gradient,
    row_loss,
    row_weights,
    scaled_row,
    sum_of_tiles,
    zero_row,
)
from lowtide.head.kernels.launch import Launcher


@Launcher
@triton.jit(do_not_specialize=["rows"])  # type: ignore[untyped-decorator]
def _sum_shard_rows(  # type: ignore[no-untyped-def]
    sum_ptr, P, sum_stride, y_ptr, t_ptr, e_ptr, e_stride, told_ptr, highest_ptr, list_ptr, count_ptr, width, rows,
    SHIFTED: tl.constexpr, STORED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64)
    alive = i < rows
    if SHIFTED:
        alive = i < tl.load(count_ptr)
        i = tl.load(list_ptr + i, mask=alive, other=0).to(tl.int64)
    if alive:
        r = sum_of_tiles(sum_ptr + i * sum_stride, P, BLOCK)
        if SHIFTED:
            tl.store(told_ptr + rows + i, from_ordered(tl.load(highest_ptr + i)) + tl.log(r))
        else:
            kept = tl.load(y_ptr + i) >= 0
            t = tl.load(t_ptr + i)
            tl.store(told_ptr + i, tl.where(kept, r, 0.0))
            tl.store(told_ptr + rows + i, tl.where(kept, t + tl.log(r), float("-inf")))
            if kept:
                if out_of_range(r, t):
                    tl.store(highest_ptr + i, to_ordered(t))
                    slot = tl.atomic_add(count_ptr, 1)
                    tl.store(list_ptr + slot, i.to(tl.int32))
            elif r != 0.0:  # noqa: SIM102 (decided when run, the other when compiled)
                if STORED:
                    zero_row(e_ptr + i * e_stride, width, BLOCK)


@triton.jit
def _lse_of_others(told_ptr, i, W, rows):  # type: ignore[no-untyped-def]
    """The logsumexp of all ranks' classes but the target."""
    top = tl.load(told_ptr + rows + i)
    for rank in range(1, W):
        top = tl.maximum(top, tl.load(told_ptr + (2 * rank + 1) * rows + i))
    total = tl.exp(tl.load(told_ptr + rows + i) - top)
    for rank in range(1, W):
        total += tl.exp(tl.load(told_ptr + (2 * rank + 1) * rows + i) - top)
    return tl.where(top == float("-inf"), top, top + tl.log(total))


@Launcher
@triton.jit(do_not_specialize=["rows"])  # type: ignore[untyped-decorator]
def _finish_shard_rows(  # type: ignore[no-untyped-def]
    told_ptr, W, y_ptr, t_ptr, uniform_logit_ptr, g_ptr, x_ptr, x_stride, scaled_ptr, e_ptr, e_stride, loss_ptr,
    lse_ptr, miss_ptr, s_ptr, rest_ptr, highest_ptr, list_ptr, count_ptr, own_ptr, total_ptr, scale_ptr, cap,
    smoothing, z_loss, D, V, width, rows, SHIFTED: tl.constexpr, GRADIENT: tl.constexpr, SCALED: tl.constexpr,
    SMOOTH: tl.constexpr, CLASS_WEIGHT: tl.constexpr, SCALE: tl.constexpr, CAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64)
    alive = i < rows
    if SHIFTED:
        alive = i < tl.load(count_ptr)
        i = tl.load(list_ptr + i, mask=alive, other=0).to(tl.int64)
    if alive:
        y = tl.load(y_ptr + i).to(tl.int64)
        kept = y >= 0
        here = kept & (y < width)
        t = tl.load(t_ptr + i)
        others = _lse_of_others(told_ptr, i, W, rows)
        gap = others - t
        more = log1p(tl.exp(-tl.abs(gap)))
        lse = tl.where(gap > 0.0, others, t) + more
        if SHIFTED:
            miss = tl.where(gap > 0.0, gap, 0.0) + more
            e = tl.exp(-miss)
            r = -expm1(-miss)
        else:
            tl.store(highest_ptr + i, to_ordered(lse))
            r = tl.load(told_ptr + i)
            for rank in range(1, W):
                r += tl.load(told_ptr + 2 * rank * rows + i)
            e = 1.0
            miss = log1p(r)
            lse = t + miss
        own, spread, k = row_weights(i, lse, own_ptr, total_ptr, V, smoothing, z_loss, CLASS_WEIGHT)
        loss = row_loss(i, own, miss, lse, uniform_logit_ptr, total_ptr, V, smoothing, z_loss, SMOOTH, CLASS_WEIGHT)
        tl.store(loss_ptr + i, tl.where(kept, loss, 0.0))
        tl.store(lse_ptr + i, tl.where(kept, lse, 0.0))
        tl.store(miss_ptr + i, tl.where(kept, miss, 0.0))
        wrong = out_of_range(r, t)
        if GRADIENT:
            s, c, lost = row_gradient(i, kept, t, r, e, own, spread, k, g_ptr, scale_ptr, cap, SCALE, CAP)
            wrong = wrong | lost
            stored = c.to(e_ptr.dtype.element_ty)
            if here:
                tl.store(e_ptr + i * e_stride + y, stored)
            tl.store(s_ptr + i, s)
            tl.store(rest_ptr + i, tl.where(here, c - stored.to(tl.float32), 0.0))
            if SCALED:
                scaled_row(x_ptr + i * x_stride, scaled_ptr + i * D, s, D, BLOCK)
        if not SHIFTED:  # noqa: SIM102 (decided when compiled, the other when run)
            if kept & wrong:
                slot = tl.atomic_add(count_ptr, 1)
                tl.store(list_ptr + slot, i.to(tl.int32))


def sum_shard_rows(
    sum_CP: Tensor,
    P: int,
    y_C: Tensor,
    rows: Reports,
    told_2C: Tensor,
    *,
    e_CV: Tensor | None = None,
    shifted: bool = False,
) -> None:
    """Write what this rank tells the others of its classes, and list the rows whose sums left the safe range here.

    Args:
        sum_CP: Row sums from the GEMM, ``P`` of them.
        P: How many.
        y_C: int32, as in `finish_shard_rows`.
        rows: Holds the target's logit; takes the list, whose count is 0, and of listed rows `to_ordered` of that logit.
        told_2C: Takes each row's sum, 0 where ignored, and its logsumexp.
        e_CV: E, where it is stored: ignored rows that are no numbers become 0.
        shifted: Whether to do the listed rows alone, whose sums are relative to their highest logit; their first number
            stays.
    """
    C = len(y_C)
    e = told_2C if e_CV is None else e_CV
    _sum_shard_rows[(C,)](
        sum_CP, P, sum_CP.stride(0), y_C, rows.target_logit, e, e.stride(0), told_2C, rows.highest, rows.listed,
        rows.count, 0 if e_CV is None else e_CV.shape[1], C, SHIFTED=shifted, STORED=e_CV is not None,
        BLOCK=block_of(P), num_warps=4,
    )  # fmt: skip


def finish_shard_rows(
    told_W2C: Tensor,
    x_CD: Tensor,
    y_C: Tensor,
    factor_C: Tensor | None,
    rows: Reports,
    own_C: Tensor | None,
    terms: RowTerms,
    V: int,
    width: int,
    *,
    e_CV: Tensor | None = None,
    scaled_CD: Tensor | None = None,
    shifted: bool = False,
) -> None:
    """Turn all ranks' sums into losses and, where a factor is given, finish E and what the gradients' GEMMs need.

    Args:
        told_W2C: Every rank's numbers from `sum_shard_rows`.
        x_CD: Hidden states.
        y_C: int32: row of this rank's weight, ``width`` or more where another rank has the class, -1 if ignored.
        factor_C: g, float32; None: losses alone.
        rows: Takes the results, and the list, whose count is 0, of the rows whose whole sum left the safe range; holds
            the target's logit, and with smoothing the weighted sum of all logits.
        own_C: float32, each row's class weight; None: 1.
        terms: The loss; its class weight's total is that of all classes.
        V: Classes of all ranks.
        width: Classes of this rank.
        e_CV: E, with a factor; None where this rank has no class.
        scaled_CD: Takes s x, contiguous; None where the weight gets no gradient.
        shifted: Whether to do the listed rows alone, with E relative to their logsumexp.
    """
    C, D = x_CD.shape
    nothing = rows.loss

    def given(tensor: Tensor | None) -> Tensor:
        return nothing if tensor is None else tensor

    _finish_shard_rows[(C,)](
        told_W2C, told_W2C.shape[0], y_C, rows.target_logit, rows.uniform_logit, given(factor_C), x_CD, x_CD.stride(0),
        given(scaled_CD), given(e_CV), 0 if e_CV is None else e_CV.stride(0), rows.loss, rows.lse, rows.miss, rows.s,
        rows.rest, rows.highest, rows.listed, rows.count, given(own_C), given(terms.total_class_weight),
        given(terms.scale), terms.softcap or 1.0, terms.smoothing, terms.z_loss, D, V, width, C, SHIFTED=shifted,
        GRADIENT=factor_C is not None, SCALED=scaled_CD is not None, SMOOTH=terms.smoothing != 0,
        CLASS_WEIGHT=own_C is not None, SCALE=terms.scale is not None, CAP=terms.softcap is not None,
        BLOCK=block_of(D), num_warps=4,
    )  # fmt: skip
