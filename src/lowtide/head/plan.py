"""What will run, in chunks of how many rows, and the bytes it takes: options in, plan out, arithmetic alone.

N tokens, D hidden size, V vocabulary, C rows of a chunk.
"""

from functools import cache, lru_cache
from typing import Literal

import torch

from lowtide.errors import ArgumentValueError, UnsupportedError, message
from lowtide.head.arguments import check_options, check_reduction
from lowtide.head.backends import choose_backend, choose_backend_of_function
from lowtide.head.exponentials.plan import plan_exp
from lowtide.head.head_plan import (
    BYTES_PER_TOKEN,
    GPU_TILE,
    MIB,
    HeadPlan,
    accumulate_in,
    level,
    padded,
    workspace_bytes,
    workspace_note,
)
from lowtide.head.options import HeadOptions

FEWEST_CHUNKS = 12  # where nobody asked: a twelfth of the logits is small beside what else a step keeps
FEWEST_ROWS = 512  # fewer are not made for FEWEST_CHUNKS' sake: the weight is read, and its gradient added to, in each
CPU_CHUNK_BYTES = 8 * MIB  # nor shorter chunks on a CPU, where each operator wakes all threads and waits for the last
ONEDNN_BYTES, ONEDNN_ROW_BYTES = MIB // 2, 3072  # measured: what its bf16 GEMMs pack operands into, by rows of a chunk
ONEDNN_LEAST_WORKSPACE = 8 * MIB  # in less than this, the packing would crowd out the logits

# Any function of the logits (linear_apply).
FUNCTION_COPIES = 8  # wide [rows, V] tensors that a function's graph and its backward hold: entropy has 7, CE 4
PIECE_ELEMENTS = {"cpu": 2**20, "cuda": 2**26}  # logits it gets at a time: half a millisecond of the host's for each
FUNCTION_CHUNKS = {"cpu": FEWEST_CHUNKS, "cuda": 8}  # FEWEST_CHUNKS and FEWEST_ROWS where a function gets the logits
FUNCTION_ROWS = {"cpu": 8, "cuda": 2048}
BIAS_COLUMN_SHARE = 8  # of the workspace: what a copy of the weight may take that saves a pass for the bias
FUNCTION_PIECES = 16  # on a GPU, where nobody asked: what a function makes of a piece is small beside all logits


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
        >>> plan = plan_head(16384, 2048, 131072, torch.float32, "cpu", HeadOptions(workspace_mib=64))
        >>> plan.chunk_rows, plan.chunks
        (103, 160)
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
        return plan_exp(
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


remembered_plan = lru_cache(maxsize=256)(plan_head)


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
    fixed += 0 if function else accumulate_dtype.itemsize * padded(V)  # a soft cap's block is a row at least
    automatic, wanted = options.workspace_mib is None, _automatic_rows(N, V, device.type, function)
    piece_rows = 0
    if function:
        left = budget - fixed - wanted * row_bytes if automatic else 0  # by chunks that are as large as they should be
        piece_row_bytes = FUNCTION_COPIES * accumulate_dtype.itemsize * V
        piece_rows = _piece_rows(N, V, max(left, (budget - fixed) // 2) // piece_row_bytes, device.type)
        if automatic and device.type != "cpu":
            piece_rows = min(piece_rows, max(FEWEST_ROWS, N // FUNCTION_PIECES))
        fixed += piece_rows * piece_row_bytes
    if device.type == "cpu" and backward_gemm == "narrow":
        fixed, row_bytes = fixed + ONEDNN_BYTES, row_bytes + ONEDNN_ROW_BYTES
    most = max(1, (budget - fixed) // max(1, row_bytes))
    rows = min(most, wanted) if automatic else most
    if device.type != "cpu" and rows > GPU_TILE:
        rows -= rows % GPU_TILE
        rows = level(N, rows) if function else rows
    chunks = -(-N // rows)
    rows = max(1, -(-N // max(1, chunks))) if device.type == "cpu" else min(rows, max(1, N))
    scratch = fixed + rows * row_bytes
    needs_whole_weight = backward_gemm != "blocks" or logits_gemm == "out_dtype"
    accumulate = accumulate_in(options, weight_dtype, accumulate_dtype, many=chunks > 1)
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
    if device.type == "cpu" and dtype == torch.bfloat16 and cpu_multiplies_bf16() and budget >= ONEDNN_LEAST_WORKSPACE:
        return "blocks", "narrow"
    return "blocks", "blocks"


@cache
def cpu_multiplies_bf16() -> bool:
    """Return whether this machine's CPU has instructions for bf16 GEMMs.

    The one place that looks at the CPU: a test that replaces this function runs what another machine would.
    """
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def _automatic_rows(N: int, V: int, device_type: str, function: bool) -> int:
    """Return the rows of a chunk where memory is no matter."""
    kind = device_type if device_type == "cpu" else "cuda"
    chunks, fewest = (FUNCTION_CHUNKS[kind], FUNCTION_ROWS[kind]) if function else (FEWEST_CHUNKS, FEWEST_ROWS)
    if kind == "cpu" and not function:
        fewest = max(fewest, CPU_CHUNK_BYTES // (4 * max(1, V)))
    return max(1, fewest, -(-N // chunks))


def _piece_rows(N: int, V: int, most: int, device_type: str) -> int:
    enough = PIECE_ELEMENTS.get(device_type, PIECE_ELEMENTS["cuda"]) // max(1, V)
    return max(1, min(max(2, enough), most, N))


def block_rows_of(budget: int, D: int, V: int) -> int:
    """Return how many rows of the weight are cast at a time."""
    return max(1, min(V, 4096, budget // 8 // max(1, 4 * D)))


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
