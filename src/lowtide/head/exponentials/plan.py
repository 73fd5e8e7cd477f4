"""Plans of the exponential path: chunks by bytes, and blocks of the vocabulary where they are too short.

N tokens, D hidden size, V vocabulary. Figures: benchmarks/results, one H100; docs/algorithm.md says what they mean.
"""

import math
from typing import Literal

import torch

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

STATS_BYTES_PER_TOKEN = 128  # what is found and kept of each token, and in backward the upstream gradients
STATS_BYTES_PER_TARGET = 64  # the same of each target beyond the first
EXP_ROWS = 2048  # a chunk may have so many however few the tokens: W is read twice for each, dW read and written
EXP_WORK = 3 * 2**20  # rows times hidden size below which the thin kernels between the GEMMs begin to show
EXP_PIECES = 8  # chunks, where memory allows: dW may be rounded that often
EXP_BLOCKS_BELOW = {"input": 384, "float32": 704}  # chunk rows below which four GEMMs in blocks beat three in chunks
EXP_LIGHT_CHUNK = 5e10  # rows * D * V: less work than this, and the device waits for the host to launch the next chunk
EXP_CHUNK_WORK = 10**11  # the same with some room, for a slow host: a millisecond of the device's
EXP_SHARD_WORK = 2 * 10**11  # the same of a piece of a chunk whose host has exchanges between ranks to launch as well
EXP_FEW_CHUNKS = 8  # the weight's gradient may be rounded this often
EXP_FEW_ASKED_CHUNKS = 48  # likewise where the user bounds the memory, and would not have V * D * 4 bytes more
EXP_BLOCK_WORKSPACE = 256 * MIB  # where E is built in blocks anyway, and nobody asked
EXP_LEAST_BLOCK = 2048  # columns
EXP_WAVE = 132 * 128 * 256  # elements of E W that Hopper's multiprocessors compute at a time, in tiles of 128 x 256
EXP_SUM_ROWS = 8192  # rows of a pass that stores no E


def plan_exp(
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
    row_bytes: int = 0,
    pieces: int = 0,
) -> HeadPlan:
    """Return the plan of the exponential path: chunks by bytes, and vocabulary blocks where they are too short.

    ``token_bytes`` are held for all N tokens; ``tile_numbers`` float32 are what each tile leaves of a row,
    ``row_bytes`` what else a row of a chunk takes, and ``sum_row_bytes`` where nothing but sums is computed. Where
    nobody bounds the memory, a chunk has at least so many ``pieces`` of one wave of tiles, or of more rows where few
    classes make that too little work beside what the host launches for each.
    """
    fixed = N * token_bytes + 24 * V + 32 * D
    thin = D * (2 + 4 + 2 * input_is_copied) + 64 + row_bytes  # s x, E W and the hidden states, a row's numbers
    sums = 4 * tile_numbers * -(-V // GPU_TILE)
    whole = thin + sums + 2 * padded(V)
    budget = workspace_bytes(options, device, device_bytes)
    room = max(0, budget - fixed)
    automatic = options.workspace_mib is None
    piece_rows = _piece_rows(N, D, V) if pieces else _wave_rows(D)
    wanted = max(_exp_rows(N, D, V), pieces * piece_rows)
    rows = min(room // whole, wanted) if automatic else room // whole
    rows = max(1, min(_whole_tiles(rows), max(1, N)))
    rows = level(N, rows)
    few = EXP_FEW_CHUNKS if automatic else EXP_FEW_ASKED_CHUNKS
    many = -(-N // rows) > few
    accumulate = accumulate_in(options, weight_dtype, torch.float32, many=many)
    columns = V
    light = -(-N // rows) > EXP_FEW_CHUNKS and rows * D * V < EXP_LIGHT_CHUNK
    if gradient == "recompute" or light or rows < min(N, EXP_BLOCKS_BELOW[accumulate]):
        if automatic:
            room = max(0, min(budget, EXP_BLOCK_WORKSPACE) - fixed)
        blocked = _exp_blocks(N, V, room, thin)
        if blocked is not None:
            rows, columns = blocked
            many = -(-N // rows) > few
            accumulate = accumulate_in(options, weight_dtype, torch.float32, many=many)
    blocked_schedule = gradient == "recompute" or columns < V
    product_rows = min(rows, piece_rows)
    if pieces:
        product_rows = level(rows, product_rows)
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
        product_rows=rows if blocked_schedule else product_rows,
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
    device_bytes: int | None = None,
    row_bytes: int = 0,
    pieces: int = 0,
) -> HeadPlan:
    """Return the plan of `linear_token_stats` on the exponential path; arguments as in `plan_head`.

    ``tile_numbers`` float32 are what each tile of the vocabulary leaves of a row, ``sum_row_bytes`` are what else it
    takes in forward. Each token has so many ``targets``.
    """
    return plan_exp(
        N, D, V, device, options, reason, "recompute", weight_dtype, weight_frozen, input_is_copied,
        token_bytes=STATS_BYTES_PER_TOKEN + STATS_BYTES_PER_TARGET * max(0, targets - 1), tile_numbers=tile_numbers,
        sum_row_bytes=sum_row_bytes, device_bytes=device_bytes, row_bytes=row_bytes, pieces=pieces,
    )  # fmt: skip


def _exp_rows(N: int, D: int, V: int) -> int:
    """Return the rows of a chunk where memory is no matter: few enough to be small beside N, enough to be fast."""
    fast = max(N // EXP_PIECES, -(-EXP_WORK // max(1, D)), -(-EXP_CHUNK_WORK // max(1, D * V)))
    return max(1, min(_next_power(fast), max(N // 4, EXP_ROWS)))


def _exp_blocks(N: int, V: int, room: int, thin: int) -> tuple[int, int] | None:
    """Return (chunk rows, columns of a block) that fit ``room`` bytes; None where blocks would be no use."""
    for rows in (2048, 1536, 1024, 768, 512, 384, 256, 128):
        rows = min(rows, max(1, N))
        columns = (room - rows * thin) // (2 * rows) // 256 * 256
        if columns >= min(V, EXP_LEAST_BLOCK):
            return level(N, rows), min(V, columns)
    return None


def _wave_rows(D: int) -> int:
    """Return the power of two nearest to the rows of one wave of tiles: beyond it a second one would begin."""
    return 1 << round(math.log2(EXP_WAVE / max(1, D)))


def _piece_rows(N: int, D: int, V: int) -> int:
    """Return the rows of a piece between two exchanges: a wave of tiles, more where few classes are little work."""
    fast = _next_power(-(-EXP_SHARD_WORK // max(1, D * V)))
    return max(_wave_rows(D), min(fast, N // 4))


def _next_power(rows: int) -> int:
    return 1 << max(0, rows - 1).bit_length()


def _whole_tiles(rows: int) -> int:
    """Return fewer rows, in whole tiles; half ones count where a tile is much of a chunk."""
    tile = GPU_TILE if rows >= 4 * GPU_TILE else GPU_TILE // 2
    return rows - rows % tile if rows > GPU_TILE else rows
