"""Two GEMMs that leave no logits: what a row's logits amount to, tile by tile, and the gradient of that, in bfloat16.

C rows of a chunk, D hidden size, V vocabulary, P tiles across the vocabulary. Each tile measures its rows from their
highest logit in it, so that nothing overflows, and keeps that logit's own exponential, 1, out of the sums: where the
model is sure, what is left keeps its digits.
"""

import triton
import triton.language as tl
from torch import Tensor

from lowtide.head.kernels.configs import GemmConfig
from lowtide.head.kernels.gemm import (
    LOG2E,
    PLAIN,
    LogitTransform,
    descriptors,
    each_tile,
    finish_logits,
    halves,
    matrix,
)
from lowtide.kernel_launch import Launcher

LN2 = tl.constexpr(0.6931471805599453)
FLOOR = tl.constexpr(-1e4)  # a log-probability whose probability is 0: stands for -inf, which times 0 would be NaN
NO_LOGIT = tl.constexpr(-1e30)  # stands beyond V; its exponential times it is 0


@triton.jit
def _exponential(z, reference, transform):  # type: ignore[no-untyped-def]
    """exp(z - reference), and z - reference in bits; ``reference`` is in bits. Only a bias makes a logit -inf."""
    below = z * LOG2E - reference[:, None]
    if transform.bias_V is not None:
        below = tl.maximum(below, FLOOR)
    return tl.exp2(below), below


@triton.jit  # type: ignore[untyped-decorator]
def _piece_sums(z, at, reference, top_id, transform, HEAT: tl.constexpr, SQUARES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sums over some of a tile's logits but its highest one: of e = exp(z - top), of e (z - top) and of e^2."""
    e, below = _exponential(z, reference, transform)
    e = tl.where(at[None, :] == top_id[:, None], 0.0, e)
    rest = tl.sum(e, 1)
    heat = rest
    if HEAT:
        heat = tl.sum(e * below, 1) * LN2
    squares = rest
    if SQUARES:
        squares = tl.sum(e * e, 1)
    return rest, heat, squares


@triton.jit  # type: ignore[untyped-decorator]
def _stats_tile(z, row, p, C, V, _out_d, sums, transform, ASKED: tl.constexpr, CONFIG: tl.constexpr):  # type: ignore[no-untyped-def]
    """Half a tile at a time, since the exponentials of a whole one do not fit the registers beside its logits."""
    sums_ptr, id_ptr, plane, stride = sums
    BOUND: tl.constexpr = ASKED[0]
    HEAT: tl.constexpr = ASKED[1]
    SQUARES: tl.constexpr = ASKED[2]
    TOTAL: tl.constexpr = ASKED[3]
    HALF: tl.constexpr = CONFIG.columns // 2
    left, right = halves(z, CONFIG.rows, CONFIG.columns)
    at_left = p * CONFIG.columns + tl.arange(0, HALF)
    at_right = at_left + HALF
    left = finish_logits(left, at_left, V, transform)
    right = finish_logits(right, at_right, V, transform)
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
    rest, heat, squares = _piece_sums(left, at_left, reference, top_id, transform, HEAT, SQUARES)
    more_rest, more_heat, more_squares = _piece_sums(right, at_right, reference, top_id, transform, HEAT, SQUARES)
    rows = row + tl.arange(0, CONFIG.rows)
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


@Launcher
@triton.jit(do_not_specialize=["C"])  # type: ignore[untyped-decorator]
def _tile_stats(  # type: ignore[no-untyped-def]
    x_d, w_d, sums, transform, C, V, D, ASKED: tl.constexpr, CONFIG: tl.constexpr, PROGRAMS: tl.constexpr
):  # fmt: skip
    """Each tile's highest logit, its class, and sums over the tile's other classes: see `tile_stats`."""
    each_tile(x_d, w_d, None, sums, transform, C, V, D, _stats_tile, ASKED, CONFIG, PROGRAMS)


@triton.jit  # type: ignore[untyped-decorator]
def _gradient_tile(z, row, p, C, V, g_d, numbers, transform, ASKED: tl.constexpr, CONFIG: tl.constexpr):  # type: ignore[no-untyped-def]
    """Turn accumulators into the gradient, a half at a time where a tile is stored so."""
    numbers_ptr, plane = numbers
    HEAT: tl.constexpr = ASKED[0]
    EVEN: tl.constexpr = ASKED[1]
    WIDTH: tl.constexpr = CONFIG.columns // CONFIG.pieces
    PIECES: tl.constexpr = CONFIG.pieces
    column = p * CONFIG.columns
    rows = row + tl.arange(0, CONFIG.rows)
    inside = rows < C
    at = numbers_ptr + rows
    alive = tl.load(at, mask=inside, other=0.0) != 0.0
    lse = tl.load(at + plane, mask=inside, other=0.0) * LOG2E
    slope = tl.load(at + 2 * plane, mask=inside, other=0.0)
    heat = tl.load(at + 3 * plane, mask=inside, other=0.0) * LN2
    even = tl.load(at + 4 * plane, mask=inside, other=0.0)
    pieces = (z,)
    if PIECES == 2:
        pieces = halves(z, CONFIG.rows, CONFIG.columns)
    for i in tl.static_range(PIECES):
        logits = finish_logits(pieces[i], column + i * WIDTH + tl.arange(0, WIDTH), V, transform)
        gradient, below = _exponential(logits, lse, transform)
        if HEAT:
            gradient *= slope[:, None] - heat[:, None] * below
        else:
            gradient *= slope[:, None]
        if EVEN:
            gradient += even[:, None]
        if transform.softcap is not None:
            gradient *= 1.0 - (logits / transform.softcap) * (logits / transform.softcap)
        gradient = tl.where(alive[:, None], gradient, 0.0)
        g_d.store([row, column + i * WIDTH], gradient.to(g_d.dtype))


@Launcher
@triton.jit(do_not_specialize=["C"])  # type: ignore[untyped-decorator]
def _stats_gradient(  # type: ignore[no-untyped-def]
    x_d, w_d, g_d, numbers, transform, C, V, D, ASKED: tl.constexpr, CONFIG: tl.constexpr, PROGRAMS: tl.constexpr
):  # fmt: skip
    """The logits' gradient over each row's s: see `stats_gradient`."""
    each_tile(x_d, w_d, g_d, numbers, transform, C, V, D, _gradient_tile, ASKED, CONFIG, PROGRAMS)


def tile_stats(
    x_CD: Tensor,
    w_VD: Tensor,
    sums_FCP: Tensor,
    id_CP: Tensor,
    config: GemmConfig,
    programs: int,
    *,
    transform: LogitTransform = PLAIN,
    heat: bool = False,
    squares: bool = False,
    total: bool = False,
) -> None:
    """Write what each tile of the logits z amounts to.

    Args:
        x_CD: Hidden states, as `gemm` takes them.
        w_VD: Weight, the same.
        sums_FCP: float32, contiguous; takes each tile's highest logit ("top"), the sum of ``exp(z - top)`` over its
            other classes, and, where asked for, in this order: the sum of ``exp(z - top) * (z - top)``, of
            ``exp(z - top)**2``, and of all its z.
        id_CP: int32, contiguous; takes the class of the highest logit.
        config: Tile sizes.
        programs: How many programs run: one for each multiprocessor.
        transform: What makes logits of the products.
        heat: Whether the third is asked for.
        squares: Whether the fourth is.
        total: Whether the fifth is.
    """
    (C, D), V = x_CD.shape, w_VD.shape[0]
    assert sums_FCP.is_contiguous()
    assert len(sums_FCP) == 2 + heat + squares + total
    x_d, w_d, _ = descriptors(x_CD, w_VD, None, config)
    count = programs * config.per_multiprocessor
    _tile_stats[(count,)](
        x_d, w_d, (sums_FCP, id_CP, *sums_FCP.stride()[:2]), transform, C, V, D,
        ASKED=(V % config.columns != 0, heat, squares, total), CONFIG=config, PROGRAMS=count,
        num_stages=config.stages, num_warps=config.warps,
    )  # fmt: skip


def stats_gradient(
    x_CD: Tensor,
    w_VD: Tensor,
    g_CV: Tensor,
    numbers_5C: Tensor,
    config: GemmConfig,
    programs: int,
    *,
    transform: LogitTransform = PLAIN,
    heat: bool = False,
    even: bool = False,
) -> None:
    """Write ``f_v (p_v (slope - heat (z_v - lse)) + even)``, p = exp(z - lse), f_v = 1 - (z_v / softcap)**2 with a cap.

    In rows whose s is 0, zeros. Targets and the highest class are as the others: see `stats_entries.put_entries`.

    ``w_VD`` is of any classes, the gradient's rows ``g_CV`` are of 16-byte stride, ``numbers_5C`` (float32, contiguous)
    are s, lse, slope, heat and even; ``heat`` and ``even`` say whether any row's are not 0. The other arguments are as
    in `tile_stats`.
    """
    (C, D), V = x_CD.shape, w_VD.shape[0]
    count = programs * config.per_multiprocessor
    _stats_gradient[(count,)](
        *descriptors(x_CD, w_VD, g_CV, config), matrix(numbers_5C), transform, C, V, D, ASKED=(heat, even),
        CONFIG=config, PROGRAMS=count, num_stages=config.stages, num_warps=config.warps,
    )  # fmt: skip
