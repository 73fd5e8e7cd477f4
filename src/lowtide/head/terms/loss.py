"""The loss of cross entropy as a function of a row's statistics, and any term over a part of the classes.

N tokens, C rows of a chunk, n rows, K targets a row, V vocabulary, V_r classes of it on this rank.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lowtide.head.call import Gradients
from lowtide.head.engine import Numbers, Terms, UpstreamOf
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
    mask: Tensor | None = None  # [N, V] of all tokens: see `CrossEntropyArgs`

    def over_its_classes(self, terms: Terms) -> Terms:
        """Return a term over the classes of each row's distribution."""
        return terms if self.mask is None else Masked(terms, self.mask, self.rows, self.y[:, None])

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

    def _target_share(self, part: slice) -> Tensor | float:
        share = 1 - self.label_smoothing
        return share if self.own_n is None else share * self.own_n[part]

    @property
    def _even_share(self) -> Tensor | float:
        """Return a Q / V."""
        return self.label_smoothing if self.total is None else self.label_smoothing * self.total / self.vocab

    def of(self, numbers: Numbers) -> Tensor:
        """Return each row's loss [n]."""
        loss = -self._target_share(slice(None)) * numbers["logprob"][:, 0]
        if self.label_smoothing:
            loss = loss + self._even_share * numbers["lse"] - self.label_smoothing * numbers["mean_logit"]
        return loss + self.z_loss * numbers["lse"].square() if self.z_loss else loss

    def upstream(self, numbers: Numbers, part: slice, factor_C: Tensor) -> Upstream:
        """Return the gradient of ``factor * loss`` by a chunk's numbers."""
        lse = None
        if self.label_smoothing or self.z_loss:
            lse = self._even_share + 2 * self.z_loss * numbers["lse"]
        share = self._target_share(part)
        return Upstream(
            logprob=-share[:, None] if isinstance(share, Tensor) else -share,
            lse=lse,
            mean_logit=torch.full_like(factor_C, -self.label_smoothing) if self.label_smoothing else None,
            outside=factor_C,
        )


class Masked(Terms):
    """Any other term, for which the classes where ``mask_NV`` is True have probability 0, unless they are targets.

    The mask is read where it lies, in any strides. A logit of -inf gets no gradient, whatever the scale: it is above 0.
    """

    def __init__(self, terms: Terms, mask_NV: Tensor, rows: Rows, y_nK: Tensor) -> None:
        self.terms, self.mask_NV, self.rows, self.y_nK, self.raw = terms, mask_NV, rows, y_nK, terms.raw

    def numbers(self, z: Tensor, part: slice) -> Numbers:
        """See `Terms.numbers`; masked logits remain -inf."""
        return self.terms.numbers(self._masked_(z, part), part)

    def gradient_(self, z: Tensor, part: slice, known: Numbers, g: object) -> Tensor | None:
        """See `Terms.gradient_`."""
        return self.terms.gradient_(self._masked_(z, part), part, known, g)

    def both_(self, z: Tensor, part: slice, upstream: UpstreamOf) -> tuple[Numbers, Tensor | None]:
        """See `Terms.both_`."""
        return self.terms.both_(self._masked_(z, part), part, upstream)

    def _masked_(self, z: Tensor, part: slice) -> Tensor:
        y, index = self.y_nK[part], self.rows.index
        at_y = z.gather(1, y)
        for block in slices(len(z), len(z) if index is None else GATHERED // max(1, z.shape[1])):
            of_all = slice(part.start + block.start, part.start + block.stop)
            mask = self.mask_NV[of_all] if index is None else self.mask_NV[index[of_all]]
            z[block].masked_fill_(mask, -torch.inf)
        return z.scatter_(1, y, at_y)
