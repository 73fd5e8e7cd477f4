"""The loss of cross entropy as a function of a row's statistics, and classes that a row's distribution lacks.

N tokens, C rows of a chunk, n rows, K targets a row, V vocabulary, V_r classes of it on this rank.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from lowtide.head.call import Gradients
from lowtide.head.engine import Numbers
from lowtide.head.rows import Rows, slices
from lowtide.head.terms.statistics import Upstream

GATHERED = 2**20  # entries of a mask that are copied at a time, where a chunk's rows do not lie one after another
# Returns the factor of each row's loss in the gradients [n], and the memory of these; called once both are needed.
RowFactors = Callable[[], tuple[Tensor, Gradients]]


@dataclass(frozen=True, kw_only=True)
class Loss:
    """A call's cross entropy: what is known of its rows before any product, each one's loss and gradient after it."""

    rows: Rows
    y: Tensor  # [n] classes, all valid; on the exponential path int32 rows of this rank's weight, -1 where ignored
    unit: Tensor  # [n] the token's weight; 0 if ignored, NaN if its target is no class
    counted: Tensor | None  # parts of what "mean" divides by; None for the other reductions
    class_weight: Tensor | None  # [V_r] wide, of this rank's classes
    total: Tensor | None  # Q
    own_n: Tensor | None  # [n] q_y
    label_smoothing: float
    z_loss: float
    vocab: int  # V
    mask: Callable[[Tensor, slice], object] | None = None

    @cached_property
    def denominator(self) -> Tensor | None:
        """Return what "mean" divides by; None for the other reductions."""
        return None if self.counted is None else self.counted.sum()

    def divided(self) -> Tensor:
        """Return each row's factor: its weight over the denominator, and 0 for ignored rows even where that is 0."""
        if self.denominator is None:
            return self.unit
        factor = self.unit / self.denominator
        return factor if self.rows.kept is None else factor.where(self.rows.kept, 0)

    @cached_property
    def _shares(self) -> tuple[Tensor | float, Tensor | float]:
        """Return (1 - a) q_y [n], or a number, and a Q / V."""
        a = self.label_smoothing
        even = a if self.total is None else a * self.total / self.vocab
        return 1 - a if self.own_n is None else (1 - a) * self.own_n, even

    def of(self, numbers: Numbers) -> Tensor:
        """Return each row's loss [n]."""
        share, even = self._shares
        loss = -share * numbers["logprob"][:, 0]
        if self.label_smoothing:
            loss = loss + even * numbers["lse"] - self.label_smoothing * numbers["mean_logit"]
        return loss + self.z_loss * numbers["lse"].square() if self.z_loss else loss

    def upstream(self, numbers: Numbers, part: slice, factor_C: Tensor) -> Upstream:
        """Return the gradient of ``factor * loss`` by a chunk's numbers."""
        share, even = self._shares
        spread = even + 2 * self.z_loss * numbers["lse"] if self.label_smoothing or self.z_loss else None
        return Upstream(
            logprob=-share[part, None] if isinstance(share, Tensor) else -share,
            lse=spread,
            mean_logit=torch.full_like(factor_C, -self.label_smoothing) if self.label_smoothing else None,
            outside=factor_C,
        )


class Mask(NamedTuple):
    """Classes that a row's distribution lacks: where ``mask_NV`` is True, unless they are targets.

    The mask is read where it lies, in any strides. A logit of -inf gets no gradient, whatever the scale: it is above 0.
    """

    mask_NV: Tensor  # bool, of all tokens
    rows: Rows
    y_nK: Tensor

    def fill_(self, z: Tensor, part: slice) -> None:
        """Write -inf over the logits of such classes in these rows."""
        y, index = self.y_nK[part], self.rows.index
        at_y = z.gather(1, y)
        for block in slices(len(z), len(z) if index is None else GATHERED // max(1, z.shape[1])):
            of_all = slice(part.start + block.start, part.start + block.stop)
            z[block].masked_fill_(self.mask_NV[of_all if index is None else index[of_all]], -torch.inf)
        z.scatter_(1, y, at_y)
