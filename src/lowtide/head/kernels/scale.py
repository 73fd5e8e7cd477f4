"""A tensor times a factor on the device, in place, without reading or writing anything if it is 1."""

import triton
import triton.language as tl
from torch import Tensor

from lowtide.kernel_launch import Launcher

BLOCK = 4096


@Launcher
@triton.jit  # type: ignore[untyped-decorator]
def _scale(x_ptr, factor_ptr, columns, blocks, ZEROS_STAY: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Each row times its factor: the product in the factor's dtype, the result rounded to x's."""
    program = tl.program_id(0).to(tl.int64)
    row = program // blocks
    factor = tl.load(factor_ptr + row)
    if factor != 1.0:
        column = program % blocks * BLOCK + tl.arange(0, BLOCK)
        at, inside = row * columns + column, column < columns
        x = tl.load(x_ptr + at, mask=inside).to(factor.dtype)
        product = x * factor
        if ZEROS_STAY:
            product = tl.where(x == 0.0, x, product)
        tl.store(x_ptr + at, product.to(x_ptr.dtype.element_ty), mask=inside)


def scale_(x: Tensor, factor: Tensor, *, zeros_stay: bool = False) -> None:
    """Multiply ``x`` (contiguous) with ``factor`` (float32 or float64) in place.

    The factor is 0-d, or has one value [N] for each row of ``x`` [N, D], contiguous. With ``zeros_stay`` a 0 stays 0
    where the factor is infinite or NaN.
    """
    if x.numel():
        rows = factor.numel()
        columns = x.numel() // rows
        blocks = triton.cdiv(columns, BLOCK)
        _scale[(rows * blocks,)](x, factor, columns, blocks, ZEROS_STAY=zeros_stay, BLOCK=BLOCK)
