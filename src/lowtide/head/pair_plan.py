"""How many rows of two heads' logits exist at a time: the student's, and beside them the teacher's."""

from dataclasses import replace
from functools import lru_cache

import torch

from lowtide.head.options import HeadOptions
from lowtide.head.plan import (
    HeadPlan,
    block_rows_of,
    choose_gemms,
    columns_of,
    padded,
    plan_rows_of_logits,
    workspace_bytes,
)


@lru_cache(maxsize=256)
def plan_pair(
    N: int,
    student: tuple[int, int],
    teacher: tuple[int, int],
    dtype: torch.dtype,
    teacher_dtype: torch.dtype,
    device: torch.device,
    options: HeadOptions,
    *,
    backend: str,
    reason: str,
    weight_dtype: torch.dtype,
    weight_frozen: bool,
) -> tuple[HeadPlan, HeadPlan]:
    """Return the plans of both sides of `linear_divergence`, for the same rows.

    Args:
        N: Tokens that are computed.
        student: Its hidden size D and vocabulary V.
        teacher: Its own; (0, K) where K of its log-probabilities a token are given.
        dtype: Of the student's GEMM operands.
        teacher_dtype: Of the teacher's.
        device: Where the tensors are.
        options: As given to `linear_divergence`.
        backend: "row" or "torch", from `backends.choose_divergence_backend`.
        reason: Why it runs.
        weight_dtype: Of the student's weight.
        weight_frozen: Whether neither the student's weight nor its bias needs a gradient.
    """
    (D, V), (teacher_D, teacher_V) = student, teacher
    wide = 8 if dtype == torch.float64 else 4
    budget = workspace_bytes(options, device)
    logits_gemm, _ = choose_gemms(device, teacher_dtype, budget, backend)
    block_rows = block_rows_of(budget, teacher_D, teacher_V) if logits_gemm == "blocks" else 0
    if backend == "row":
        row = wide * padded(teacher_V) + teacher_D * (wide + teacher_dtype.itemsize) + 16 * wide
    elif teacher_D:
        longer = padded(max(V, teacher_V))
        row = wide * (2 * longer - padded(V) + 2 * columns_of(1, longer, device.type))
        row += teacher_D * (wide + teacher_dtype.itemsize) + 16 * wide
    else:
        row = wide * (padded(V + 1) - padded(V)) + teacher_V * (8 + 16 * wide)  # ids, and both sides' outcomes
    plan = plan_rows_of_logits(
        N,
        D,
        V,
        dtype,
        device,
        options,
        backend=backend,
        reason=reason,
        gradient="recompute",
        weight_dtype=weight_dtype,
        weight_frozen=weight_frozen,
        beside=block_rows * teacher_D * (wide + teacher_dtype.itemsize) + 8 * teacher_V,
        beside_row=row,
    )
    plan = replace(
        plan, columns=max(1, plan.columns // 2)
    )  # in plain PyTorch up to four blocks of columns are beside the logits
    others = replace(
        plan,
        logits_gemm=logits_gemm,
        backward_gemm="blocks" if logits_gemm == "blocks" else "same",
        block_rows=block_rows,
        accumulator_bytes=0,
    )
    return plan, others
