"""A row's arithmetic, of losses and of statistics; the letters and formulas are those of `exp_rows`."""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from lowtide.head.kernels.gemm import ALL, Used, counted_rows, matrix
from lowtide.kernel_launch import Launcher, power_of_2

MOST = tl.constexpr(2.0**62)  # a sum above it, and its square or its row's s would leave float32's range


class RowTerms(NamedTuple):
    """The head and its loss as the rows' kernels read them, on the device; None or 0 for options that are off.

    Where the vocabulary is sharded the bias and ``uniform_D`` are of this rank's classes.
    """

    vocab: int  # V, of all ranks
    bias_V: Tensor | None  # float32
    scale: Tensor | None  # 0-d float32
    softcap: float | None
    class_weight: Tensor | None  # float32 [V]
    total_class_weight: Tensor | None  # 0-d float32
    smoothing: float
    z_loss: float
    uniform_D: Tensor | None  # float32, sum_v q_v w_v, with smoothing
    uniform_bias: Tensor | None  # 0-d float32, sum_v q_v b_v, with smoothing
    own_weight: Tensor | None = None  # float32 [C]: the targets' weights, in place of all classes'

    def even(self, factor_C: Tensor) -> tuple[Tensor | None, Tensor, Tensor | None, float]:
        """Return (sum_v q_v w_v, g, m, a / V), what smoothing adds to every row's dX."""
        return self.uniform_D, factor_C, self.scale, self.smoothing / self.vocab


@triton.jit  # type: ignore[untyped-decorator]
def dot(x_ptr, w_ptr, D, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Two rows of length D, in float32."""
    total = tl.zeros((BLOCK,), tl.float32)
    for d in range(0, D, BLOCK):
        at = d + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + at, mask=at < D, other=0.0).to(tl.float32)
        total += x * tl.load(w_ptr + at, mask=at < D, other=0.0).to(tl.float32)
    return tl.sum(total, 0)


@triton.jit
def row_weights(i, y, lse, terms):  # type: ignore[no-untyped-def]
    """((1 - a) q_y, a Q / V + 2 u lse, their sum k): what multiplies the target's share and the whole softmax.

    Where the two cancel, k is a small number in place of 0: the row's gradient is divided by it, and multiplied again.
    """
    own = 1.0 - terms.smoothing
    spread = terms.smoothing
    if terms.own_weight is not None:
        own *= tl.load(terms.own_weight + i)
    elif terms.class_weight is not None:
        own *= tl.load(terms.class_weight + y)
    if terms.total_class_weight is not None:
        spread *= tl.load(terms.total_class_weight) / terms.vocab
    spread += 2.0 * terms.z_loss * lse
    k = own + spread
    return own, spread, tl.where((k == 0.0) & (own != 0.0), own * 2.0**-24, k)


@triton.jit
def out_of_range(r, t):  # type: ignore[no-untyped-def]
    """Whether a sum relative to t left the range in which all of this is safe."""
    return ~(r <= MOST) | ~(tl.abs(t) < float("inf"))


@triton.jit  # type: ignore[untyped-decorator]
def scaled_row(x_ptr, out_ptr, s, D, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write s x, and 0 where s is 0, whatever x holds."""
    for d in range(0, D, BLOCK):
        at = d + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + at, mask=at < D, other=0.0).to(tl.float32)
        x = tl.where(s == 0.0, 0.0, x * s)
        tl.store(out_ptr + at, x.to(out_ptr.dtype.element_ty), mask=at < D)


@Launcher
@triton.jit(do_not_specialize=["first_class", "C"])  # type: ignore[untyped-decorator]
def _finish_input_grad(  # type: ignore[no-untyped-def]
    product_ptr, out_ptr, to_ptr, w, s_ptr, targets, even, used, C, first_class, V, D, BLOCK: tl.constexpr
):  # fmt: skip
    """dX = s (E W + sum_k what the k-th target's entry lost in rounding * w_k) - m g (a / V) sum_v q_v w_v."""
    y_ptr, y_stride, rest_ptr, K = targets
    w_ptr, w_stride, _ = w
    uniform_ptr, g_ptr, scale_ptr, share = even
    i = tl.program_id(0).to(tl.int64)
    to = i
    if to_ptr is not None:
        to = tl.load(to_ptr + i)
    out_ptr += to * D
    counts = i < counted_rows(used, C)  # otherwise the product was not computed, and the row is 0
    s = tl.where(counts, tl.load(s_ptr + i), 0.0)
    end = tl.where(counts, D, 0)
    if uniform_ptr is not None:
        kept = counts & (tl.load(y_ptr + i) >= 0)
        share *= tl.load(g_ptr + i)
        if scale_ptr is not None:
            share *= tl.load(scale_ptr)
    for d in range(0, D, BLOCK):
        at = d + tl.arange(0, BLOCK)
        inside = at < D
        grad = tl.load(product_ptr + i * D + at, mask=at < end, other=0.0)
        for k in range(K):
            y = tl.load(y_ptr + i * y_stride + k).to(tl.int64) - first_class
            here = counts & (y >= 0) & (y < V)
            rest = tl.where(here, tl.load(rest_ptr + i * K + k), 0.0)
            w_row = w_ptr + tl.where(here, y, 0) * w_stride
            extent = tl.where(rest == 0.0, 0, D)  # where nothing was lost infinity times 0 would be NaN
            grad += rest * tl.load(w_row + at, mask=at < extent, other=0.0).to(tl.float32)
        grad = tl.where(s == 0.0, 0.0, grad * s)
        if uniform_ptr is not None:
            grad = tl.where(kept, grad - share * tl.load(uniform_ptr + at, mask=inside, other=0.0), 0.0)
        tl.store(out_ptr + at, grad.to(out_ptr.dtype.element_ty), mask=inside)


def finish_input_grad(
    product_CD: Tensor, out_CD: Tensor, w_VD: Tensor, s_C: Tensor, y_CK: Tensor, rest_CK: Tensor, first_class: int = 0,
    even: tuple[Tensor | None, Tensor | None, Tensor | None, float] = (None, None, None, 0.0),
    to_C: Tensor | None = None, used: Used = ALL,
) -> None:  # fmt: skip
    """Write dX, or this rank's part of it, into ``out_CD`` (contiguous) from ``product_CD = E W`` (float32).

    With ``to_C`` (int64) each row goes to its place in ``out``, which may have more. Rows that are not `Used` are 0.

    What the targets' entries lost in rounding, [C] or [C, K] and contiguous, is added where ``w_VD``, of the classes
    from ``first_class`` on, has theirs. Where a row is ignored s is 0. With smoothing there is one target a row, and
    ``even`` from `RowTerms`.
    """
    (C, D), V = product_CD.shape, len(w_VD)
    K = (rest_CK.shape[1] if rest_CK.dim() > 1 else 1) if V else 0  # there may be room for more rows
    _finish_input_grad[(C,)](
        product_CD, out_CD, to_C, matrix(w_VD), s_C, (y_CK, y_CK.stride(0), rest_CK, K), even, used, C, first_class,
        V, D, BLOCK=block_of(D), num_warps=4,
    )  # fmt: skip


def block_of(D: int) -> int:
    """Return how many numbers of a row of D a program takes at a time."""
    return min(1024, max(64, power_of_2(D)))
