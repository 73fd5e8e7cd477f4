"""float32 GEMMs as bfloat16 GEMMs: a float32 number is the sum of three bfloat16 ones, its pieces.

With pieces ``a = a_0 + a_1 + a_2`` and ``b`` likewise, each at most 2**-8 of the one before it, ``a b`` is the sum of
``a_i b_j`` over ``i + j < n``, but for about 2**-8n of it. The pieces stand side by side along the inner dimension, the
smallest products first, so that one GEMM with float32 output sums them all:

    n = 3    [a_2 a_1 a_0 a_1 a_0 a_0] [b_0 b_1 b_2 b_0 b_1 b_0]^T    6 products, 2**-24 is left out
    n = 2    [a_1 a_0 a_0] [b_0 b_1 b_0]^T                            3 products, 2**-16

An operand that holds bfloat16 numbers is its own first piece: the products with its other ones are left out.
Source: Henry, Tang, Heinecke, "Leveraging the bfloat16 artificial intelligence datatype for higher-precision
computations" (2019).
"""

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowtide.head.matmul import matmul_into
from lowtide.kernel_launch import why_no_triton

RAW = 3  # a place's number besides those of the pieces: the first one, not finite where the operand is not
_CAST = "ToCopyBackward0"
_SAME_NUMBERS = frozenset({
    "AliasBackward0", "CloneBackward0", "ExpandBackward0", "IndexBackward0", "IndexSelectBackward0", "PermuteBackward0",
    "SelectBackward0", "SliceBackward0", "SqueezeBackward0", "SqueezeBackward1", "TBackward0", "TransposeBackward0",
    "UnsafeViewBackward0", "UnsqueezeBackward0", "ViewBackward0",
})  # fmt: skip


class Places(NamedTuple):
    """Which piece stands where along the inner dimension of both operands."""

    left: tuple[int, ...]
    right: tuple[int, ...]


@cache
def places_of(n: int, left: int, right: int) -> Places:
    """Return the places of products up to order ``n`` of operands that have so many pieces, at most ``n``.

    The product of the first pieces comes last, and alone takes what is not finite: infinity times a later piece of the
    other side, which may be 0 or of the other sign, would be NaN.
    """
    pairs = [(i, order - i) for order in reversed(range(n)) for i in reversed(range(order + 1))]
    pairs = [(i, j) for i, j in pairs if i < left and j < right][:-1]
    return Places((*(i for i, _ in pairs), RAW), (*(j for _, j in pairs), RAW))


def most_places(n: int) -> int:
    """Return how many products there are with ``n`` pieces on both sides."""
    return n * (n + 1) // 2


def side_by_side(x: Tensor, places: tuple[int, ...], inner: int) -> Tensor:
    """Return pieces of a float32 matrix side by side along axis ``inner``, in bfloat16 and in the order of its memory.

    Piece i is what the pieces before it lack, rounded to bfloat16. One that rounds beyond bfloat16's largest number is
    that number, and later pieces have the rest.
    """
    if x.stride(0) == 1 != x.stride(1):
        return side_by_side(x.T, places, 1 - inner).T
    R, S = x.shape
    out = x.new_empty((R * len(places), S) if inner == 0 else (R, len(places) * S), dtype=torch.bfloat16)
    if why_no_triton(x.device) is None:
        from lowtide.head.kernels.pieces import put_pieces

        put_pieces(x, out, places, inner)
    else:
        put_pieces_by_torch(x, out, places, inner)
    return out


def put_pieces_by_torch(x: Tensor, out: Tensor, places: tuple[int, ...], inner: int) -> None:
    """Write what `side_by_side` returns, in plain PyTorch."""
    most = torch.finfo(torch.bfloat16).max
    rest = x.where(x.isfinite(), 0)
    pieces = []
    for _ in range(1 + max((i for i in places if i != RAW), default=0)):
        pieces.append(rest.clamp(-most, most).to(torch.bfloat16))
        rest = rest - pieces[-1].float()
    raw = x.to(torch.bfloat16).where(~x.isfinite(), pieces[0])
    size = x.shape[inner]
    for at, i in enumerate(places):
        out.narrow(inner, at * size, size).copy_(raw if i == RAW else pieces[i])


def multiply_into(a: Tensor, b: Tensor, out: Tensor, places: Places, *, add: bool) -> None:
    """Write ``a @ b`` into ``out`` (float32), or add it; float32 operands, or bfloat16 ones of `side_by_side`.

    Only NVIDIA GPUs have such GEMMs. Elsewhere the pieces are multiplied in float32, for tests.
    """
    a = side_by_side(a, places.left, 1) if a.dtype == torch.float32 else a
    b = side_by_side(b, places.right, 0) if b.dtype == torch.float32 else b
    if not out.is_cuda:
        a, b = a.float(), b.float()
    if a.shape[1]:
        matmul_into(a, b, out, add=add)
    elif not add:
        out.zero_()


def is_cast(x: Tensor | None) -> bool:
    """Return whether a float32 tensor is known to be a cast of a bfloat16 one, rows of it or a view: by its graph.

    Its numbers are not read, for which the host would wait. One that was written to since is not.
    """
    node: Any = None if x is None else x.grad_fn
    while node is not None and node.name() in _SAME_NUMBERS:
        node = node.next_functions[0][0]
    if x is None or node is None or node.name() != _CAST or x._version:
        return False
    source, at = node.next_functions[0]
    return source is not None and bool(source._input_metadata[at].dtype == torch.bfloat16)
