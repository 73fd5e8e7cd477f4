"""The plan of a call: the rows of a chunk, the implementation, and the bytes.

N tokens, D hidden size, V vocabulary, C rows of a chunk.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

import torch

from lowtide.arguments import check_name
from lowtide.errors import ArgumentValueError, message
from lowtide.head.backends import choose, skips_ignored, why_not_exp, why_not_row
from lowtide.head.call import REDUCTIONS, CrossEntropyArgs, DivergenceArgs, Head, TokenStatsArgs, Wanted
from lowtide.head.choice import Args, choose_backend, choose_gradient, skips_tokens
from lowtide.head.kernels.configs import topk_row_bytes
from lowtide.head.matmul import slices
from lowtide.head.options import HeadOptions, check_options
from lowtide.head.planner import (
    MIB,
    STATS_BYTES_PER_TARGET,
    STATS_BYTES_PER_TOKEN,
    When,
    Work,
    accumulate_in,
    cut,
    gemms_of,
)
from lowtide.head.ranks.parallel import Alone
from lowtide.head.rows import input_is_copied


@dataclass(frozen=True, kw_only=True)
class HeadPlan:
    """What one call of the head will do. All sizes are upper bounds in bytes.

    Attributes:
        backend: The implementation that runs.
        reason: Why it does, and why not one before it.
        gradient: ``"forward"`` or ``"recompute"``, as in `HeadOptions`.
        accumulate: ``"float32"`` or ``"input"``, as in `HeadOptions`.
        rows: Tokens that are computed.
        chunks: The number of chunks in which they are.
        chunk_rows: Tokens of a chunk; the last one may have fewer.
        scratch_bytes: Workspace: logits of one chunk, row sums, [C, D] buffers and blocks of the weight.
        accumulator_bytes: The float32 sum of the weight's gradient, where the gradient itself is narrower; and the
            input's gradient in float32, where a float16 one waits for backward.
        cast_bytes: The weight's low-precision copy under autocast.
        logits_gemm: How the logits are computed: ``"same"`` (operands and result share a dtype), ``"out_dtype"``
            (narrow operands, float32 result, on the device), ``"blocks"`` (a block of the weight at a time is cast).
        backward_gemm: The same for the two gradient GEMMs; ``"narrow"`` casts the logits' gradient to the operands'
            dtype instead.
        block_rows: Rows of the weight cast at a time (0: none are).
        columns: Width of the blocks in which a chunk's logits are turned into their gradient.
        note: What else the reader should know, such as a workspace that was too small; empty if nothing.
        schedule: ``"chunks"``: a chunk's logits (or exponentials) over the whole vocabulary at once. ``"blocks"``, on
            the exponential path: row sums first, then blocks of ``block_columns`` classes: one GEMM more.
        block_columns: Classes of a block, see ``schedule``.
        sum_rows: Rows of a chunk where nothing but row sums is computed, on the exponential path.
        product_rows: Rows of a chunk per GEMM with the weight, on the exponential path and in `linear_divergence`.
        piece_rows: Rows of a chunk that `linear_apply` hands to its function at a time; 0 elsewhere.
        bias_column: Whether a bias becomes one more column of a copy of the weight, which is in the scratch.
        kept: Whether the gradients skip tiles of the softmax, as ``HeadOptions(skip=...)`` asks: in a copy of the
            weight, which is in the scratch.
    """

    backend: str
    reason: str
    gradient: When
    accumulate: Literal["float32", "input"]
    rows: int
    chunks: int
    chunk_rows: int
    scratch_bytes: int
    accumulator_bytes: int
    cast_bytes: int
    logits_gemm: Literal["same", "out_dtype", "blocks"] = "out_dtype"
    backward_gemm: Literal["same", "narrow", "blocks"] = "narrow"
    block_rows: int = 0
    columns: int = 0
    note: str = ""
    schedule: Literal["chunks", "blocks"] = "chunks"
    block_columns: int = 0
    sum_rows: int = 0
    product_rows: int = 0
    piece_rows: int = 0
    bias_column: bool = False
    kept: bool = False

    def slices(self) -> Iterator[slice]:
        """Yield each chunk's rows."""
        return slices(self.rows, self.chunk_rows)

    def __str__(self) -> str:
        lines = [
            f"backend {self.backend}: {self.reason}",
            f"{self.rows} rows in {self.chunks} chunks of {self.chunk_rows}; gradients"
            f" {'in forward' if self.gradient == 'forward' else 'recomputed in backward'}, weight gradient summed in"
            f" {'float32' if self.accumulate == 'float32' else 'its own dtype'}",
            f"scratch {self.scratch_bytes / MIB:.1f} MiB, accumulator {self.accumulator_bytes / MIB:.1f} MiB,"
            f" weight copy {self.cast_bytes / MIB:.1f} MiB",
        ]
        if self.schedule == "blocks":
            lines.append(f"exponentials built twice, the second time in blocks of {self.block_columns} classes")
        if self.backend == "row" and 0 < self.product_rows < self.chunk_rows:
            lines.append(f"both sides' logits exist of {self.product_rows} rows at a time, their gradient of a chunk's")
        if self.kept:
            lines.append("the gradients skip tiles of the softmax, in an ordered copy of the weight")
        if self.piece_rows:
            lines.append(f"the function gets {self.piece_rows} rows of logits at a time")
        return "\n".join([*lines, self.note] if self.note else lines)


@lru_cache(maxsize=512)
def plan_of(work: Work, *, of_teacher: bool = False) -> HeadPlan:
    """Return the plan of a pass, or the same chunks with the GEMMs of its second side, which gets no gradient."""
    if of_teacher:
        return replace(plan_of(work), accumulator_bytes=0, **gemms_of(work, of_teacher=True))
    (N, D, V), (backend, reason), mib = work.size, work.choice, work.options.workspace_mib
    rows, scratch, more = cut(work)
    accumulate = accumulate_in(work, -(-N // rows))
    summed = V * D * work.wide.itemsize if accumulate == "float32" and not work.weight_frozen else 0
    if work.dtype == torch.float16 and work.gradient == "forward":
        summed += N * D * work.wide.itemsize
    cast = more.get("backward_gemm") != "blocks" or more.get("logits_gemm") == "out_dtype"
    note = ""
    if mib is not None and scratch > mib * MIB:
        note = (
            f"workspace_mib={mib} is less than one row of logits and the numbers kept for each of {N} tokens take: one"
            f" row is computed at a time, in {scratch / MIB:.2f} MiB"
        )
    return HeadPlan(
        backend=backend, reason=reason, gradient=work.gradient, accumulate=accumulate, rows=N, chunks=-(-N // rows),
        chunk_rows=rows, scratch_bytes=scratch,
        accumulator_bytes=summed,
        cast_bytes=V * D * work.dtype.itemsize if work.weight_dtype != work.dtype and cast else 0, note=note, **more,
    )  # fmt: skip


def plan_head(
    N: int,
    D: int,
    V: int,
    dtype: torch.dtype,
    device: torch.device | str,
    options: HeadOptions | None = None,
    *,
    weight_dtype: torch.dtype | None = None,
    reduction: str = "mean",
    weight_frozen: bool = False,
    capped_and_smoothed: bool = False,
    weight_fits: bool = True,
    input_is_copied: bool = False,
    function: bool = False,
    capability: tuple[int, int] | None = None,
    device_bytes: int | None = None,
) -> HeadPlan:
    """Return what `linear_cross_entropy` will do for N valid tokens, hidden size D and vocabulary V, and its bytes.

    Nothing is computed or allocated. On the CPU ignored tokens are dropped first, so N counts the others, as with
    ``HeadOptions(ignored_tokens="drop")``; elsewhere N counts all.

    Args:
        N: Tokens that are computed.
        D: Hidden size.
        V: Vocabulary.
        dtype: dtype of the GEMMs' operands: that of ``input``, or autocast's.
        device: Where the tensors are.
        options: As given to `linear_cross_entropy`.
        weight_dtype: dtype of ``linear_weight``, where autocast makes it differ from ``dtype``.
        reduction: As given to `linear_cross_entropy`.
        weight_frozen: True if neither ``linear_weight`` nor ``linear_bias`` needs a gradient.
        capped_and_smoothed: True if the loss has both a soft cap and label smoothing.
        weight_fits: False if the weight's rows do not lie one after another, at 16-byte addresses.
        input_is_copied: True if a chunk's hidden states have to be copied: another dtype, or axes that do not flatten.
        function: True for `linear_apply`, whose function gets a chunk's logits in pieces: `HeadPlan.piece_rows`.
        capability: Compute capability of a GPU that is planned for and is not this machine's. None: this machine's.
        device_bytes: Likewise that GPU's memory.

    Returns:
        HeadPlan: print it, or read its fields.

    Raises:
        ArgumentValueError: A negative size, or an unknown reduction.
        ArgumentTypeError: ``options`` is not `HeadOptions`.
        UnsupportedError: ``options`` requests an implementation that cannot run here.

    Example:
        >>> plan = plan_head(16384, 2048, 131072, torch.float32, "cpu", HeadOptions(workspace_mib=64))
        >>> plan.chunk_rows, plan.chunks
        (103, 160)
    """
    _check_sizes(N=N, D=D, V=V)
    check_name("reduction", reduction, REDUCTIONS)
    options, device = check_options(options), torch.device(device)
    if function:
        choice = choose("linear_apply", options, " for linear_apply")
    else:
        exp = why_not_exp(
            device, dtype, D, V, capped_and_smoothed=capped_and_smoothed, weight_fits=weight_fits, capability=capability
        )
        choice = choose("cross entropy", options, exp=exp, row=why_not_row(device, dtype, V))
    gradient = choose_gradient(options, reduction, weight_frozen)
    work = Work((N, D, V), dtype, weight_dtype or dtype, device, options, choice, weight_frozen, gradient, device_bytes)
    ends_early = choice[0] == "exp" and skips_ignored(device, capability)
    kept = options.skip is not None and ends_early and not weight_frozen
    skips = ends_early and (kept or options.ignored_tokens == "skip")
    return plan_of(work._replace(function=function, input_is_copied=input_is_copied, skips=skips, kept=kept))


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
    """Return what `linear_divergence` will do with gradients for N tokens, and its bytes, as `plan_head` does.

    Nothing is computed or allocated. On the CPU masked tokens are dropped first, so N counts the others; elsewhere N
    counts all. ``chunk_rows`` are the rows per GEMM of gradients, ``product_rows`` those of both sides' logits.

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
        ArgumentValueError: A negative size, an unknown reduction, or not one of ``teacher_D`` and ``topk``.
        ArgumentTypeError: ``options`` is not `HeadOptions`.
        UnsupportedError: ``options`` requests an implementation that cannot run here.

    Example:
        >>> plan = plan_divergence(8192, 2048, 128256, 4096, torch.float32, "cpu", reduction="mean")
        >>> plan.chunk_rows, plan.gradient
        (135, 'forward')
    """
    given = {"teacher_D": teacher_D, "teacher_V": teacher_V, "topk": topk}
    _check_sizes(N=N, D=D, V=V, **{name: size for name, size in given.items() if size is not None})
    if (teacher_D is None) == (topk is None):
        raise ArgumentValueError(message("teacher_D", "a size without topk, None with it", str(teacher_D)))
    check_name("reduction", reduction, REDUCTIONS)
    options, device = check_options(options), torch.device(device)
    of_teacher = (0, topk or 0) if teacher_D is None else (teacher_D, V if teacher_V is None else teacher_V)
    choice = choose("divergence", options, row=why_not_row(device, dtype, V, topk=topk is not None))
    gradient = choose_gradient(options, reduction, weight_frozen, divergence=True)
    work = Work((N, D, V), dtype, weight_dtype or dtype, device, options, choice, weight_frozen, gradient)
    return plan_of(work._replace(teacher=(*of_teacher, teacher_dtype or dtype)))


def _check_sizes(**sizes: int) -> None:
    for name, size in sizes.items():
        if not isinstance(size, int) or size < 0:
            raise ArgumentValueError(message(name, "a size of 0 or more", str(size)))


def plan_cross_entropy(head: Head, args: CrossEntropyArgs, n: int, wanted: Wanted, known: bool = False) -> HeadPlan:
    """Return the plan for n rows, the same on every rank: for the largest shard, and what all ranks can do."""
    frozen = head.ranks.alone and not any(wanted[1:])
    gradient = "recompute" if known else choose_gradient(head.options, args.reduction, frozen)
    sums = 2 if head.order > 0 and head.softcap is not None else 1  # with a cap also those of what E is
    return plan_of(_work(head, args, n, wanted, gradient=gradient, tile_numbers=sums))


def plan_token_stats(head: Head, args: TokenStatsArgs, n: int, wanted: Wanted) -> HeadPlan:
    """Return the same for token statistics."""
    K, topk = args.target.shape[1], args.topk
    more = {
        "token_bytes": STATS_BYTES_PER_TOKEN + STATS_BYTES_PER_TARGET * max(0, K - 1),
        "tile_numbers": 3 + len(args.wanted & {"entropy", "sum_sq_prob", "mean_logit"}),
        "sum_row_bytes": topk_row_bytes(topk, head.ranks.most_rows, head.input.device),
    }
    return plan_of(_work(head, args, n, wanted, **more))


def plan_both_sides(
    head: Head, args: DivergenceArgs, n: int, wanted: Wanted, stored: bool
) -> tuple[HeadPlan, HeadPlan]:
    """Return the same for a divergence: the student's plan, and the teacher's, for the same chunks."""
    weight, V, teacher = args.teacher_weight, head.ranks.most_rows, (0, 0, head.dtype)
    if weight is not None:
        teacher = (weight.shape[1], weight.shape[0] if head.ranks.alone else V + 1, args.teacher_dtype)
    elif args.topk_ids is not None:
        teacher = (0, args.topk_ids.shape[1], head.dtype)
    more = {"gradient": "forward" if stored else "recompute", "teacher": teacher, "values_only": not any(wanted)}
    work = _work(head, args, n, wanted, **more)
    return plan_of(work), plan_of(work, of_teacher=True)


def _work(head: Head, args: Args, n: int, wanted: Wanted, **more: Any) -> Work:
    """Return what a pass over n tokens is, on every rank alike: by the largest shard and the smallest GPU."""
    ranks, weight, sharded = head.ranks, head.weight_VD, not head.ranks.alone
    copied = sharded or n != head.tokens or input_is_copied(head.input, head.dtype)  # rounded, or gathered, on any rank
    if not isinstance(ranks, Alone):
        n, more["device_bytes"] = ranks.slots if ranks.spread else n, ranks.limits.gpu_bytes
    choice = choose_backend(head, args)
    size = n, weight.shape[1], ranks.most_rows + (sharded and choice[0] != "exp")  # a column for other ranks' classes
    more |= {"weight_frozen": not any(wanted[1:]), "sharded": sharded, "groups": ranks.groups}
    more |= {"input_is_copied": copied, "skips": skips_tokens(head, choice[0]), "kept": head.order > 0}
    return Work(size, head.dtype, weight.dtype, head.input.device, head.options, choice, **more)
