"""Any term over a part of the classes that differs from token to token: the others' logits are -inf.

N tokens, n rows computed, C rows of a chunk, K targets a row, V vocabulary.
"""

import torch
from torch import Tensor

from lowtide.head.engine import Numbers, Terms, UpstreamOf
from lowtide.head.matmul import slices
from lowtide.head.rows import Rows

GATHERED = 2**20  # entries of a mask that are copied at a time, where a chunk's rows do not lie one after another


class Masked(Terms):
    """Another term, for which the classes where ``mask_NV`` is True have probability 0, unless they are targets.

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
