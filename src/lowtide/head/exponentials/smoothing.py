"""Weighted sums over the vocabulary, and outer products with the weights, to float32's digits by narrow GEMMs.

D hidden size, V classes of this rank, q their weights (else 1).
"""

import torch
from torch import Tensor

from lowtide.head.matmul import matmul_into


def _parts_of(x: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Return tensors of ``dtype`` that add up to ``x`` (float32), to all the digits that float32 has."""
    if dtype == x.dtype:
        return [x]
    first = x.to(dtype)
    second = (x - first.float()).to(dtype)
    return [first, second, (x - first.float() - second.float()).to(dtype)]


def weighted_sum(q_V: Tensor | None, w_VD: Tensor) -> Tensor:
    """Return ``sum_v q_v w_v`` in float32, without a float32 copy of the weight."""
    V, D = w_VD.shape
    if not V:  # a rank without classes
        return w_VD.new_zeros(D, dtype=torch.float32)
    if q_V is None:
        weights = w_VD.new_ones(1, V)
    else:
        weights = torch.stack(_parts_of(q_V, w_VD.dtype))
    out = w_VD.new_empty(len(weights), D, dtype=torch.float32)
    matmul_into(weights, w_VD, out, add=False)
    return out.sum(0)


def put_outer(q_V: Tensor | None, x_D: Tensor, out_VD: Tensor, dtype: torch.dtype, *, add: bool) -> None:
    """Write or add ``q x^T`` to ``out_VD``, without a float32 copy of it: products of ``dtype``, summed in float32."""
    right = _parts_of(x_D, dtype)
    if q_V is None:
        left = [x_D.new_ones(out_VD.shape[0], dtype=dtype)] * len(right)
    else:
        parts = _parts_of(q_V, dtype)
        pairs = [(i, j) for i in range(len(parts)) for j in range(len(right)) if i + j < 3]
        left, right = [parts[i] for i, _ in pairs], [right[j] for _, j in pairs]
    matmul_into(torch.stack(left, 1), torch.stack(right), out_VD, add=add)
