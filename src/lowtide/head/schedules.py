"""The loop over chunks of tokens: logits of a few rows at a time, turned into losses and gradients where they lie.

N tokens, n of them computed (ignored ones are dropped where a count is free), C rows of a chunk, D hidden size,
V vocabulary.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal

import torch
from torch import Tensor

from lowtide.errors import TargetIndexError
from lowtide.head.gradients import Gradients, put_input_grad
from lowtide.head.head_plan import HeadPlan, padded
from lowtide.head.matmul import HeadMatmul, narrow_view
from lowtide.head.options import HeadOptions
from lowtide.head.plan import plan_head
from lowtide.head.rows import input_is_copied, rows_are_aligned, take_rows
from lowtide.head.scaling import factor_lift
from lowtide.head.softmax import LossTerms, loss_and_gradient_

KERNEL_GRADIENT: dict[torch.dtype, Literal["wide", "bfloat16", "float16"]] = {
    torch.float32: "wide",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}
CAPPED_BLOCKS = 8  # of a chunk's rows: what a soft cap holds beside the logits, it holds for one of them
FP16_LIFT = 2.0**14  # see row_softmax: fp16 gradients are stored so much larger


@dataclass(frozen=True, kw_only=True)
class CrossEntropyJob:
    """One call of the head, flattened: tokens in one axis N, labels already shifted, nothing left to validate."""

    input: Tensor  # [..., D]
    weight_VD: Tensor
    target_N: Tensor  # int64
    bias_V: Tensor | None  # wide
    token_weight_N: Tensor | None  # wide
    num_items: Tensor | None  # scalar, wide
    logit_scale: Tensor | None  # scalar, wide
    softcap: float | None
    terms: LossTerms
    ignore_index: int
    reduction: str
    dtype: torch.dtype  # the GEMMs' operands
    wide: torch.dtype  # logits, losses and sums

    @property
    def shape(self) -> tuple[int, int, int]:
        """Return (N, D, V)."""
        V, D = self.weight_VD.shape
        return self.target_N.numel(), D, V


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The n tokens that are computed, and what each counts."""

    index: Tensor | None  # [n] positions among all N; None: all of them, in order
    kept: Tensor | None  # [n] bool; None: all of them
    target: Tensor  # [n] valid class indices; on the exponential path int32, -1 where ignored
    unit: Tensor  # [n] the token's weight; 0 if ignored, NaN if its target is no class
    counted: Tensor | None = None  # parts of what "mean" divides by; None for the other reductions

    @cached_property
    def denominator(self) -> Tensor | None:
        """Return what "mean" divides by; None for the other reductions."""
        return None if self.counted is None else self.counted.sum()


def select_rows(job: CrossEntropyJob) -> Rows:
    """Find the tokens to compute. On the CPU ignored ones are dropped here, and a target out of range is an error.

    Elsewhere a count would stop the host until the device has caught up, so that all tokens are computed, ignored
    ones as zeros, and a target out of range turns its token's loss and gradient into NaN.
    """
    N, _, V = job.shape
    kept = job.target_N != job.ignore_index
    is_class = (job.target_N >= 0) & (job.target_N < V)
    if job.target_N.device.type == "cpu":
        check_classes(job.target_N, kept & ~is_class, V, job.ignore_index)
        index = kept.nonzero()[:, 0]
        if index.numel() == N:
            return _weigh(job, None, None, job.target_N, None)
        return _weigh(job, index, None, job.target_N[index], None)
    return _weigh(job, None, kept, job.target_N.where(is_class, 0), is_class)


def select_rows_at_once(job: CrossEntropyJob) -> Rows:
    """The same by one kernel, for the exponential path: what stands before the first GEMM stands in its way."""
    from lowtide.head.kernels.select import select

    q = job.terms.class_weight
    y_N, unit, counted = select(job.target_N, job.shape[2], job.ignore_index, job.token_weight_N, q)
    return Rows(index=None, kept=None, target=y_N, unit=unit, counted=_denominator_parts(job, counted))


def _denominator_parts(job: CrossEntropyJob, counted: Tensor) -> Tensor | None:
    if job.reduction != "mean":
        return None
    return counted if job.num_items is None else job.num_items


def check_classes(target_N: Tensor, wrong: Tensor, V: int, ignore_index: int) -> None:
    """Raise where a target is wrong; this looks at numbers, which on a device would stop the host.

    Raises:
        TargetIndexError: With the first one's value and place.
    """
    if wrong.any():
        position = int(wrong.nonzero()[0, 0])
        raise TargetIndexError(
            f"target: expected class indices from 0 to {V - 1} or ignore_index={ignore_index},"
            f" got {int(target_N[position])} at position {position} of the flattened (and shifted) targets."
            " Mask such tokens with ignore_index, or check that tokenizer and head have the same vocabulary."
        )


def _weigh(
    job: CrossEntropyJob, index: Tensor | None, kept: Tensor | None, target: Tensor, is_class: Tensor | None
) -> Rows:
    weight = job.token_weight_N
    if weight is None:
        unit = torch.ones_like(target, dtype=job.wide)
    else:
        unit = weight if index is None else weight[index]
    counted = torch.ones_like(unit) if job.terms.class_weight is None else job.terms.class_weight[target]
    if kept is not None and is_class is not None:
        unit = unit.where(is_class, torch.nan).where(kept, 0)
        counted = counted.where(kept, 0)
    return Rows(index=index, kept=kept, target=target, unit=unit, counted=_denominator_parts(job, counted))


def plan_rows(job: CrossEntropyJob, options: HeadOptions, weight_frozen: bool) -> tuple[Rows, HeadPlan]:
    """Return the rows that are computed, and the plan for them."""
    rows = select_rows(job) if job.input.device.type == "cpu" else None
    plan = _plan(job, job.target_N.numel() if rows is None else rows.target.numel(), options, weight_frozen)
    if rows is None:
        rows = select_rows_at_once(job) if plan.backend == "exp" else select_rows(job)
    return rows, plan


def _plan(job: CrossEntropyJob, n: int, options: HeadOptions, weight_frozen: bool) -> HeadPlan:
    N, D, V = job.shape
    weight = job.weight_VD
    return remembered_plan(
        n,
        D,
        V,
        job.dtype,
        job.weight_VD.device,
        options,
        weight_dtype=job.weight_VD.dtype,
        reduction=job.reduction,
        weight_frozen=weight_frozen,
        capped_and_smoothed=job.softcap is not None and job.terms.label_smoothing != 0,
        weight_fits=weight.dtype != job.dtype or rows_are_aligned(weight),
        input_is_copied=n != N or input_is_copied(job.input, job.dtype),
    )


remembered_plan = lru_cache(maxsize=256)(plan_head)


def run_chunks(
    job: CrossEntropyJob,
    rows: Rows,
    plan: HeadPlan,
    *,
    loss_n: Tensor | None,
    factor_n: Tensor | None,
    into: Gradients,
) -> None:
    """Compute losses and gradients chunk by chunk.

    The rows' factors stay outside of the logits' gradient: it is one pass less over it, and where it is narrowed for
    the GEMMs, the target's entry is close to -1, which bf16 holds exactly, times -1 / N, which it may miss by 0.4%, in
    every row alike.

    Args:
        job: The call.
        rows: Its rows, from `select_rows`.
        plan: From `plan_rows`.
        loss_n: Takes each row's loss, its weight not applied; None where only gradients are wanted.
        factor_n: What each row's loss is multiplied with on its way to the gradients; None: no gradients.
        into: Buffers that take the gradients; ``input_ND`` zero in the rows that are not computed.
    """
    V = job.weight_VD.shape[0]
    matmul = HeadMatmul(job.weight_VD, plan, job.dtype, job.wide)
    z_buffer = job.input.new_empty(plan.chunk_rows if plan.chunks else 0, padded(V), dtype=job.wide)
    lift = None
    if plan.backend == "row" and job.dtype == torch.float16 and factor_n is not None and into.weight_VD is not None:
        # an fp16 gradient is stored 2**14 times too large; what multiplies x must not be as much too small
        lift = FP16_LIFT * factor_lift(factor_n, job.logit_scale, job.terms.class_weight)
    for part in plan.slices():
        first = part.start == 0
        x_CD = take_rows(job.input, rows.index, part, job.dtype)
        if rows.kept is not None:
            x_CD = x_CD.where(rows.kept[part, None], 0)  # a NaN in an ignored row would reach the weight's gradient
        z_CP = z_buffer[: part.stop - part.start]
        z_CV = z_CP[:, :V]
        matmul.logits(x_CD, z_CV)
        loss_C = None if loss_n is None else loss_n[part]
        factor_C = None if factor_n is None else factor_n[part]
        if plan.backend == "row":
            outside = _turn_by_kernel(job, rows, part, z_CV, loss_C, factor_C, into.bias_V)
        else:
            outside = _turn_by_operators(job, rows, part, z_CP, loss_C, factor_C, into.bias_V)
        if factor_C is None or (into.input_ND is None and into.weight_VD is None):
            continue
        g_CV = matmul.operand(z_CV)
        if into.input_ND is not None:
            put_input_grad(matmul, g_CV, outside, into, rows.index, part)
        if into.weight_VD is not None:
            raised = outside if lift is None or outside is None else outside * lift
            matmul.weight_grad(g_CV, raised, x_CD, into.weight_VD, first)
    if into.weight_VD is not None and lift is not None:
        into.weight_VD.div_(lift)


def _turn_by_operators(
    job: CrossEntropyJob,
    rows: Rows,
    part: slice,
    z_CP: Tensor,
    loss_C: Tensor | None,
    factor_C: Tensor | None,
    bias_grad_V: Tensor | None,
) -> Tensor | None:
    """Turn products into losses and gradients in plain PyTorch, and add the bias's gradient.

    Returns:
        Tensor | None: What each row's gradient is still to be multiplied with.
    """
    V, y_C = job.weight_VD.shape[0], rows.target[part]
    step = len(y_C) if job.softcap is None else max(1, len(y_C) // CAPPED_BLOCKS)
    for start in range(0, len(y_C), step):
        block = slice(start, start + step)
        loss = loss_and_gradient_(
            z_CP[block], y_C[block], V, job.terms, job.bias_V, job.logit_scale, job.softcap,
            gradient=factor_C is not None,
        )  # fmt: skip
        if loss_C is not None:
            loss_C[block] = loss
    if factor_C is None:
        return None
    outside = factor_C if job.logit_scale is None else factor_C * job.logit_scale
    if bias_grad_V is not None:
        bias_grad_V += outside @ z_CP[:, :V]
    return outside


def _turn_by_kernel(
    job: CrossEntropyJob,
    rows: Rows,
    part: slice,
    z_CV: Tensor,
    loss_C: Tensor | None,
    factor_C: Tensor | None,
    bias_grad_V: Tensor | None,
) -> Tensor | None:
    """The same by one kernel that reads each row twice; it leaves a narrow gradient in the first half of the row."""
    from lowtide.head.kernels.exp_rows import add_column_sums
    from lowtide.head.kernels.gemm import LogitTransform
    from lowtide.head.kernels.row_softmax import LossTerms, softmax_rows

    q = job.terms.class_weight
    narrow = job.dtype != job.wide
    half = job.dtype == torch.float16
    lift_C = torch.empty_like(rows.unit[part]) if half and factor_C is not None else None
    softmax_rows(
        z_CV,
        rows.target[part],
        rows.unit[part],
        kept_C=None if rows.kept is None else rows.kept[part],
        transform=LogitTransform(job.bias_V, job.logit_scale, job.softcap),
        terms=LossTerms(q, None if q is None else q.sum(), job.terms.label_smoothing, job.terms.z_loss),
        loss_C=loss_C,
        gradient=None if factor_C is None else KERNEL_GRADIENT[job.dtype],
        factor_C=None if narrow else factor_C,
        lift_C=lift_C,
    )
    if factor_C is None:
        return None
    outside = factor_C if lift_C is None else factor_C * lift_C
    if bias_grad_V is not None:
        g_CV = narrow_view(z_CV, job.dtype) if narrow else z_CV
        add_column_sums(g_CV, outside if narrow else torch.ones_like(factor_C), bias_grad_V)
    return outside if narrow else None
