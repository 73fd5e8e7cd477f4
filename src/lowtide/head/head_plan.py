"""What every plan of the head is made of: `HeadPlan`, the workspace, where the weight's gradient is summed."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch

from lowtide.head.options import HeadOptions

MIB = 2**20
CPU_WORKSPACE = 160 * MIB  # 256 rows of a vocabulary of 128K; with 128 rows a step takes 6% longer on two cores
GPU_WORKSPACE = 1152 * MIB  # 2048 rows of bfloat16 for a 256K vocabulary: below that, reading W and dW costs time
MOST_OF_A_GPU = 1 / 32  # the automatic workspace's share of a small GPU's memory
GPU_FUNCTION_WORKSPACE = 3072 * MIB  # what is counted for the function is more than most functions take
MOST_FOR_A_FUNCTION = 1 / 24  # MOST_OF_A_GPU for a function
GPU_TILE = 128
BYTES_PER_TOKEN = 48  # loss, lse, row factor, kept mask and index: what is held for all N tokens, not a chunk's


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


def workspace_note(options: HeadOptions, N: int, scratch: int) -> str:
    """Return what a plan says where the least that can be done takes more than was asked for; empty if it does not."""
    if options.workspace_mib is None or scratch <= options.workspace_mib * MIB:
        return ""
    return (
        f"workspace_mib={options.workspace_mib} is less than one row of logits and the numbers kept for each of"
        f" {N} tokens take: one row is computed at a time, in {scratch / MIB:.2f} MiB"
    )


def accumulate_in(
    options: HeadOptions, weight_dtype: torch.dtype, wide: torch.dtype, *, many: bool
) -> Literal["float32", "input"]:
    """Return where the weight's gradient is summed, over ``many`` chunks or few: see `HeadOptions`."""
    if weight_dtype == torch.float16:
        return "float32"
    if weight_dtype.itemsize >= wide.itemsize:
        return "input"
    return "float32" if options.accumulate == "float32" or (options.accumulate == "auto" and many) else "input"


def level(N: int, rows: int) -> int:
    """Return fewer rows where that leaves the number of chunks: the last one should not be a short one."""
    if rows < GPU_TILE or rows >= N:
        return rows
    share = -(-N // -(-N // rows))
    tile = GPU_TILE if rows >= 4 * GPU_TILE else GPU_TILE // 2
    return min(rows, -(-share // tile) * tile)


def padded(V: int) -> int:
    """Return the row length of a chunk's logits: 16-byte rows for the GEMMs, also when narrowed to two bytes."""
    return -(-V // 8) * 8
