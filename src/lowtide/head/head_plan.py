"""What goes into a plan and what comes out: `Work` and `HeadPlan`.

N tokens, D hidden size, V vocabulary, C rows of a chunk.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

MIB = 2**20
When = Literal["forward", "recompute"]


class Work(NamedTuple):
    """What one pass computes, in sizes, the same on every rank: with the options all that a plan depends on."""

    size: tuple[int, int, int]  # N that are computed, D, V: of the largest shard, with a column for others' classes
    dtype: torch.dtype  # of the GEMMs' operands
    weight_dtype: torch.dtype
    device: torch.device
    choice: tuple[str, str]  # the implementation, and why
    gradient: When
    weight_frozen: bool  # neither weight nor bias gets a gradient
    device_bytes: int | None = None  # memory of the GPU that is planned for; None: the one that is there
    function: bool = False  # a user's function gets the logits
    teacher: tuple[int, int, torch.dtype] | None = None  # a second side's D, V and dtype; of its top k 0 and k
    values_only: bool = False  # no gradient is computed
    # exponentials' own, beside what all take:
    input_is_copied: bool = False  # a chunk's hidden states are, for another dtype or layout
    token_bytes: int = 0  # for each of the N
    row_bytes: int = 0  # for each row of a chunk
    sum_row_bytes: int = 0  # for each where nothing but sums is computed
    tile_numbers: int = 1  # float32 that each tile of the vocabulary leaves of a row
    pieces: int = 0  # that a chunk has at least, so that one's exchanges run beside another's GEMMs

    @property
    def wide(self) -> torch.dtype:
        """Return the dtype of logits and sums."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    @property
    def narrow_pair(self) -> bool:
        """Return whether kernels turn two sides' logits into a gradient that is narrower than they are."""
        by_kernels = self.teacher is not None and self.choice[0] == "row" and not self.values_only
        return by_kernels and self.dtype.itemsize < self.wide.itemsize


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


def padded(V: int) -> int:
    """Return the row length of a chunk's logits: 16-byte rows for the GEMMs, also when narrowed to two bytes."""
    return -(-V // 8) * 8
