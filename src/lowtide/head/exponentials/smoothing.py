"""Label smoothing's part of a loss over exponentials, the same for every row: it stays out of the wide GEMMs.

D hidden size, V classes of this rank, q their weights (else 1).
"""

import torch
from torch import Tensor

from lowtide.head.gradients import Gradients
from lowtide.head.kernels.exp_rows import RowTerms, add_column_sums
from lowtide.head.matmul import matmul_into


class EvenPart:
    """Its part of the weight's and the bias's gradient: - m (a / V) q times sums over the rows.

    Args:
        terms: The loss.
        q_V: Class weights, or None.
        factor_n: What each row's loss is multiplied with; 0 where ignored.
        into: Takes the gradients.
        dtype: Of the GEMMs' operands.
    """

    def __init__(
        self, terms: RowTerms, q_V: Tensor | None, factor_n: Tensor, into: Gradients, dtype: torch.dtype
    ) -> None:
        self._terms, self._q_V, self._factor_n, self._into, self._dtype = terms, q_V, factor_n, into, dtype
        assert terms.uniform_D is not None
        self._sum_D = torch.zeros_like(terms.uniform_D)

    def add(self, x_CD: Tensor, part: slice) -> None:
        """Add some rows' hidden states [C, D], times their factors."""
        if self._into.weight_VD is not None:
            add_column_sums(x_CD, self._factor_n[part], self._sum_D)

    def put(self, *, add: bool) -> bool:
        """Put it into the gradients, when all rows are added; return whether the weight's holds something now.

        ``add`` says whether it holds something already; it is overwritten otherwise.
        """
        terms, into, q = self._terms, self._into, self._q_V
        share = -terms.smoothing / terms.vocab * (1.0 if terms.scale is None else terms.scale)
        factor = self._factor_n.sum()
        if into.bias_V is not None:
            into.bias_V += factor * share if q is None else factor * share * q
        if into.weight_VD is None:
            return add
        _outer(q, self._sum_D * share, into.weight_VD, self._dtype, add=add)
        return True


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


def _outer(q_V: Tensor | None, x_D: Tensor, out_VD: Tensor, dtype: torch.dtype, *, add: bool) -> None:
    """Write or add ``q x^T`` to ``out_VD``, without a float32 copy of it: products of ``dtype``, summed in float32."""
    right = _parts_of(x_D, dtype)
    if q_V is None:
        left = [x_D.new_ones(out_VD.shape[0], dtype=dtype)] * len(right)
    else:
        parts = _parts_of(q_V, dtype)
        pairs = [(i, j) for i in range(len(parts)) for j in range(len(right)) if i + j < 3]
        left, right = [parts[i] for i, _ in pairs], [right[j] for _, j in pairs]
    matmul_into(torch.stack(left, 1), torch.stack(right), out_VD, add=add)
