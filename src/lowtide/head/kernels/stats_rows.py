"""What stands before and behind the GEMMs of `stats_logits`: a program a row, over [C, P], [C, D] or [C].

C rows of a chunk, D hidden size, V vocabulary, P tiles across it. With M the highest logit and R the sum of exp(z - M)
over the other classes, K that of exp(z - M) (z - M), S that of exp(z - M)**2:

    lse = M + log1p(R)    entropy = log1p(R) - K / (1 + R)    sum p^2 = (1 + S) / (1 + R)^2    log p_y = t - lse
"""

import triton
import triton.language as tl
from torch import Tensor

from lowtide.head.kernels.elementary import expm1, log1p, tanh
from lowtide.head.kernels.exp_rows import block_of, dot, scaled_row
from lowtide.head.kernels.launch import Launcher
from lowtide.head.kernels.stats_logits import FLOOR


@Launcher
@triton.jit  # type: ignore[untyped-decorator]
def _finish_stats(  # type: ignore[no-untyped-def]
    sums_ptr, id_ptr, plane, stride, P, x_ptr, x_stride, w_ptr, w_stride, y_ptr, bias_ptr, scale_ptr, cap, lse_ptr,
    argmax_ptr, top_ptr, logprob_ptr, entropy_ptr, squares_ptr, mean_ptr, D, V, BIAS: tl.constexpr,
    SCALE: tl.constexpr, CAP: tl.constexpr, TARGET: tl.constexpr, HEAT: tl.constexpr, SQUARES: tl.constexpr,
    TOTAL: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """See `finish_stats`."""
    i = tl.program_id(0).to(tl.int64)
    p = tl.arange(0, TILES)
    inside = p < P
    at = sums_ptr + i * stride + p
    tops = tl.load(at, mask=inside, other=float("-inf"))
    highest = tl.max(tops, 0)
    top_id = tl.min(tl.where(tops == highest, tl.load(id_ptr + i * stride + p, mask=inside, other=V), V), 0)
    winner = tl.min(tl.where(tops == highest, p, TILES), 0)
    below = tops - tl.where(highest == float("-inf"), 0.0, highest)
    weight = tl.exp(below)
    own = tl.where(p == winner, 0.0, 1.0)  # each other tile's highest class is one of the rest
    at += plane
    in_tile = tl.load(at, mask=inside, other=0.0) + own
    rest = tl.sum(tl.where(inside, weight * in_tile, 0.0), 0) + (highest - highest)  # NaN where that is not finite
    spread = log1p(rest)
    lse = highest + spread
    tl.store(lse_ptr + i, lse)
    tl.store(argmax_ptr + i, tl.minimum(top_id, V - 1).to(tl.int64))
    tl.store(top_ptr + i, -spread)
    if HEAT:
        at += plane
        heat = weight * (tl.load(at, mask=inside, other=0.0) + tl.maximum(below, FLOOR) * in_tile)
        tl.store(entropy_ptr + i, spread - tl.sum(tl.where(inside & (weight > 0.0), heat, 0.0), 0) / (1.0 + rest))
    if SQUARES:
        at += plane
        squares = weight * weight * (tl.load(at, mask=inside, other=0.0) + own)
        squares = 1.0 + tl.sum(tl.where(inside, squares, 0.0), 0)
        tl.store(squares_ptr + i, squares / ((1.0 + rest) * (1.0 + rest)))
    if TOTAL:
        at += plane
        tl.store(mean_ptr + i, tl.sum(tl.load(at, mask=inside, other=0.0), 0) / V)
    if TARGET:
        y = tl.load(y_ptr + i).to(tl.int64)
        t = dot(x_ptr + i * x_stride, w_ptr + y * w_stride, D, BLOCK)
        if BIAS:
            t += tl.load(bias_ptr + y)
        if SCALE:
            t *= tl.load(scale_ptr)
        if CAP:
            t = cap * tanh(t / cap)
        tl.store(logprob_ptr + i, tl.where(y == top_id, -spread, (t - highest) - spread))


@triton.jit  # type: ignore[untyped-decorator]
def _at_class(logprob, lse, g, h, a, entropy, even, cap, own, CAP: tl.constexpr):  # type: ignore[no-untyped-def]
    """The gradient at a class whose log-probability is known, g's own share there (own is 1) without cancellation."""
    share = tl.exp(logprob)
    gradient = share * (a - h * (tl.maximum(logprob, FLOOR) + entropy)) + even
    gradient += g * tl.where(own, -expm1(logprob), -share)
    if CAP:
        z = (logprob + lse) / cap
        gradient *= 1.0 - z * z
    return gradient


@Launcher
@triton.jit  # type: ignore[untyped-decorator]
def _prepare_stats(  # type: ignore[no-untyped-def]
    lse_ptr, entropy_ptr, y_ptr, logprob_ptr, top_ptr, top_logprob_ptr, g_ptr, h_ptr, a_ptr, m_ptr, x_ptr, x_stride,
    scaled_ptr, numbers_ptr, plane, rest_ptr, scale_ptr, cap, D, V, G: tl.constexpr, H: tl.constexpr, A: tl.constexpr,
    M: tl.constexpr, SCALED: tl.constexpr, SCALE: tl.constexpr, CAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """See `prepare_stats`."""
    i = tl.program_id(0).to(tl.int64)
    y = tl.load(y_ptr + i)
    zero = tl.full((), 0.0, tl.float32)
    g, h, a, even, entropy = zero, zero, zero, zero, zero
    if G:
        g = tl.load(g_ptr + i)
    if H:
        h = tl.load(h_ptr + i)
        entropy = tl.load(entropy_ptr + i)
    if A:
        a = tl.load(a_ptr + i)
    if M:
        even = tl.load(m_ptr + i) / V
    largest = tl.maximum(tl.maximum(tl.abs(g), tl.abs(h)), tl.maximum(tl.abs(a), tl.abs(even)))
    largest += (g - g) + (h - h) + (a - a) + (even - even)  # NaN where one of them is no number
    scale = zero + 1.0
    if SCALE:
        scale = tl.load(scale_ptr)
        largest *= tl.abs(scale)
    s = (largest.to(tl.int32, bitcast=True) & -0x800000).to(tl.float32, bitcast=True)  # the power of two below it
    s = tl.where(s < float("inf"), s, largest)
    share = scale / tl.where(s == 0.0, 1.0, s)
    g, h, a, even = g * share, h * share, a * share, even * share
    lse = tl.load(lse_ptr + i)
    top_id = tl.load(top_ptr + i)
    top_logprob = tl.load(top_logprob_ptr + i)
    at_top = _at_class(top_logprob, lse, g, h, a, entropy, even, cap, top_id == y, CAP)
    at_y = at_top
    if G:
        at_y = _at_class(tl.load(logprob_ptr + i), lse, g, h, a, entropy, even, cap, y == y, CAP)
        at_y = tl.where(top_id == y, at_top, at_y)
    at = numbers_ptr + i
    tl.store(at, s)
    tl.store(at + plane, lse)
    tl.store(at + 2 * plane, a - g - h * entropy)
    tl.store(at + 3 * plane, at_y)
    tl.store(at + 4 * plane, at_top)
    tl.store(at + 5 * plane, h)
    tl.store(at + 6 * plane, even)
    rest = at_y - at_y.to(x_ptr.dtype.element_ty).to(tl.float32)
    tl.store(rest_ptr + i, tl.where((y < 0) | (s == 0.0), 0.0, rest))
    if SCALED:
        scaled_row(x_ptr + i * x_stride, scaled_ptr + i * D, s, D, BLOCK)


def finish_stats(
    sums_FCP: Tensor,
    id_CP: Tensor,
    x_CD: Tensor,
    w_VD: Tensor,
    out: dict[str, Tensor],
    *,
    y_C: Tensor | None = None,
    bias_V: Tensor | None = None,
    scale: Tensor | None = None,
    softcap: float | None = None,
) -> None:
    """Turn tiles' sums into what is known of each row.

    Args:
        sums_FCP: From `tile_stats`, with the sums that ``out`` needs.
        id_CP: See there.
        x_CD: Hidden states.
        w_VD: Weight.
        out: Takes [C] each, float32: "lse", "top_logprob" (the highest log-probability) and, where there, "logprob" (of
            ``y``), "entropy", "sum_sq_prob", "mean_logit"; int64 "argmax".
        y_C: Classes, all of them valid; needed for "logprob".
        bias_V: float32, or None.
        scale: 0-d float32 on the device, or None.
        softcap: Above 0, or None.
    """
    _, C, P = sums_FCP.shape
    D, nothing = x_CD.shape[1], sums_FCP
    target = "logprob" in out and y_C is not None
    _finish_stats[(C,)](
        sums_FCP, id_CP, sums_FCP.stride(0), sums_FCP.stride(1), P, x_CD, x_CD.stride(0), w_VD, w_VD.stride(0),
        id_CP if y_C is None else y_C, nothing if bias_V is None else bias_V, nothing if scale is None else scale,
        1.0 if softcap is None else softcap, out["lse"], out["argmax"], out["top_logprob"], out.get("logprob", nothing),
        out.get("entropy", nothing), out.get("sum_sq_prob", nothing), out.get("mean_logit", nothing), D, w_VD.shape[0],
        BIAS=bias_V is not None, SCALE=scale is not None, CAP=softcap is not None, TARGET=target,
        HEAT="entropy" in out, SQUARES="sum_sq_prob" in out, TOTAL="mean_logit" in out, BLOCK=block_of(D),
        TILES=triton.next_power_of_2(P), num_warps=4,
    )  # fmt: skip


def prepare_stats(
    known: dict[str, Tensor],
    upstream: dict[str, Tensor],
    x_CD: Tensor,
    numbers_7C: Tensor,
    rest_C: Tensor,
    V: int,
    *,
    scale: Tensor | None,
    softcap: float | None,
    scaled_CD: Tensor | None,
) -> None:
    """From what forward found and the upstream gradients, write what `stats_gradient` takes.

    Args:
        known: [C] each: float32 "lse", "top_logprob", "logprob", with an upstream gradient of it "entropy"; int32
            "y" (-1: no target), "argmax".
        upstream: [C] each, float32, any of "logprob", "entropy", "lse", "mean_logit".
        x_CD: Hidden states.
        numbers_7C: Takes the numbers; the first, s, is a power of two, by which the gradient is divided.
        rest_C: Takes what the gradient at the target loses in rounding, float32.
        V: Vocabulary.
        scale: 0-d float32 on the device, or None.
        softcap: Above 0, or None.
        scaled_CD: Takes s x, contiguous; None where the weight gets no gradient.
    """
    C, D = x_CD.shape
    nothing = rest_C
    lse = known["lse"]
    _prepare_stats[(C,)](
        lse, known.get("entropy", nothing), known["y"], known["logprob"], known["argmax"], known["top_logprob"],
        *(upstream.get(name, nothing) for name in ("logprob", "entropy", "lse", "mean_logit")), x_CD, x_CD.stride(0),
        x_CD if scaled_CD is None else scaled_CD, numbers_7C, numbers_7C.stride(0), rest_C,
        nothing if scale is None else scale, 1.0 if softcap is None else softcap, D, V, G="logprob" in upstream,
        H="entropy" in upstream, A="lse" in upstream, M="mean_logit" in upstream, SCALED=scaled_CD is not None,
        SCALE=scale is not None, CAP=softcap is not None, BLOCK=block_of(D), num_warps=4,
    )  # fmt: skip
