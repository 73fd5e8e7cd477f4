"""A row's arithmetic on the exponential path; the letters and formulas are those of `exp_rows`."""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

MOST = tl.constexpr(2.0**92)  # a sum above it, and its row's s would leave float32's range


class RowTerms(NamedTuple):
    """The head and its loss as the rows' kernels read them, on the device; None or 0 where it is not asked for.

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
def zero_row(row_ptr, V, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write zeros: an ignored row whose logits are no numbers."""
    for v in range(0, V, BLOCK):
        at = v + tl.arange(0, BLOCK)
        tl.store(row_ptr + at, tl.zeros((BLOCK,), row_ptr.dtype.element_ty), mask=at < V)


@triton.jit  # type: ignore[untyped-decorator]
def sum_of_tiles(sum_ptr, P, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """A row's sum from what its tiles left."""
    sums = tl.zeros((BLOCK,), tl.float32)
    for p in range(0, P, BLOCK):
        at = p + tl.arange(0, BLOCK)
        sums += tl.load(sum_ptr + at, mask=at < P, other=0.0)
    return tl.sum(sums, 0)


@triton.jit  # type: ignore[untyped-decorator]
def scaled_row(x_ptr, out_ptr, s, D, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write s x, and 0 where s is 0, whatever x holds."""
    for d in range(0, D, BLOCK):
        at = d + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + at, mask=at < D, other=0.0).to(tl.float32)
        x = tl.where(s == 0.0, 0.0, x * s)
        tl.store(out_ptr + at, x.to(out_ptr.dtype.element_ty), mask=at < D)
