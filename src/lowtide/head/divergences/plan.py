"""How many rows of two heads' logits exist at a time: the student's, and beside them the teacher's."""

from dataclasses import replace
from functools import lru_cache
from typing import Literal

import torch

from lowtide.errors import ArgumentValueError, message
from lowtide.head.arguments import check_options, check_reduction
from lowtide.head.backends import choose_divergence_backend
from lowtide.head.exponentials.plan import EXP_FEW_ASKED_CHUNKS, EXP_FEW_CHUNKS
from lowtide.head.head_plan import BYTES_PER_TOKEN, GPU_TILE, HeadPlan, padded, workspace_bytes, workspace_note
from lowtide.head.options import HeadOptions
from lowtide.head.plan import block_rows_of, choose_gemms, choose_gradient, columns_of, plan_rows_of_logits

# Where gradients are narrower than logits, and nobody bounds the memory. Figures: benchmarks/results, one H100.
CHUNKS = 4  # the weight's gradient is added to so often
FEWEST_CHUNK_ROWS = 1024
FEWEST_PRODUCT_ROWS = 384  # 3% slower with 256, 50% with 128: reading both weights takes longer than multiplying


def plan_divergence(
    N: int,
    D: int,
    V: int,
    teacher_D: int | None,
    dtype: torch.dtype,
    device: torch.device | str,
    options: HeadOptions | None = None,
    *,
    teacher_V: int | None = None,
    topk: int | None = None,
    teacher_dtype: torch.dtype | None = None,
    weight_dtype: torch.dtype | None = None,
    reduction: str = "none",
    weight_frozen: bool = False,
) -> HeadPlan:
    """Say what `linear_divergence` will do with gradients for N tokens, and its bytes, as `plan_head` does.

    Nothing is computed or allocated. On the CPU masked tokens are dropped first, so N counts the others; elsewhere N
    counts all. ``chunk_rows`` are the rows whose gradients are multiplied at a time, ``product_rows`` those of which
    both sides' logits exist.

    Args:
        N: Tokens that are computed.
        D: The student's hidden size.
        V: Its vocabulary.
        teacher_D: The teacher's hidden size; None with ``topk``.
        dtype: dtype of the student's GEMM operands: that of ``input``, or autocast's.
        device: Where the tensors are.
        options: As given to `linear_divergence`.
        teacher_V: The teacher's vocabulary; None: the student's.
        topk: How many of the teacher's log-probabilities there are for each token, where its head is not here.
        teacher_dtype: dtype of the teacher's GEMM operands; None: the student's.
        weight_dtype: dtype of ``linear_weight``, where autocast makes it differ from ``dtype``.
        reduction: As given to `linear_divergence`.
        weight_frozen: True if neither ``linear_weight`` nor ``linear_bias`` needs a gradient.

    Returns:
        HeadPlan: print it, or read its fields.

    Raises:
        ArgumentValueError: A negative size, a reduction that there is not, or not one of ``teacher_D`` and ``topk``.
        ArgumentTypeError: ``options`` that are none.
        UnsupportedError: ``options`` asks for what cannot run here.

    Example:
        >>> plan = plan_divergence(8192, 2048, 128256, 4096, torch.float32, "cpu", reduction="mean")
        >>> plan.chunk_rows, plan.gradient
        (135, 'forward')
    """
    sizes = (("N", N), ("D", D), ("V", V), ("teacher_D", teacher_D), ("teacher_V", teacher_V), ("topk", topk))
    for name, size in sizes:
        if size is not None and (not isinstance(size, int) or size < 0):
            raise ArgumentValueError(message(name, "a size of 0 or more", str(size)))
    if (teacher_D is None) == (topk is None):
        raise ArgumentValueError(message("teacher_D", "a size without topk, None with it", str(teacher_D)))
    check_reduction(reduction)
    options, device = check_options(options), torch.device(device)
    backend, reason = choose_divergence_backend(options, device, dtype, V, topk=topk is not None)
    teacher = (teacher_D, V if teacher_V is None else teacher_V) if teacher_D is not None else (0, topk or 0)
    plan, _ = plan_pair(
        N,
        (D, V),
        teacher,
        dtype,
        teacher_dtype or dtype,
        device,
        options,
        backend=backend,
        reason=reason,
        weight_dtype=weight_dtype or dtype,
        gradient=choose_divergence_gradient(options, reduction, weight_frozen),
        gradients=(True, not weight_frozen),
    )
    return plan


def choose_divergence_gradient(
    options: HeadOptions, reduction: str, weight_frozen: bool
) -> Literal["forward", "recompute"]:
    """Return when `linear_divergence` computes its gradients.

    As `choose_gradient` says, but for a value of each token, where three numbers a token are kept and not the input's
    gradient unless that is asked for.

    Raises:
        UnsupportedError: ``gradient="forward"`` was asked for where it cannot be right.
    """
    if reduction == "none" and options.gradient == "auto":
        return "recompute"
    return choose_gradient(options, reduction, weight_frozen)


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
    gradient: Literal["forward", "recompute"],
    gradients: tuple[bool, bool],
    device_bytes: int | None = None,
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
        gradient: When gradients are computed.
        gradients: Whether this pass computes any, and whether that of the weight or bias is among them.
        device_bytes: Memory of the GPU that is planned for; None: the one that is there.
    """
    (D, V), (teacher_D, teacher_V) = student, teacher
    wide = 8 if dtype == torch.float64 else 4
    budget = workspace_bytes(options, device, device_bytes)
    logits_gemm, _ = choose_gemms(device, teacher_dtype, budget, backend)
    block_rows = block_rows_of(budget, teacher_D, teacher_V) if logits_gemm == "blocks" else 0
    of_teacher = teacher_D * (wide + teacher_dtype.itemsize) + 16 * wide
    if backend == "row":
        row = wide * padded(teacher_V) + of_teacher
    elif teacher_D:
        longer = padded(max(V, teacher_V))
        row = wide * (2 * longer - padded(V) + 2 * columns_of(1, longer, device.type)) + of_teacher
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
        gradient=gradient,
        weight_dtype=weight_dtype,
        weight_frozen=not gradients[1],
        beside=block_rows * teacher_D * (wide + teacher_dtype.itemsize) + 8 * teacher_V,
        beside_row=row,
        device_bytes=device_bytes,
    )
    # in plain PyTorch up to four blocks of columns are beside the logits
    plan = replace(plan, columns=max(1, plan.columns // 2), product_rows=plan.chunk_rows)
    if backend == "row" and gradients[0] and dtype.itemsize < wide:
        product_row = wide * (padded(V) + padded(teacher_V)) + of_teacher
        row = dtype.itemsize * padded(V) + D * 2 * (wide + dtype.itemsize) + 16 * wide
        plan = _with_narrow_gradients(plan, product_row, row, V + teacher_V, options, budget)
        few = EXP_FEW_CHUNKS if options.workspace_mib is None else EXP_FEW_ASKED_CHUNKS
        if options.accumulate == "auto" and weight_dtype == dtype == torch.bfloat16 and plan.chunks <= few:
            plan = replace(plan, accumulate="input", accumulator_bytes=0)
    others = replace(
        plan,
        logits_gemm=logits_gemm,
        backward_gemm="blocks" if logits_gemm == "blocks" else "same",
        block_rows=block_rows,
        accumulator_bytes=0,
    )
    return plan, others


def _with_narrow_gradients(
    plan: HeadPlan, product_row: int, row: int, classes: int, options: HeadOptions, budget: int
) -> HeadPlan:
    """Return the plan where both sides' float32 logits exist of a few rows, and the narrow gradient of more.

    The weight's gradient is read and written once a chunk, and in its own dtype rounded as often: rows of the gradient,
    which take a quarter of the bytes, make longer chunks than rows of logits would.
    """
    fixed = plan.rows * BYTES_PER_TOKEN + 16 * classes
    room = max(0, budget - fixed)
    products, rows = room // 2 // product_row, plan.rows
    if options.workspace_mib is None:
        products = min(products, max(FEWEST_PRODUCT_ROWS, rows // (6 * CHUNKS)))
        share = -(-rows // CHUNKS)
        rows = min(rows, max(FEWEST_CHUNK_ROWS, share + -share % GPU_TILE))
    products = max(1, min(_whole_tiles(products), rows))
    rows = max(products, min(_whole_tiles((room - products * product_row) // row), rows))
    scratch = fixed + products * product_row + rows * row
    return replace(
        plan,
        chunk_rows=rows,
        chunks=-(-plan.rows // rows),
        product_rows=products,
        scratch_bytes=scratch,
        note=workspace_note(options, plan.rows, scratch),
    )


def _whole_tiles(rows: int) -> int:
    return rows - rows % GPU_TILE if rows > GPU_TILE else rows
