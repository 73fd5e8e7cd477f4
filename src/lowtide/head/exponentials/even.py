"""Label smoothing's part of the gradients, the same for every row: thin products in place of entries of E.

It is ``- m g (a / V) q_v`` in row i's entry of class v: m the logit scale, g the row's factor, a the smoothing, q the
class weights. So dW has the outer product of q with the sum of all hidden states times their factors, which is taken as
they pass by; in dX it is a part of each row's end.
"""

import torch
from torch import Tensor

from lowtide.head.gradients import Gradients
from lowtide.head.kernels import exp_rows
from lowtide.head.kernels.exp_terms import RowTerms
from lowtide.head.kernels.gemm import Used
from lowtide.head.matmul import matmul_into


class Even:
    """That part of the gradients of weight and bias, where there is smoothing."""

    def __init__(self, terms: RowTerms, q_V: Tensor | None, factor_n: Tensor, into: Gradients) -> None:
        """``factor_n``: each row's factor, 0 where it is ignored."""
        assert terms.uniform_D is not None
        self._terms, self._q_V, self._factor_n, self._into = terms, q_V, factor_n, into
        self._sum_D = torch.zeros_like(terms.uniform_D)

    def add(self, x_CD: Tensor, part: slice, used: Used) -> None:
        """Add some rows' hidden states."""
        if self._into.weight_VD is not None:
            exp_rows.add_column_sums(x_CD, self._factor_n[part], self._sum_D, used)

    def put(self, dtype: torch.dtype, *, add: bool) -> bool:
        """Put it into the gradients; return whether the weight's holds something now, as it does with ``add``."""
        into, terms, q = self._into, self._terms, self._q_V
        share = -terms.smoothing / terms.vocab * (1.0 if terms.scale is None else terms.scale)
        if into.bias_V is not None:
            share_of_all = self._factor_n.sum() * share
            into.bias_V += share_of_all if q is None else share_of_all * q
        if into.weight_VD is None:
            return add
        _put_outer(q, self._sum_D * share, into.weight_VD, dtype, add=add)
        return True


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


def _parts_of(x: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Return tensors of ``dtype`` that add up to ``x`` (float32), to all the digits that float32 has."""
    if dtype == x.dtype:
        return [x]
    first = x.to(dtype)
    second = (x - first.float()).to(dtype)
    return [first, second, (x - first.float() - second.float()).to(dtype)]


def _put_outer(q_V: Tensor | None, x_D: Tensor, out_VD: Tensor, dtype: torch.dtype, *, add: bool) -> None:
    """Write or add ``q x^T`` to ``out_VD``, without a float32 copy of it: products of ``dtype``, summed in float32."""
    right = _parts_of(x_D, dtype)
    if q_V is None:
        left = [x_D.new_ones(out_VD.shape[0], dtype=dtype)] * len(right)
    else:
        parts = _parts_of(q_V, dtype)
        pairs = [(i, j) for i in range(len(parts)) for j in range(len(right)) if i + j < 3]
        left, right = [parts[i] for i, _ in pairs], [right[j] for _, j in pairs]
    matmul_into(torch.stack(left, 1), torch.stack(right), out_VD, add=add)
