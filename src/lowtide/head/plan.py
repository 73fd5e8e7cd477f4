"""The plan of a call: what runs, in how many chunks, at what memory, by arithmetic alone.

N tokens, D hidden size, V vocabulary, C rows of a chunk. Figures: benchmarks/results, one H100 where no CPU is named.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from types import ModuleType
from typing import Any, Literal, NamedTuple

import torch

from lowtide.arguments import check_name
from lowtide.errors import ArgumentTypeError, ArgumentValueError, UnsupportedError, message
from lowtide.head.backends import (
    NOT_OF_MASKED,
    NOT_OF_SHARDS,
    choose,
    skips_ignored,
    why_not_exp,
    why_not_row,
)
from lowtide.head.call import (
    REDUCTIONS,
    CrossEntropyArgs,
    DivergenceArgs,
    Head,
    SupportArgs,
    TokenStatsArgs,
    Wanted,
)
from lowtide.head.options import HeadOptions, Reduction, check_options
from lowtide.head.ranks import SpreadRanks
from lowtide.head.rows import input_is_copied, rows_are_aligned
from lowtide.kernel_launch import power_of_2

MIB = 2**20
When = Literal["forward", "recompute"]

BYTES_PER_TOKEN = 48  # loss, lse, row factor, valid mask and index: what is held for all N tokens, not a chunk's
# The workspace, if the user sets no limit: on a GPU no more than a 24th of its memory.
CPU_WORKSPACE = 160 * MIB  # 256 rows of a vocabulary of 128K; with 128 rows a step takes 6% longer on two cores
GPU_WORKSPACE = 1152 * MIB  # 2048 rows of bfloat16 for a 256K vocabulary: below that, reading W and dW costs time
GPU_FUNCTION_WORKSPACE = 3072 * MIB  # what is counted for the function is more than most functions take
EXP_BLOCK_WORKSPACE = 256 * MIB  # of exponentials, where the gradients wait for backward
SUPPORT_WORKSPACE = 1024 * MIB  # of sets of classes: what sorting the ids, and their logits, may take
MOST_OF_A_GPU = 24
GPU_BYTES = 81079 * MIB  # of a GPU that is not here
# Chunks of logits.
FEWEST_CHUNKS = 12  # by default: a twelfth of the logits is small next to what else a step saves
FEWEST_ROWS = 512  # fewer are not made for FEWEST_CHUNKS' sake: the weight is read, and its gradient added to, in each
CPU_CHUNK_BYTES = 8 * MIB  # nor shorter chunks on a CPU, where each operator wakes all threads and waits for the last
ONEDNN_BYTES, ONEDNN_ROW_BYTES = MIB // 2, 3072  # measured: what its bf16 GEMMs pack operands into, by rows of a chunk
ONEDNN_LEAST_WORKSPACE = 8 * MIB  # in less than this, the packing would crowd out the logits
MOST_BLOCK_ROWS, BLOCK_SHARE = 4096, 8  # rows of the weight cast at a time; of the workspace, what these take
# Any function of the logits (linear_apply), on a CPU (True) and on a GPU.
FUNCTION_COPIES = 8  # wide [rows, V] tensors that a function's graph and its backward hold: entropy has 7, CE 4
FUNCTION_ROWS = {True: 8, False: 2048}  # FEWEST_ROWS where a function gets the logits
PIECE_ELEMENTS = {True: 2**20, False: 2**26}  # logits it gets at a time: half a millisecond of the host's for each
FUNCTION_PIECES = 16  # at least, of more than FEWEST_ROWS: its intermediates are small next to all logits
# Two sides' logits whose gradient is narrower than they are (linear_divergence), without a limit.
PAIR_CHUNKS = 4  # the weight's gradient is added to so often
PAIR_ROWS = 1024  # of a chunk, at least
PAIR_LOGITS = 384  # rows whose logits exist: 3% slower with 256, 50% with 128: reading both weights takes longer
# Exponentials.
KEPT_ROWS = 512  # of a chunk, from which tiles are skipped
EXP_ROWS = 2048  # a chunk may have so many by default, or half of the tokens if that is more; from here a power of 2
EXP_BYTES = 2**30  # of a chunk's E, where that is more rows
EXP_SHARD_WORK = 2 * 10**11  # rows * D * V of such a piece: its host has exchanges between ranks to launch as well
EXP_SUM_ROWS = 8192  # rows of a pass that stores no E
STATS_BYTES_PER_TOKEN = 120  # what is computed and kept of each token, and in backward the upstream gradients
STATS_BYTES_PER_TARGET = 160  # the same of each target
# Sums of the weight's gradient in its own narrow dtype, by exponentials and of two sides.
FEW_CHUNKS = 8  # it may be rounded this often
FEW_ASKED_CHUNKS = 48  # likewise where the user bounds the memory, and would not have V * D * 4 bytes more
GPU_TILE, TILE_COLUMNS, PROCESSORS = 128, 256, 132  # Hopper's
WAVE = PROCESSORS * GPU_TILE * TILE_COLUMNS  # elements of E W at a time in float32, to the nearest power of 2 rows
BLOCK_ROWS = (4096, 2048, 1024, 512, 256, 128)  # of a chunk in blocks
BLOCK_COLUMNS, LEAST_BLOCK = 6144, 1024  # of less than the first the host launches more slowly than the GPU computes


Args = CrossEntropyArgs | TokenStatsArgs | DivergenceArgs | SupportArgs


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
        columns: Width of the blocks in which a chunk's logits are turned into their gradient, or see ``schedule``.
        note: What else the reader should know, such as a workspace that was too small; empty if nothing.
        schedule: ``"chunks"``: a chunk's logits (or exponentials) over the whole vocabulary at once. ``"blocks"``, on
            the exponential path: row sums first, then blocks of ``columns`` classes: one GEMM more.
        sum_rows: Rows of a chunk where nothing but row sums is computed, on the exponential path.
        product_rows: Rows of a chunk per GEMM with the weight, on the exponential path and in `linear_divergence`.
        piece_rows: Rows of a chunk that `linear_apply` hands to its function at a time; 0 elsewhere.
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
    sum_rows: int = 0
    product_rows: int = 0
    piece_rows: int = 0
    kept: bool = False

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
            lines.append(f"exponentials built twice, the second time in blocks of {self.columns} classes")
        if self.backend == "row" and 0 < self.product_rows < self.chunk_rows:
            lines.append(f"both sides' logits exist of {self.product_rows} rows at a time, their gradient of a chunk's")
        if self.kept:
            lines.append("the gradients skip tiles of the softmax, in an ordered copy of the weight")
        if self.piece_rows:
            lines.append(f"the function gets {self.piece_rows} rows of logits at a time")
        return "\n".join([*lines, self.note] if self.note else lines)


class Work(NamedTuple):
    """What one pass computes, the same on every rank: all that a plan depends on."""

    size: tuple[int, int, int]  # N that are computed, D, V: of the largest shard, with a column for others' classes
    dtype: torch.dtype  # of the GEMMs' operands
    weight_dtype: torch.dtype
    device: torch.device
    workspace_mib: float | None  # as in `HeadOptions`, and the next
    accumulate: str
    choice: tuple[str, str]  # the implementation, and why
    weight_frozen: bool  # neither weight nor bias gets a gradient
    gradient: When = "recompute"
    device_bytes: int | None = None  # memory of the GPU that is planned for; None: the one that is there
    function: bool = False  # a user's function gets the logits
    teacher: tuple[int, int, torch.dtype] | None = None  # a second side's D, V and dtype; of its top k 0 and k
    values_only: bool = False  # no gradient is computed
    groups: int = 1  # ranks with tokens of their own; a chunk has at least one row of each
    # exponentials' own, beside what all take:
    copies: int = 0  # of a chunk's hidden states, for another dtype or layout; 2: ignored tokens are put last
    token_bytes: int = 0  # for each of the N
    sum_row_bytes: int = 0  # for each where nothing but sums is computed
    tile_numbers: int = 1  # float32 that each tile of the vocabulary leaves of a row
    kept: bool = False  # tiles of E are skipped: see the room skip
    sharded: bool = False  # the vocabulary is, and a chunk has two pieces: one's exchanges run beside the other's GEMMs

    @property
    def wide(self) -> torch.dtype:
        """Return the dtype of logits and sums."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    @property
    def automatic(self) -> bool:
        """Return whether the workspace has no limit."""
        return self.workspace_mib is None

    @property
    def narrow_pair(self) -> bool:
        """Return whether kernels turn two sides' logits into a gradient that is narrower than they are."""
        by_kernels = self.teacher is not None and self.choice[0] == "row" and not self.values_only
        return by_kernels and self.dtype.itemsize < self.wide.itemsize

    def budget(self) -> int:
        """Return how much scratch memory the pass may take."""
        if self.workspace_mib is not None:
            return int(self.workspace_mib * MIB)
        if self.device.type == "cpu":
            return CPU_WORKSPACE
        most: float = GPU_FUNCTION_WORKSPACE if self.function else GPU_WORKSPACE
        if self.choice[0] == "exp":
            most = EXP_BLOCK_WORKSPACE if self.gradient == "recompute" else math.inf
        memory = memory_of(self.device) if self.device_bytes is None else self.device_bytes
        return int(min(most, memory / MOST_OF_A_GPU))


def plan_head(
    N: int,
    D: int,
    V: int,
    dtype: torch.dtype,
    device: torch.device | str,
    options: HeadOptions | None = None,
    *,
    weight_dtype: torch.dtype | None = None,
    reduction: Reduction = "mean",
    weight_frozen: bool = False,
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
        function: True for `linear_apply`, whose function gets a chunk's logits in pieces: `HeadPlan.piece_rows`.
        capability: Compute capability of a GPU that is planned for and is not this machine's. None: this machine's.
        device_bytes: Likewise that GPU's memory.

    Returns:
        HeadPlan: print it, or read its fields.

    Raises:
        ArgumentValueError: A negative size, an unknown reduction, or what is no device.
        ArgumentTypeError: ``options`` is not `HeadOptions`, or ``dtype`` no dtype.
        UnsupportedError: ``options`` requests an implementation that cannot run here.

    Example:
        >>> plan = plan_head(16384, 2048, 131072, torch.float32, "cpu", HeadOptions(workspace_mib=64))
        >>> plan.chunk_rows, plan.chunks
        (103, 160)
    """
    options, device = _checked(options, device, dtype, reduction, N=N, D=D, V=V)
    if function:
        choice = choose("linear_apply", options.backend, " for linear_apply")
    else:
        exp, row = why_not_exp(device, dtype, D, V, capability=capability), why_not_row(device, dtype, V)
        choice = choose("cross entropy", options.backend, exp=exp, row=row)
    gradient = choose_gradient(options.gradient, reduction, weight_frozen)
    ends_early = choice[0] == "exp" and skips_ignored(device, capability)
    kept = options.skip is not None and ends_early and not weight_frozen
    return plan_of(Work(
        (N, D, V), dtype, weight_dtype or dtype, device, options.workspace_mib, options.accumulate, choice,
        weight_frozen, gradient, device_bytes, function, kept=kept,
        copies=2 if ends_early and options.ignored_tokens == "skip" else kept or weight_dtype not in (None, dtype),
    ))  # fmt: skip


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
    reduction: Reduction = "none",
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
        ArgumentValueError: A negative size, an unknown reduction, what is no device, or not one of ``teacher_D`` and
            ``topk``.
        ArgumentTypeError: ``options`` is not `HeadOptions`, or ``dtype`` no dtype.
        UnsupportedError: ``options`` requests an implementation that cannot run here.

    Example:
        >>> plan = plan_divergence(8192, 2048, 128256, 4096, torch.float32, "cpu", reduction="mean")
        >>> plan.chunk_rows, plan.gradient
        (135, 'forward')
    """
    given = {"teacher_D": teacher_D, "teacher_V": teacher_V, "topk": topk}
    sizes = {"N": N, "D": D, "V": V} | {name: size for name, size in given.items() if size is not None}
    options, device = _checked(options, device, dtype, reduction, **sizes)
    if (teacher_D is None) == (topk is None):
        raise ArgumentValueError(message("teacher_D", "a size without topk, None with it", str(teacher_D)))
    of_teacher = (0, topk or 0) if teacher_D is None else (teacher_D, V if teacher_V is None else teacher_V)
    choice = choose("divergence", options.backend, row=why_not_row(device, dtype, V, topk=topk is not None))
    gradient = choose_gradient(options.gradient, reduction, weight_frozen, divergence=True)
    return plan_of(Work(
        (N, D, V), dtype, weight_dtype or dtype, device, options.workspace_mib, options.accumulate, choice,
        weight_frozen, gradient, teacher=(*of_teacher, teacher_dtype or dtype),
    ))  # fmt: skip


def _checked(
    options: HeadOptions | None, device: torch.device | str, dtype: object, reduction: str, **sizes: int
) -> tuple[HeadOptions, torch.device]:
    for name, size in sizes.items():
        if not isinstance(size, int) or size < 0:
            raise ArgumentValueError(message(name, "a size of 0 or more", str(size)))
    check_name("reduction", reduction, REDUCTIONS)
    if not isinstance(dtype, torch.dtype):
        raise ArgumentTypeError(message("dtype", "a torch.dtype", repr(dtype)))
    options = check_options(options)
    try:
        return options, torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ArgumentValueError(message("device", "a torch.device or its name", repr(device))) from error


def plan_cross_entropy(head: Head, args: CrossEntropyArgs, n: int, wanted: Wanted, known: bool = False) -> HeadPlan:
    """Return the plan for n rows, the same on every rank: for the largest shard."""
    frozen = head.ranks.alone and not any(wanted[1:])
    gradient = "recompute" if known else choose_gradient("auto", args.reduction, frozen)
    sums = 2 if head.remembered is not None and head.softcap is not None else 1  # with a cap also those of what E is
    return plan_of(_work(head, args, n, wanted, gradient=gradient, tile_numbers=sums))


def plan_token_stats(head: Head, args: TokenStatsArgs, n: int, wanted: Wanted) -> HeadPlan:
    """Return the same for token statistics."""
    more = {
        "token_bytes": STATS_BYTES_PER_TOKEN + STATS_BYTES_PER_TARGET * args.target.shape[1],
        # the logits of the tiles that may contain the highest ones, and what sorting them takes
        "sum_row_bytes": min(args.topk, -(-head.ranks.most_rows // 256)) * (4 * 256 + 48),
        "tile_numbers": 3 + len(args.wanted & {"entropy", "mean_logit", "sum_sq_prob"}),
    }
    return plan_of(_work(head, args, n, wanted, **more))


def plan_both_sides(
    head: Head, args: DivergenceArgs, n: int, wanted: Wanted, stored: bool
) -> tuple[HeadPlan, HeadPlan]:
    """Return the same for a divergence: the student's plan, and the teacher's, for the same chunks."""
    weight, ids = args.teacher_weight, args.topk_ids
    if weight is not None:
        teacher = weight.shape[1], len(weight) if head.ranks.alone else head.ranks.most_rows + 1, args.teacher_dtype
    else:
        teacher = 0, 0 if ids is None else ids.shape[1], head.dtype
    more = {"gradient": "forward" if stored else "recompute", "teacher": teacher, "values_only": not any(wanted)}
    work = _work(head, args, n, wanted, **more)
    return plan_of(work), plan_of(work, of_teacher=True)


def _work(head: Head, args: Args, n: int, wanted: Wanted, **more: Any) -> Work:
    """Return what a pass over n tokens is, on every rank alike: by the largest shard."""
    ranks, weight, sharded = head.ranks, head.weight_VD, not head.ranks.alone
    copied = sharded or n != head.tokens or input_is_copied(head.input, head.dtype)  # rounded, or gathered, on any rank
    if isinstance(ranks, SpreadRanks):
        n = ranks.slots
    choice = choose_backend(head, args)
    size = n, weight.shape[1], ranks.most_rows + (sharded and choice[0] != "exp")  # a column for other ranks' classes
    return Work(
        size, head.dtype, weight.dtype, head.input.device, head.workspace_mib, head.accumulate, choice,
        not any(wanted[1:]), sharded=sharded, groups=ranks.groups, kept=head.remembered is not None,
        copies=2 if skips_tokens(head, choice[0]) else copied, **more,
    )  # fmt: skip


def skips_tokens(head: Head, backend: str) -> bool:
    """Return whether the device puts ignored tokens last, and the kernels end before them."""
    if backend != "exp" or head.ignored_tokens != "skip" or head.ranks.spread:
        return False
    return skips_ignored(head.input.device)


def skipping() -> ModuleType:
    """Return what leaves tiles out of gradients, for a call that requests it: the head's one import of that room."""
    from lowtide.skip import seam

    return seam


def choose_backend(head: Head, args: Args) -> tuple[str, str]:
    """Return the implementation that runs, and why; each record of arguments but cross entropy's has a branch."""
    device, dtype, ranks, w, asked = head.input.device, head.dtype, head.ranks, head.weight_VD, head.backend
    if isinstance(args, SupportArgs):
        return support_backend(head)
    if isinstance(args, DivergenceArgs):
        row = why_not_row(device, dtype, ranks.vocab, topk=args.topk_ids is not None)
        return choose("divergence", asked, row=row if ranks.alone else NOT_OF_SHARDS)
    where, of_work = "" if ranks.alone else " where the vocabulary is sharded", dict[str, Any]()
    if isinstance(args, TokenStatsArgs):
        of_work |= {"targets": args.target.shape[1], "highest": args.topk}
    else:
        of_work["capped_and_smoothed"] = head.softcap is not None and args.label_smoothing != 0
    exp: str | None = NOT_OF_MASKED
    if args.mask is None:
        copied = not ranks.alone or w.dtype != dtype
        fits = copied or torch.compiler.is_compiling() or rows_are_aligned(w)  # a compiler traces no address
        exp = why_not_exp(device, dtype, w.shape[1], ranks.most_rows, weight_fits=fits, **of_work)
    if isinstance(args, TokenStatsArgs):
        return choose("statistics", asked, where, exp=exp)
    row = why_not_row(device, dtype, ranks.most_rows) if ranks.alone else NOT_OF_SHARDS
    return choose("cross entropy", asked, where, exp=exp, row=row)


def support_backend(head: Head) -> tuple[str, str]:
    """Return the implementation that runs for sets of classes, and why."""
    return choose("sets", head.backend, row=why_not_row(head.input.device, head.dtype, max(1, head.ranks.most_rows)))


def choose_gradient(asked: str, reduction: str, weight_frozen: bool, *, divergence: bool = False) -> When:
    """Return when the gradients are computed; raise if forward was requested and cannot be right.

    With a scalar loss the upstream gradient is one factor, applied afterwards. With one loss a token it is not, but
    then a frozen head still allows it: the input's gradient is a row times the upstream factor of that row. Of a
    divergence three numbers per token are stored instead, and the input's gradient only if requested.
    """
    known = reduction != "none" or weight_frozen
    if asked == "forward" and not known:
        expected = "'auto' or 'recompute' with reduction='none' and a head that is trained"
        hint = "The weight's gradient needs each token's upstream gradient, known in backward only."
        raise UnsupportedError(message("gradient", expected, "'forward'", hint))
    small = divergence and reduction == "none" and asked == "auto"
    return "recompute" if asked == "recompute" or not known or small else "forward"


@lru_cache(maxsize=512)
def plan_of(work: Work, *, of_teacher: bool = False) -> HeadPlan:
    """Return the plan of a pass, or the same chunks with the GEMMs of its second side, which gets no gradient."""
    if of_teacher:
        return replace(plan_of(work), accumulator_bytes=0, **gemms_of(work, of_teacher=True))
    (N, D, V), (backend, reason), mib = work.size, work.choice, work.workspace_mib
    if backend == "exp":
        rows, scratch, more = _cut_kept(work) if work.kept else _cut_exponentials(work)
    else:
        rows, scratch, more = _cut_narrow_pair(work) if work.narrow_pair else _cut_logits(work)
        # two sides in plain PyTorch need up to four blocks of columns besides the logits
        columns = max(1, _columns_of(work, rows, V) // (1 if work.teacher is None else 2))
        more |= {**gemms_of(work), "columns": columns}
    accumulate, note = accumulate_in(work, -(-N // rows)), ""
    summed = V * D * work.wide.itemsize if accumulate == "float32" and not work.weight_frozen else 0
    if work.dtype == torch.float16 and work.gradient == "forward":
        summed += N * D * work.wide.itemsize
    cast = more.get("backward_gemm") != "blocks" or more.get("logits_gemm") == "out_dtype"
    if mib is not None and scratch > mib * MIB:
        note = (
            f"workspace_mib={mib} is less than one row of logits and the numbers kept for each of {N} tokens take: one"
            f" row is computed at a time, in {scratch / MIB:.2f} MiB"
        )
    return HeadPlan(
        backend=backend, reason=reason, gradient=work.gradient, accumulate=accumulate, rows=N, chunks=-(-N // rows),
        chunk_rows=rows, scratch_bytes=scratch, accumulator_bytes=summed,
        cast_bytes=V * D * work.dtype.itemsize if work.weight_dtype != work.dtype and cast else 0, note=note, **more,
    )  # fmt: skip


Cut = tuple[int, int, dict[str, Any]]  # rows of a chunk, bytes of scratch, more of the plan


def accumulate_in(work: Work, chunks: int) -> Literal["float32", "input"]:
    """Return where the weight's gradient is summed over so many chunks: see `HeadOptions`."""
    dtype, asked, exp, few = work.weight_dtype, work.accumulate, work.choice[0] == "exp", 1
    if dtype == torch.float16 or (not exp and work.device.type != "cpu" and dtype not in (work.dtype, work.wide)):
        return "float32"  # a GPU's GEMM of operands narrowed in another way cannot add to the weight's dtype
    if dtype.itemsize >= work.wide.itemsize:
        return "input"
    if exp or work.narrow_pair:
        few = FEW_CHUNKS if work.automatic else FEW_ASKED_CHUNKS
    return "float32" if asked == "float32" or (asked == "auto" and chunks > few) else "input"


def gemms_of(work: Work, *, of_teacher: bool = False) -> dict[str, Any]:
    """Return how logits and gradients of one side are multiplied, and how many rows of its weight are cast at a time.

    float32 logits come from narrow operands without a float32 copy of the weight. On CPUs a bf16 GEMM rounds its
    result, and without AVX-512-BF16 or AMX it runs up to 20 times slower than a float32 one; fp16 is slower still,
    and its range too small for the gradient of the logits.
    """
    D, V, dtype = work.teacher if of_teacher and work.teacher else (*work.size[1:], work.dtype)
    device, bf16, budget = work.device.type, dtype == torch.bfloat16, work.budget()
    logits, backward = "blocks", "blocks"
    if dtype in (torch.float32, torch.float64):
        logits, backward = "same", "same"
    elif work.choice[0] == "row":
        logits, backward = "out_dtype", "narrow"  # fp16 too: the kernel lifts its gradients to where fp16 is precise
    elif device == "cuda" and torch.version.hip is None:
        logits, backward = "out_dtype", "narrow" if bf16 else "blocks"
    elif device == "cpu" and bf16 and cpu_multiplies_bf16() and budget >= ONEDNN_LEAST_WORKSPACE:
        backward = "narrow"
    if of_teacher:
        backward = "blocks" if logits == "blocks" else "same"
    fitting = max(1, min(V, MOST_BLOCK_ROWS, budget // BLOCK_SHARE // max(1, 4 * D)))
    block_rows = fitting if "blocks" in (logits, backward) else 0
    return {"logits_gemm": logits, "backward_gemm": backward, "block_rows": block_rows}


@cache
def memory_of(device: torch.device) -> int:
    """Return the bytes of the GPU at hand; of Hopper's where there is none."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return GPU_BYTES
    return torch.cuda.get_device_properties(device).total_memory


@cache
def cpu_multiplies_bf16() -> bool:
    """Return whether this machine's CPU has instructions for bf16 GEMMs.

    The one place that looks at the CPU: a test that replaces this function runs what another machine would.
    """
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def _cut_logits(work: Work) -> Cut:
    """Cut where a chunk's logits exist, and of two sides both."""
    (N, D, V), cpu, by_kernel = work.size, work.device.type == "cpu", work.choice[0] == "row"
    wide, narrow, budget, gemms = work.wide.itemsize, work.dtype.itemsize, work.budget(), gemms_of(work)
    fixed = N * BYTES_PER_TOKEN + gemms["block_rows"] * D * (wide + narrow) + 16 * V
    row = wide * padded(V) + D * (2 * wide + narrow) + (D * narrow + 64 if by_kernel else 24 * wide)
    if not (by_kernel or work.function):  # a soft cap's block is a row at least
        fixed, row = fixed + wide * padded(V), row + wide * 2 * _columns_of(work, 1, V)
    if work.teacher is not None:
        of_teacher, row_of_teacher = _bytes_of_teacher(work)
        fixed, row = fixed + of_teacher, row + row_of_teacher
    if cpu and gemms["backward_gemm"] == "narrow":
        fixed, row = fixed + ONEDNN_BYTES, row + ONEDNN_ROW_BYTES
    least, more = FEWEST_ROWS, dict[str, Any]()
    if work.function:
        least, piece_bytes = FUNCTION_ROWS[cpu], FUNCTION_COPIES * wide * max(1, V)
        pieces = max(2, PIECE_ELEMENTS[cpu] // max(1, V)), max(FEWEST_ROWS, N // FUNCTION_PIECES)
        piece_rows = max(1, min(N, (budget - fixed) // 2 // piece_bytes, *pieces))
        fixed += piece_rows * piece_bytes
    elif cpu:
        least = max(least, CPU_CHUNK_BYTES // (4 * max(1, V)))
    enough = max(least, -(-N // FEWEST_CHUNKS)) if work.automatic else math.inf
    rows = int(min(max(1, (budget - fixed) // max(1, row)), enough))
    rows = evenly(N, rows) if cpu else min(level(N, whole_tiles(rows)), max(1, N))
    if work.function:
        more["piece_rows"] = evenly(rows, piece_rows)
    rows = max(work.groups, rows - rows % work.groups)  # as many of each rank that has tokens of its own
    if work.teacher is not None:
        more["product_rows"] = rows
    return rows, fixed + rows * row, more


def _bytes_of_teacher(work: Work) -> tuple[int, int]:
    """Return what a second side takes, and what it takes for each row of a chunk."""
    assert work.teacher is not None
    (D, V, dtype), wide, of_student = work.teacher, work.wide.itemsize, padded(work.size[2])
    if not D:
        return V * (8 + 16 * wide), wide * (padded(work.size[2] + 1) - of_student)  # ids, both sides' outcomes
    operands = D * (wide + dtype.itemsize)
    fixed, row = gemms_of(work, of_teacher=True)["block_rows"] * operands + 8 * V, operands + 16 * wide
    if work.choice[0] == "row":
        return fixed, row + wide * padded(V)
    longer = max(of_student, padded(V))  # both sides' logits are as long, and both have blocks of columns beside
    return fixed, row + wide * (2 * longer - of_student + 2 * _columns_of(work, 1, longer))


def _cut_narrow_pair(work: Work) -> Cut:
    """Cut where both sides' float32 logits exist of a few rows, and the narrow gradient of more.

    The weight's gradient is read and written once a chunk, and in its own dtype rounded as often: rows of the gradient,
    which take a quarter of the bytes, make longer chunks than rows of logits would.
    """
    assert work.teacher is not None
    (N, D, V), wide, narrow = work.size, work.wide.itemsize, work.dtype.itemsize
    logits = wide * padded(V) + _bytes_of_teacher(work)[1]
    gradient = narrow * padded(V) + D * 2 * (wide + narrow) + 16 * wide
    fixed = N * BYTES_PER_TOKEN + 16 * (V + work.teacher[1])
    room = max(0, work.budget() - fixed)
    few, rows = room // 2 // logits, N
    if work.automatic:
        few = min(few, max(PAIR_LOGITS, N // (6 * PAIR_CHUNKS)))
        rows = min(rows, max(PAIR_ROWS, -(-N // PAIR_CHUNKS // GPU_TILE) * GPU_TILE))
    few = max(1, min(few - few % GPU_TILE or few, rows))
    rows = max(few, min(whole_tiles((room - few * logits) // gradient), rows))
    return rows, fixed + few * logits + rows * gradient, {"product_rows": few}


def _cut_exponentials(work: Work) -> Cut:
    """Cut chunks of exponentials; or blocks of the vocabulary, where chunks would be short or the gradients wait.

    A chunk has as many rows as fit, from 2048 on a power of 2, which cuBLAS multiplies fastest. By default there are
    two at least, and a chunk has no more rows than 4096, than make `EXP_BYTES` of E or a `WAVE` of E W, or than leave
    `FEW_CHUNKS`, whichever is most; half of it where the head is frozen. Chunks are short below 512 rows, and where
    a limit of the memory makes so many that the weight's gradient would be summed in float32: if blocks have twice the
    rows, or need no float32. Of a sharded vocabulary a chunk has two pieces, longer ones where few classes are little
    work.
    """
    (N, D, V), sharded = work.size, work.sharded
    trained = not work.weight_frozen
    part, tiles = 1 if trained else 2, -(-V // TILE_COLUMNS) * work.kept
    fixed = N * (BYTES_PER_TOKEN + work.token_bytes) + 24 * V + 32 * D
    if work.kept:  # the ordered copy, or the gradient put back; means and sums; parts that meet; squares, masses, lists
        fixed += work.weight_dtype.itemsize * V * D + 6 * tiles * D + 4 * WAVE
    # s x and a row's numbers, and copies of hidden states; ranks gather these ahead, of sums alone four pieces and of
    # gradients three at once, and sum all of E W.
    x, product, sums = 2 * D * (work.copies > 0), 4 * D * (not work.kept), 4 * work.tile_numbers * -(-V // GPU_TILE)
    of_row = 2 * D + x + 8 * D * sharded + 64 + 24 * tiles
    sum_row = sums + 64 + x + 6 * D * sharded + work.sum_row_bytes + 28 * tiles
    room = max(0, work.budget() - fixed)
    sum_rows = max(work.groups, min(N, EXP_SUM_ROWS, whole_tiles(room // sum_row)))
    N, more = max(1, N), {"sum_rows": sum_rows}

    of_block = of_row + product + x * (work.copies > 1 and not sharded)  # beside the sum over blocks parts of E W meet
    of_chunk = of_row + sums + 2 * padded(V)
    if sharded:
        of_chunk, product = of_chunk + product, 0
    piece = max(GPU_TILE, 1 << round(math.log2(WAVE / max(1, D))))
    least = 2 * max(piece, min(power_of_2(-(-EXP_SHARD_WORK // max(1, D * V))), N // 4)) * sharded
    longest = max(room // (of_chunk + product), (room - product * piece) // of_chunk)
    if work.automatic:
        few = power_of_2(-(-N // FEW_CHUNKS)) if trained else 0
        most = max(4096 // part, piece, EXP_BYTES // (2 * part * V), few, least)
        longest = min(longest, most, max(N // 2, EXP_ROWS, least))
    unit = 2 * work.groups if work.groups > 1 else 1  # two pieces, each with as many rows of each rank's tokens
    longest = rows = max(unit, min(longest, -(-N // unit) * unit) // unit * unit)
    if rows < N:
        power = 1 << rows.bit_length() - 1
        rows = whole_tiles(rows) if power < EXP_ROWS or work.kept else max(power, min(rows, least))
        rows = -(-level(N, rows) // unit) * unit

    def many(rows: int) -> bool:
        return trained and accumulate_in(work, -(-N // rows)) != accumulate_in(work, 1)

    short = rows < min(N, 512 // part) or (many(rows) and not work.automatic)
    block: tuple[int, int] | None = None
    if work.gradient == "recompute" or (short and not work.kept):
        block = _fitting_block(N, V, room, of_block, many)
    if (block is None or (block[0] < 2 * rows and many(block[0]) == many(rows))) and work.gradient == "forward":
        product_rows = max(level(rows, min(rows, piece)), -(-rows // 2) * sharded)
        if unit > 1 and rows > piece:
            product_rows = rows // 2
        scratch = fixed + rows * of_chunk + product_rows * product
        return rows, scratch, {**more, "schedule": "chunks", "columns": V, "product_rows": product_rows}
    rows, columns = block or (whole_tiles(longest), V)
    if work.groups > 1:  # both passes take the tokens of each rank in one order
        rows = sum_rows = more["sum_rows"] = max(work.groups, min(rows, sum_rows) // work.groups * work.groups)
    scratch = fixed + max(rows * (of_block + 2 * padded(columns)), sum_rows * sum_row)
    return rows, scratch, {**more, "schedule": "blocks", "columns": columns, "product_rows": rows}


def _fitting_block(N: int, V: int, room: int, of_row: int, many: Callable[[int], bool]) -> tuple[int, int] | None:
    """Return rows and columns of the blocks, None if none fits: the most rows that leave `BLOCK_COLUMNS`.

    Or as many columns as can be; and in any case few chunks if they can be. Columns are whole waves of tiles, if these
    are not much less. ``room`` is in bytes, as is ``of_row``: what a row takes besides its columns.
    """
    found = []
    for longest in BLOCK_ROWS:
        rows, all_tiles = level(N, min(longest, N)), -(-V // TILE_COLUMNS)
        widest = min((room - rows * of_row) // (2 * rows) // TILE_COLUMNS, all_tiles)
        if TILE_COLUMNS * widest >= min(V, LEAST_BLOCK):
            tiles = -(-rows // GPU_TILE)
            whole = widest * tiles // PROCESSORS * PROCESSORS // tiles
            width = whole if widest < all_tiles and 8 * whole > 7 * widest else widest
            columns = min(V, TILE_COLUMNS * -(-all_tiles // -(-all_tiles // width)))
            narrow = columns < min(V, BLOCK_COLUMNS)
            found.append((many(rows), narrow, -columns if narrow else -rows, rows, columns))
    return min(found)[3:] if found else None


def _cut_kept(work: Work) -> Cut:
    """Cut where tiles are skipped: by default in the memory of a loss that skips none, if the ordered copy fits there.

    If it does not, in as much more; a user's own limit is kept, and where it is too low no tile is skipped. The chunks
    are those of all gradients in forward, also where backward computes some: of short ones little would be won, and
    both passes choose alike, since backward reads what forward saved of tiles.
    """
    (N, D, V), of_chunks = work.size, work._replace(gradient="forward", weight_frozen=False)
    scratch = _cut_exponentials(of_chunks._replace(kept=False))[1]
    limits = [scratch, scratch + work.weight_dtype.itemsize * V * D] if work.automatic else [work.budget()]
    for limit in limits:
        rows, scratch, more = _cut_exponentials(of_chunks._replace(workspace_mib=limit / MIB))
        if rows >= min(N, KEPT_ROWS) and scratch <= limit:
            return rows, scratch, {**more, "kept": True}
    return _cut_exponentials(work._replace(kept=False))


def _columns_of(work: Work, rows: int, V: int) -> int:
    """Return the columns handled at a time: few launches on a GPU; on a CPU 2 MiB, which stay in cache."""
    if work.device.type != "cpu":
        return max(1, -(-V // 4))
    return max(1, min(V, max(64, min(-(-V // 16), 2**19 // rows))))


def padded(V: int) -> int:
    """Return the row length of a chunk's logits: 16-byte rows for the GEMMs, also when narrowed to two bytes."""
    return -(-V // 8) * 8


def tile_of(rows: int) -> int:
    """Return the tile that chunks of so many rows are made of: half a GPU's where a whole one is much of a chunk."""
    return GPU_TILE if rows >= 4 * GPU_TILE else GPU_TILE // 2


def whole_tiles(rows: int) -> int:
    """Return fewer rows, in whole tiles, where they are more than one."""
    return rows - rows % tile_of(rows) if rows > GPU_TILE else rows


def evenly(N: int, rows: int) -> int:
    """Return the rows of as many chunks of one size."""
    return max(1, -(-N // max(1, -(-N // rows))))


def level(N: int, rows: int) -> int:
    """Return fewer rows, in whole tiles, where that leaves the number of chunks: the last should not be a short one."""
    if rows < GPU_TILE or rows >= N:
        return rows
    tile = tile_of(rows)
    return min(rows, -(-evenly(N, rows) // tile) * tile)
