"""The errors of gradients from some tiles of E, measured by random signs beside those from all tiles.

N tokens, C rows of a chunk, D hidden size, V vocabulary, P tiles across it, k columns of signs. With R [D, k] of
independent signs the mean square of the rows of ``dX R`` is k times that of dX, and so is it of what dX is off by. For
``dX R = s (E (W R))`` and ``dW R = E^T (S R)`` E is read twice, and no GEMM is run again.
"""

import torch
from torch import Tensor

from lowtide.head.call import matmul_into
from lowtide.skip.kernels.ordered import COLUMNS

SIGNS = 16


class Comparison:
    """Of one call, chunk by chunk; all classes are in the order of the tiles."""

    def __init__(self, w_VD: Tensor, tokens: int, seed: int) -> None:
        """``seed``: of the signs, another in each pass: errors that some signs miss, the same signs miss for good."""
        random, (V, D) = torch.Generator(w_VD.device).manual_seed(seed), w_VD.shape
        signs = torch.randint(0, 2, (D, SIGNS), generator=random, device=w_VD.device) * 2 - 1
        self._signs = signs.to(w_VD.dtype)
        self._weight = self._mixed(w_VD)
        self._parts = _in_two(self._weight, w_VD.dtype)
        self._input = torch.zeros(tokens, SIGNS, dtype=torch.float32, device=w_VD.device)  # from all tiles
        self._sum = w_VD.new_empty(V, 2 * SIGNS, dtype=torch.float32)

    def _mixed(self, x: Tensor) -> Tensor:
        """Return ``x R`` in float32."""
        out = x.new_empty(len(x), SIGNS, dtype=torch.float32)
        matmul_into(x, self._signs.to(x.dtype), out, add=False)
        return out

    def see_input(self, e_CV: Tensor, to_C: Tensor, s_C: Tensor, y_C: Tensor, rest_C: Tensor) -> None:
        """Take a chunk's part of dX, of the tokens ``to_C``."""
        both = self._weight.new_empty(len(e_CV), 2 * SIGNS)
        matmul_into(e_CV, self._parts, both, add=False)
        own, s = rest_C[:, None] * self._weight[y_C.clamp(min=0).long()], s_C[:, None]
        right = ((both[:, :SIGNS] + both[:, SIGNS:] + own) * s).where((y_C >= 0)[:, None] & (s != 0), 0)
        self._input.index_copy_(0, to_C, right)

    def see_weight(self, e_CV: Tensor, scaled_CD: Tensor, y_C: Tensor, *, add: bool) -> None:
        """Take a chunk's part of dW; all but the first add theirs."""
        mixed = self._mixed(scaled_CD).where((y_C >= 0)[:, None], 0)  # the rest may be an earlier chunk's
        matmul_into(e_CV.t(), _in_two(mixed, scaled_CD.dtype), self._sum, add=add)

    def errors(self, input_ND: Tensor | None, sum_VD: Tensor | None, shared_PD: Tensor, sizes_P: Tensor) -> Tensor:
        """Return what dX and dW are off by, relative [2]: 0 where there is none, no number where it is 0.

        ``sum_VD`` is dW of all chunks, without what the rows of each tile share, as many as ``sizes_P``.
        """
        off_input = off_weight = self._input.new_zeros(())
        if input_ND is not None:
            off_input = _relative(self._mixed(input_ND), self._input)
        if sum_VD is not None:
            found = self._mixed(sum_VD)
            shared = shared_PD @ self._signs.float() / sizes_P[:, None]
            found += shared.repeat_interleave(COLUMNS.value, 0)[: len(found)]
            off_weight = _relative(found, self._sum[:, :SIGNS].add_(self._sum[:, SIGNS:]))
        return torch.stack((off_input, off_weight))


def _relative(found: Tensor, right: Tensor) -> Tensor:
    """Return the error of ``found``, in its memory: there are as many rows as classes."""
    relative: Tensor = torch.linalg.vector_norm(found.sub_(right)) / torch.linalg.vector_norm(right)
    return relative


def _in_two(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return two matrices side by side, of ``dtype``, that add up to ``x``."""
    first = x.to(dtype)
    return torch.cat((first, (x - first.float()).to(dtype)), 1)
