"""Split float32 matrices into bfloat16 pieces that stand side by side: see `lowtide.head.pieces`.

R rows and S columns of the matrix.
"""

import triton
import triton.language as tl
from torch import Tensor

from lowtide.kernel_launch import Launcher, blocks_of

BLOCK = 1024
LARGEST = tl.constexpr(3.3895313892515355e38)  # bfloat16's


@Launcher
@triton.jit(do_not_specialize=["R"])  # type: ignore[untyped-decorator]
def _put_pieces(  # type: ignore[no-untyped-def]
    x_ptr, out_ptr, stride, R, S, PLACES: tl.constexpr, COUNT: tl.constexpr, INNER: tl.constexpr, BLOCK: tl.constexpr
):
    """``PLACES`` has the pieces' numbers, two bits each, the first place lowest; 3 is the first piece as it is."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = column < S
    x = tl.load(x_ptr + row * stride + column, mask=inside, other=0.0)
    finite = tl.abs(x) < float("inf")  # not of NaN
    rest = tl.where(finite, x, 0.0)
    first = tl.minimum(tl.maximum(rest, -LARGEST), LARGEST).to(tl.bfloat16)
    rest -= first.to(tl.float32)
    second = rest.to(tl.bfloat16)
    third = (rest - second.to(tl.float32)).to(tl.bfloat16)
    raw = tl.where(finite, first.to(tl.float32), x).to(tl.bfloat16)
    for place in tl.static_range(COUNT):
        kind = (PLACES >> (2 * place)) & 3
        piece = raw
        if kind == 0:
            piece = first
        if kind == 1:
            piece = second
        if kind == 2:
            piece = third
        if INNER == 0:
            at = (place * R + row) * S
        else:
            at = (row * COUNT + place) * S
        tl.store(out_ptr + at + column, piece, mask=inside)


def put_pieces(x: Tensor, out: Tensor, places: tuple[int, ...], inner: int) -> None:
    """Write what `lowtide.head.pieces.side_by_side` returns of a matrix whose rows lie in one piece each."""
    x = x if x.stride(1) == 1 else x.contiguous()
    R, S = x.shape
    if R and S:
        code = sum(place << 2 * at for at, place in enumerate(places))
        grid = (R, blocks_of(S, BLOCK))
        _put_pieces[grid](x, out, x.stride(0), R, S, PLACES=code, COUNT=len(places), INNER=inner, BLOCK=BLOCK)
