"""The plan of a call: what runs, in how many chunks, at what memory, by arithmetic alone.

A chunk has as many rows as fit the workspace; chunks are of one length, and on a GPU of whole tiles. Without a limit:

- of logits, a twelfth of the tokens, at least 512; 2048 where a function or a narrow gradient takes the logits of a
  fifth of the chunk at a time, which have at most half of the workspace;
- of exponentials, 4096 (2048 of up to 8192 tokens), or what makes 8 chunks, or GEMMs of 2^39 multiplications and a GiB;
  half of that where the head is frozen; no more than half of the tokens from 4096 on. From 2048 rows on a power of 2.
  Where sums alone are computed, as many rows as fit.

Exponentials are computed twice, the second time in blocks of up to 4096 rows by 4096 classes or more, where gradients
wait for backward, where chunks would be shorter than 512 rows, and where so many that the weight's gradient were summed
in float32, if blocks are not. N tokens, D hidden size, V vocabulary, C rows of a chunk.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from lowtide.arguments import check_name
from lowtide.errors import ArgumentTypeError, ArgumentValueError, UnsupportedError, message
from lowtide.head.backends import NOT_OF_MASKED, NOT_OF_SHARDS, choose, skips_ignored, why_not_exp, why_not_row
from lowtide.head.call import REDUCTIONS, CrossEntropyArgs, DivergenceArgs, Head, TokenStatsArgs, Wanted
from lowtide.head.options import HeadOptions, Reduction, check_options
from lowtide.head.rows import input_is_copied, rows_are_aligned
from lowtide.kernel_launch import power_of_2

MIB = 2**20
BYTES_PER_TOKEN = 48  # loss, lse, row factor, valid mask and index: what is held for all N tokens, not a chunk's
# The workspace, if the user sets no limit: on a GPU no more than a 24th of its memory.
CPU_WORKSPACE = 160 * MIB  # 256 rows of a vocabulary of 128K; with 128 rows a step takes 6% longer on two cores
GPU_WORKSPACE = 1152 * MIB  # 2048 rows of bfloat16 for a 256K vocabulary: below that, reading W and dW costs time
GPU_FUNCTION_WORKSPACE = 3072 * MIB  # what is counted for the function is more than most functions take
EXP_BLOCK_WORKSPACE = 256 * MIB  # of exponentials, where the gradients wait for backward
MOST_OF_A_GPU = 24
# Rows of a chunk, and what it takes.
FEWEST_CHUNKS = 12  # by default: a twelfth of the logits is small next to what else a step saves
FEWEST_ROWS = 512  # fewer are not made for FEWEST_CHUNKS' sake: the weight is read, and its gradient added to, in each
ROWS = 2048  # the same where it is no chunk's logits that take the memory; multiplied fastest if a power of 2
CPU_CHUNK_BYTES = 8 * MIB  # nor shorter chunks on a CPU, where each operator wakes all threads and waits for the last
ONEDNN_BYTES, ONEDNN_ROW_BYTES = MIB // 2, 3072  # measured: what its bf16 GEMMs pack operands into, by rows of a chunk
ONEDNN_LEAST_WORKSPACE = 8 * MIB  # in less than this, the packing would crowd out the logits
FUNCTION_COPIES = 8  # wide [rows, V] tensors that a function's graph and its backward hold: entropy has 7, CE 4
EXP_WORK = 2**39  # multiplications of a chunk's GEMM; where D is below 1024, E has a GiB
BLOCK = 4096  # rows of a block of exponentials, its classes or more; rows of the weight cast at a time
# Sums of the weight's gradient in its own narrow dtype, by exponentials and of two sides.
FEW_CHUNKS = 8  # it may be rounded this often
FEW_ASKED_CHUNKS = 48  # likewise where the user bounds the memory, and would not have V * D * 4 bytes more
GPU_TILE, TILE_COLUMNS = 128, 256  # Hopper's
WAVE = 2**22  # elements of a GEMM's result that keep all of its processors busy


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
        product_rows: Rows of a chunk per GEMM with the weight, on the exponential path and in `linear_divergence`.
        piece_rows: Rows of a chunk that `linear_apply` hands to its function at a time; 0 elsewhere.
        kept: Whether the gradients skip tiles of the softmax, by ``HeadOptions(skip=...)``, in a copy of the weight.
    """

    backend: str
    reason: str
    gradient: str
    accumulate: str
    rows: int
    chunks: int
    chunk_rows: int
    scratch_bytes: int
    accumulator_bytes: int
    cast_bytes: int
    logits_gemm: str = "out_dtype"
    backward_gemm: str = "narrow"
    block_rows: int = 0
    columns: int = 0
    note: str = ""
    schedule: str = "chunks"
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
        apart = self.backend == "row" and self.product_rows < self.chunk_rows
        more = {
            f"exponentials built twice, the second time in blocks of {self.columns} classes": self.schedule == "blocks",
            f"both sides' logits exist of {self.product_rows} rows at a time, their gradient of a chunk's": apart,
            "the gradients skip tiles of the softmax, in an ordered copy of the weight": self.kept,
            f"the function gets {self.piece_rows} rows of logits at a time": self.piece_rows > 0,
            self.note: self.note != "",
        }
        return "\n".join([*lines, *(line for line, holds in more.items() if holds)])


class Work(NamedTuple):
    """What one pass computes, the same on every rank: all that a plan depends on."""

    size: tuple[int, int, int]  # N that are computed, D, V: of the largest shard, with a column for others' classes
    dtype: torch.dtype  # of the GEMMs' operands
    weight_dtype: torch.dtype
    device: torch.device
    workspace_mib: float | None  # as in `HeadOptions`, and the next
    accumulate: str
    backend: str
    reason: str
    weight_frozen: bool  # neither weight nor bias gets a gradient
    gradient: str = "recompute"
    device_bytes: int = 0  # memory of the GPU that is planned for; 0: the one that is there
    function: bool = False  # a user's function gets the logits
    teacher: tuple[int, int, torch.dtype] | None = None  # a second side's D, V and dtype; of its top k 0 and k
    values_only: bool = False  # no gradient is computed
    groups: int = 1  # ranks with tokens of their own; a chunk has at least one row of each
    copied: bool = False  # a chunk's hidden states are, for another dtype or order
    skips: bool = False  # ignored tokens are put last, on the exponential path
    token_bytes: int = 0  # for each of the N, beside what all take
    sum_row_bytes: int = 0  # for each row whose sums are computed, beside one number of each tile
    kept: bool = False  # tiles of E are skipped: see the room skip
    sharded: bool = False  # the vocabulary is, and a chunk has two pieces: one's exchanges run beside the other's GEMMs

    @property
    def wide(self) -> int:
        """Return the bytes of a logit, and of a sum."""
        return 8 if self.dtype == torch.float64 else 4

    @property
    def narrow_pair(self) -> bool:
        """Return whether kernels turn two sides' logits into a gradient that is narrower than they are."""
        return self.teacher is not None and self.backend == "row" and not self.values_only and self.dtype.itemsize < 4

    def budget(self) -> int:
        """Return how much scratch memory the pass may take."""
        if self.workspace_mib is not None:
            return int(self.workspace_mib * MIB)
        if self.device.type == "cpu":
            return CPU_WORKSPACE
        memory = (self.device_bytes or memory_of(self.device)) // MOST_OF_A_GPU
        if self.backend == "exp":
            return min(memory, EXP_BLOCK_WORKSPACE) if self.gradient == "recompute" else memory
        return min(memory, GPU_FUNCTION_WORKSPACE if self.function else GPU_WORKSPACE)


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
        choice = choose("linear_apply", options.implementation)
    else:
        exp = why_not_exp(device, dtype, D, V, capability=capability)
        choice = choose("cross entropy", options.implementation, exp=exp, row=why_not_row(device, dtype, V))
    gradient = choose_gradient(options.gradient, reduction, weight_frozen)
    ends_early = choice[0] == "exp" and skips_ignored(device, capability)
    kept = ends_early and options.skip is not None and not weight_frozen
    skips = ends_early and options.ignored_tokens == "skip"
    return plan_of(Work(
        (N, D, V), dtype, weight_dtype or dtype, device, options.workspace_mib, options.accumulate, *choice,
        weight_frozen, gradient, device_bytes or 0, function, kept=kept, skips=skips,
        copied=kept or skips or weight_dtype not in (None, dtype),
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
        ArgumentValueError: As in `plan_head`; also where not one of ``teacher_D`` and ``topk`` is given.
        ArgumentTypeError, UnsupportedError: As in `plan_head`.

    Example:
        >>> plan = plan_divergence(8192, 2048, 128256, 4096, torch.float32, "cpu", reduction="mean")
        >>> plan.chunk_rows, plan.gradient
        (133, 'forward')
    """
    options, device = _checked(
        options, device, dtype, reduction, N=N, D=D, V=V,
        teacher_D=teacher_D or 0, teacher_V=teacher_V or 0, topk=topk or 0,
    )  # fmt: skip
    if (teacher_D is None) == (topk is None):
        raise ArgumentValueError(message("teacher_D", "a size without topk, None with it", str(teacher_D)))
    choice = choose("divergence", options.implementation, row=why_not_row(device, dtype, V, topk=topk is not None))
    return plan_of(Work(
        (N, D, V), dtype, weight_dtype or dtype, device, options.workspace_mib, options.accumulate, *choice,
        weight_frozen, choose_gradient(options.gradient, reduction),
        teacher=(teacher_D or 0, topk or teacher_V or V, teacher_dtype or dtype),
    ))  # fmt: skip


def _checked(
    options: Any, device: Any, dtype: object, reduction: str, **sizes: int
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
    gradient = "forward" if any(wanted) and not known else "recompute"
    return plan_of(_work(head, args, n, wanted, gradient=gradient))


def plan_token_stats(head: Head, args: TokenStatsArgs, n: int, wanted: Wanted) -> HeadPlan:
    """Return the same for token statistics."""
    tiles = -(-head.ranks.most_rows // TILE_COLUMNS)
    # of a row whose sums are computed: numbers of each tile, the logits of tiles of the highest, and what sorts these
    sums = 0 if any(wanted) else 24 * tiles + (12 * tiles + 1072 * min(args.topk, tiles)) * (args.topk > 0)
    return plan_of(_work(head, args, n, wanted, token_bytes=136 + 160 * args.target.shape[1], sum_row_bytes=sums))


def plan_both_sides(
    head: Head, args: DivergenceArgs, n: int, wanted: Wanted, stored: bool
) -> tuple[HeadPlan, HeadPlan]:
    """Return the same for a divergence: the student's plan, and the teacher's, for the same chunks."""
    weight, ids = args.teacher_weight, args.topk_ids
    teacher = 0, 0 if ids is None else ids.shape[1], head.dtype
    if weight is not None:
        teacher = weight.shape[1], len(weight) if head.ranks.alone else head.ranks.most_rows + 1, args.teacher_dtype
    work = _work(head, args, n, wanted, gradient="forward" if stored else "recompute", teacher=teacher)
    return plan_of(work), plan_of(work, of_teacher=True)


def _work(head: Head, args: Any, n: int, wanted: Wanted, **more: Any) -> Work:
    """Return what a pass over n tokens is, on every rank alike: by the largest shard, a column for others' classes."""
    ranks, weight, sharded = head.ranks, head.weight_VD, not head.ranks.alone
    choice, copied = choose_backend(head, args), n != head.tokens or input_is_copied(head.input, head.dtype)
    skips, kept = skips_tokens(head, choice[0]), head.remembered is not None
    size = ranks.slots if ranks.spread else n, weight.shape[1], ranks.most_rows + (sharded and choice[0] != "exp")
    return Work(
        size, head.dtype, weight.dtype, head.input.device, head.workspace_mib, head.accumulate, *choice,
        not any(wanted[1:]), values_only=not any(wanted), sharded=sharded, groups=ranks.groups, skips=skips, kept=kept,
        copied=sharded or copied or skips or kept, **more,
    )  # fmt: skip


def skips_tokens(head: Head, backend: str) -> bool:
    """Return whether the device puts ignored tokens last, and the kernels end before them."""
    asked = backend == "exp" and head.ignored_tokens == "skip" and not head.ranks.spread
    return asked and skips_ignored(head.input.device)


def skipping() -> Any:
    """Return what leaves tiles out of gradients, for a call that requests it: the head's one import of that room."""
    from lowtide.skip import seam

    return seam


def choose_backend(head: Head, args: Any) -> tuple[str, str]:
    """Return the implementation that runs, and why; each record of arguments but cross entropy's has a branch."""
    device, dtype, ranks, w = head.input.device, head.dtype, head.ranks, head.weight_VD
    topk, stats = getattr(args, "topk_ids", None) is not None, isinstance(args, TokenStatsArgs)
    row = why_not_row(device, dtype, ranks.vocab, topk=topk) if ranks.alone else NOT_OF_SHARDS
    if isinstance(args, DivergenceArgs):
        return choose("divergence", head.backend, row=row)
    # copied, or aligned: a compiler traces no address
    fits = not ranks.alone or w.dtype != dtype or torch.compiler.is_compiling() or rows_are_aligned(w)
    exp = NOT_OF_MASKED if args.mask is not None else why_not_exp(
        device, dtype, w.shape[1], ranks.most_rows, weight_fits=fits,
        capped_and_smoothed=not stats and head.softcap is not None and args.label_smoothing != 0,
        targets=args.target.shape[1] if stats else 1, highest=args.topk if stats else 0,
    )  # fmt: skip
    if stats:
        return choose("statistics", head.backend, exp=exp)
    return choose("cross entropy", head.backend, exp=exp, row=row)


def support_backend(head: Head) -> tuple[str, str]:
    """Return the implementation that runs for sets of classes, and why."""
    return choose("sets", head.backend, row=why_not_row(head.input.device, head.dtype, max(1, head.ranks.most_rows)))


def choose_gradient(asked: str, reduction: str, weight_frozen: bool = False) -> str:
    """Return when the gradients are computed; raise if forward was requested and cannot be right.

    A scalar loss has one upstream gradient, a factor applied afterwards. With one loss a token a frozen head still
    allows it: the input's gradient is a row times its upstream factor.
    """
    known = reduction != "none" or weight_frozen
    if asked == "forward" and not known:
        expected = "'auto' or 'recompute' with a value for each token, unless that is a frozen head's loss"
        hint = "Each token's upstream gradient is known in backward only."
        raise UnsupportedError(message("gradient", expected, "'forward'", hint))
    return "recompute" if asked == "recompute" or not known else "forward"


@lru_cache(maxsize=512)
def plan_of(work: Work, of_teacher: bool = False) -> HeadPlan:
    """Return the plan of a pass, or the same chunks with the GEMM of its second side, which gets no gradient."""
    if of_teacher and work.teacher is not None:
        logits, _ = gemms_of(work, work.teacher[2])
        return replace(plan_of(work), logits_gemm=logits, backward_gemm=logits)
    (N, D, V), mib, note = work.size, work.workspace_mib, ""
    if work.backend == "exp":
        cut = _cut_kept(work) if work.kept else _cut_exponentials(work)
    else:
        cut = _cut_logits(work)
    rows, scratch = cut["chunk_rows"], cut["scratch_bytes"]
    accumulate = accumulate_in(work, -(-N // rows))
    summed = V * D * work.wide if accumulate == "float32" else 0
    if work.dtype == torch.float16 and work.gradient == "forward":
        summed += N * D * work.wide
    in_blocks = cut.get("logits_gemm") == cut.get("backward_gemm") == "blocks"
    cast = V * D * work.dtype.itemsize if work.weight_dtype != work.dtype and not in_blocks else 0
    if mib is not None and scratch > mib * MIB:
        note = f"one row is computed at a time, in {scratch / MIB:.2f} MiB: workspace_mib={mib} is less than that"
    return HeadPlan(
        backend=work.backend, reason=work.reason, gradient=work.gradient, accumulate=accumulate, rows=N,
        chunks=-(-N // rows), accumulator_bytes=summed, cast_bytes=cast, note=note, **cut,
    )  # fmt: skip


def accumulate_in(work: Work, chunks: int) -> str:
    """Return where the weight's gradient is summed over so many chunks: see `HeadOptions`."""
    dtype = work.weight_dtype
    if work.weight_frozen or dtype.itemsize >= work.wide:
        return "input"
    other = work.backend != "exp" and work.device.type != "cpu" and dtype != work.dtype
    if dtype == torch.float16 or other:  # a GPU's GEMM of other operands cannot add to the weight's dtype
        return "float32"
    few = FEW_CHUNKS if work.workspace_mib is None else FEW_ASKED_CHUNKS
    if work.backend != "exp" and not work.narrow_pair:
        few = 1
    return "float32" if work.accumulate == "float32" or (work.accumulate == "auto" and chunks > few) else "input"


def gemms_of(work: Work, dtype: torch.dtype) -> tuple[str, str]:
    """Return how the logits of a side with operands of ``dtype`` are multiplied, and how its gradients: see `HeadPlan`.

    On CPUs a bf16 GEMM rounds its result, and without AVX-512-BF16 or AMX it runs up to 20 times slower than a float32
    one; fp16 is slower still, and its range too small for the gradient of the logits.
    """
    device, bf16 = work.device.type, dtype == torch.bfloat16
    if dtype.itemsize >= 4:
        return "same", "same"
    if work.backend == "row":
        return "out_dtype", "narrow"  # fp16 too: the kernel lifts its gradients to where fp16 is precise
    if device == "cuda" and torch.version.hip is None:
        return "out_dtype", "narrow" if bf16 else "blocks"
    narrow = device == "cpu" and bf16 and cpu_multiplies_bf16() and work.budget() >= ONEDNN_LEAST_WORKSPACE
    return "blocks", "narrow" if narrow else "blocks"


def memory_of(device: torch.device) -> int:
    """Return the bytes of the GPU at hand; of an H100 where there is none."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return 81079 * MIB
    return torch.cuda.get_device_properties(device).total_memory


def cpu_multiplies_bf16() -> bool:
    """Return whether this machine's CPU has instructions for bf16 GEMMs: nothing else looks at the CPU."""
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def _cut_logits(work: Work) -> dict[str, Any]:
    """Cut where a chunk's logits exist, and of two sides both: see the rule above.

    The narrow gradient of two sides takes a quarter of their logits' bytes: chunks of it are longer than of logits, and
    the weight's gradient is read, written and rounded once a chunk.
    """
    (N, D, V), cpu, pair, budget = work.size, work.device.type == "cpu", work.narrow_pair, work.budget()
    wide, narrow = work.wide, work.dtype.itemsize
    teacher_D, U, teacher_dtype = work.teacher or (0, 0, work.dtype)
    gemms, block_rows = gemms_of(work, work.dtype), 0
    if "blocks" in (*gemms, gemms_of(work, teacher_dtype)[0]):
        block_rows = max(1, min(V, BLOCK, budget // 8 // max(1, 4 * (D + teacher_D))))
    fixed = N * BYTES_PER_TOKEN + block_rows * (D + teacher_D) * (wide + narrow) + 16 * V + 8 * U
    columns = max(64, -(-V // (16 if cpu else 4)))  # handled at a time, by plain PyTorch
    logits = wide * (padded(max(V, U) + 1) + 2 * columns * (work.backend != "row" and not work.function))
    row = 2 * D * (wide + narrow) + 40 * wide
    if teacher_D:
        logits = 2 * logits + teacher_D * (wide + teacher_dtype.itemsize)
    else:
        row += U * (8 + 16 * wide)  # ids, both sides' outcomes
    if cpu and gemms[1] == "narrow":
        fixed, row = fixed + ONEDNN_BYTES, row + ONEDNN_ROW_BYTES
    piece = FUNCTION_COPIES * wide * V if work.function else logits * pair
    row += narrow * padded(V) if pair else logits

    most = some = N
    if work.workspace_mib is None:
        least = max(FEWEST_ROWS, CPU_CHUNK_BYTES // (4 * max(1, V)) * cpu)
        if piece:
            least = 8 if cpu else ROWS
        most = max(least, -(-N // (FEW_CHUNKS if pair else FEWEST_CHUNKS)))
        some = most if cpu else most // 5
    room, tile = max(0, budget - fixed), 1 if cpu else GPU_TILE
    product_rows = max(1, min(N, room // 2 // piece, some)) if piece else 0
    product_rows -= product_rows % tile * (pair and product_rows > tile)
    rows = chunk_of(N, max(1, min(most, (room - product_rows * piece) // row)), tile)
    rows = max(work.groups, rows - rows % work.groups)  # as many of each rank that has tokens of its own
    return {
        "chunk_rows": rows, "scratch_bytes": fixed + product_rows * piece + rows * row, "block_rows": block_rows,
        "logits_gemm": gemms[0], "backward_gemm": gemms[1],
        "columns": min(columns, max(64, 2**19 // rows)) if cpu else columns,  # 2 MiB, which stay in cache
        "piece_rows" if work.function else "product_rows": chunk_of(rows, product_rows or rows, tile),
    }  # fmt: skip


def _cut_exponentials(work: Work) -> dict[str, Any]:
    """Cut chunks of exponentials, or blocks of the vocabulary: see the rule above.

    Of a sharded vocabulary a chunk has two pieces; where ranks have tokens of their own, each piece as many of each.
    """
    (N, D, V), sharded, kept = work.size, work.sharded, work.kept
    unit, part = 2 * work.groups if work.groups > 1 else 1, 1 + work.weight_frozen
    fixed = N * (BYTES_PER_TOKEN + work.token_bytes) + 24 * V + 32 * D
    if kept:  # the ordered copy, or the gradient put back; means and sums
        fixed += work.weight_dtype.itemsize * V * D * 33 // 32
    # Of a row: hidden states in order and times s, and numbers; of skipped tiles squares, masses and lists. Ranks
    # gather hidden states ahead, and sum all of E W. In blocks E W is summed, and parts of it may meet.
    row, room = 2 * D * (1 + work.copied) + 64 + V // 7 * kept + 8 * D * sharded, max(0, work.budget() - fixed)
    sums, of_block = row + 4 * -(-V // GPU_TILE) + work.sum_row_bytes, row + 4 * D + 2 * D * work.skips
    of_chunk = sums + 4 * D + 2 * padded(V)

    def whole(rows: int) -> int:
        rows = max(unit, rows // unit * unit)
        if ROWS <= rows < N and not kept and unit == 1:
            rows = 1 << rows.bit_length() - 1
        return -(-chunk_of(N, rows, GPU_TILE) // unit) * unit

    def in_float32(rows: int) -> bool:  # because chunks are many
        return accumulate_in(work, -(-N // rows)) != accumulate_in(work, 1)

    if work.values_only and not (sharded or kept):
        rows = whole(room // sums)
        return {"chunk_rows": rows, "scratch_bytes": fixed + rows * sums, "columns": V, "product_rows": rows}
    longest = room // of_chunk
    if work.workspace_mib is None:
        few = ROWS * (part if N <= 4 * ROWS else 2)
        most = max(few, EXP_WORK // (V * max(D, 1024)), power_of_2(-(-N // FEW_CHUNKS)) // part) // part
        longest = min(longest, most, max(N // 2, ROWS * (1 + sharded)))
        room = max(room, BLOCK * (of_block + 2 * min(V, BLOCK)) * (not sharded))
    rows, least = whole(longest), min(V, BLOCK // 4)
    fitting = [min(BLOCK, room // max(of_block + 2 * classes, sums)) for classes in (min(V, BLOCK), least)]
    C = min(map(whole, fitting), key=in_float32)
    short = rows < min(N, FEWEST_ROWS // part) or in_float32(rows) > in_float32(C)
    if work.gradient == "recompute" or (short and not kept):
        widest = (room // C - of_block) // 2 // TILE_COLUMNS * TILE_COLUMNS
        columns = chunk_of(V, max(least, widest), WAVE // C)
        scratch = fixed + C * max(of_block + 2 * padded(columns), sums)
        return {"chunk_rows": C, "scratch_bytes": scratch, "columns": columns, "product_rows": C, "schedule": "blocks"}
    products = chunk_of(rows, min(BLOCK, power_of_2(WAVE // D)), GPU_TILE)
    if sharded:
        products = rows if rows <= ROWS else -(-rows // 2)
    return {"chunk_rows": rows, "scratch_bytes": fixed + rows * of_chunk, "columns": V, "product_rows": products}


def _cut_kept(work: Work) -> dict[str, Any]:
    """Cut where tiles are skipped: in the memory of a loss that skips none, or as much more as the ordered copy takes.

    A user's own limit is kept, and where it is too low no tile is skipped. The chunks are those of all gradients in
    forward also where backward computes some: both passes choose alike, since backward reads what forward saved.
    """
    (N, D, V), of_chunks = work.size, work._replace(gradient="forward", weight_frozen=False, values_only=False)
    scratch = _cut_exponentials(of_chunks._replace(kept=False))["scratch_bytes"]
    limits = [scratch, scratch + work.weight_dtype.itemsize * V * D] if work.workspace_mib is None else [work.budget()]
    for limit in limits:
        cut = _cut_exponentials(of_chunks._replace(workspace_mib=limit / MIB))
        if cut["chunk_rows"] >= min(N, FEWEST_ROWS) and cut["scratch_bytes"] <= limit:
            return {**cut, "kept": True}
    return _cut_exponentials(work._replace(kept=False))


def padded(V: int) -> int:
    """Return the row length of a chunk's logits: 16-byte rows for the GEMMs, also when narrowed to two bytes."""
    return -(-V // 8) * 8


def chunk_of(N: int, rows: int, tile: int) -> int:
    """Return the rows of chunks of one length, at most ``rows``, that make up N: the last should not be a short one.

    In whole tiles, or halves where whole ones are much of a chunk.
    """
    if rows >= N:
        return max(1, N)
    tile = tile if rows >= 4 * tile else max(1, tile // 2)
    if rows > 2 * tile:
        rows -= rows % tile
    evenly = -(-N // -(-N // rows))
    return min(rows, -(-evenly // tile) * tile)
