"""The errors of gradients from some tiles of E, found by random signs: what they are off by from those from all tiles.

N tokens, C rows of a chunk, D hidden size, V vocabulary, P tiles across it, k columns of signs. With R [D, k] of
independent signs the mean square of the rows of ``dX R`` is k times that of dX, and so is it of what dX is off by. For
``dX R = s (E (W R))`` and ``dW R = E^T (S R)`` E is read twice, and no GEMM is run again. What tiles alone add is found
from E less what stands for it, in the same way; the rest of the error is rounding.
"""

import torch
from torch import Tensor

from lowtide.head.kernels.input_rows_hopper import InputRows
from lowtide.head.kernels.kept_tiles import COLUMNS, Targets
from lowtide.head.matmul import matmul_into
from lowtide.head.threshold import Errors


class Comparison:
    """Of one call, chunk by chunk; all classes are in the order of the tiles."""

    def __init__(self, w_VD: Tensor, signs_Dk: Tensor, tokens: int) -> None:
        self._signs, k, new = signs_Dk, signs_Dk.shape[1], signs_Dk.new_empty
        self._weight = self._mixed(w_VD)
        self._parts = _in_two(self._weight, signs_Dk.dtype)
        self._input = new(2, tokens, k, dtype=torch.float32).zero_()  # from all tiles, and what is lost of it
        self._sum = new(len(w_VD), 2 * k, dtype=torch.float32)
        self._lost = new(len(w_VD), k, dtype=torch.float32)
        self._begun = False
        self._scaled: Tensor | None = None  # of the last chunk, mixed, in two parts
        self._ends: InputRows | None = None
        self._of_weight: Tensor | None = None

    def _mixed(self, x: Tensor) -> Tensor:
        """Return ``x R`` in float32."""
        out = x.new_empty(len(x), self._signs.shape[1], dtype=torch.float32)
        matmul_into(x, self._signs.to(x.dtype), out, add=False)
        return out

    def see_input(self, e_CV: Tensor, targets: Targets, ends: InputRows) -> None:
        """Take a chunk's part of dX."""
        k = self._signs.shape[1]
        both = self._weight.new_empty(len(e_CV), 2 * k)
        matmul_into(e_CV, self._parts, both, add=False)
        y, s = targets.y.clamp(min=0).long(), targets.s[:, None]
        right = (both[:, :k] + both[:, k:] + targets.rest[:, None] * self._weight[y]) * s
        right = right.where(_counted(targets), 0)
        if ends.uniform is not None and ends.factor is not None:
            even = ends.factor * ends.share * (1 if ends.scale is None else ends.scale)
            even = even.where(targets.y >= 0, 0)
            right = right - even[:, None] * (ends.uniform @ self._signs.float())
        assert ends.to is not None
        self._input[0].index_copy_(0, ends.to.long(), right)
        self._ends = ends

    def see_weight(self, e_CV: Tensor, targets: Targets, scaled_CD: Tensor) -> None:
        """Take a chunk's part of dW."""
        mixed = self._mixed(scaled_CD).where((targets.y >= 0)[:, None], 0)  # the rest may be an earlier chunk's
        self._scaled = _in_two(mixed, scaled_CD.dtype)
        matmul_into(e_CV.t(), self._scaled, self._sum, add=self._begun)

    def see_lost(self, lost_CV: Tensor, targets: Targets) -> None:
        """Take a chunk's E less what stands for it, after the chunk's parts of dX and dW."""
        k = self._signs.shape[1]
        assert self._scaled is not None
        if self._ends is not None and self._ends.to is not None:
            lost = self._weight.new_empty(len(lost_CV), k)
            matmul_into(lost_CV, self._parts[:, :k], lost, add=False)
            lost = (lost * targets.s[:, None]).where(_counted(targets), 0)
            self._input[1].index_copy_(0, self._ends.to.long(), lost)
        matmul_into(lost_CV.t(), self._scaled[:, :k], self._lost, add=self._begun)
        self._begun = True

    def see_sum(self, sum_VD: Tensor, shared_PD: Tensor) -> None:
        """Take dW of all chunks, without what the rows of a tile share."""
        (V, P), k = (len(sum_VD), len(shared_PD)), self._signs.shape[1]
        size = torch.full((P, 1), float(COLUMNS.value), device=sum_VD.device)
        size[-1] -= P * COLUMNS.value - V
        given = self._mixed(sum_VD)
        given += (shared_PD @ self._signs.float() / size).repeat_interleave(COLUMNS.value, 0)[:V]
        self._of_weight = _norms(given, self._sum[:, :k].add_(self._sum[:, k:]), self._lost)

    def errors(self, input_ND: Tensor | None) -> Errors:
        """Return what dX and dW are off by, relative: 0 where there is none, no number where it is 0."""
        nothing = torch.arange(4, dtype=torch.float32, device=self._input.device) // 3
        of_input = nothing if input_ND is None else _norms(self._mixed(input_ND), *self._input)
        found = torch.stack((of_input, nothing if self._of_weight is None else self._of_weight), 1)
        return Errors(*(found[:3] / found[3]))


def _counted(targets: Targets) -> Tensor:
    """Return which rows have a gradient [C, 1]."""
    return ((targets.y >= 0) & (targets.s != 0))[:, None]


def _norms(given: Tensor, right: Tensor, lost: Tensor) -> Tensor:
    """Return the norms of what is off, of that without what tiles lose, of what they do, and of what is right.

    In the memory of ``given``: there are as many rows as classes.
    """
    norm = torch.linalg.vector_norm
    off = given.sub_(right)
    return torch.stack((norm(off), norm(off.add_(lost)), norm(lost), norm(right)))


def _in_two(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return two matrices side by side, of ``dtype``, that add up to ``x``."""
    first = x.to(dtype)
    return torch.cat((first, (x - first.float()).to(dtype)), 1)
