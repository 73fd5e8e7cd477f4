"""The weight in the order of the tiles, and its gradient back in the classes' own order.

D hidden size, V vocabulary, P tiles across it.
"""

import triton
import triton.language as tl
from torch import Tensor

from lowtide.head.kernels import hopper
from lowtide.head.kernels.gemm import matrix
from lowtide.kernel_launch import Launcher, blocks_of

ROWS = tl.constexpr(2 * hopper.ROWS.value)  # of a tile
COLUMNS = tl.constexpr(hopper.COLUMNS.value)


@Launcher
@triton.jit  # type: ignore[untyped-decorator]
def _move(x, order_ptr, out_ptr, rest_ptr, BACK: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """A program per tile of classes and part of D: into the order, with their mean; or back, with what they share."""
    x_ptr, x_stride, D = x
    p = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    V = tl.load(order_ptr)
    n = tl.minimum(V - p * COLUMNS, COLUMNS)
    rest_at = rest_ptr + p * D + at
    total = tl.zeros((BLOCK,), tl.float32)
    if BACK:
        total += tl.load(rest_at, mask=at < D, other=0.0) / n
    for part in tl.static_range(4):
        v = p * COLUMNS + part * (COLUMNS // 4) + tl.arange(0, COLUMNS // 4)
        own = tl.load(order_ptr + 1 + v, mask=v < V, other=0).to(tl.int64)
        mask = (v < V)[:, None] & (at < D)[None, :]
        if BACK:
            source, target = v.to(tl.int64), own
        else:
            source, target = own, v.to(tl.int64)
        y = tl.load(x_ptr + source[:, None] * x_stride + at[None, :], mask=mask, other=0.0).to(tl.float32)
        if BACK:
            y += total[None, :]
        else:
            total += tl.sum(y, 0)
        tl.store(out_ptr + target[:, None] * D + at[None, :], y.to(out_ptr.dtype.element_ty), mask=mask)
    if not BACK:
        tl.store(rest_at, (total / n).to(rest_ptr.dtype.element_ty), mask=at < D)


def put_in_order(w_VD: Tensor, order: Tensor, out_VD: Tensor, mean_PD: Tensor) -> None:
    """Write the rows of W in order, and the mean row of each tile; ``order`` (int32) is V, and the classes in order."""
    rows = w_VD if w_VD.stride(1) == 1 else w_VD.contiguous()
    _put(rows, order, out_VD, mean_PD, back=False)


def put_back(sum_VD: Tensor, shared_PD: Tensor, order: Tensor, out_VD: Tensor) -> None:
    """Write dW in the classes' own order, with what each tile's rows share (float32: the sum of them)."""
    _put(sum_VD, order, out_VD, shared_PD, back=True)


def _put(x_VD: Tensor, order: Tensor, out_VD: Tensor, rest_PD: Tensor, *, back: bool) -> None:
    P, D = rest_PD.shape
    _move[(P, blocks_of(D, 64))](matrix(x_VD), order, out_VD, rest_PD, BACK=back, BLOCK=64, num_warps=4)
