"""What stands before and behind the GEMMs of `stats_logits`: a program a row, over [C, P], [C, D] or [C, K].

C rows of a chunk, D hidden size, V vocabulary, P tiles across it, K targets a row. With M the highest logit and R the
sum of exp(z - M) over the other classes, H that of exp(z - M) (z - M), S that of exp(z - M)**2:

    lse = M + log1p(R)    entropy = log1p(R) - H / (1 + R)    sum p^2 = (1 + S) / (1 + R)^2    log p_y = t - lse
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowtide.head.kernels.elementary import expm1, log1p, tanh
from lowtide.head.kernels.exp_rows import block_of
from lowtide.head.kernels.exp_terms import dot, scaled_row
from lowtide.head.kernels.launch import Launcher
from lowtide.head.kernels.stats_logits import FLOOR


@Launcher
@triton.jit  # type: ignore[untyped-decorator]
def _finish_stats(  # type: ignore[no-untyped-def]
    sums_ptr, id_ptr, plane, stride, P, x_ptr, x_stride, w_ptr, w_stride, y_ptr, bias_ptr, scale_ptr, cap, lse_ptr,
    argmax_ptr, top_ptr, logprob_ptr, entropy_ptr, squares_ptr, mean_ptr, D, V, K, BIAS: tl.constexpr,
    SCALE: tl.constexpr, CAP: tl.constexpr, HEAT: tl.constexpr, SQUARES: tl.constexpr, TOTAL: tl.constexpr,
    BLOCK: tl.constexpr, TILES: tl.constexpr,
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
    lse = tl.where(tl.abs(highest) == float("inf"), highest, highest + spread)
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
    for k in range(K):
        y = tl.load(y_ptr + i * K + k).to(tl.int64)
        t = dot(x_ptr + i * x_stride, w_ptr + y * w_stride, D, BLOCK)
        if BIAS:
            t += tl.load(bias_ptr + y)
        if SCALE:
            t *= tl.load(scale_ptr)
        if CAP:
            t = cap * tanh(t / cap)
        tl.store(logprob_ptr + i * K + k, tl.where(y == top_id, -spread, (t - highest) - spread))


@triton.jit  # type: ignore[untyped-decorator]
def _at_class(logprob, lse, own, others, h, a, entropy, even, cap, CAP: tl.constexpr):  # type: ignore[no-untyped-def]
    """The gradient at classes whose log-probability is known, their ``own`` targets' part without cancellation."""
    share = tl.exp(logprob)
    gradient = share * (a - h * (tl.maximum(logprob, FLOOR) + entropy)) + even
    gradient += -own * expm1(logprob) - others * share
    if CAP:
        z = (logprob + lse) / cap
        gradient *= 1.0 - z * z
    return gradient


@Launcher
@triton.jit  # type: ignore[untyped-decorator]
def _prepare_stats(  # type: ignore[no-untyped-def]
    lse_ptr, entropy_ptr, y_ptr, logprob_ptr, top_ptr, top_logprob_ptr, g_ptr, h_ptr, a_ptr, m_ptr, x_ptr, x_stride,
    scaled_ptr, numbers_ptr, plane, id_ptr, entry_ptr, rest_ptr, scale_ptr, cap, D, V, K, TARGETS: tl.constexpr,
    G: tl.constexpr, H: tl.constexpr, A: tl.constexpr, M: tl.constexpr, SCALED: tl.constexpr, SCALE: tl.constexpr,
    CAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """See `prepare_stats`."""
    i = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, TARGETS)
    given = k < K
    zero = tl.full((), 0.0, tl.float32)
    h, a, even, entropy = zero, zero, zero, zero
    y = tl.full((TARGETS,), -1, tl.int32)
    g = tl.zeros((TARGETS,), tl.float32)
    if G:
        y = tl.load(y_ptr + i * K + k, mask=given, other=-1)
        g = tl.load(g_ptr + i * K + k, mask=given, other=0.0)
    if H:
        h = tl.load(h_ptr + i)
        entropy = tl.load(entropy_ptr + i)
    if A:
        a = tl.load(a_ptr + i)
    if M:
        even = tl.load(m_ptr + i) / V
    largest = tl.maximum(tl.maximum(tl.max(tl.abs(g), 0), tl.abs(h)), tl.maximum(tl.abs(a), tl.abs(even)))
    largest += tl.sum(g - g, 0) + (h - h) + (a - a) + (even - even)  # NaN where one of them is no number
    scale = zero + 1.0
    if SCALE:
        scale = tl.load(scale_ptr)
        largest *= tl.abs(scale)
    s = (largest.to(tl.int32, bitcast=True) & -0x800000).to(tl.float32, bitcast=True)  # the power of two below it
    s = tl.where(s < float("inf"), s, largest)
    share = scale / tl.where(s == 0.0, 1.0, s)
    g, h, a, even = g * share, h * share, a * share, even * share
    of_targets = tl.sum(g, 0)
    lse = tl.load(lse_ptr + i)
    at = numbers_ptr + i
    tl.store(at, s)
    tl.store(at + plane, lse)
    tl.store(at + 2 * plane, a - of_targets - h * entropy)
    tl.store(at + 3 * plane, h)
    tl.store(at + 4 * plane, even)
    # each class once: the highest one here, unless it is a target, and a target where it first stands
    top_id = tl.load(top_ptr + i).to(tl.int32)
    is_target = tl.max((y == top_id).to(tl.int32), 0) != 0
    at_top = _at_class(tl.load(top_logprob_ptr + i), lse, zero, of_targets, h, a, entropy, even, cap, CAP)
    row = i * (K + 1)
    tl.store(id_ptr + row, tl.where(s == 0.0, -1, tl.where(is_target, -1, top_id)))
    tl.store(entry_ptr + row, at_top)
    if G:
        same = y[:, None] == y[None, :]
        own = tl.sum(tl.where(same, g[None, :], 0.0), 1)
        first = tl.min(tl.where(same, k[None, :], TARGETS), 1)
        logprob = tl.load(logprob_ptr + i * K + k, mask=given, other=0.0)
        at_y = _at_class(logprob, lse, own, of_targets - own, h, a, entropy, even, cap, CAP)
        place = tl.where(s == 0.0, -1, tl.where(first == k, y, -1))
        tl.store(id_ptr + row + 1 + k, place, mask=given)
        tl.store(entry_ptr + row + 1 + k, at_y, mask=given)
        rest = at_y - at_y.to(x_ptr.dtype.element_ty).to(tl.float32)
        tl.store(rest_ptr + i * K + k, tl.where(place < 0, 0.0, rest), mask=given)
    if SCALED:
        scaled_row(x_ptr + i * x_stride, scaled_ptr + i * D, s, D, BLOCK)


@Launcher
@triton.jit(do_not_specialize=["first_class"])  # type: ignore[untyped-decorator]
def _put_entries(g_ptr, g_stride, id_ptr, entry_ptr, first_class, columns, count, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """See `put_entries`."""
    i = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, WIDTH)
    column = tl.load(id_ptr + i * count + k, mask=k < count, other=-1)
    here = (column >= first_class) & (column < first_class + columns)  # no id is below 0 that counts
    entry = tl.load(entry_ptr + i * count + k, mask=here, other=0.0)
    tl.store(g_ptr + i * g_stride + column - first_class, entry.to(g_ptr.dtype.element_ty), mask=here)


@Launcher
@triton.jit  # type: ignore[untyped-decorator]
def _finish_input_grad(  # type: ignore[no-untyped-def]
    product_ptr, out_ptr, w_ptr, w_stride, id_ptr, rest_ptr, s_ptr, D, K, BLOCK: tl.constexpr
):  # fmt: skip
    """dX = s (E W + sum_k what the k-th target's entry lost in rounding * w_k)."""
    i = tl.program_id(0).to(tl.int64)
    s = tl.load(s_ptr + i)
    for d in range(0, D, BLOCK):
        at = d + tl.arange(0, BLOCK)
        inside = at < D
        grad = tl.load(product_ptr + i * D + at, mask=inside, other=0.0)
        for k in range(K):
            y = tl.load(id_ptr + i * (K + 1) + 1 + k).to(tl.int64)
            rest = tl.load(rest_ptr + i * K + k)
            w = tl.load(w_ptr + tl.maximum(y, 0) * w_stride + at, mask=inside, other=0.0)
            grad += tl.where(rest == 0.0, 0.0, rest * w.to(tl.float32))
        grad = tl.where(s == 0.0, 0.0, grad * s)
        tl.store(out_ptr + i * D + at, grad.to(out_ptr.dtype.element_ty), mask=inside)


def finish_stats(
    sums_FCP: Tensor,
    id_CP: Tensor,
    x_CD: Tensor,
    w_VD: Tensor,
    out: dict[str, Tensor],
    *,
    y_CK: Tensor | None = None,
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
        out: Takes [C] each, float32: "lse", "top_logprob" (the highest log-probability) and, where there, "entropy",
            "sum_sq_prob", "mean_logit"; int64 "argmax"; with ``y_CK`` float32 "logprob" [C, K], contiguous.
        y_CK: Classes, int64, contiguous, all of them valid; or None.
        bias_V: float32, or None.
        scale: 0-d float32 on the device, or None.
        softcap: Above 0, or None.
    """
    _, C, P = sums_FCP.shape
    D, nothing = x_CD.shape[1], sums_FCP
    K = 0 if y_CK is None else y_CK.shape[1]
    _finish_stats[(C,)](
        sums_FCP, id_CP, sums_FCP.stride(0), sums_FCP.stride(1), P, x_CD, x_CD.stride(0), w_VD, w_VD.stride(0),
        id_CP if y_CK is None else y_CK, nothing if bias_V is None else bias_V, nothing if scale is None else scale,
        1.0 if softcap is None else softcap, out["lse"], out["argmax"], out["top_logprob"], out.get("logprob", nothing),
        out.get("entropy", nothing), out.get("sum_sq_prob", nothing), out.get("mean_logit", nothing), D, w_VD.shape[0],
        K, BIAS=bias_V is not None, SCALE=scale is not None, CAP=softcap is not None, HEAT="entropy" in out,
        SQUARES="sum_sq_prob" in out, TOTAL="mean_logit" in out, BLOCK=block_of(D), TILES=triton.next_power_of_2(P),
        num_warps=4,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Entries:
    """Where a chunk's gradient differs from what `stats_logits.stats_gradient` writes, a class of a row once."""

    id: Tensor  # [C, 1 + K] int32: the highest class, and the targets; -1: nothing stands here
    entry: Tensor  # [C, 1 + K] float32
    rest: Tensor  # [C, K] float32: what the targets' entries lose in rounding

    @classmethod
    def empty(cls, C: int, K: int, device: torch.device) -> "Entries":
        """Return room for K targets a row."""
        return cls(
            id=torch.empty(C, 1 + K, dtype=torch.int32, device=device),
            entry=torch.empty(C, 1 + K, dtype=torch.float32, device=device),
            rest=torch.empty(C, K, dtype=torch.float32, device=device),
        )

    def rows(self, C: int) -> "Entries":
        """Return the first C rows."""
        return Entries(id=self.id[:C], entry=self.entry[:C], rest=self.rest[:C])


def prepare_stats(
    known: dict[str, Tensor],
    upstream: dict[str, Tensor],
    x_CD: Tensor,
    numbers_5C: Tensor,
    entries: Entries,
    V: int,
    *,
    scale: Tensor | None,
    softcap: float | None,
    scaled_CD: Tensor | None,
) -> None:
    """From what forward found and the upstream gradients, write what `stats_gradient` and `put_entries` take.

    Args:
        known: float32 [C] "lse", "top_logprob", with an upstream gradient of it "entropy"; int64 [C] "argmax"; with one
            of the log-probabilities, contiguous, float32 [C, K] "logprob" and int32 "y" (-1: ignored).
        upstream: float32, any of "logprob" [C, K] (contiguous, 0 where ignored), "entropy", "lse", "mean_logit" [C].
        x_CD: Hidden states.
        numbers_5C: Takes the numbers; the first, s, is a power of two, by which the gradient is divided.
        entries: Takes the entries; of no targets, where their log-probabilities have no upstream gradient.
        V: Vocabulary.
        scale: 0-d float32 on the device, or None.
        softcap: Above 0, or None.
        scaled_CD: Takes s x, contiguous; None where the weight gets no gradient.
    """
    C, D = x_CD.shape
    K = entries.rest.shape[1]
    nothing = numbers_5C
    _prepare_stats[(C,)](
        known["lse"], known.get("entropy", nothing), known.get("y", nothing), known.get("logprob", nothing),
        known["argmax"], known["top_logprob"],
        *(upstream.get(name, nothing) for name in ("logprob", "entropy", "lse", "mean_logit")), x_CD, x_CD.stride(0),
        x_CD if scaled_CD is None else scaled_CD, numbers_5C, numbers_5C.stride(0), entries.id, entries.entry,
        entries.rest, nothing if scale is None else scale, 1.0 if softcap is None else softcap, D, V, K,
        TARGETS=triton.next_power_of_2(max(1, K)), G=K > 0, H="entropy" in upstream, A="lse" in upstream,
        M="mean_logit" in upstream, SCALED=scaled_CD is not None, SCALE=scale is not None, CAP=softcap is not None,
        BLOCK=block_of(D), num_warps=4,
    )  # fmt: skip


def put_entries(g_CV: Tensor, entries: Entries, first_class: int) -> None:
    """Write those entries into ``g_CV`` whose classes are its columns, counted as ``first_class`` and on."""
    C, V = g_CV.shape
    count = entries.id.shape[1]
    _put_entries[(C,)](
        g_CV, g_CV.stride(0), entries.id, entries.entry, first_class, V, count, WIDTH=triton.next_power_of_2(count),
        num_warps=1,
    )  # fmt: skip


def finish_input_grad(product_CD: Tensor, out_CD: Tensor, w_VD: Tensor, entries: Entries, s_C: Tensor) -> None:
    """Write dX into ``out_CD`` (contiguous) from ``product_CD = E W`` (float32, contiguous), E rounded."""
    C, D = product_CD.shape
    _finish_input_grad[(C,)](
        product_CD, out_CD, w_VD, w_VD.stride(0), entries.id, entries.rest, s_C, D, entries.rest.shape[1],
        BLOCK=block_of(D), num_warps=4,
    )  # fmt: skip
