"""GEMMs in Hopper's own instructions: shared parts, and those that make E, statistics or gradients of plain logits.

C rows of a chunk, D hidden size, V vocabulary, P tiles across the vocabulary.

Written in Gluon, since Triton itself does not split a Hopper program by role. One program a multiprocessor, persistent,
of three parts: a producer warp issues the TMA loads; two consumer warpgroups multiply, each its own ROWS rows of a tile
[2 * ROWS, COLUMNS], and finish their accumulators. The two share every stage of W, and while they finish a tile
the producer already loads the next one's beginning.

The barriers. A step is DEPTH hidden sizes of one tile. Each part counts the steps of the program's tiles in the same
order, and step i is in stage i % STAGES, for the (i // STAGES)-th time. The phase to wait for is that number's parity;
of a fresh barrier, a wait for phase 1 passes and one for phase 0 does not.

    full[stage]   completed once a step, by the producer's announcement and the bytes of its three loads. Consumers wait
                  for it before they read.
    empty[stage]  completed once a step, by one arrival of each consumer when it has read the stage. The producer waits
                  for the previous step's in that stage before it loads; the first STAGES times that passes at once.

Parities are enough, since nobody gets two phases ahead: a stage is not loaded before both consumers have left it. Every
step loaded is waited for and released by both, so no load is in flight and nobody is left waiting when a part ends.

Gluon's compiler (3.6 to 3.9) takes a variable to change in a loop when one pass over the body leaves it different from
what it was. One that starts as a copy of another, and in the loop takes that other's value, looks unchanged and stays
as it was: a version of this kernel so released one stage for ever, and hung. Hence one counter of steps, never copied.
"""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowtide.head.kernels.exp_logits import ExpRows, Listed
from lowtide.head.kernels.gemm import ALL, LN2, LOG2E, NO_LOGIT, Used
from lowtide.kernel_launch import Launcher, multiprocessors, why_no_triton

try:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.hopper import (
        fence_async_shared,
        mbarrier,
        tma,
        warpgroup_mma,
        warpgroup_mma_wait,
    )
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    # Triton 3.9's names, else 3.6's
    load_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
    store_tile = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
    barrier = getattr(gl, "barrier", None) or gl.thread_barrier
    HALF_TILE = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
    GLUON_ERROR = None
except (ImportError, AttributeError) as error:  # no kernel of these can run: see `runs_on`
    gluon, gl, GLUON_ERROR = triton, tl, str(error)
    fence_async_shared = mbarrier = tma = warpgroup_mma = warpgroup_mma_wait = None
    load_tile = store_tile = barrier = TensorDescriptor = HALF_TILE = None

__all__ = ["TensorDescriptor", "fence_async_shared", "gl", "gluon", "mbarrier", "tma"]  # of Gluon's

ROWS = gl.constexpr(64)  # of each consumer; a tile has twice as many
COLUMNS = gl.constexpr(256)
PIECE = gl.constexpr(64)  # columns finished at a time
LEAVE = gl.constexpr(2)  # the step at which a consumer asks whether its last store has left the buffer
CONSUMER_REGISTERS = gl.constexpr(240)
PRODUCER_REGISTERS = gl.constexpr(24)
# of the exponentials
STORED = gl.constexpr(128)  # columns stored at a time: two pieces share a buffer
DEPTH = gl.constexpr(64)
GROUP = gl.constexpr(16)  # row tiles that share a part of W in cache
STAGES = gl.constexpr(4)


@gluon.jit
def stage_and_phase(step, b_s):  # type: ignore[no-untyped-def]
    """Return where a step's operands lie, and the parity of how often others lay there before."""
    return step % b_s.shape[0], (step // b_s.shape[0]) & 1


@gluon.jit  # type: ignore[untyped-decorator]
def multiply(  # type: ignore[no-untyped-def]
    step, steps, stages, old_empty, HALF: gl.constexpr, TRANSPOSED: gl.constexpr, DEEP: gl.constexpr
):
    """Return the sum of the next ``steps`` steps' products, and the next step. DEEP: a product runs on meanwhile.

    TRANSPOSED: "a" or "b", the operand that is stored the other way round; None: neither.
    """
    a_s, b_s, full, empty = stages
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    z = gl.zeros([ROWS, COLUMNS], gl.float32, layout)
    for k in range(steps):
        stage, phase = stage_and_phase(step, b_s)
        mbarrier.wait(full.index(stage), phase)
        a = a_s.index(2 * stage + HALF)
        b = b_s.index(stage)
        if TRANSPOSED == "a":
            a = a.permute((1, 0))
        elif TRANSPOSED == "b":
            b = b.permute((1, 0))
        z = warpgroup_mma(a, b, z, use_acc=k > 0, is_async=True)
        if old_empty is not None:  # noqa: SIM102 - known when compiled
            if k == gl.minimum(LEAVE, steps - 1):
                tma.store_wait(0)
                barrier()
                mbarrier.arrive(old_empty.index(HALF), count=1)
        if DEEP:
            z = warpgroup_mma_wait(1, deps=(z,))
            if k > 0:
                barrier()
                mbarrier.arrive(empty.index((step - 1) % b_s.shape[0]), count=1)
        else:
            z = warpgroup_mma_wait(0, deps=(z,))
            barrier()  # a warp's wait is for its own rows, and one thread arrives for all four
            mbarrier.arrive(empty.index(stage), count=1)
        step += 1
    if DEEP:
        z = warpgroup_mma_wait(0, deps=(z,))
        if steps > 0:
            barrier()
            mbarrier.arrive(empty.index((step - 1) % b_s.shape[0]), count=1)
    return z, step


@gluon.jit  # type: ignore[untyped-decorator]
def load_stage(stages, step, a_d, row, b_d, column, at, TRANSPOSED: gl.constexpr):  # type: ignore[no-untyped-def]
    """Load a step's operands when both consumers have left its stage: a's two blocks from ``row`` on, and b's.

    ``at`` is where the step's sum begins, TRANSPOSED as in `multiply`.
    """
    a_s, b_s, full, empty = stages
    stage, phase = stage_and_phase(step, b_s)
    above, below, b_at = [row, at], [row + ROWS, at], [at, column]
    if TRANSPOSED == "a":
        above, below = [at, row], [at, row + ROWS]
    elif TRANSPOSED == "b":
        b_at = [column, at]
    mbarrier.wait(empty.index(stage), phase ^ 1)
    loaded = full.index(stage)
    mbarrier.expect(loaded, 2 * a_d.block_type.nbytes + b_d.block_type.nbytes)
    load_tile(a_d, above, loaded, a_s.index(2 * stage))
    load_tile(a_d, below, loaded, a_s.index(2 * stage + 1))
    load_tile(b_d, b_at, loaded, b_s.index(stage))


@gluon.jit  # type: ignore[untyped-decorator]
def barriers(COUNT: gl.constexpr, EMPTY: gl.constexpr):  # type: ignore[no-untyped-def]
    """Return COUNT barriers that one arrival completes, and COUNT that EMPTY arrivals do."""
    full = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=EMPTY)
    return full, empty


@gluon.jit  # type: ignore[untyped-decorator]
def new_stages(a_d, b_d, STAGES: gl.constexpr):  # type: ignore[no-untyped-def]
    """Set up stages, each of two blocks of a and one of b, and their barriers."""
    a_s = gl.allocate_shared_memory(a_d.dtype, [2 * STAGES] + a_d.block_type.shape, a_d.layout)  # noqa: RUF005
    b_s = gl.allocate_shared_memory(b_d.dtype, [STAGES] + b_d.block_type.shape, b_d.layout)  # noqa: RUF005
    full, empty = barriers(STAGES, 2)
    return a_s, b_s, full, empty


@gluon.jit  # type: ignore[untyped-decorator]
def _part(role: gl.constexpr, HALF: gl.constexpr, work):  # type: ignore[no-untyped-def]
    if HALF is None:
        role(*work)
    else:
        role(HALF, *work)


@gluon.jit  # type: ignore[untyped-decorator]
def run_parts(produce: gl.constexpr, consume: gl.constexpr, work):  # type: ignore[no-untyped-def]
    """Send the warps to their parts: a producer, and a consumer for each half of the rows."""
    fence_async_shared()  # loads report to the barriers; the warps meet once more before their parts begin
    gl.warp_specialize(
        [(_part, (consume, 0, work)), (_part, (consume, 1, work)), (_part, (produce, None, work))],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )


@gluon.jit
def pieces_of(z):  # type: ignore[no-untyped-def]
    """Return a tile's columns in four pieces, in order."""
    even, odd = z.reshape([ROWS, 2, 2, PIECE]).permute(0, 3, 1, 2).split()
    first, third = even.split()
    second, fourth = odd.split()
    return first, second, third, fourth


@gluon.jit
def counted(count, first, C):  # type: ignore[no-untyped-def]
    """Return how many rows count."""
    rows = gl.to_tensor(C)
    if count is not None:
        rows = gl.minimum(gl.maximum(gl.load(count) - first, 0), C)
    return rows


def hopper_descriptor(x: Tensor, *block: Any) -> Any:
    """Return the TMA descriptor of ``x``, to copy blocks of it into shared memory as the tensor cores read it."""
    shape = tuple(map(int, block))
    return TensorDescriptor.from_tensor(x, list(shape), _shared_layout(shape, x.dtype))


@cache
def _shared_layout(block: tuple[int, ...], dtype: torch.dtype) -> Any:
    return gl.NVMMASharedLayout.get_default_for(list(block), gl.bfloat16 if dtype == torch.bfloat16 else gl.float32)


@gluon.jit
def _number_of_tiles(listed, C, V):  # type: ignore[no-untyped-def]
    """Return how many tiles there are, or how many are listed."""
    tiles = gl.cdiv(C, 2 * ROWS) * gl.cdiv(V, COLUMNS)
    if listed is not None:
        tiles = gl.load(listed.number)
    return tiles


@gluon.jit
def _tile_at(tile, listed, C, V):  # type: ignore[no-untyped-def]
    """Return the tile's place, (row tile, column tile): groups of GROUP row tiles, rows go first."""
    row_tiles = gl.cdiv(C, 2 * ROWS)
    width = GROUP * gl.cdiv(V, COLUMNS)
    first = (tile // width) * GROUP
    height = gl.minimum(row_tiles - first, GROUP)
    row_tile = first + (tile % width) % height
    p = (tile % width) // height
    if listed is not None:
        place = gl.load(listed.tiles + tile)
        row_tile = place >> 16
        p = place & 0xFFFF
    return row_tile, p


@gluon.jit  # type: ignore[untyped-decorator]
def _produce(  # type: ignore[no-untyped-def]
    x_d, w_d, _e_d, _e_s, stages, _rows, listed, C, V, D, _bound: gl.constexpr, _store: gl.constexpr
):
    """Load the stages. What is outside of x and w is read as zeros, and counts as bytes that arrived."""
    tiles = _number_of_tiles(listed, C, V)
    step = gl.to_tensor(0)
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        row_tile, p = _tile_at(tile, listed, C, V)
        row = row_tile * (2 * ROWS)
        for k in range(gl.cdiv(D, DEPTH)):
            load_stage(stages, step, x_d, row, w_d, p * COLUMNS, k * DEPTH, "b")
            step += 1


@gluon.jit
def halves_of(z):  # type: ignore[no-untyped-def]
    """Return the left and the right half of a consumer's tile: finished one by one, they need fewer registers."""
    left, right = z.reshape([ROWS, 2, STORED]).permute(0, 2, 1).split()
    left = gl.convert_layout(left, HALF_TILE, assert_trivial=True)
    return left, gl.convert_layout(right, HALF_TILE, assert_trivial=True)


@gluon.jit
def store_half(e, buffer, e_d, row, column):  # type: ignore[no-untyped-def]
    """Round a half of a consumer's tile and begin to store it."""
    rounded = e.to(gl.bfloat16)
    tma.store_wait(0)  # the thread that stored the last half knows that the buffer has been read,
    barrier()  # and tells the others
    buffer.store(rounded)
    fence_async_shared()
    barrier()
    store_tile(e_d, [row, column], buffer)


@gluon.jit
def _half_sums(z, at, top, top_id, rows_of):  # type: ignore[no-untyped-def]
    """Do what `exp_logits._half_sums` does, to the bit."""
    reference = gl.where(top == float("-inf"), 0.0, top * LOG2E)
    below = gl.fma(z, LOG2E, -reference[:, None])
    e = gl.where(at[None, :] == top_id[:, None], 0.0, gl.exp2(below))
    rest = gl.sum(e, 1)
    heat, squares = rest, rest
    if rows_of.heat is not None:
        heat = gl.sum(e * below, 1) * LN2
    if rows_of.top_squares is not None:
        squares = gl.sum(e * e, 1)
    return rest, heat, squares


@gluon.jit
def _put_stats(left, right, rows_of, rows, p, C, V):  # type: ignore[no-untyped-def]
    """Write what `exp_logits._put_stats` does, of plain logits."""
    at = p * COLUMNS + gl.arange(0, STORED, gl.SliceLayout(0, HALF_TILE))
    place, inside = rows.to(gl.int64) * rows_of.sum_stride + p, rows < C
    if rows_of.total is not None:
        gl.store(rows_of.total + place, gl.sum(left, 1) + gl.sum(right, 1), mask=inside)
    if (p + 1) * COLUMNS > V:
        left = gl.where((at < V)[None, :], left, NO_LOGIT)
        right = gl.where((at + STORED < V)[None, :], right, NO_LOGIT)
    top = gl.maximum(gl.max(left, 1), gl.max(right, 1))
    top_id = gl.minimum(
        gl.min(gl.where(left == top[:, None], at[None, :], V), 1),
        gl.min(gl.where(right == top[:, None], at[None, :] + STORED, V), 1),
    )
    rest, heat, squares = _half_sums(left, at, top, top_id, rows_of)
    more_rest, more_heat, more_squares = _half_sums(right, at + STORED, top, top_id, rows_of)
    gl.store(rows_of.top + place, top, mask=inside)
    gl.store(rows_of.top_id + place, top_id, mask=inside)
    gl.store(rows_of.rest + place, rest + more_rest, mask=inside)
    if rows_of.heat is not None:
        gl.store(rows_of.heat + place, heat + more_heat, mask=inside)
    if rows_of.top_squares is not None:
        gl.store(rows_of.top_squares + place, squares + more_squares, mask=inside)


@gluon.jit  # type: ignore[untyped-decorator]
def _consume(  # type: ignore[no-untyped-def]
    HALF: gl.constexpr, _x_d, _w_d, e_d, e_s, stages, rows_of, listed, C, V, D, BOUND: gl.constexpr,
    STORE: gl.constexpr,
):  # fmt: skip
    """Multiply, and finish, the HALF-th ROWS rows of each tile."""
    tiles = _number_of_tiles(listed, C, V)
    buffer = e_s.index(HALF)
    step = gl.to_tensor(0)
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        row_tile, p = _tile_at(tile, listed, C, V)
        row = row_tile * (2 * ROWS) + HALF * ROWS
        column = p * COLUMNS
        rows = row + gl.arange(0, ROWS, gl.SliceLayout(1, HALF_TILE))
        # loaded here, used after the GEMM, which hides the latency
        y = gl.load(rows_of.y + rows, mask=rows < C, other=-1)
        reference = gl.load(rows_of.reference + rows, mask=rows < C, other=0.0)

        z, step = multiply(step, gl.cdiv(D, DEPTH), stages, None, HALF, "b", False)

        kept = y >= 0
        reference = gl.where(kept, reference * LOG2E, float("inf"))
        y -= rows_of.first_class + column  # within the tile; stays negative where ignored
        bound = gl.zeros([ROWS], gl.int32, gl.SliceLayout(1, HALF_TILE)) + (V - column)
        if rows_of.coefficient is not None:
            bound = gl.where(kept, bound, 0)
        # most tiles hold neither targets nor columns beyond V
        special = (y >= 0) & (y < COLUMNS)
        if BOUND:
            special = special | (bound < COLUMNS)
        is_special = gl.max(special.to(gl.int32), 0) != 0

        total = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, HALF_TILE))
        squared = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, HALF_TILE))
        halves = halves_of(z)
        for i in gl.static_range(2):
            at = i * STORED + gl.arange(0, STORED, gl.SliceLayout(0, HALF_TILE))
            e = gl.exp2(gl.fma(halves[i], LOG2E, -reference[:, None]))
            if is_special:
                e = gl.where(at[None, :] == y[:, None], 0.0, e)
                if BOUND:
                    e = gl.where(at[None, :] < bound[:, None], e, 0.0)
            if rows_of.sums is not None:
                total += gl.sum(e, 1)
            if rows_of.squares is not None:
                squared += gl.sum(e * e, 1)
            if STORE:
                if rows_of.coefficient is not None:  # noqa: SIM102 - known when compiled
                    if is_special:  # loaded only here, as there are no registers to hold it for long
                        coefficient = gl.load(rows_of.coefficient + rows, mask=rows < C, other=0.0)
                        e = gl.where(at[None, :] == y[:, None], coefficient[:, None], e)
                store_half(e, buffer, e_d, row, column + i * STORED)
        if rows_of.sums is not None:
            gl.store(rows_of.sums + rows.to(gl.int64) * rows_of.sum_stride + p, total, mask=rows < C)
        if rows_of.squares is not None:
            gl.store(rows_of.squares + rows.to(gl.int64) * rows_of.sum_stride + p, squared, mask=rows < C)
        if rows_of.top is not None:
            _put_stats(halves[0], halves[1], rows_of, rows, p, C, V)
    tma.store_wait(0)  # shared memory goes when the program ends


@gluon.jit  # type: ignore[untyped-decorator]
def _consume_gradient(  # type: ignore[no-untyped-def]
    HALF: gl.constexpr, _x_d, _w_d, g_d, g_s, stages, of_row, listed, C, V, D, _bound: gl.constexpr,
    _store: gl.constexpr,
):  # fmt: skip
    """Multiply, and write what `stats.gradient_tile` does, of plain logits."""
    step = gl.to_tensor(0)
    for tile in range(gl.program_id(0), _number_of_tiles(listed, C, V), gl.num_programs(0)):
        row_tile, p = _tile_at(tile, listed, C, V)
        row = row_tile * (2 * ROWS) + HALF * ROWS
        rows = row + gl.arange(0, ROWS, gl.SliceLayout(1, HALF_TILE))
        alive = gl.load(of_row.s + rows, mask=rows < C, other=0.0) != 0.0
        lse = gl.load(of_row.lse + rows, mask=rows < C, other=0.0) * LOG2E
        slope = gl.load(of_row.slope + rows, mask=rows < C, other=0.0)
        if of_row.heat is not None:
            heat = gl.load(of_row.heat + rows, mask=rows < C, other=0.0) * LN2
        if of_row.even is not None:
            even = gl.load(of_row.even + rows, mask=rows < C, other=0.0)
        z, step = multiply(step, gl.cdiv(D, DEPTH), stages, None, HALF, "b", False)
        halves = halves_of(z)
        for i in gl.static_range(2):
            below = gl.fma(halves[i], LOG2E, -lse[:, None])
            gradient = gl.exp2(below)
            if of_row.heat is not None:
                gradient *= slope[:, None] - heat[:, None] * below
            else:
                gradient *= slope[:, None]
            if of_row.even is not None:
                gradient += even[:, None]
            gradient = gl.where(alive[:, None], gradient, 0.0)
            store_half(gradient, g_s.index(HALF), g_d, row, p * COLUMNS + i * STORED)
    tma.store_wait(0)


@Launcher
@gluon.jit(do_not_specialize=["first", "C", "V", "D"])  # type: ignore[untyped-decorator]
def _tiles_hopper(  # type: ignore[no-untyped-def]
    x_d, w_d, e_d, rows, listed, count, first, C, V, D, consume: gl.constexpr, BOUND: gl.constexpr,
    STORE: gl.constexpr,
):  # fmt: skip
    """Set up the stages and the barriers, and send the warps to their parts."""
    stages = new_stages(x_d, w_d, STAGES)
    e_s = gl.allocate_shared_memory(gl.bfloat16, [2, ROWS, STORED], e_d.layout)
    used = counted(count, first, C)
    if count is not None:  # in whole tiles, as `gemm.rows_in_tiles`
        used = gl.minimum(gl.cdiv(used, 2 * ROWS) * (2 * ROWS), C)
    run_parts(_produce, consume, (x_d, w_d, e_d, e_s, stages, rows, listed, used, V, D, BOUND, STORE))


@cache
def runs_on(device: torch.device) -> bool:
    """Return whether these kernels run on ``device``: a Hopper GPU, and Triton with its Gluon."""
    runs = GLUON_ERROR is None and why_no_triton(device) is None
    return runs and torch.cuda.get_device_capability(device) == (9, 0)


def exp_logits_hopper(
    x_CD: Tensor, w_VD: Tensor, e_CV: Tensor | None, rows: ExpRows, used: Used = ALL, listed: Listed | None = None
) -> None:
    """Do what `exp_logits.exp_tile` does, in tiles COLUMNS wide, of plain bfloat16 logits.

    Rows at multiples of 16 bytes, none empty. If it `runs_on` the device. Tiles that are not ``listed`` are left as
    they are.
    """
    _launch(_consume, x_CD, w_VD, e_CV, rows, used, listed, bound=rows.coefficient is not None)


def gradient_hopper(x_CD: Tensor, w_VD: Tensor, g_CV: Tensor, of_row: tuple[Any, ...], used: Used) -> None:
    """Do the same for `stats.gradient_tile`, with a `stats.Gradient`."""
    _launch(_consume_gradient, x_CD, w_VD, g_CV, of_row, used)


def _launch(
    consume: Any, x_CD: Tensor, w_VD: Tensor, out_CV: Tensor | None, rows: tuple[Any, ...], used: Used,
    listed: Listed | None = None, *, bound: bool = False,
) -> None:  # fmt: skip
    (C, D), V = x_CD.shape, w_VD.shape[0]
    x_d = hopper_descriptor(x_CD, ROWS, DEPTH)
    _tiles_hopper[(multiprocessors(x_CD.device),)](
        x_d, hopper_descriptor(w_VD, COLUMNS, DEPTH),
        x_d if out_CV is None else hopper_descriptor(out_CV, ROWS, STORED), rows, listed, *used, C, V, D,
        consume=consume, BOUND=bound or V % COLUMNS.value != 0, STORE=out_CV is not None, num_warps=4,
    )  # fmt: skip
