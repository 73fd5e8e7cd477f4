"""The gradients' GEMMs on Hopper over the tiles of E that are kept.

C rows of a chunk, D hidden size, V vocabulary, P tiles across the vocabulary, R tiles of rows. A tile of E has 128 rows
and 256 columns; which are kept, and what stands for the others, says `choice`:

    input_grad:   out = finish(E' W + m mean)    E' with zeros in the other tiles, m [C, P] what these hold in each row,
                                                 mean [P, D] the mean row of W in each tile across
    weight_grad:  dW = E'^T S, dW += E'^T S      tiles of dW for which nothing is kept are not touched where it is added

Both are the kernels of `gradient_gemms_hopper` with sums that run over lists. The producer warp alone reads the lists;
the consumers only count the steps.

E' W has few tiles and long sums of unlike lengths. The steps of all its tiles, one tile's after another's, are shared
out evenly: a program begins and ends anywhere, also within a tile. Whoever has a tile's last step finishes it; the
programs before it store their parts, each before anything else that it computes, and wait for nobody until then.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from lowtide.head.kernels.gemm import ALL, Used
from lowtide.head.kernels.gradient_gemms_hopper import (
    InputRows,
    Room,
    await_parts,
    finish_input,
    load_old,
    store_part,
    weight_stages,
    weight_tile,
)
from lowtide.head.kernels.hopper import (
    COLUMNS,
    DEPTH,
    LEAVE,
    ROWS,
    STAGES,
    counted,
    gl,
    gluon,
    hopper_descriptor,
    load_stage,
    multiply,
    new_stages,
    run_parts,
    tma,
)
from lowtide.kernel_launch import Launcher, multiprocessors

PER_COLUMN_TILE = gl.constexpr(4)  # stages of a step of the sum over the vocabulary
PER_ROW_TILE = gl.constexpr(2)  # stages of a step of the sum over tokens


class Lists(NamedTuple):
    """Which tiles of a chunk's E are kept, int32: from both sides, in order."""

    across: Tensor  # [R, P]: of each tile of rows, the tiles across the vocabulary
    across_count: Tensor  # [R]
    down: Tensor  # [P, R]: of each tile across, the tiles of rows
    down_count: Tensor  # [P]
    starts: Tensor  # [R + 1]: the steps of E' W before the tiles of each tile of rows, and all
    ranges: Tensor  # [programs, 2]: the first and the last tile of E' W of each program


@gluon.jit
def _share(lists, C, P):  # type: ignore[no-untyped-def]
    """Return a program's (number of tiles, last one, first step and their end), how many have others, and means."""
    steps = gl.load(lists.starts + gl.cdiv(C, 2 * ROWS))
    share = gl.cdiv(steps, gl.num_programs(0))
    begin = gl.program_id(0) * share
    first = gl.load(lists.ranges + 2 * gl.program_id(0))
    last = gl.load(lists.ranges + 2 * gl.program_id(0) + 1)
    return last - first + 1, last, begin, gl.minimum(begin + share, steps), share, gl.cdiv(P, COLUMNS)


@gluon.jit
def _unit(tile, begin, end, means, lists, across):  # type: ignore[no-untyped-def]
    """Return a tile's (tile of rows, tile of D, step at which it starts, how many it has), and a program's part."""
    row_tile = tile // across
    length = gl.load(lists.across_count + row_tile) + means
    start = gl.load(lists.starts + row_tile) + (tile % across) * length
    return row_tile, tile % across, start, length, gl.maximum(begin - start, 0), gl.minimum(end - start, length)


@gluon.jit
def _produce_input(operands, stages, _ends, lists, _room, _rows, C, P, _V, D):  # type: ignore[no-untyped-def]
    """Load the stages: a tile's first steps are those of what stands for the tiles that are not kept."""
    e_d, w_d, mass_d, mean_d = operands
    number, last, begin, end, _, means = _share(lists, C, P)
    step = gl.to_tensor(0)
    for i in range(number):
        row_tile, d_tile, _, _, first, stop = _unit(last - i, begin, end, means, lists, gl.cdiv(D, COLUMNS))
        row = row_tile * (2 * ROWS)
        column = d_tile * COLUMNS
        kept = lists.across + row_tile * P
        for k in range(first * PER_COLUMN_TILE, gl.minimum(stop, means) * PER_COLUMN_TILE):
            load_stage(stages, step, mass_d, row, mean_d, column, k * DEPTH, None)
            step += 1
        first = gl.maximum(first - means, 0)
        ahead = gl.load(kept + first)  # read one tile ahead of its use
        for at in range(first, stop - means):
            v = ahead * COLUMNS
            ahead = gl.load(kept + gl.minimum(at + 1, P - 1))
            for k in range(PER_COLUMN_TILE):
                load_stage(stages, step, e_d, row, w_d, column, v + k * DEPTH, None)
                step += 1


@gluon.jit  # type: ignore[untyped-decorator]
def _consume_input(  # type: ignore[no-untyped-def]
    HALF: gl.constexpr, _operands, stages, ends, lists, room, rows, C, P, V, D
):
    """Multiply, and finish, the HALF-th ROWS rows of each tile, the last one first, which another program waits for."""
    number, last, begin, end, share, means = _share(lists, C, P)
    program = gl.program_id(0)
    step = gl.to_tensor(0)
    for i in range(number):
        row_tile, d_tile, start, length, first, stop = _unit(last - i, begin, end, means, lists, gl.cdiv(D, COLUMNS))
        z, step = multiply(step, (stop - first) * PER_COLUMN_TILE, stages, None, HALF, None, True)
        if stop < length:
            store_part(z, HALF, room.parts, program, room.arrived + 2 * ((start + length - 1) // share))
        else:
            earliest = start // share
            await_parts(room.arrived + 2 * program, program - earliest, HALF)
            meeting = (room.parts, earliest, 1, program - earliest)
            finish_input(z, HALF, row_tile * (2 * ROWS), d_tile * COLUMNS, rows, V, D, ends, meeting)


@Launcher
@gluon.jit(do_not_specialize=["first", "C", "P", "V", "D"])
def _input_grad(  # type: ignore[no-untyped-def]
    e_d, w_d, mass_d, mean_d, ends, lists, room, count, first, C, P, V, D
):
    operands, stages = (e_d, w_d, mass_d, mean_d), new_stages(e_d, w_d, STAGES)
    rows = counted(count, first, C)
    run_parts(_produce_input, _consume_input, (operands, stages, ends, lists, room, rows, C, P, V, D))


@gluon.jit  # type: ignore[untyped-decorator]
def _produce_weight(  # type: ignore[no-untyped-def]
    e_d, x_d, out_d, stages, old, lists, R, P, D, ADD: gl.constexpr
):
    """Load E's and S's stages, and the tiles that are added to."""
    STAGES: gl.constexpr = stages[1].shape[0]
    across = gl.cdiv(D, COLUMNS)
    step = gl.to_tensor(0)
    done = gl.to_tensor(0)
    for unit in range(gl.program_id(0), P * 2 * across, gl.num_programs(0)):
        tile, row, column = unit // (2 * across), (unit // across) * (2 * ROWS), (unit % across) * COLUMNS
        count = gl.load(lists.down_count + tile)
        kept = lists.down + tile * R
        ahead = gl.load(kept)
        for at in range(count):
            c = ahead * (2 * ROWS)
            ahead = gl.load(kept + gl.minimum(at + 1, R - 1))
            for k in range(PER_ROW_TILE):
                load_stage(stages, step, e_d, row, x_d, column, c + k * DEPTH, "a")
                step += 1
                if ADD:  # noqa: SIM102 - known when compiled
                    # this stage was left last at the step in which the consumers freed the buffer, or later
                    if at * PER_ROW_TILE + k == gl.minimum(STAGES + LEAVE, count * PER_ROW_TILE - 1):
                        load_old(out_d, old, row, column, done)
        if ADD:
            done += gl.minimum(count, 1)


@gluon.jit  # type: ignore[untyped-decorator]
def _consume_weight(  # type: ignore[no-untyped-def]
    HALF: gl.constexpr, _e_d, _x_d, out_d, stages, old, lists, _R, P, D, ADD: gl.constexpr
):
    """Compute the HALF-th ROWS rows of each tile of dW: where nothing is kept, only if nothing is added to."""
    across = gl.cdiv(D, COLUMNS)
    step = gl.to_tensor(0)
    done = gl.to_tensor(0)
    for unit in range(gl.program_id(0), P * 2 * across, gl.num_programs(0)):
        steps = gl.load(lists.down_count + unit // (2 * across)) * PER_ROW_TILE
        if (steps > 0) | (not ADD):
            step = weight_tile(HALF, unit, across, step, steps, done, out_d, stages, old, ADD)
            done += 1
    tma.store_wait(0)  # shared memory goes when the program ends


@Launcher
@gluon.jit(do_not_specialize=["R", "P", "D"])  # type: ignore[untyped-decorator]
def _weight_grad(  # type: ignore[no-untyped-def]
    e_d, x_d, out_d, lists, R, P, D, ADD: gl.constexpr, STAGES: gl.constexpr
):
    stages, old = weight_stages(e_d, x_d, out_d, STAGES)
    run_parts(_produce_weight, _consume_weight, (e_d, x_d, out_d, stages, old, lists, R, P, D, ADD))


def input_grad(
    e_CV: Tensor, w_VD: Tensor, mass_CP: Tensor, mean_PD: Tensor, ends: InputRows, lists: Lists, room: Room,
    used: Used = ALL,
) -> None:  # fmt: skip
    """Write ``finish(E' W + m mean)`` into ``ends.out``: bfloat16 operands, rows at multiples of 16 bytes."""
    (C, V), (P, D) = e_CV.shape, mean_PD.shape
    _input_grad[(multiprocessors(e_CV.device),)](
        hopper_descriptor(e_CV, ROWS, DEPTH), hopper_descriptor(w_VD, DEPTH, COLUMNS),
        hopper_descriptor(mass_CP, ROWS, DEPTH), hopper_descriptor(mean_PD, DEPTH, COLUMNS),
        ends, lists, room, *used, C, P, V, D, num_warps=4,
    )  # fmt: skip


def weight_grad(e_CV: Tensor, scaled_CD: Tensor, out_VD: Tensor, lists: Lists, *, add: bool) -> None:
    """Write ``E'^T S`` into ``out_VD`` (bfloat16 or float32), or add it."""
    P, R = lists.down.shape
    _weight_grad[(multiprocessors(e_CV.device),)](
        hopper_descriptor(e_CV, DEPTH, ROWS), hopper_descriptor(scaled_CD, DEPTH, COLUMNS),
        hopper_descriptor(out_VD, ROWS, COLUMNS), lists, R, P, scaled_CD.shape[1],
        ADD=add, STAGES=3 if out_VD.dtype == torch.bfloat16 else 2, num_warps=4,
    )  # fmt: skip
