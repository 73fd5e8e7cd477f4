"""The end of a tile of the input's gradient, on Hopper: parts that meet, and what a row still lacks.

Parts of one tile are float32 tiles in memory that every program reads. A program whose part is not the last to be added
stores it and arrives; the one that finishes the tile waits for the others, and adds them in order.
"""

from typing import NamedTuple

from torch import Tensor

from lowtide.head.kernels.hopper import COLUMNS, PIECE, ROWS, barrier, gl, gluon, pieces_of


class InputRows(NamedTuple):
    """What ends the tiles of E W, of ``out``'s type: dX = s (E W + rest w_y) - m g (a / V) sum_v q_v w_v.

    See `exp_terms.finish_input_grad`. Without ``s`` it is E W alone.
    """

    out: Tensor  # [.., D], unit stride within rows
    out_stride: int
    to: Tensor | None = None  # [C] integers: the row of ``out`` of each row; None: the same
    s: Tensor | None = None  # [C] float32
    y: Tensor | None = None  # [C] int32
    rest: Tensor | None = None  # [C] float32
    w: Tensor | None = None  # [V, D]
    w_stride: int = 0
    first_class: int = 0
    uniform: Tensor | None = None  # [D] float32
    factor: Tensor | None = None  # [C] float32
    scale: Tensor | None = None  # 0-d float32
    share: float = 0.0
    before: Tensor | None = None  # [C, D] float32, contiguous: what E W is added to; it may be ``out``

    def even(self, uniform_D: Tensor | None, factor_C: Tensor, scale: Tensor | None, share: float) -> "InputRows":
        """Return the same with what smoothing adds to every row: see `exp_terms.RowTerms.even`."""
        return self._replace(uniform=uniform_D, factor=factor_C, scale=scale, share=share)


class Room(NamedTuple):
    """Where parts of tiles meet."""

    parts: Tensor  # float32, of ``tiles`` tiles
    arrived: Tensor  # int32, two a program, 0 outside of the kernel
    tiles: int


@gluon.jit  # type: ignore[untyped-decorator]
def store_part(z, HALF: gl.constexpr, parts, number, arrived):  # type: ignore[no-untyped-def]
    """Store a consumer's rows of the ``number``-th part, and arrive."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PIECE, 16])
    within = gl.arange(0, ROWS, gl.SliceLayout(1, layout))[:, None] * COLUMNS
    within += gl.arange(0, PIECE, gl.SliceLayout(0, layout))[None, :]
    stored = parts + HALF * (ROWS * COLUMNS) + number.to(gl.int64) * (2 * ROWS * COLUMNS)
    pieces = pieces_of(z)
    for i in gl.static_range(4):
        gl.store(stored + (within + i * PIECE), gl.convert_layout(pieces[i], layout, assert_trivial=True))
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
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PIECE, 16])
    parts, first, stride, others = meeting
    within = gl.arange(0, ROWS, gl.SliceLayout(1, layout))[:, None] * COLUMNS
    within += gl.arange(0, PIECE, gl.SliceLayout(0, layout))[None, :]
    stored = parts + HALF * (ROWS * COLUMNS)
    pieces = pieces_of(z)
    at_row = row + HALF * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    counts = at_row < rows
    if ends.to is not None:
        to = gl.load(ends.to + at_row, mask=counts, other=0).to(gl.int64) * ends.out_stride
    else:
        to = at_row.to(gl.int64) * ends.out_stride
    if ends.s is not None:
        s = gl.load(ends.s + at_row, mask=counts, other=0.0)
        y = gl.load(ends.y + at_row, mask=counts, other=-1)
        lost = gl.load(ends.rest + at_row, mask=counts, other=0.0)
        at_w = (y - ends.first_class).to(gl.int64)
        lost = gl.where((at_w >= 0) & (at_w < V), lost, 0.0)
        at_w = gl.where(lost == 0.0, 0, at_w) * ends.w_stride
        if ends.uniform is not None:
            even = gl.load(ends.factor + at_row, mask=counts, other=0.0) * ends.share
            if ends.scale is not None:
                even *= gl.load(ends.scale)
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
            if ends.uniform is not None:
                uniform = gl.load(ends.uniform + at, mask=at < D, other=0.0)
                piece = gl.where(y[:, None] >= 0, piece - even[:, None] * uniform[None, :], 0.0)
        out = ends.out + (to[:, None] + at[None, :])
        gl.store(out, piece.to(ends.out.dtype.element_ty), mask=counts[:, None] & inside)
