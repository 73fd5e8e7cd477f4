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
def _put_in_order(w, order_ptr, out_ptr, mean_ptr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """A program per tile of classes and part of D."""
    w_ptr, w_stride, D = w
    p = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    V = tl.load(order_ptr)
    for part in tl.static_range(4):
        v = p * COLUMNS + part * (COLUMNS // 4) + tl.arange(0, COLUMNS // 4)
        own = tl.load(order_ptr + 1 + v, mask=v < V, other=0).to(tl.int64)
        mask = (v < V)[:, None] & (at < D)[None, :]
        x = tl.load(w_ptr + own[:, None] * w_stride + at[None, :], mask=mask, other=0.0)
        tl.store(out_ptr + v.to(tl.int64)[:, None] * D + at[None, :], x, mask=mask)
        total += tl.sum(x.to(tl.float32), 0)
    n = tl.minimum(V - p * COLUMNS, COLUMNS)
    tl.store(mean_ptr + p * D + at, (total / n).to(mean_ptr.dtype.element_ty), mask=at < D)


@Launcher
@triton.jit  # type: ignore[untyped-decorator]
def _put_back(sum_ptr, shared_ptr, order_ptr, out_ptr, D, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """A program per tile of classes and part of D: rows of the sum and what they share, to the classes' places."""
    p = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    V = tl.load(order_ptr)
    shared = tl.load(shared_ptr + p * D + at, mask=at < D, other=0.0) / tl.minimum(V - p * COLUMNS, COLUMNS)
    for part in tl.static_range(4):
        v = p * COLUMNS + part * (COLUMNS // 4) + tl.arange(0, COLUMNS // 4)
        own = tl.load(order_ptr + 1 + v, mask=v < V, other=0).to(tl.int64)
        mask = (v < V)[:, None] & (at < D)[None, :]
        x = tl.load(sum_ptr + v.to(tl.int64)[:, None] * D + at[None, :], mask=mask, other=0.0).to(tl.float32)
        x += shared[None, :]
        tl.store(out_ptr + own[:, None] * D + at[None, :], x.to(out_ptr.dtype.element_ty), mask=mask)


def put_in_order(w_VD: Tensor, order: Tensor, out_VD: Tensor, mean_PD: Tensor) -> None:
    """Write the rows of W in order, and the mean row of each tile; ``order`` (int32) is V, and the classes in order."""
    P, D = mean_PD.shape
    rows = w_VD if w_VD.stride(1) == 1 else w_VD.contiguous()
    _put_in_order[(P, blocks_of(D, 64))](matrix(rows), order, out_VD, mean_PD, BLOCK=64, num_warps=4)


def put_back(sum_VD: Tensor, shared_PD: Tensor, order: Tensor, out_VD: Tensor) -> None:
    """Write dW in the classes' own order, with what each tile's rows share (float32: the sum of them)."""
    P, D = shared_PD.shape
    _put_back[(P, blocks_of(D, 64))](sum_VD, shared_PD, order, out_VD, D, BLOCK=64, num_warps=4)
