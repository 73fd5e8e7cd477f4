"""A tensor times a scalar that lies on the device, in place, without reading or writing anything where it is 1."""

import triton
import triton.language as tl
from torch import Tensor

from lowtide.head.kernels.launch import Launcher

BLOCK = 4096


@Launcher
@triton.jit  # type: ignore[untyped-decorator]
def _scale(x_ptr, factor_ptr, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """x *= factor: the product in the factor's dtype, the result rounded to x's."""
    factor = tl.load(factor_ptr)
    if factor != 1.0:
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + at, mask=at < n)
        tl.store(x_ptr + at, (x.to(factor.dtype) * factor).to(x_ptr.dtype.element_ty), mask=at < n)


def scale_(x: Tensor, factor: Tensor) -> None:
    """Multiply ``x`` (contiguous, any shape) with ``factor`` (0-d, float32 or float64) in place."""
    n = x.numel()
    if n:
        _scale[(triton.cdiv(n, BLOCK),)](x, factor, n, BLOCK=BLOCK)
