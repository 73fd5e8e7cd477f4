"""Two GEMMs that leave no logits: what a row's logits amount to, tile by tile, and the gradient of that, in bfloat16.

C rows of a chunk, D hidden size, V vocabulary, P tiles across the vocabulary. Both work on the float32 accumulators,
through TMA descriptors, persistent. Each tile measures its rows from their highest logit in it, so that nothing
overflows, and keeps that logit's own exponential, 1, out of the sums: where the model is sure, what is left keeps its
digits.
"""

import triton
import triton.language as tl
from torch import Tensor

from lowtide.head.kernels.configs import GemmConfig
from lowtide.head.kernels.exp_logits import descriptor, finish_logits, halves, tile_at, tile_logits
from lowtide.head.kernels.launch import Launcher

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
FLOOR = tl.constexpr(-1e4)  # a log-probability whose probability is 0: stands for -inf, which times 0 would be NaN
NO_LOGIT = tl.constexpr(-1e30)  # stands beyond V; its exponential times it is 0


@triton.jit  # type: ignore[untyped-decorator]
def _exponential(z, reference, BIAS: tl.constexpr):  # type: ignore[no-untyped-def]
    """exp(z - reference), and z - reference in bits; ``reference`` is in bits. Only a bias makes a logit -inf."""
    below = z * LOG2E - reference[:, None]
    if BIAS:
        below = tl.maximum(below, FLOOR)
    return tl.exp2(below), below


@triton.jit  # type: ignore[untyped-decorator]
def _piece_sums(z, at, reference, top_id, BIAS: tl.constexpr, HEAT: tl.constexpr, SQUARES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sums over some of a tile's logits but its highest one: of e = exp(z - top), of e (z - top) and of e^2."""
    e, below = _exponential(z, reference, BIAS)
    e = tl.where(at[None, :] == top_id[:, None], 0.0, e)
    rest = tl.sum(e, 1)
    heat = rest
    if HEAT:
        heat = tl.sum(e * below, 1) * LN2
    squares = rest
    if SQUARES:
        squares = tl.sum(e * e, 1)
    return rest, heat, squares


@Launcher
@triton.jit(do_not_specialize=["C"])  # type: ignore[untyped-decorator]
def _tile_stats(  # type: ignore[no-untyped-def]
    x_d, w_d, sums_ptr, id_ptr, bias_ptr, scale_ptr, cap, C, V, D, plane, stride, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr, PROGRAMS: tl.constexpr, BIAS: tl.constexpr,
    SCALE: tl.constexpr, CAP: tl.constexpr, BOUND: tl.constexpr, HEAT: tl.constexpr, SQUARES: tl.constexpr,
    TOTAL: tl.constexpr,
):  # fmt: skip
    """Each tile's highest logit, its class, and sums over the tile's other classes: see `tile_stats`.

    Half a tile at a time, since the exponentials of a whole one do not fit the registers beside its logits.
    """
    HALF: tl.constexpr = COLUMNS // 2
    steps = tl.cdiv(D, DEPTH)
    for tile in tl.range(tl.program_id(0), tl.cdiv(C, ROWS) * tl.cdiv(V, COLUMNS), PROGRAMS, flatten=True):
        row_tile, p = tile_at(tile, C, V, ROWS, COLUMNS, GROUP)
        row, column = row_tile * ROWS, p * COLUMNS
        z = tile_logits(x_d, w_d, row, column, steps, ROWS, COLUMNS, DEPTH)
        left, right = halves(z, ROWS, COLUMNS)
        at_left = column + tl.arange(0, HALF)
        at_right = at_left + HALF
        left = finish_logits(left, at_left, V, bias_ptr, scale_ptr, cap, BIAS, SCALE, CAP)
        right = finish_logits(right, at_right, V, bias_ptr, scale_ptr, cap, BIAS, SCALE, CAP)
        if TOTAL:
            total = tl.sum(left, 1) + tl.sum(right, 1)  # beyond V logits are 0: no weight, no bias
        if BOUND:
            left = tl.where((at_left < V)[None, :], left, NO_LOGIT)
            right = tl.where((at_right < V)[None, :], right, NO_LOGIT)
        top = tl.maximum(tl.max(left, 1), tl.max(right, 1))
        top_id = tl.minimum(
            tl.min(tl.where(left == top[:, None], at_left[None, :], V), 1),
            tl.min(tl.where(right == top[:, None], at_right[None, :], V), 1),
        )
        reference = tl.where(top == float("-inf"), 0.0, top * LOG2E)
        rest, heat, squares = _piece_sums(left, at_left, reference, top_id, BIAS, HEAT, SQUARES)
        more_rest, more_heat, more_squares = _piece_sums(right, at_right, reference, top_id, BIAS, HEAT, SQUARES)
        rows = row + tl.arange(0, ROWS)
        inside = rows < C
        out = sums_ptr + rows.to(tl.int64) * stride + p
        tl.store(id_ptr + rows.to(tl.int64) * stride + p, top_id, mask=inside)
        tl.store(out, top, mask=inside)
        out += plane
        tl.store(out, rest + more_rest, mask=inside)
        if HEAT:
            out += plane
            tl.store(out, heat + more_heat, mask=inside)
        if SQUARES:
            out += plane
            tl.store(out, squares + more_squares, mask=inside)
        if TOTAL:
            out += plane
            tl.store(out, total, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _gradient_piece(  # type: ignore[no-untyped-def]
    z, at, V, alive, lse, slope, heat, even, bias_ptr, scale_ptr, cap, BIAS: tl.constexpr, SCALE: tl.constexpr,
    CAP: tl.constexpr, HEAT: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Turn accumulators of the classes ``at`` into the gradient."""
    z = finish_logits(z, at, V, bias_ptr, scale_ptr, cap, BIAS, SCALE, CAP)
    gradient, below = _exponential(z, lse, BIAS)
    if HEAT:
        gradient *= slope[:, None] - heat[:, None] * below
    else:
        gradient *= slope[:, None]
    if EVEN:
        gradient += even[:, None]
    if CAP:
        gradient *= 1.0 - (z / cap) * (z / cap)
    return tl.where(alive[:, None], gradient, 0.0)


@Launcher
@triton.jit(do_not_specialize=["C"])  # type: ignore[untyped-decorator]
def _stats_gradient(  # type: ignore[no-untyped-def]
    x_d, w_d, g_d, numbers_ptr, bias_ptr, scale_ptr, cap, C, V, D, plane, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, GROUP: tl.constexpr, PROGRAMS: tl.constexpr, PIECES: tl.constexpr, BIAS: tl.constexpr,
    SCALE: tl.constexpr, CAP: tl.constexpr, HEAT: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """The logits' gradient over each row's s: see `stats_gradient`."""
    steps = tl.cdiv(D, DEPTH)
    for tile in tl.range(tl.program_id(0), tl.cdiv(C, ROWS) * tl.cdiv(V, COLUMNS), PROGRAMS, flatten=True):
        row_tile, p = tile_at(tile, C, V, ROWS, COLUMNS, GROUP)
        row, column = row_tile * ROWS, p * COLUMNS
        z = tile_logits(x_d, w_d, row, column, steps, ROWS, COLUMNS, DEPTH)
        rows = row + tl.arange(0, ROWS)
        inside = rows < C
        at = numbers_ptr + rows
        alive = tl.load(at, mask=inside, other=0.0) != 0.0
        lse = tl.load(at + plane, mask=inside, other=0.0) * LOG2E
        slope = tl.load(at + 2 * plane, mask=inside, other=0.0)
        heat = tl.load(at + 3 * plane, mask=inside, other=0.0) * LN2
        even = tl.load(at + 4 * plane, mask=inside, other=0.0)
        if PIECES == 1:
            gradient = _gradient_piece(
                z, column + tl.arange(0, COLUMNS), V, alive, lse, slope, heat, even, bias_ptr, scale_ptr, cap,
                BIAS, SCALE, CAP, HEAT, EVEN,
            )  # fmt: skip
            g_d.store([row, column], gradient.to(g_d.dtype))
        else:
            HALF: tl.constexpr = COLUMNS // 2
            left, right = halves(z, ROWS, COLUMNS)
            classes = column + tl.arange(0, HALF)
            gradient = _gradient_piece(
                left, classes, V, alive, lse, slope, heat, even, bias_ptr, scale_ptr, cap, BIAS, SCALE, CAP, HEAT, EVEN
            )  # fmt: skip
            g_d.store([row, column], gradient.to(g_d.dtype))
            gradient = _gradient_piece(
                right, classes + HALF, V, alive, lse, slope, heat, even, bias_ptr, scale_ptr, cap, BIAS, SCALE, CAP,
                HEAT, EVEN,
            )  # fmt: skip
            g_d.store([row, column + HALF], gradient.to(g_d.dtype))


def tile_stats(
    x_CD: Tensor,
    w_VD: Tensor,
    sums_FCP: Tensor,
    id_CP: Tensor,
    config: GemmConfig,
    programs: int,
    *,
    bias_V: Tensor | None = None,
    scale: Tensor | None = None,
    softcap: float | None = None,
    heat: bool = False,
    squares: bool = False,
    total: bool = False,
) -> None:
    """Write what each tile of ``z = softcap * tanh((x @ w.T + bias) * scale / softcap)`` amounts to.

    Args:
        x_CD: Hidden states, rows of 16-byte stride, unit stride within.
        w_VD: Weight, the same.
        sums_FCP: float32, contiguous; takes each tile's highest logit ("top"), the sum of ``exp(z - top)`` over its
            other classes, and, where asked for, in this order: the sum of ``exp(z - top) * (z - top)``, of
            ``exp(z - top)**2``, and of all its z.
        id_CP: int32, contiguous; takes the class of the highest logit.
        config: Tile sizes.
        programs: How many programs run: one for each multiprocessor.
        bias_V: float32, or None.
        scale: 0-d float32 on the device, or None.
        softcap: Above 0, or None.
        heat: Whether the third is asked for.
        squares: Whether the fourth is.
        total: Whether the fifth is.
    """
    C, D = x_CD.shape
    V = w_VD.shape[0]
    assert sums_FCP.is_contiguous()
    assert len(sums_FCP) == 2 + heat + squares + total
    count = programs * config.per_multiprocessor
    _tile_stats[(count,)](
        descriptor(x_CD, C, D, config.rows, config.depth), descriptor(w_VD, V, D, config.columns, config.depth),
        sums_FCP, id_CP, sums_FCP if bias_V is None else bias_V, sums_FCP if scale is None else scale,
        1.0 if softcap is None else softcap, C, V, D, sums_FCP.stride(0), sums_FCP.stride(1), ROWS=config.rows,
        COLUMNS=config.columns, DEPTH=config.depth, GROUP=config.group, PROGRAMS=count, BIAS=bias_V is not None,
        SCALE=scale is not None, CAP=softcap is not None, BOUND=V % config.columns != 0, HEAT=heat, SQUARES=squares,
        TOTAL=total, num_stages=config.stages, num_warps=config.warps,
    )  # fmt: skip


def stats_gradient(
    x_CD: Tensor,
    w_VD: Tensor,
    g_CV: Tensor,
    numbers_5C: Tensor,
    config: GemmConfig,
    programs: int,
    *,
    bias_V: Tensor | None = None,
    scale: Tensor | None = None,
    softcap: float | None = None,
    heat: bool = False,
    even: bool = False,
) -> None:
    """Write ``f_v (p_v (slope - heat (z_v - lse)) + even)``, p = exp(z - lse), f_v = 1 - (z_v / softcap)**2 with a cap.

    In rows whose s is 0, zeros. Targets and the highest class are no exception: `stats_rows.put_entries` is for them.

    Args:
        x_CD: As in `tile_stats`; so are the others that are not named here.
        w_VD: See there.
        g_CV: Takes the gradient, rows of 16-byte stride.
        numbers_5C: float32, contiguous: s, lse, slope, heat, even.
        config: See there.
        programs: See there.
        bias_V: See there.
        scale: See there.
        softcap: See there.
        heat: Whether any row's heat is not 0.
        even: Whether any row's even is not 0.
    """
    C, D = x_CD.shape
    V = w_VD.shape[0]
    count = programs * config.per_multiprocessor
    _stats_gradient[(count,)](
        descriptor(x_CD, C, D, config.rows, config.depth), descriptor(w_VD, V, D, config.columns, config.depth),
        descriptor(g_CV, C, V, config.rows, config.columns // config.pieces), numbers_5C,
        numbers_5C if bias_V is None else bias_V, numbers_5C if scale is None else scale,
        1.0 if softcap is None else softcap, C, V, D, numbers_5C.stride(0), ROWS=config.rows, COLUMNS=config.columns,
        DEPTH=config.depth, GROUP=config.group, PROGRAMS=count, PIECES=config.pieces, BIAS=bias_V is not None,
        SCALE=scale is not None, CAP=softcap is not None, HEAT=heat, EVEN=even, num_stages=config.stages,
        num_warps=config.warps,
    )  # fmt: skip
