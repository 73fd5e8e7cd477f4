"""What stands between the GEMMs of a chunk's gradient by `stats_logits.stats_gradient`: a program a row.

C rows of a chunk, D hidden size, V vocabulary, K targets a row. Classes count among those of all ranks, so that this is
the same on every rank:

    prepare_stats(known, upstream, y, x, entries, V)            what the others take
    stats_gradient(x, w, e, entries)                            in blocks of this rank's classes
    put_entries(e, entries, first)                              where a class of a row is not as the others
    finish_input_grad(e @ w, out, w, entries, first)            this rank's part of dX, to be summed over the ranks
"""

import triton
import triton.language as tl
from torch import Tensor

from lowtide.head.kernels.elementary import expm1
from lowtide.head.kernels.exp_rows import block_of
from lowtide.head.kernels.exp_terms import scaled_row
from lowtide.head.kernels.gemm import PLAIN, LogitTransform, matrix
from lowtide.head.kernels.stats_logits import FLOOR, Entries
from lowtide.head.kernels.stats_rows import RowStats
from lowtide.kernel_launch import Launcher, power_of_2


@triton.jit
def _at_class(logprob, lse, own, others, h, a, entropy, even, transform):  # type: ignore[no-untyped-def]
    """The gradient at classes whose log-probability is known, their ``own`` targets' part without cancellation."""
    share = tl.exp(logprob)
    gradient = share * (a - h * (tl.maximum(logprob, FLOOR) + entropy)) + even
    gradient += -own * expm1(logprob) - others * share
    if transform.softcap is not None:
        z = (logprob + lse) / transform.softcap
        gradient *= 1.0 - z * z
    return gradient


@Launcher
@triton.jit  # type: ignore[untyped-decorator]
def _prepare_stats(  # type: ignore[no-untyped-def]
    known, upstream, y_ptr, x, scaled_ptr, entries, transform, D, V, K, CLASSES: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """See `prepare_stats`."""
    x_ptr, x_stride = x
    i = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, CLASSES)  # the highest class, and the targets
    is_target = (k > 0) & (k <= K)
    of_target = i * K + k - 1
    zero = tl.full((), 0.0, tl.float32)
    h, a, even, entropy = zero, zero, zero, zero
    y = tl.where(k == 0, tl.load(known.top + i).to(tl.int32), -1)
    logprob = tl.where(k == 0, tl.load(known.top_logprob + i), 0.0)
    g = tl.zeros((CLASSES,), tl.float32)
    if upstream.logprob is not None:
        y = tl.load(y_ptr + of_target, mask=is_target, other=y)
        logprob = tl.load(known.logprob + of_target, mask=is_target, other=logprob)
        g = tl.load(upstream.logprob + of_target, mask=is_target, other=0.0)
    if upstream.entropy is not None:
        h = tl.load(upstream.entropy + i)
        entropy = tl.load(known.entropy + i)
    if upstream.lse is not None:
        a = tl.load(upstream.lse + i)
    if upstream.mean is not None:
        even = tl.load(upstream.mean + i) / V
    largest = tl.maximum(tl.maximum(tl.max(tl.abs(g), 0), tl.abs(h)), tl.maximum(tl.abs(a), tl.abs(even)))
    largest += tl.sum(g - g, 0) + (h - h) + (a - a) + (even - even)  # NaN where one of them is no number
    scale = zero + 1.0
    if transform.scale is not None:
        scale = tl.load(transform.scale)
        largest *= tl.abs(scale)
    s = (largest.to(tl.int32, bitcast=True) & -0x800000).to(tl.float32, bitcast=True)  # the power of two below it
    s = tl.where(s < float("inf"), s, largest)
    share = scale / tl.where(s == 0.0, 1.0, s)
    g, h, a, even = g * share, h * share, a * share, even * share
    of_targets = tl.sum(g, 0)
    lse = tl.load(known.lse + i)
    tl.store(entries.s + i, s)
    tl.store(entries.lse + i, lse)
    tl.store(entries.slope + i, a - of_targets - h * entropy)
    if entries.heat is not None:
        tl.store(entries.heat + i, h)
    if entries.even is not None:
        tl.store(entries.even + i, even)
    same = y[:, None] == y[None, :]
    own = tl.sum(tl.where(same, g[None, :], 0.0), 1)
    last = tl.max(tl.where(same, k[None, :], 0), 1)  # each class once: where it stands last, so a target if it is one
    entry = _at_class(logprob, lse, own, of_targets - own, h, a, entropy, even, transform)
    place = tl.where(s == 0.0, -1, tl.where(last == k, y, -1))
    row = i * (K + 1) + k
    tl.store(entries.id + row, place, mask=k <= K)
    tl.store(entries.entry + row, entry, mask=k <= K)
    if upstream.logprob is not None:
        rest = entry - entry.to(x_ptr.dtype.element_ty).to(tl.float32)
        tl.store(entries.rest + of_target, tl.where(place < 0, 0.0, rest), mask=is_target)
    if scaled_ptr is not None:
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
@triton.jit(do_not_specialize=["first_class"])  # type: ignore[untyped-decorator]
def _finish_input_grad(product_ptr, out_ptr, w, entries, first_class, V, D, K, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """dX = s (E W + sum_k what the k-th target's entry lost in rounding * w_k), of the classes that are here."""
    w_ptr, w_stride = w
    i = tl.program_id(0).to(tl.int64)
    s = tl.load(entries.s + i)
    for d in range(0, D, BLOCK):
        at = d + tl.arange(0, BLOCK)
        inside = at < D
        grad = tl.load(product_ptr + i * D + at, mask=inside, other=0.0)
        for k in range(K):
            y = tl.load(entries.id + i * (K + 1) + 1 + k).to(tl.int64) - first_class
            here = (y >= 0) & (y < V)
            rest = tl.where(here, tl.load(entries.rest + i * K + k), 0.0)
            w_row = tl.load(w_ptr + tl.where(here, y, 0) * w_stride + at, mask=inside, other=0.0)
            grad += tl.where(rest == 0.0, 0.0, rest * w_row.to(tl.float32))
        grad = tl.where(s == 0.0, 0.0, grad * s)
        tl.store(out_ptr + i * D + at, grad.to(out_ptr.dtype.element_ty), mask=inside)


def prepare_stats(
    known: RowStats,
    upstream: RowStats,
    y_CK: Tensor | None,
    x_CD: Tensor,
    entries: Entries,
    V: int,
    *,
    transform: LogitTransform = PLAIN,
    scaled_CD: Tensor | None = None,
) -> None:
    """From what forward found and the upstream gradients, write what `stats_gradient` and `put_entries` take.

    Args:
        known: lse, top and top_logprob; with an upstream gradient of it the entropy; with one of the log-probabilities
            these, contiguous.
        upstream: Any of logprob (contiguous, 0 where ignored), entropy, lse and mean.
        y_CK: Targets, int32, contiguous, -1 where ignored; with an upstream gradient of the log-probabilities.
        x_CD: Hidden states.
        entries: Takes the entries; of no targets, where their log-probabilities have no upstream gradient.
        V: Classes of all ranks.
        transform: What makes logits of the products; the bias may be None.
        scaled_CD: Takes s x, contiguous; None where the weight gets no gradient.
    """
    (C, D), K = x_CD.shape, entries.rest.shape[1]
    _prepare_stats[(C,)](
        known, upstream, y_CK, matrix(x_CD), scaled_CD, entries, transform, D, V, K, CLASSES=power_of_2(1 + K),
        BLOCK=block_of(D), num_warps=4,
    )  # fmt: skip


def put_entries(g_CV: Tensor, entries: Entries, first_class: int) -> None:
    """Write those entries into ``g_CV`` whose classes are its columns, counted as ``first_class`` and on."""
    (C, V), count = g_CV.shape, entries.id.shape[1]
    _put_entries[(C,)](
        *matrix(g_CV), entries.id, entries.entry, first_class, V, count, WIDTH=power_of_2(count), num_warps=1
    )


def finish_input_grad(product_CD: Tensor, out_CD: Tensor, w_VD: Tensor, entries: Entries, first_class: int = 0) -> None:
    """Write dX into ``out_CD`` (contiguous) from ``product_CD = E W`` (float32, contiguous), E rounded.

    ``w_VD`` holds the classes from ``first_class`` on; what entries of other ranks' classes lose is added there.
    """
    (C, D), V = product_CD.shape, len(w_VD)
    _finish_input_grad[(C,)](
        product_CD, out_CD, matrix(w_VD), entries, first_class, V, D, entries.rest.shape[1] if V else 0,
        BLOCK=block_of(D), num_warps=4,
    )  # fmt: skip
