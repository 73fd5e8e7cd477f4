"""`kernels.exp_rows` where each rank holds a part of the vocabulary: a program a row, between the ranks' exchanges.

The target's logit t is every rank's, and so is r, the sum of exp(z_v - t) over all ranks' classes but the target. The
formulas are those of `exp_rows`; E is of this rank's classes, and its entry at the target is on the rank that has it.

Rows whose sum left the safe range are done again from the logsumexp of the other classes, which the ranks have
exchanged by then, with E relative to the whole row's: e = exp(t - lse), r = 1 - e.
"""

import triton
import triton.language as tl
from torch import Tensor

from lowtide.head.kernels.elementary import expm1, log1p
from lowtide.head.kernels.exp_logits import to_ordered
from lowtide.head.kernels.exp_rows import LEAST, MOST, TO_BLAME, Reports, RowTerms, block_of, row_weights, scaled_row
from lowtide.head.kernels.launch import Launcher


@Launcher
@triton.jit(do_not_specialize=["rows"])  # type: ignore[untyped-decorator]
def _finish_shard_rows(  # type: ignore[no-untyped-def]
    sum_ptr, y_ptr, t_ptr, uniform_logit_ptr, g_ptr, x_ptr, x_stride, scaled_ptr, e_ptr, e_stride, loss_ptr, lse_ptr,
    miss_ptr, s_ptr, rest_ptr, again_ptr, highest_ptr, list_ptr, count_ptr, own_ptr, total_ptr, scale_ptr, cap,
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
        given = tl.load(sum_ptr + i)
        if SHIFTED:
            gap = given - t
            more = log1p(tl.exp(-tl.abs(gap)))
            miss = tl.where(gap > 0.0, gap, 0.0) + more
            lse = tl.where(gap > 0.0, given, t) + more
            e = tl.exp(-miss)
            r = -expm1(-miss)
        else:
            r = given
            e = 1.0
            miss = log1p(r)
            lse = t + miss
        own, spread, k = row_weights(i, lse, own_ptr, total_ptr, V, smoothing, z_loss, CLASS_WEIGHT)
        loss = tl.where(own == 0.0, 0.0, own * miss) + z_loss * lse * lse
        if SMOOTH:
            total = 1.0 * V
            if CLASS_WEIGHT:
                total = tl.load(total_ptr)
            loss += smoothing / V * (total * lse - tl.load(uniform_logit_ptr + i))
        tl.store(loss_ptr + i, tl.where(kept, loss, 0.0))
        tl.store(lse_ptr + i, tl.where(kept, lse, 0.0))
        tl.store(miss_ptr + i, tl.where(kept, miss, 0.0))
        wrong = ~(r <= MOST) | ~(tl.abs(t) < float("inf"))
        if GRADIENT:
            weight = tl.load(g_ptr + i) * k
            if SCALE:
                weight *= tl.load(scale_ptr)
            s = tl.where(kept & (k != 0.0), weight / (r + e), 0.0)
            wrong = wrong | ((r > TO_BLAME) & (tl.abs(s) < LEAST) & (weight != 0.0))
            c = tl.where(k == 0.0, 0.0, (spread * e - own * r) / k)
            if CAP:
                c *= 1.0 - (t / cap) * (t / cap)
            stored = c.to(e_ptr.dtype.element_ty)
            if here:
                tl.store(e_ptr + i * e_stride + y, stored)
            tl.store(s_ptr + i, s)
            tl.store(rest_ptr + i, tl.where(here, c - stored.to(tl.float32), 0.0))
            if SCALED:
                scaled_row(x_ptr + i * x_stride, scaled_ptr + i * D, s, D, BLOCK)
        if not SHIFTED:
            again = kept & wrong
            tl.store(again_ptr + i, again.to(tl.int32))
            if again:
                tl.store(highest_ptr + i, to_ordered(t))
                slot = tl.atomic_add(count_ptr, 1)
                tl.store(list_ptr + slot, i.to(tl.int32))


def finish_shard_rows(
    sum_C: Tensor,
    x_CD: Tensor,
    y_C: Tensor,
    factor_C: Tensor | None,
    rows: Reports,
    again_C: Tensor,
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
        sum_C: All ranks' sums of exponentials; with ``shifted`` the logsumexp of all classes but the target.
        x_CD: Hidden states.
        y_C: int32: row of this rank's weight, ``width`` or more where another rank has the class, -1 if ignored.
        factor_C: g, float32; None: losses alone.
        rows: Takes the results; holds the target's logit, and with smoothing the weighted sum of all logits.
        again_C: int32; takes 1 for the rows that are put on the list.
        own_C: float32, each row's class weight; None: 1.
        terms: The loss; its class weight's total is that of all classes.
        V: Classes of all ranks.
        width: Classes of this rank.
        e_CV: E, with a factor; None where this rank has no class.
        scaled_CD: Takes s x, contiguous; None where the weight gets no gradient.
        shifted: Whether to do the listed rows alone.
    """
    C, D = x_CD.shape
    nothing = rows.loss

    def given(tensor: Tensor | None) -> Tensor:
        return nothing if tensor is None else tensor

    _finish_shard_rows[(C,)](
        sum_C, y_C, rows.target_logit, rows.uniform_logit, given(factor_C), x_CD, x_CD.stride(0), given(scaled_CD),
        given(e_CV), 0 if e_CV is None else e_CV.stride(0), rows.loss, rows.lse, rows.miss, rows.s, rows.rest, again_C,
        rows.highest, rows.listed, rows.count, given(own_C), given(terms.total_class_weight), given(terms.scale),
        terms.softcap or 1.0, terms.smoothing, terms.z_loss, D, V, width, C, SHIFTED=shifted,
        GRADIENT=factor_C is not None, SCALED=scaled_CD is not None, SMOOTH=terms.smoothing != 0,
        CLASS_WEIGHT=own_C is not None, SCALE=terms.scale is not None, CAP=terms.softcap is not None,
        BLOCK=block_of(D), num_warps=4,
    )  # fmt: skip
