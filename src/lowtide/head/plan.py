"""What will run, in chunks of how many rows, and the bytes it takes: options in, plan out, arithmetic alone.

N tokens, D hidden size, V vocabulary, C rows of a chunk.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from numbers import Real
from typing import Literal, get_args

import torch

from lowtide.errors import ArgumentTypeError, ArgumentValueError, UnsupportedError, message

Accumulate = Literal["auto", "float32", "input"]
Backend = Literal["auto", "exp", "row", "torch"]
Gradient = Literal["auto", "forward", "recompute"]

MIB = 2**20
CPU_WORKSPACE = 128 * MIB  # GEMMs of 128 rows already run at 93% of their best rate on two AVX-512 cores
GPU_WORKSPACE = 1024 * MIB  # 2048 rows of a 128K vocabulary: below that, reading W and dW costs time
MOST_OF_A_GPU = 1 / 32  # the automatic workspace's share of a small GPU's memory
FEWEST_CHUNKS = 12  # where nobody asked: a twelfth of the logits is small beside what else a step keeps
FEWEST_ROWS = {"cpu": 8, "cuda": 512}  # chunks smaller than this are not made for FEWEST_CHUNKS' sake
GPU_TILE = 128
ONEDNN_BYTES, ONEDNN_ROW_BYTES = MIB // 2, 3072  # measured: what its bf16 GEMMs pack operands into, by rows of a chunk
ONEDNN_LEAST_WORKSPACE = 8 * MIB  # in less than this, the packing would crowd out the logits
BYTES_PER_TOKEN = 48  # loss, lse, row factor, kept mask and index: what is held for all N tokens, not a chunk's


@dataclass(frozen=True, kw_only=True)
class HeadOptions:
    """How the head trades memory for time. The defaults choose for you; `plan_head` says what they chose.

    Args:
        workspace_mib: Most scratch memory in MiB above inputs, outputs and returned gradients: the chunk's logits,
            row sums and [C, D] buffers. The float32 accumulator of the weight's gradient, and under autocast the
            weight's low-precision copy, are not in it; `plan_head` reports them. Never less than one row.
            None: chosen by device.
        accumulate: Where the weight's gradient is summed over chunks: ``"float32"``, ``"input"`` (the weight's own
            dtype: V*D*4 bytes less, and one more rounding a chunk), or ``"auto"``: float32 where there is more than
            one chunk. An fp16 weight's always is in float32: the sum may not fit fp16 before its scale is known.
        backend: ``"auto"`` takes the fastest that fits. One asked for by name runs or raises: ``"torch"`` is plain
            PyTorch on any device.
        gradient: ``"forward"`` computes the gradients along with the loss (three GEMMs), ``"recompute"`` builds the
            logits once more in backward (four), and ``"auto"`` takes the first wherever the upstream gradient is a
            scalar, or the head is frozen.

    Raises:
        ArgumentValueError: A value that is none of these.
        ArgumentTypeError: ``workspace_mib`` is not a number.
    """

    workspace_mib: float | None = None
    accumulate: Accumulate = "auto"
    backend: Backend = "auto"
    gradient: Gradient = "auto"

    def __post_init__(self) -> None:
        mib: object = self.workspace_mib
        if mib is not None:
            if isinstance(mib, bool) or not isinstance(mib, Real):
                raise ArgumentTypeError(message("workspace_mib", "a number of MiB or None", f"{mib!r}"))
            if not 0 < float(mib) < math.inf:
                raise ArgumentValueError(message("workspace_mib", "a finite number above 0, or None", f"{mib!r}"))
        for name, kind in (("accumulate", Accumulate), ("backend", Backend), ("gradient", Gradient)):
            allowed, got = get_args(kind), getattr(self, name)
            if got not in allowed:
                raise ArgumentValueError(message(name, f"one of {', '.join(map(repr, allowed))}", f"{got!r}"))


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
    logits_gemm: Literal["same", "out_dtype", "blocks"]
    backward_gemm: Literal["same", "narrow", "blocks"]
    block_rows: int
    columns: int
    note: str = ""

    def slices(self) -> Iterator[slice]:
        """Yield each chunk's rows."""
        for start in range(0, self.rows, self.chunk_rows):
            yield slice(start, min(start + self.chunk_rows, self.rows))

    def __str__(self) -> str:
        lines = [
            f"backend {self.backend}: {self.reason}",
            f"{self.rows} rows in {self.chunks} chunks of {self.chunk_rows}; gradients in {self.gradient}"
            f"{' pass' if self.gradient == 'forward' else ' in backward'}, weight gradient summed in"
            f" {'float32' if self.accumulate == 'float32' else 'its own dtype'}",
            f"scratch {self.scratch_bytes / MIB:.1f} MiB, accumulator {self.accumulator_bytes / MIB:.1f} MiB,"
            f" weight copy {self.cast_bytes / MIB:.1f} MiB",
        ]
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

    Returns:
        HeadPlan: print it, or read its fields.

    Raises:
        ArgumentValueError: A negative size.
        UnsupportedError: ``options`` asks for what cannot run here.

    Example:
        >>> plan = plan_head(16384, 2048, 131072, torch.bfloat16, "cpu", HeadOptions(workspace_mib=64))
        >>> plan.chunk_rows, plan.chunks
        (98, 168)
    """
    for name, size in (("N", N), ("D", D), ("V", V)):
        if not isinstance(size, int) or size < 0:
            raise ArgumentValueError(message(name, "a size of 0 or more", str(size)))
    options = options or HeadOptions()
    device = torch.device(device)
    weight_dtype = weight_dtype or dtype
    backend, reason = choose_backend(options)
    accumulate_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    budget = _budget(options, device)
    logits_gemm, backward_gemm = choose_gemms(device, dtype, budget)
    block_rows = _block_rows(budget, D, V) if "blocks" in (logits_gemm, backward_gemm) else 0
    fixed = N * BYTES_PER_TOKEN + block_rows * D * (accumulate_dtype.itemsize + dtype.itemsize) + 16 * V
    row_bytes = _row_bytes(D, V, dtype, accumulate_dtype, device.type)
    if device.type == "cpu" and backward_gemm == "narrow":
        fixed, row_bytes = fixed + ONEDNN_BYTES, row_bytes + ONEDNN_ROW_BYTES
    most = max(1, (budget - fixed) // max(1, row_bytes))
    rows = _automatic_rows(N, most, device.type) if options.workspace_mib is None else most
    if device.type != "cpu" and rows > GPU_TILE:
        rows -= rows % GPU_TILE
    chunks = -(-N // rows)
    rows = max(1, -(-N // max(1, chunks))) if device.type == "cpu" else min(rows, max(1, N))
    scratch = fixed + rows * row_bytes
    needs_whole_weight = backward_gemm != "blocks" or logits_gemm == "out_dtype"
    note = ""
    if options.workspace_mib is not None and scratch > budget:
        note = (
            f"workspace_mib={options.workspace_mib} is less than one row of logits and the numbers kept for each of"
            f" {N} tokens take: one row is computed at a time, in {scratch / MIB:.2f} MiB"
        )
    accumulate: Literal["float32", "input"] = "input"
    if weight_dtype == torch.float16 or (
        weight_dtype.itemsize < accumulate_dtype.itemsize
        and (options.accumulate == "float32" or (options.accumulate == "auto" and chunks > 1))
    ):
        accumulate = "float32"
    return HeadPlan(
        backend=backend,
        reason=reason,
        gradient=choose_gradient(options, reduction, weight_frozen),
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
        columns=_columns(rows, V, device.type),
        note=note,
    )


def choose_backend(options: HeadOptions) -> tuple[str, str]:
    """Return the implementation that runs, and why.

    Raises:
        UnsupportedError: The one asked for by name is not in this version.
    """
    if options.backend in ("exp", "row"):
        raise UnsupportedError(
            message("backend", "'auto' or 'torch'", repr(options.backend), "This version has no other implementation.")
        )
    return "torch", "asked for by name" if options.backend == "torch" else "plain PyTorch runs on every device"


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
    device: torch.device, dtype: torch.dtype, budget: int
) -> tuple[Literal["same", "out_dtype", "blocks"], Literal["same", "narrow", "blocks"]]:
    """Return how logits and gradients are multiplied for operands of ``dtype`` in ``budget`` bytes: see `HeadPlan`.

    float32 logits come from narrow operands without a float32 copy of the weight. On CPUs a bf16 GEMM rounds its
    result, and without AVX-512-BF16 or AMX it runs up to 20 times slower than a float32 one; fp16 is slower still,
    and its range too small for the gradient of the logits.
    """
    if dtype in (torch.float32, torch.float64):
        return "same", "same"
    if device.type == "cuda" and torch.version.hip is None:
        return "out_dtype", "narrow" if dtype == torch.bfloat16 else "blocks"
    if device.type == "cpu" and dtype == torch.bfloat16 and _cpu_multiplies_bf16() and budget >= ONEDNN_LEAST_WORKSPACE:
        return "blocks", "narrow"
    return "blocks", "blocks"


@cache
def _cpu_multiplies_bf16() -> bool:
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def _budget(options: HeadOptions, device: torch.device) -> int:
    if options.workspace_mib is not None:
        return int(options.workspace_mib * MIB)
    if device.type == "cuda" and torch.cuda.is_available():
        return min(GPU_WORKSPACE, int(torch.cuda.get_device_properties(device).total_memory * MOST_OF_A_GPU))
    return CPU_WORKSPACE if device.type == "cpu" else GPU_WORKSPACE


def _automatic_rows(N: int, most: int, device_type: str) -> int:
    fewest = FEWEST_ROWS.get(device_type, FEWEST_ROWS["cuda"])
    return max(1, min(most, max(fewest, -(-N // FEWEST_CHUNKS))))


def _block_rows(budget: int, D: int, V: int) -> int:
    return max(1, min(V, 4096, budget // 8 // max(1, 4 * D)))


def padded(V: int) -> int:
    """Return the row length of a chunk's logits: 16-byte rows for the GEMMs, also when narrowed to two bytes."""
    return -(-V // 8) * 8


def _columns(rows: int, V: int, device_type: str) -> int:
    """Columns handled at a time: few launches on a GPU; on a CPU 2 MiB, which stay in cache."""
    if device_type != "cpu":
        return max(1, -(-V // 4))
    return max(1, min(V, max(64, min(-(-V // 16), 2**19 // rows))))


def _row_bytes(D: int, V: int, dtype: torch.dtype, accumulate_dtype: torch.dtype, device_type: str) -> int:
    wide = accumulate_dtype.itemsize
    return wide * (padded(V) + 2 * _columns(1, V, device_type)) + D * (2 * wide + dtype.itemsize) + 24 * wide
