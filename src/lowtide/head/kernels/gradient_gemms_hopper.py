"""The gradients' GEMMs for Hopper's own instructions, which end early where the device alone knows the rows.

C rows of a chunk of which the first `rows` count, D hidden size, V vocabulary; E [C, V] the exponentials.

    input_grad:   out = finish(E W)           the rows of E W that count, each finished as `InputRows` says
    weight_grad:  dW = E^T S, dW += E^T S     over the rows that count

Both are the kernel of `hopper.exp_logits_hopper` with other operands and another end: a persistent program a
multiprocessor, a producer warp, two consumer warpgroups of ROWS rows each, stages with `full` and `empty` barriers.
Here W and S are stored the other way round, which the tensor cores read as well.

`rows` is C, or clamp(count - first, 0, C) of a number on the device. What is beyond costs nothing: tiles of E W beyond
it are not computed, and the sum over rows ends at its step. Within that last step E or S holds zeros where rows do not
count, and the other one finite numbers.

E W has few tiles and a long sum. Tiles that do not fill the multiprocessors are split along the sum: every part but the
last stores its tile in float32, and the last waits for them, adds them in order and finishes the tile. It waits for
programs before it only, which the device starts first, and which wait for nobody: it is never left waiting. Parts are
float32 tiles in memory that every program reads.

E^T S has many tiles and a short sum. The tile of dW that is added to is loaded while the products run, into the buffer
from which the sum is then stored. Two barriers more for each consumer: `old_full` when the tile is there, and
`old_empty` when the buffer's last store has read it.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from lowtide.head.kernels.gemm import ALL, Used
from lowtide.head.kernels.hopper import (
    COLUMNS,
    DEPTH,
    LEAVE,
    PIECE,
    ROWS,
    STAGES,
    barrier,
    barriers,
    counted,
    fence_async_shared,
    gl,
    gluon,
    hopper_descriptor,
    load_stage,
    load_tile,
    mbarrier,
    multiply,
    new_stages,
    pieces_of,
    run_parts,
    store_tile,
    tma,
)
from lowtide.kernel_launch import Launcher, multiprocessors

MOST_PARTS = gl.constexpr(16)


class InputRows(NamedTuple):
    """What ends the tiles of E W, of ``out``'s type: dX = s (E W + rest w_y), see `exp_rows.finish_input_grad`.

    Without ``s`` it is E W alone.
    """

    out: Tensor  # [.., D], unit stride within rows
    out_stride: int
    to: Tensor | None = None  # [C] integers: the row of ``out`` of each row; None: the same
    s: Tensor | None = None  # [C] float32
    y: Tensor | None = None  # [C] int32
    rest: Tensor | None = None  # [C] float32
    w: Tensor | None = None  # [V, D]
    w_stride: int = 0
    before: Tensor | None = None  # [C, D] float32, contiguous: what E W is added to; it may be ``out``


class Room(NamedTuple):
    """Where parts of tiles meet."""

    parts: Tensor  # float32, of ``tiles`` tiles
    arrived: Tensor  # int32, two a program, 0 outside of the kernel
    tiles: int


@gluon.jit
def _within():  # type: ignore[no-untyped-def]
    """Return where a piece's values lie in a tile, in the layout of what `pieces_of` returns."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PIECE, 16])
    row = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    return row[:, None] * COLUMNS + gl.arange(0, PIECE, gl.SliceLayout(0, layout))[None, :]


@gluon.jit  # type: ignore[untyped-decorator]
def store_part(z, HALF: gl.constexpr, parts, number, arrived):  # type: ignore[no-untyped-def]
    """Store a consumer's rows of the ``number``-th part, and arrive."""
    within = _within()
    stored = parts + HALF * (ROWS * COLUMNS) + number.to(gl.int64) * (2 * ROWS * COLUMNS)
    pieces = pieces_of(z)
    for i in gl.static_range(4):
        piece = gl.convert_layout(pieces[i], within.type.layout, assert_trivial=True)
        gl.store(stored + (within + i * PIECE), piece)
    barrier()  # one thread arrives for all
    gl.atomic_add(arrived + HALF, 1, sem="release")


@gluon.jit  # type: ignore[untyped-decorator]
def await_parts(arrived, others, HALF: gl.constexpr):  # type: ignore[no-untyped-def]
    """Wait for ``others`` parts of a consumer's rows, and leave 0 arrivals."""
    if others > 0:
        while gl.atomic_add(arrived + HALF, 0, sem="acquire") < others:
            pass
        barrier()
        gl.atomic_xchg(arrived + HALF, 0, sem="relaxed")


@gluon.jit  # type: ignore[untyped-decorator]
def finish_input(z, HALF: gl.constexpr, row, column, rows, V, D, ends, meeting):  # type: ignore[no-untyped-def]
    """Add the other parts to a tile and write its rows as `InputRows` says: the HALF-th ROWS from ``row`` on.

    ``meeting`` is (parts, the first one's number, the step to the next, how many).
    """
    within = _within()
    layout: gl.constexpr = within.type.layout
    parts, first, stride, others = meeting
    stored = parts + HALF * (ROWS * COLUMNS)
    pieces = pieces_of(z)
    at_row = row + HALF * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    counts = at_row < rows
    to = at_row
    if ends.to is not None:
        to = gl.load(ends.to + at_row, mask=counts, other=0)
    to = to.to(gl.int64) * ends.out_stride
    if ends.s is not None:
        s = gl.load(ends.s + at_row, mask=counts, other=0.0)
        y = gl.load(ends.y + at_row, mask=counts, other=-1)
        lost = gl.load(ends.rest + at_row, mask=counts, other=0.0)
        at_w = y.to(gl.int64)
        lost = gl.where((at_w >= 0) & (at_w < V), lost, 0.0)
        at_w = gl.where(lost == 0.0, 0, at_w) * ends.w_stride
    for i in gl.static_range(4):
        piece = gl.convert_layout(pieces[i], layout, assert_trivial=True)
        for other in range(others):
            tile = (other * stride + first).to(gl.int64) * (2 * ROWS * COLUMNS)
            piece += gl.load(stored + tile + (within + i * PIECE))
        at = column + i * PIECE + gl.arange(0, PIECE, gl.SliceLayout(0, layout))
        inside = (at < D)[None, :]
        if ends.before is not None:
            before = ends.before + (at_row.to(gl.int64)[:, None] * D + at[None, :])
            piece += gl.load(before, mask=counts[:, None] & inside, other=0.0)
        if ends.s is not None:
            w_at = ends.w + (at_w[:, None] + at[None, :])
            own = gl.load(w_at, mask=(lost != 0.0)[:, None] & inside, other=0.0)
            piece = (piece + lost[:, None] * own.to(gl.float32)) * s[:, None]
            piece = gl.where(s[:, None] == 0.0, 0.0, piece)
        out = ends.out + (to[:, None] + at[None, :])
        gl.store(out, piece.to(ends.out.dtype.element_ty), mask=counts[:, None] & inside)


@gluon.jit
def _parts_of(rows, D, room):  # type: ignore[no-untyped-def]
    """Return (tiles computed whole, tiles split, parts of each) of E W."""
    tiles = gl.cdiv(rows, 2 * ROWS) * gl.cdiv(D, COLUMNS)
    programs = gl.num_programs(0)
    rest = tiles % programs
    parts = gl.minimum(programs, rest + room.tiles) // gl.maximum(rest, 1)
    return tiles - rest, rest, gl.maximum(gl.minimum(parts, MOST_PARTS), 1)


@gluon.jit
def _unit_at(unit, rows, V, whole, rest, parts):  # type: ignore[no-untyped-def]
    """Return a unit's (row, column, first step, number of steps): rows go first, and a tile's parts are far apart."""
    tile = unit
    steps = gl.cdiv(V, DEPTH)
    begin = steps * 0
    if unit >= whole:
        tile = whole + (unit - whole) % rest
        part = (unit - whole) // rest
        begin = part * steps // parts
        steps = (part + 1) * steps // parts - begin
    row_tiles = gl.cdiv(rows, 2 * ROWS)
    return (tile % row_tiles) * (2 * ROWS), (tile // row_tiles) * COLUMNS, begin, steps


@gluon.jit
def _produce_input(e_d, w_d, stages, _ends, room, rows, V, D):  # type: ignore[no-untyped-def]
    """Load E's and W's stages."""
    whole, rest, parts = _parts_of(rows, D, room)
    step = gl.to_tensor(0)
    for unit in range(gl.program_id(0), whole + rest * parts, gl.num_programs(0)):
        row, column, begin, steps = _unit_at(unit, rows, V, whole, rest, parts)
        for k in range(begin, begin + steps):
            load_stage(stages, step, e_d, row, w_d, column, k * DEPTH, None)
            step += 1


@gluon.jit  # type: ignore[untyped-decorator]
def _consume_input(HALF: gl.constexpr, _e_d, _w_d, stages, ends, room, rows, V, D):  # type: ignore[no-untyped-def]
    """Multiply, and finish, the HALF-th ROWS rows of each tile of E W."""
    whole, rest, parts = _parts_of(rows, D, room)
    step = gl.to_tensor(0)
    for unit in range(gl.program_id(0), whole + rest * parts, gl.num_programs(0)):
        row, column, _, steps = _unit_at(unit, rows, V, whole, rest, parts)
        z, step = multiply(step, steps, stages, None, HALF, None, False)
        number = unit - whole  # among the parts
        arrived = room.arrived + 2 * (number % rest)
        if number >= 0 and number < rest * (parts - 1):
            store_part(z, HALF, room.parts, number, arrived)
        else:
            others = gl.to_tensor(0)
            if number >= 0:
                others = parts - 1
            await_parts(arrived, others, HALF)
            finish_input(z, HALF, row, column, rows, V, D, ends, (room.parts, number % rest, rest, others))


@Launcher
@gluon.jit(do_not_specialize=["first", "C", "V", "D"])
def _input_grad(e_d, w_d, ends, room, count, first, C, V, D):  # type: ignore[no-untyped-def]
    stages = new_stages(e_d, w_d, STAGES)
    run_parts(_produce_input, _consume_input, (e_d, w_d, stages, ends, room, counted(count, first, C), V, D))


@gluon.jit  # type: ignore[untyped-decorator]
def weight_stages(e_d, x_d, out_d, STAGES: gl.constexpr):  # type: ignore[no-untyped-def]
    """Set up the stages of E^T S, and the buffers of what is added to and stored with their barriers."""
    stages = new_stages(e_d, x_d, STAGES)
    out_s = gl.allocate_shared_memory(out_d.dtype, [2] + out_d.block_type.shape, out_d.layout)  # noqa: RUF005
    full, empty = barriers(2, 1)
    return stages, (out_s, full, empty)


@gluon.jit
def load_old(out_d, old, row, column, done):  # type: ignore[no-untyped-def]
    """Load the tile that is added to, when the consumers have freed its buffer."""
    out_s, old_full, old_empty = old
    for half in gl.static_range(2):
        mbarrier.wait(old_empty.index(half), done & 1)
        mbarrier.expect(old_full.index(half), ROWS * COLUMNS * out_d.dtype.primitive_bitwidth // 8)
        load_tile(out_d, [row + half * ROWS, column], old_full.index(half), out_s.index(half))


@gluon.jit  # type: ignore[untyped-decorator]
def weight_tile(  # type: ignore[no-untyped-def]
    HALF: gl.constexpr, tile, across, step, steps, done, out_d, stages, old, ADD: gl.constexpr
):
    """Multiply, and finish, the HALF-th ROWS rows of a tile of dW; return the next step."""
    DEEP: gl.constexpr = out_d.dtype == gl.bfloat16
    out_s, old_full, old_empty = old
    buffer = out_s.index(HALF)
    z, step = multiply(step, steps, stages, old_empty if ADD else None, HALF, "a", DEEP)
    if ADD:
        mbarrier.wait(old_full.index(HALF), done & 1)
        z += buffer.load(z.type.layout).to(gl.float32)
    else:
        tma.store_wait(0)
    barrier()
    buffer.store(z.to(out_d.dtype))
    fence_async_shared()
    barrier()
    store_tile(out_d, [(tile // across) * (2 * ROWS) + HALF * ROWS, (tile % across) * COLUMNS], buffer)
    return step


@gluon.jit  # type: ignore[untyped-decorator]
def _weight_tiles(rows, V, D, ADD: gl.constexpr):  # type: ignore[no-untyped-def]
    """Return how many tiles of dW are written: none where nothing is added."""
    tiles = gl.cdiv(V, 2 * ROWS) * gl.cdiv(D, COLUMNS)
    if ADD:
        tiles = gl.where(rows > 0, tiles, 0)
    return tiles


@gluon.jit  # type: ignore[untyped-decorator]
def _produce_weight(e_d, x_d, out_d, stages, old, rows, V, D, ADD: gl.constexpr):  # type: ignore[no-untyped-def]
    """Load E's and S's stages, and the tiles that are added to."""
    DEPTH: gl.constexpr = x_d.block_type.shape[0]
    STAGES: gl.constexpr = stages[1].shape[0]
    across = gl.cdiv(D, COLUMNS)
    steps = gl.cdiv(rows, DEPTH)
    step = gl.to_tensor(0)
    done = gl.to_tensor(0)
    for tile in range(gl.program_id(0), _weight_tiles(rows, V, D, ADD), gl.num_programs(0)):
        row = (tile // across) * (2 * ROWS)
        column = (tile % across) * COLUMNS
        for k in range(steps):
            load_stage(stages, step, e_d, row, x_d, column, k * DEPTH, "a")
            step += 1
            if ADD:  # noqa: SIM102 - known when compiled
                # this stage was left last at the step in which the consumers freed the buffer, or later
                if k == gl.minimum(STAGES + LEAVE, steps - 1):
                    load_old(out_d, old, row, column, done)
        done += 1


@gluon.jit  # type: ignore[untyped-decorator]
def _consume_weight(  # type: ignore[no-untyped-def]
    HALF: gl.constexpr, _e_d, x_d, out_d, stages, old, rows, V, D, ADD: gl.constexpr
):
    """Compute the HALF-th ROWS rows of each tile of E^T S."""
    across = gl.cdiv(D, COLUMNS)
    steps = gl.cdiv(rows, x_d.block_type.shape[0])
    step = gl.to_tensor(0)
    done = gl.to_tensor(0)
    for tile in range(gl.program_id(0), _weight_tiles(rows, V, D, ADD), gl.num_programs(0)):
        step = weight_tile(HALF, tile, across, step, steps, done, out_d, stages, old, ADD)
        done += 1
    tma.store_wait(0)  # shared memory goes when the program ends


@Launcher
@gluon.jit(do_not_specialize=["first", "C", "V", "D"])  # type: ignore[untyped-decorator]
def _weight_grad(  # type: ignore[no-untyped-def]
    e_d, x_d, out_d, count, first, C, V, D, ADD: gl.constexpr, STAGES: gl.constexpr
):
    stages, old = weight_stages(e_d, x_d, out_d, STAGES)
    run_parts(_produce_weight, _consume_weight, (e_d, x_d, out_d, stages, old, counted(count, first, C), V, D, ADD))


def input_grad(e_CV: Tensor, w_VD: Tensor, ends: InputRows, room: Room, used: Used = ALL) -> None:
    """Write ``finish(E W)`` of the rows that are `Used` into ``ends.out``: bfloat16 rows at multiples of 16 bytes."""
    _input_grad[(multiprocessors(e_CV.device),)](
        hopper_descriptor(e_CV, ROWS, DEPTH), hopper_descriptor(w_VD, DEPTH, COLUMNS), ends, room, *used,
        *e_CV.shape, w_VD.shape[1], num_warps=4,
    )  # fmt: skip


def weight_grad(e_CV: Tensor, scaled_CD: Tensor, out_VD: Tensor, used: Used = ALL, *, add: bool) -> None:
    """Write ``E^T S`` over the rows that are `Used` into ``out_VD`` (bfloat16 or float32), or add it."""
    depth, stages = (64, 3) if out_VD.dtype == torch.bfloat16 else (32, 4)
    _weight_grad[(multiprocessors(e_CV.device),)](
        hopper_descriptor(e_CV, depth, ROWS), hopper_descriptor(scaled_CD, depth, COLUMNS),
        hopper_descriptor(out_VD, ROWS, COLUMNS), *used, *e_CV.shape, scaled_CD.shape[1],
        ADD=add, STAGES=stages, num_warps=4,
    )  # fmt: skip


def room_for(device: torch.device, elements: int | None = None) -> Room:
    """Return memory in which parts of tiles meet: of as many as there can be, or as have so many elements."""
    programs = multiprocessors(device)
    tile = 2 * ROWS.value * COLUMNS.value
    tiles = programs if elements is None else min(programs, elements // tile)
    tiles -= tiles == 1  # which Triton would make a constant, and 3.6 loses those on the way to the warps' parts
    parts = torch.empty(max(1, tiles) * tile, dtype=torch.float32, device=device)
    return Room(parts, torch.zeros(2 * programs, dtype=torch.int32, device=device), tiles)
