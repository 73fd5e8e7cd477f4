"""What will run, in chunks of how many rows, and the bytes it takes: options in, plan out, arithmetic alone.

N tokens, D hidden size, V vocabulary, C rows of a chunk.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch

from lowtide.errors import ArgumentValueError, UnsupportedError, message
from lowtide.head.arguments import check_options, check_reduction
from lowtide.head.backends import choose_backend, choose_backend_of_function
from lowtide.head.options import HeadOptions

MIB = 2**20
CPU_WORKSPACE = 128 * MIB  # GEMMs of 128 rows already run at 93% of their best rate on two AVX-512 cores
GPU_WORKSPACE = 1152 * MIB  # 2048 rows of bfloat16 for a 256K vocabulary: below that, reading W and dW costs time
MOST_OF_A_GPU = 1 / 32  # the automatic workspace's share of a small GPU's memory
FEWEST_CHUNKS = 12  # where nobody asked: a twelfth of the logits is small beside what else a step keeps
FEWEST_ROWS = {"cpu": 8, "cuda": 512}  # chunks smaller than this are not made for FEWEST_CHUNKS' sake
GPU_TILE = 128
ONEDNN_BYTES, ONEDNN_ROW_BYTES = MIB // 2, 3072  # measured: what its bf16 GEMMs pack operands into, by rows of a chunk
ONEDNN_LEAST_WORKSPACE = 8 * MIB  # in less than this, the packing would crowd out the logits
BYTES_PER_TOKEN = 48  # loss, lse, row factor, kept mask and index: what is held for all N tokens, not a chunk's
STATS_BYTES_PER_TOKEN = 128  # what is found and kept of each token, and in backward the upstream gradients
STATS_BYTES_PER_TARGET = 64  # the same of each target beyond the first

# The exponential path. Figures: benchmarks/results, one H100; docs/algorithm.md says what they mean.
EXP_ROWS = 2048  # a chunk may have so many however few the tokens: W is read twice for each, dW read and written
EXP_WORK = 3 * 2**20  # rows times hidden size below which the thin kernels between the GEMMs begin to show
EXP_PIECES = 8  # chunks, where memory allows: dW may be rounded that often
EXP_BLOCKS_BELOW = {"input": 384, "float32": 704}  # chunk rows below which four GEMMs in blocks beat three in chunks
EXP_LIGHT_CHUNK = 5e10  # rows * D * V: less work than this, and the device waits for the host to launch the next chunk
EXP_FEW_CHUNKS = 8  # the weight's gradient may be rounded this often
EXP_FEW_ASKED_CHUNKS = 48  # likewise where the user bounds the memory, and would not have V * D * 4 bytes more
EXP_BLOCK_WORKSPACE = 256 * MIB  # where E is built in blocks anyway, and nobody asked
EXP_LEAST_BLOCK = 2048  # columns
EXP_WAVE = 132 * 128 * 256  # elements of E W that Hopper's multiprocessors compute at a time, in tiles of 128 x 256
EXP_SUM_ROWS = 8192  # rows of a pass that stores no E

# Any function of the logits (linear_apply).
FUNCTION_COPIES = 8  # wide [rows, V] tensors that a function's graph and its backward hold: entropy has 7, CE 4
PIECE_ELEMENTS = {"cpu": 2**20, "cuda": 2**26}  # logits it gets at a time: half a millisecond of the host's for each
GPU_FUNCTION_WORKSPACE = 3072 * MIB  # what is counted for the function is more than most functions take
MOST_FOR_A_FUNCTION = 1 / 24  # MOST_OF_A_GPU for a function
FUNCTION_CHUNKS = {"cpu": FEWEST_CHUNKS, "cuda": 8}  # FEWEST_CHUNKS and FEWEST_ROWS where a function gets the logits
FUNCTION_ROWS = {"cpu": 8, "cuda": 2048}
BIAS_COLUMN_SHARE = 8  # of the workspace: what a copy of the weight may take that saves a pass for the bias
FUNCTION_PIECES = 16  # on a GPU, where nobody asked: what a function makes of a piece is small beside all logits


@dataclass(frozen=True, kw_only=True)
class HeadPlan:
    """What one call of the head will do. All sizes are upper bounds in bytes.

    Attributes:
        backend: The implementation that runs, and ``reason``, why it does.
        gradient: ``"forward"`` or ``"recompute"``, as in `HeadOptions`.
        accumulate: ``"float32"`` or ``"input"``, as in `HeadOptions`.
        rows: Tokens that are computed, in ``chunks`` chunks of ``chunk_rows`` tokens, the last one perhaps of fewer.
        scratch_bytes: Workspace: logits of one chunk, row sums, [C, D] buffers and blocks of the weight.
        accumulator_bytes: The float32 sum of the weight's gradient, where the gradient itself is narrower.
        cast_bytes: The weight's low-precision copy under autocast.
        logits_gemm: How the logits come about: ``"same"`` (operands and result share a dtype), ``"out_dtype"``
            (narrow operands, float32 result, on the device), ``"blocks"`` (a block of the weight at a time is cast).
        backward_gemm: The same for the two gradient GEMMs; ``"narrow"`` casts the logits' gradient to the operands'
            dtype instead.
        block_rows: Rows of the weight cast at a time (0: none are).
        columns: Width of the blocks in which a chunk's logits are turned into their gradient.
        note: What else the reader should know, such as a workspace that was too small; empty if nothing.
        schedule: ``"chunks"``: a chunk's logits (or exponentials) over the whole vocabulary at once. ``"blocks"``, on
            the exponential path: row sums first, then blocks of ``block_columns`` classes: one GEMM more.
        block_columns: See there.
        sum_rows: Rows of a chunk where nothing but row sums is computed, on the exponential path.
        product_rows: Rows of a chunk whose product with the weight exists at a time, on the exponential path and in
            `linear_divergence`.
        piece_rows: Rows of a chunk that `linear_apply` hands to its function at a time; 0 elsewhere.
        bias_column: Whether a bias becomes one more column of a copy of the weight, which is in the scratch.
    """

    backend: str
    reason: str
    gradient: Literal["forward", "recompute"]
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

    def slices(self) -> Iterator[slice]:
        """Yield each chunk's rows."""
        for start in range(0, self.rows, self.chunk_rows):
            yield slice(start, min(start + self.chunk_rows, self.rows))

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
        if self.piece_rows:
            lines.append(f"the function gets {self.piece_rows} rows of logits at a time")
        return "\n".join([*lines, self.note] if self.note else lines)


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
    """Say what `linear_cross_entropy` will do for N kept tokens, hidden size D and vocabulary V, and its bytes.

    Nothing is computed or allocated. On the CPU ignored tokens are dropped first, so N counts the others; elsewhere
    N counts all.

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
        input_is_copied: True if the hidden states of a chunk have to be copied: another dtype, or axes that cannot be
            flattened without.
        function: True for `linear_apply`, whose function gets a chunk's logits in pieces: `HeadPlan.piece_rows`.
        capability: Compute capability of a GPU that is planned for and is not this machine's. None: this machine's.
        device_bytes: Likewise that GPU's memory.

    Returns:
        HeadPlan: print it, or read its fields.

    Raises:
        ArgumentValueError: A negative size, or a reduction that there is not.
        ArgumentTypeError: ``options`` that are none.
        UnsupportedError: ``options`` asks for what cannot run here.

    Example:
        >>> plan = plan_head(16384, 2048, 131072, torch.bfloat16, "cpu", HeadOptions(workspace_mib=64))
        >>> plan.chunk_rows, plan.chunks
        (98, 168)
    """
    for name, size in (("N", N), ("D", D), ("V", V)):
        if not isinstance(size, int) or size < 0:
            raise ArgumentValueError(message(name, "a size of 0 or more", str(size)))
    check_reduction(reduction)
    options, device = check_options(options), torch.device(device)
    weight_dtype = weight_dtype or dtype
    if function:
        backend, reason = choose_backend_of_function(options)
    else:
        backend, reason = choose_backend(
            options,
            device,
            dtype,
            D,
            V,
            capped_and_smoothed=capped_and_smoothed,
            weight_fits=weight_fits,
            capability=capability,
        )
    gradient = choose_gradient(options, reduction, weight_frozen)
    if backend == "exp":
        return _plan_exp(
            N, D, V, device, options, reason, gradient, weight_dtype, weight_frozen, input_is_copied,
            device_bytes=device_bytes,
        )  # fmt: skip
    return plan_rows_of_logits(
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
        weight_frozen=weight_frozen,
        function=function,
        device_bytes=device_bytes,
    )


def plan_rows_of_logits(
    N: int,
    D: int,
    V: int,
    dtype: torch.dtype,
    device: torch.device,
    options: HeadOptions,
    *,
    backend: str,
    reason: str,
    gradient: Literal["forward", "recompute"],
    weight_dtype: torch.dtype,
    weight_frozen: bool,
    beside: int = 0,
    beside_row: int = 0,
    function: bool = False,
    device_bytes: int | None = None,
) -> HeadPlan:
    """Return the plan where a chunk's logits exist: as many rows of them as the workspace holds.

    ``beside`` bytes of it, and ``beside_row`` for each row of a chunk, are needed for something else. The other
    arguments are those of `plan_head`, settled.
    """
    accumulate_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    budget = workspace_bytes(options, device, device_bytes, function=function)
    logits_gemm, backward_gemm = choose_gemms(device, dtype, budget, backend)
    block_rows = block_rows_of(budget, D, V) if "blocks" in (logits_gemm, backward_gemm) else 0
    fixed = N * BYTES_PER_TOKEN + block_rows * D * (accumulate_dtype.itemsize + dtype.itemsize) + 16 * V + beside
    columns = 0 if function else 2 * columns_of(1, V, device.type)
    row_bytes = _row_bytes(D, V, dtype, accumulate_dtype, backend, columns) + beside_row
    copied = V * padded(D + 1) * dtype.itemsize
    bias_column = function and logits_gemm == "out_dtype" and copied <= budget // BIAS_COLUMN_SHARE
    fixed += copied * bias_column
    automatic, wanted = options.workspace_mib is None, _automatic_rows(N, device.type, function)
    piece_rows = 0
    if function:
        left = budget - fixed - wanted * row_bytes if automatic else 0  # by chunks that are as large as they should be
        piece_row_bytes = FUNCTION_COPIES * accumulate_dtype.itemsize * V
        piece_rows = _piece_rows(N, V, max(left, (budget - fixed) // 2) // piece_row_bytes, device.type)
        if automatic and device.type != "cpu":
            piece_rows = min(piece_rows, max(FEWEST_ROWS["cuda"], N // FUNCTION_PIECES))
        fixed += piece_rows * piece_row_bytes
    if device.type == "cpu" and backward_gemm == "narrow":
        fixed, row_bytes = fixed + ONEDNN_BYTES, row_bytes + ONEDNN_ROW_BYTES
    most = max(1, (budget - fixed) // max(1, row_bytes))
    rows = min(most, wanted) if automatic else most
    if device.type != "cpu" and rows > GPU_TILE:
        rows -= rows % GPU_TILE
        rows = _level(N, rows) if function else rows
    chunks = -(-N // rows)
    rows = max(1, -(-N // max(1, chunks))) if device.type == "cpu" else min(rows, max(1, N))
    scratch = fixed + rows * row_bytes
    needs_whole_weight = backward_gemm != "blocks" or logits_gemm == "out_dtype"
    accumulate = _accumulate(options, weight_dtype, accumulate_dtype, many=chunks > 1)
    if device.type != "cpu" and weight_dtype not in (dtype, accumulate_dtype):
        accumulate = "float32"  # a GPU's GEMM of operands narrowed in another way cannot add to the weight's dtype
    return HeadPlan(
        backend=backend,
        reason=reason,
        gradient=gradient,
        accumulate=accumulate,
        rows=N,
        chunks=chunks,
        chunk_rows=rows,
        scratch_bytes=scratch,
        accumulator_bytes=V * D * accumulate_dtype.itemsize if accumulate == "float32" and not weight_frozen else 0,
        cast_bytes=V * D * dtype.itemsize if weight_dtype != dtype and needs_whole_weight else 0,
        logits_gemm=logits_gemm,
        backward_gemm=backward_gemm,
        block_rows=block_rows,
        columns=columns_of(rows, V, device.type),
        note=workspace_note(options, N, scratch),
        piece_rows=-(-rows // -(-rows // piece_rows)) if function else 0,  # pieces of one size
        bias_column=bias_column,
    )


def _plan_exp(
    N: int,
    D: int,
    V: int,
    device: torch.device,
    options: HeadOptions,
    reason: str,
    gradient: Literal["forward", "recompute"],
    weight_dtype: torch.dtype,
    weight_frozen: bool,
    input_is_copied: bool,
    *,
    token_bytes: int = BYTES_PER_TOKEN,
    tile_numbers: int = 1,
    device_bytes: int | None = None,
    sum_row_bytes: int = 0,
) -> HeadPlan:
    """Return the plan of the exponential path: chunks by bytes, and vocabulary blocks where they are too short.

    ``token_bytes`` are held for all N tokens; ``tile_numbers`` float32 are what each tile leaves of a row, and
    ``sum_row_bytes`` what else a row takes where nothing but sums is computed.
    """
    fixed = N * token_bytes + 24 * V + 32 * D
    thin = D * (2 + 4 + 2 * input_is_copied) + 64  # s x, E W and the hidden states, a row's numbers
    sums = 4 * tile_numbers * -(-V // GPU_TILE)
    whole = thin + sums + 2 * padded(V)
    budget = workspace_bytes(options, device, device_bytes)
    room = max(0, budget - fixed)
    automatic = options.workspace_mib is None
    rows = min(room // whole, _exp_rows(N, D)) if automatic else room // whole
    rows = max(1, min(_whole_tiles(rows), max(1, N)))
    rows = _level(N, rows)
    few = EXP_FEW_CHUNKS if automatic else EXP_FEW_ASKED_CHUNKS
    many = -(-N // rows) > few
    accumulate = _accumulate(options, weight_dtype, torch.float32, many=many)
    columns = V
    light = -(-N // rows) > EXP_FEW_CHUNKS and rows * D * V < EXP_LIGHT_CHUNK
    if gradient == "recompute" or light or rows < min(N, EXP_BLOCKS_BELOW[accumulate]):
        if automatic:
            room = max(0, min(budget, EXP_BLOCK_WORKSPACE) - fixed)
        blocked = _exp_blocks(N, V, room, thin)
        if blocked is not None:
            rows, columns = blocked
            many = -(-N // rows) > few
            accumulate = _accumulate(options, weight_dtype, torch.float32, many=many)
    blocked_schedule = gradient == "recompute" or columns < V
    sum_row = sums + 64 + 2 * D * input_is_copied + sum_row_bytes
    sum_rows = max(1, min(max(1, N), EXP_SUM_ROWS, _whole_tiles(room // sum_row)))
    scratch = fixed + rows * (thin + 2 * padded(columns) + (0 if blocked_schedule else sums))
    if blocked_schedule:
        scratch = max(scratch, fixed + sum_rows * sum_row)
    return HeadPlan(
        backend="exp",
        reason=reason,
        gradient=gradient,
        accumulate=accumulate,
        rows=N,
        chunks=-(-N // rows),
        chunk_rows=rows,
        scratch_bytes=scratch,
        accumulator_bytes=V * D * 4 if accumulate == "float32" and not weight_frozen else 0,
        cast_bytes=V * D * 2 if weight_dtype != torch.bfloat16 else 0,
        note=workspace_note(options, N, scratch),
        schedule="blocks" if blocked_schedule else "chunks",
        block_columns=columns,
        sum_rows=sum_rows,
        product_rows=rows if blocked_schedule else min(rows, _wave_rows(D)),
    )


def plan_exp_stats(
    N: int,
    D: int,
    V: int,
    device: torch.device,
    options: HeadOptions,
    reason: str,
    *,
    weight_dtype: torch.dtype,
    weight_frozen: bool,
    input_is_copied: bool,
    tile_numbers: int,
    targets: int,
    sum_row_bytes: int,
) -> HeadPlan:
    """Return the plan of `linear_token_stats` on the exponential path; arguments as in `plan_head`.

    ``tile_numbers`` float32 are what each tile of the vocabulary leaves of a row, ``sum_row_bytes`` are what else it
    takes in forward. Each token has so many ``targets``.
    """
    return _plan_exp(
        N, D, V, device, options, reason, "recompute", weight_dtype, weight_frozen, input_is_copied,
        token_bytes=STATS_BYTES_PER_TOKEN + STATS_BYTES_PER_TARGET * max(0, targets - 1), tile_numbers=tile_numbers,
        sum_row_bytes=sum_row_bytes,
    )  # fmt: skip


def _exp_rows(N: int, D: int) -> int:
    """Return the rows of a chunk where memory is no matter: few enough to be small beside N, enough to be fast."""
    fast = max(N // EXP_PIECES, -(-EXP_WORK // max(1, D)))
    power = 1 << max(0, fast - 1).bit_length()
    return max(1, min(power, max(N // 4, EXP_ROWS)))


def _exp_blocks(N: int, V: int, room: int, thin: int) -> tuple[int, int] | None:
    """Return (chunk rows, columns of a block) that fit ``room`` bytes; None where blocks would be no use."""
    for rows in (2048, 1536, 1024, 768, 512, 384, 256, 128):
        rows = min(rows, max(1, N))
        columns = (room - rows * thin) // (2 * rows) // 256 * 256
        if columns >= min(V, EXP_LEAST_BLOCK):
            return _level(N, rows), min(V, columns)
    return None


def _wave_rows(D: int) -> int:
    """Return the power of two nearest to the rows of one wave of tiles: beyond it a second one would begin."""
    return 1 << round(math.log2(EXP_WAVE / max(1, D)))


def _whole_tiles(rows: int) -> int:
    """Return fewer rows, in whole tiles; half ones count where a tile is much of a chunk."""
    tile = GPU_TILE if rows >= 4 * GPU_TILE else GPU_TILE // 2
    return rows - rows % tile if rows > GPU_TILE else rows


def _level(N: int, rows: int) -> int:
    """Return fewer rows where that leaves the number of chunks: the last one should not be a short one."""
    if rows < GPU_TILE or rows >= N:
        return rows
    share = -(-N // -(-N // rows))
    tile = GPU_TILE if rows >= 4 * GPU_TILE else GPU_TILE // 2
    return min(rows, -(-share // tile) * tile)


def _accumulate(
    options: HeadOptions, weight_dtype: torch.dtype, wide: torch.dtype, *, many: bool
) -> Literal["float32", "input"]:
    if weight_dtype == torch.float16:
        return "float32"
    if weight_dtype.itemsize >= wide.itemsize:
        return "input"
    return "float32" if options.accumulate == "float32" or (options.accumulate == "auto" and many) else "input"


def workspace_note(options: HeadOptions, N: int, scratch: int) -> str:
    """Return what a plan says where the least that can be done takes more than was asked for; empty if it does not."""
    if options.workspace_mib is None or scratch <= options.workspace_mib * MIB:
        return ""
    return (
        f"workspace_mib={options.workspace_mib} is less than one row of logits and the numbers kept for each of"
        f" {N} tokens take: one row is computed at a time, in {scratch / MIB:.2f} MiB"
    )


def choose_gradient(options: HeadOptions, reduction: str, weight_frozen: bool) -> Literal["forward", "recompute"]:
    """Return when the gradients are computed.

    With a scalar loss the upstream gradient is one factor, applied afterwards. With one loss a token it is not, but
    then a frozen head still allows it: the input's gradient is a row times the upstream factor of that row.

    Raises:
        UnsupportedError: ``gradient="forward"`` was asked for where it cannot be right.
    """
    known = reduction != "none" or weight_frozen
    if options.gradient == "forward" and not known:
        raise UnsupportedError(
            message(
                "gradient",
                "'auto' or 'recompute' with reduction='none' and a head that is trained",
                "'forward'",
                "The weight's gradient needs each token's upstream gradient, known in backward only.",
            )
        )
    return "recompute" if options.gradient == "recompute" or not known else "forward"


def choose_gemms(
    device: torch.device, dtype: torch.dtype, budget: int, backend: str
) -> tuple[Literal["same", "out_dtype", "blocks"], Literal["same", "narrow", "blocks"]]:
    """Return how logits and gradients are multiplied for operands of ``dtype`` in ``budget`` bytes: see `HeadPlan`.

    float32 logits come from narrow operands without a float32 copy of the weight. On CPUs a bf16 GEMM rounds its
    result, and without AVX-512-BF16 or AMX it runs up to 20 times slower than a float32 one; fp16 is slower still,
    and its range too small for the gradient of the logits.
    """
    if dtype in (torch.float32, torch.float64):
        return "same", "same"
    if backend == "row":
        return "out_dtype", "narrow"  # fp16 too: the kernel lifts its gradients to where fp16 is precise
    if device.type == "cuda" and torch.version.hip is None:
        return "out_dtype", "narrow" if dtype == torch.bfloat16 else "blocks"
    if device.type == "cpu" and dtype == torch.bfloat16 and _cpu_multiplies_bf16() and budget >= ONEDNN_LEAST_WORKSPACE:
        return "blocks", "narrow"
    return "blocks", "blocks"


@cache
def _cpu_multiplies_bf16() -> bool:
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def workspace_bytes(
    options: HeadOptions, device: torch.device, device_bytes: int | None = None, *, function: bool = False
) -> int:
    """Return how much scratch memory a call may take.

    Args:
        options: As given.
        device: Where.
        device_bytes: Memory of the GPU that is planned for; None: the one that is there.
        function: Whether the call is one of `linear_apply`.
    """
    if options.workspace_mib is not None:
        return int(options.workspace_mib * MIB)
    if device.type == "cpu":
        return CPU_WORKSPACE
    most, share = (GPU_FUNCTION_WORKSPACE, MOST_FOR_A_FUNCTION) if function else (GPU_WORKSPACE, MOST_OF_A_GPU)
    if device_bytes is None and device.type == "cuda" and torch.cuda.is_available():
        device_bytes = torch.cuda.get_device_properties(device).total_memory
    return most if device_bytes is None else min(most, int(device_bytes * share))


def _automatic_rows(N: int, device_type: str, function: bool) -> int:
    """Return the rows of a chunk where memory is no matter."""
    kind = device_type if device_type == "cpu" else "cuda"
    chunks, fewest = (FUNCTION_CHUNKS[kind], FUNCTION_ROWS[kind]) if function else (FEWEST_CHUNKS, FEWEST_ROWS[kind])
    return max(1, fewest, -(-N // chunks))


def _piece_rows(N: int, V: int, most: int, device_type: str) -> int:
    enough = PIECE_ELEMENTS.get(device_type, PIECE_ELEMENTS["cuda"]) // max(1, V)
    return max(1, min(max(2, enough), most, N))


def block_rows_of(budget: int, D: int, V: int) -> int:
    """Return how many rows of the weight are cast at a time."""
    return max(1, min(V, 4096, budget // 8 // max(1, 4 * D)))


def padded(V: int) -> int:
    """Return the row length of a chunk's logits: 16-byte rows for the GEMMs, also when narrowed to two bytes."""
    return -(-V // 8) * 8


def columns_of(rows: int, V: int, device_type: str) -> int:
    """Return the columns handled at a time: few launches on a GPU; on a CPU 2 MiB, which stay in cache."""
    if device_type != "cpu":
        return max(1, -(-V // 4))
    return max(1, min(V, max(64, min(-(-V // 16), 2**19 // rows))))


def _row_bytes(D: int, V: int, dtype: torch.dtype, accumulate_dtype: torch.dtype, backend: str, columns: int) -> int:
    """Return the scratch of one row of a chunk, with so many more ``columns`` beside its logits in plain PyTorch."""
    wide = accumulate_dtype.itemsize
    if backend == "row":
        return wide * padded(V) + D * (2 * wide + 2 * dtype.itemsize) + 64
    return wide * (padded(V) + columns) + D * (2 * wide + dtype.itemsize) + 24 * wide
