"""The planner: from a pass's sizes and the user's options to chunks, and the bytes these take, by arithmetic alone.

N tokens, D hidden size, V vocabulary, C rows of a chunk. Figures: benchmarks/results, one H100 where no CPU is named.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any, Literal, NamedTuple

import torch

from lowtide.head.cost import HOPPER, Gpu, Schedule, gpu_of
from lowtide.head.lengths import GPU_TILE, evenly, fitting_blocks, level, next_power, padded, tile_of, whole_tiles
from lowtide.head.options import HeadOptions

MIB = 2**20
When = Literal["forward", "recompute"]

BYTES_PER_TOKEN = 48  # loss, lse, row factor, valid mask and index: what is held for all N tokens, not a chunk's
# The workspace, if the user sets no limit.
CPU_WORKSPACE = 160 * MIB  # 256 rows of a vocabulary of 128K; with 128 rows a step takes 6% longer on two cores
GPU_WORKSPACE = 1152 * MIB  # 2048 rows of bfloat16 for a 256K vocabulary: below that, reading W and dW costs time
MOST_OF_A_GPU = 1 / 32  # the automatic workspace's share of a small GPU's memory
GPU_FUNCTION_WORKSPACE = 3072 * MIB  # what is counted for the function is more than most functions take
MOST_FOR_A_FUNCTION = 1 / 24  # MOST_OF_A_GPU for a function
# Chunks of logits.
FEWEST_CHUNKS = 12  # by default: a twelfth of the logits is small next to what else a step saves
FEWEST_ROWS = 512  # fewer are not made for FEWEST_CHUNKS' sake: the weight is read, and its gradient added to, in each
CPU_CHUNK_BYTES = 8 * MIB  # nor shorter chunks on a CPU, where each operator wakes all threads and waits for the last
ONEDNN_BYTES, ONEDNN_ROW_BYTES = MIB // 2, 3072  # measured: what its bf16 GEMMs pack operands into, by rows of a chunk
ONEDNN_LEAST_WORKSPACE = 8 * MIB  # in less than this, the packing would crowd out the logits
MOST_BLOCK_ROWS, BLOCK_SHARE = 4096, 8  # rows of the weight cast at a time; of the workspace, what these take
# Any function of the logits (linear_apply), on a CPU (True) and on a GPU.
FUNCTION_COPIES = 8  # wide [rows, V] tensors that a function's graph and its backward hold: entropy has 7, CE 4
FUNCTION_CHUNKS = {True: FEWEST_CHUNKS, False: 8}  # FEWEST_CHUNKS and FEWEST_ROWS where a function gets the logits
FUNCTION_ROWS = {True: 8, False: 2048}
PIECE_ELEMENTS = {True: 2**20, False: 2**26}  # logits it gets at a time: half a millisecond of the host's for each
FUNCTION_PIECES = 16  # on a GPU by default: a function's intermediates for a piece are small next to all logits
BIAS_COLUMN_SHARE = 8  # of the workspace: what a copy of the weight may take that saves a pass for the bias
# Two sides' logits whose gradient is narrower than they are (linear_divergence), without a limit.
PAIR_CHUNKS = 4  # the weight's gradient is added to so often
PAIR_ROWS = 1024  # of a chunk, at least
PAIR_LOGITS = 384  # rows whose logits exist: 3% slower with 256, 50% with 128: reading both weights takes longer
# Exponentials.
EXP_NEAR = 1.01  # times the least time, by `cost`: what the default takes, however much memory it needs
EXP_PERCENT = 128 * MIB  # within that, what it pays for one percent of the time
MOST_FOR_EXP = 1 / 24  # of a GPU's memory, and for a function
EXP_BLOCK_WORKSPACE = 256 * MIB  # by default, where the gradients wait for backward
KEPT_ROWS = 512  # of a chunk, from which tiles are skipped
KEPT_PARTS = 132 * 128 * 256  # float32 numbers, where parts of tiles meet
EXP_ROWS = 2048  # a chunk may have so many by default, however few the tokens; else half of them
EXP_BLOCKS_BELOW = 1024  # rows of the longest chunk that fits: blocks may be faster
EXP_WAVE = 132 * 128 * 256  # elements of E W that exist at a time in float32, to the nearest power of 2 rows
EXP_SHARD_WORK = 2 * 10**11  # rows * D * V of such a piece: its host has exchanges between ranks to launch as well
EXP_SUM_ROWS = 8192  # rows of a pass that stores no E
# Sets of classes.
SUPPORT_WORKSPACE = 1024 * MIB  # what sorting the ids, and their logits, may take
# Token statistics by exponentials.
STATS_BYTES_PER_TOKEN = 80  # what is computed and kept of each token, and in backward the upstream gradients
STATS_BYTES_PER_TARGET = 64  # the same of each target beyond the first
# Sums of the weight's gradient in its own narrow dtype, by exponentials and of two sides.
FEW_CHUNKS = 8  # it may be rounded this often
FEW_ASKED_CHUNKS = 48  # likewise where the user bounds the memory, and would not have V * D * 4 bytes more


class Work(NamedTuple):
    """What one pass computes, the same on every rank: all that a plan depends on."""

    size: tuple[int, int, int]  # N that are computed, D, V: of the largest shard, with a column for others' classes
    dtype: torch.dtype  # of the GEMMs' operands
    weight_dtype: torch.dtype
    device: torch.device
    options: HeadOptions
    choice: tuple[str, str]  # the implementation, and why
    weight_frozen: bool  # neither weight nor bias gets a gradient
    gradient: When = "recompute"
    device_bytes: int | None = None  # memory of the GPU that is planned for; None: the one that is there
    function: bool = False  # a user's function gets the logits
    teacher: tuple[int, int, torch.dtype] | None = None  # a second side's D, V and dtype; of its top k 0 and k
    values_only: bool = False  # no gradient is computed
    groups: int = 1  # ranks with tokens of their own; a chunk has at least one row of each
    # exponentials' own, beside what all take:
    input_is_copied: bool = False  # a chunk's hidden states are, for another dtype or layout
    token_bytes: int = 0  # for each of the N
    sum_row_bytes: int = 0  # for each where nothing but sums is computed
    tile_numbers: int = 1  # float32 that each tile of the vocabulary leaves of a row
    kept: bool = False  # tiles of E are skipped: see the room skip
    skips: bool = False  # the device puts ignored tokens last: hidden states are gathered, in chunks in place of s x
    sharded: bool = False  # the vocabulary is, and a chunk has two pieces: one's exchanges run beside the other's GEMMs

    @property
    def wide(self) -> torch.dtype:
        """Return the dtype of logits and sums."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    @property
    def automatic(self) -> bool:
        """Return whether the workspace has no limit."""
        return self.options.workspace_mib is None

    @property
    def narrow_pair(self) -> bool:
        """Return whether kernels turn two sides' logits into a gradient that is narrower than they are."""
        by_kernels = self.teacher is not None and self.choice[0] == "row" and not self.values_only
        return by_kernels and self.dtype.itemsize < self.wide.itemsize

    def budget(self) -> int:
        """Return how much scratch memory the pass may take."""
        if self.options.workspace_mib is not None:
            return int(self.options.workspace_mib * MIB)
        if self.device.type == "cpu":
            return CPU_WORKSPACE
        if self.choice[0] == "exp":
            most = EXP_BLOCK_WORKSPACE if self.gradient == "recompute" else MOST_FOR_EXP * self.gpu.memory
            return int(min(most, MOST_FOR_EXP * self.gpu.memory))
        most, share = (GPU_FUNCTION_WORKSPACE, MOST_FOR_A_FUNCTION) if self.function else (GPU_WORKSPACE, MOST_OF_A_GPU)
        return min(most, int(self.gpu.memory * share))

    @property
    def gpu(self) -> Gpu:
        """Return what the GPU can do; of one that is not here, and of several ranks', the memory alone is known."""
        return gpu_of(self.device) if self.device_bytes is None else HOPPER._replace(memory=self.device_bytes)


Cut = tuple[int, int, dict[str, Any]]  # rows of a chunk, bytes of scratch, more of the plan


def cut(work: Work) -> Cut:
    """Return chunks as long as the workspace allows, or of a fast length if it has no limit."""
    if work.choice[0] == "exp":
        return _cut_exponentials(work)
    rows, scratch, more = _cut_narrow_pair(work) if work.narrow_pair else _cut_logits(work)
    # two sides in plain PyTorch need up to four blocks of columns besides the logits
    columns = max(1, _columns_of(work, rows, work.size[2]) // (1 if work.teacher is None else 2))
    return rows, scratch, {**more, **gemms_of(work), "columns": columns}


def accumulate_in(work: Work, chunks: int) -> Literal["float32", "input"]:
    """Return where the weight's gradient is summed over so many chunks: see `HeadOptions`."""
    dtype, asked, exp, few = work.weight_dtype, work.options.accumulate, work.choice[0] == "exp", 1
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
    more: dict[str, Any] = {}
    least, most = (FUNCTION_ROWS[cpu], FUNCTION_CHUNKS[cpu]) if work.function else (FEWEST_ROWS, FEWEST_CHUNKS)
    if cpu and not work.function:
        least = max(least, CPU_CHUNK_BYTES // (4 * max(1, V)))
    enough = max(least, -(-N // most)) if work.automatic else math.inf
    if work.teacher is not None:
        of_teacher, row_of_teacher = _bytes_of_teacher(work)
        fixed, row = fixed + of_teacher, row + row_of_teacher
    if work.function:
        copied = V * padded(D + 1) * narrow
        more["bias_column"] = gemms["logits_gemm"] == "out_dtype" and copied <= budget // BIAS_COLUMN_SHARE
        fixed += copied * more["bias_column"]
        left = budget - fixed - enough * row  # by chunks that are as large as they should be
        piece_bytes = FUNCTION_COPIES * wide * max(1, V)
        pieces = [N, max(left, (budget - fixed) // 2) // piece_bytes, max(2, PIECE_ELEMENTS[cpu] // max(1, V))]
        if work.automatic and not cpu:
            pieces.append(max(FEWEST_ROWS, N // FUNCTION_PIECES))
        piece_rows = max(1, int(min(pieces)))
        fixed += piece_rows * piece_bytes
    else:
        fixed += wide * padded(V)  # a soft cap's block is a row at least
        row += 0 if by_kernel else wide * 2 * _columns_of(work, 1, V)
    if cpu and gemms["backward_gemm"] == "narrow":
        fixed, row = fixed + ONEDNN_BYTES, row + ONEDNN_ROW_BYTES
    rows = int(min(max(work.groups, (budget - fixed) // max(1, row)), enough))
    rows = evenly(N, rows) if cpu else whole_tiles(rows)
    if not cpu:
        rows = min(level(N, rows) if work.function else rows, max(1, N))
    if work.function:
        more["piece_rows"] = evenly(rows, piece_rows)
    if work.teacher is not None:
        more["product_rows"] = rows
    return rows, fixed + rows * row, more


def _bytes_of_teacher(work: Work) -> tuple[int, int]:
    """Return what a second side takes, and what it takes for each row of a chunk."""
    assert work.teacher is not None
    (D, V, dtype), wide, of_student = work.teacher, work.wide.itemsize, padded(work.size[2])
    operands = D * (wide + dtype.itemsize)
    gemms = gemms_of(work, of_teacher=True)
    fixed = gemms["block_rows"] * operands + 8 * V
    if work.choice[0] == "row":
        return fixed, wide * padded(V) + operands + 16 * wide
    if D:
        longer = max(of_student, padded(V))  # both sides' logits are as long, and both have blocks of columns beside
        return fixed, wide * (2 * longer - of_student + 2 * _columns_of(work, 1, longer)) + operands + 16 * wide
    return fixed, wide * (padded(work.size[2] + 1) - of_student) + V * (8 + 16 * wide)  # ids, both sides' outcomes


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
    few = max(1, min(whole_tiles(few), rows))
    rows = max(few, work.groups, min(whole_tiles((room - few * logits) // gradient), rows))
    return rows, fixed + few * logits + rows * gradient, {"product_rows": few}


def _cut_exponentials(work: Work) -> Cut:
    """Cut chunks of exponentials, or blocks of the vocabulary: what is fastest in the workspace, or worth its memory.

    By default the least product of time and price, the bytes in units of `EXP_PERCENT`, among what is nearly fastest.
    """
    if work.kept:
        return _cut_kept(work)
    schedule = Schedule(work.gpu, work.size, not work.weight_frozen)
    cuts = list(_cuts_of_exponentials(work, schedule))
    if not work.automatic:
        return min(cuts, key=lambda each: each[0])[1]
    enough = EXP_NEAR * min(seconds for seconds, _ in cuts)
    near = [(seconds, cut) for seconds, cut in cuts if seconds <= enough]

    def price(each: tuple[float, Cut]) -> float:
        seconds, (rows, scratch, _) = each
        return seconds * (1 + (scratch + _accumulator(work, rows)) / (100 * EXP_PERCENT))

    return min(near, key=price)[1]


def _cut_kept(work: Work) -> Cut:
    """Cut where tiles are skipped: by default in the memory of a loss that skips none, if the ordered copy fits there.

    If it does not, in as much more; a user's own limit is kept, and where it is too low no tile is skipped. The chunks
    are those of all gradients in forward, also where backward computes some: of short ones little would be won, and
    both passes choose alike, since backward reads what forward saved of tiles.
    """
    (N, D, V), work_of_chunks = work.size, work._replace(gradient="forward", weight_frozen=False)
    scratch = cut(work_of_chunks._replace(kept=False))[1]
    limits = [scratch, scratch + work.weight_dtype.itemsize * V * D] if work.automatic else [work.budget()]
    for limit in limits:
        of_limit = work_of_chunks._replace(options=replace(work.options, workspace_mib=limit / MIB))
        rows, scratch, more = next(_cuts_of_exponentials(of_limit, Schedule(work.gpu, work.size, trained=True)))[1]
        if rows >= min(N, KEPT_ROWS) and scratch <= limit:
            return rows, scratch, {**more, "kept": True}
    return cut(work._replace(kept=False))


def _cuts_of_exponentials(work: Work, schedule: Schedule) -> Iterator[tuple[float, Cut]]:
    """Yield cuts that fit the workspace, or the one that comes nearest, and the seconds of each."""
    (N, D, V), recompute, sharded = work.size, work.gradient == "recompute", work.sharded
    fixed = N * (BYTES_PER_TOKEN + work.token_bytes) + 24 * V + 32 * D
    # Of a sharded vocabulary hidden states are gathered ahead: of sums alone four pieces live at once, of gradients
    # three; and the GEMM's result in float32, while it is summed over the ranks.
    x, ahead = 2 * D * (work.input_is_copied and not (work.skips and not sharded)), 2 * D * sharded
    gathered = 2 * D * work.skips  # in blocks and of sums alone; and in blocks as much again, where parts of E W meet
    thin = D * 2 + x + 2 * ahead + 4 * D * sharded + 64  # s x, hidden states, a row's numbers; not E W, `product`
    sums, product = 4 * work.tile_numbers * -(-V // GPU_TILE), 4 * D
    tiles = -(-V // 256) * work.kept
    sum_row = sums + 64 + x + gathered + 3 * ahead + work.sum_row_bytes + 28 * tiles
    if work.kept:  # the ordered copy, or the gradient put back; means and sums; parts that meet; squares, masses, lists
        fixed += work.weight_dtype.itemsize * V * D + 6 * tiles * D + 4 * KEPT_PARTS
        thin, product = thin + 24 * tiles, 0
    room = max(0, work.budget() - fixed)
    sum_rows = room // sum_row
    sum_rows = max(work.groups, min(N, EXP_SUM_ROWS, whole_tiles(sum_rows, tile_of(sum_rows))))
    more = {"sum_rows": sum_rows}

    of_row, piece = thin + sums + 2 * padded(V), max(GPU_TILE, 1 << round(math.log2(EXP_WAVE / max(1, D))))
    # of a sharded vocabulary a chunk has two pieces, longer ones where few classes are little work
    least = 2 * max(piece, min(next_power(-(-EXP_SHARD_WORK // max(1, D * V))), N // 4)) * sharded
    longest = max(room // (of_row + product), 0 if sharded else (room - product * piece) // of_row)
    if work.automatic:
        longest = min(longest, max(N // 2, EXP_ROWS, least))
    longest = max(work.groups, min(longest, max(1, N)))
    if work.kept:  # the fewest chunks, and these of one length
        longest = N if longest >= N else level(N, whole_tiles(longest))
    lengths = {longest} if work.kept else _lengths(max(1, N), longest, least)
    for rows in [] if recompute else lengths:
        half = -(-(rows // work.groups) // 2) * work.groups  # in whole groups, or a few rows would be a third piece
        product_rows = max(level(rows, min(rows, piece)), half * sharded)
        scratch = fixed + rows * of_row + product * (rows if sharded else product_rows)
        seconds = schedule.in_chunks(rows, _sum_bytes(work, rows))
        yield seconds, (rows, scratch, {**more, "schedule": "chunks", "block_columns": V, "product_rows": product_rows})
    if work.kept or (not recompute and longest >= min(N, EXP_BLOCKS_BELOW)):
        return
    blocks = list(fitting_blocks(N, V, room, thin + product + 2 * gathered, work.gpu))
    if recompute and not blocks:
        blocks = [(whole_tiles(longest, tile_of(longest)), V)]
    for rows, columns in blocks:
        scratch = fixed + max(rows * (thin + product + 2 * gathered + 2 * padded(columns)), sum_rows * sum_row)
        seconds = schedule.in_blocks(rows, columns, sum_rows, _sum_bytes(work, rows))
        yield seconds, (rows, scratch, {**more, "schedule": "blocks", "block_columns": columns, "product_rows": rows})


def _lengths(N: int, longest: int, least: int) -> set[int]:
    """Return lengths of a chunk: powers of 2, which cuBLAS multiplies fastest, and the longest where that is short."""
    found = {1 << power for power in range(GPU_TILE.bit_length() - 1, longest.bit_length())}
    found |= {level(N, rows) for rows in found}
    if longest >= N:
        found.add(N)
    elif longest < EXP_ROWS:
        found |= {level(N, whole_tiles(longest, tile)) for tile in (tile_of(longest), GPU_TILE)}
    return {rows for rows in found if least <= rows <= longest} or {level(N, longest)}


def _sum_bytes(work: Work, rows: int) -> int:
    """Return the bytes of a number of the weight's gradient while it is summed."""
    in_float32 = accumulate_in(work, -(-work.size[0] // rows)) == "float32"
    return work.wide.itemsize if in_float32 else work.weight_dtype.itemsize


def _accumulator(work: Work, rows: int) -> int:
    """Return the bytes of a sum that is wider than the gradient."""
    _, D, V = work.size
    return V * D * 4 * (_sum_bytes(work, rows) > work.weight_dtype.itemsize and not work.weight_frozen)


def _columns_of(work: Work, rows: int, V: int) -> int:
    """Return the columns handled at a time: few launches on a GPU; on a CPU 2 MiB, which stay in cache."""
    if work.device.type != "cpu":
        return max(1, -(-V // 4))
    return max(1, min(V, max(64, min(-(-V // 16), 2**19 // rows))))
