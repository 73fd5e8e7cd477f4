"""Products of narrow operands with a wide result, and matrices in blocks.

C rows of a chunk, V vocabulary.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


def narrow_in_place(wide_CV: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``wide_CV`` rounded to ``dtype`` (half as wide), written over the first half of each of its own rows.

    Block after block, each as wide as all before it: block [a, 2a) is written to [a / 2, a), which has
    been read by then.
    """
    V = wide_CV.shape[1]
    narrow_CV = narrow_view(wide_CV, dtype)
    first = min(V, 64)
    narrow_CV[:, :first] = wide_CV[:, :first].to(dtype)
    start = first
    while start < V:
        stop = min(2 * start, V)
        narrow_CV[:, start:stop].copy_(wide_CV[:, start:stop])
        start = stop
    return narrow_CV


def narrow_view(wide_CV: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the first half of each row's memory as [C, V] of ``dtype``, half as wide."""
    rows, V = wide_CV.shape
    length = wide_CV.stride(0)
    return torch.as_strided(wide_CV, (rows, length), (length, 1)).view(dtype)[:, :V]


def clear_beside(g_CV: Tensor) -> None:
    """Write 0 beside each row of a matrix whose rows have room there.

    oneDNN's GEMMs for CPUs with AMX read rows of bfloat16 in steps of 64 bytes, and multiply what stands beside the row
    by 0, which a NaN there survives.
    """
    (rows, V), length = g_CV.shape, g_CV.stride(0)
    stop = min(-(-V // 32) * 32, length)
    g_CV.as_strided((rows, max(0, stop - V)), (length, 1), g_CV.storage_offset() + V).zero_()


def matmul_into(a: Tensor, b: Tensor, out: Tensor, *, add: bool) -> None:
    """Write ``a @ b`` into ``out``, or add it: summed in float32, rounded once."""
    wider: dict[str, Any] = {} if out.dtype == a.dtype else {"out_dtype": out.dtype}
    if add:
        torch.addmm(out, a, b, **wider, out=out)
    else:
        torch.mm(a, b, **wider, out=out)


def slices(N: int, size: int) -> Iterator[slice]:
    """Yield the slices of ``size`` that make up N, the last one perhaps shorter."""
    for start in range(0, N, max(1, size)):
        yield slice(start, min(start + max(1, size), N))
