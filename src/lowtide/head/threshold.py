"""What calls may lose of the logits' gradient: it follows the errors of dX and dW that are measured.

All of it is on the device, float32. Errors are relative, of dX and dW [2]; what tiles add to them is nearly in
proportion to what the logits' gradient loses.
"""

from typing import NamedTuple

import torch
from torch import Tensor

FIRST = 0.012  # the first threshold over the error that is accepted
SHARED = (0.8e-3, 1.4e-3)  # errors of bfloat16 in dX and dW that a comparison does not see
NEAR = 0.92  # of what is accepted, what is aimed at
ROOM = 0.15  # of what is accepted, what tiles may add where bfloat16's own errors leave less
CHANGE = (0.5, 2.0)  # of the threshold, from one comparison to the next
FOUND = 1.2  # the change from which on it is near what it will be,
SLOW = 1.1  # and grows by this at most: other calls may be unlike the one that is compared
LEAST, MOST = 1e-4, 2.0  # the threshold over the error that is accepted
BLIND = 5.0  # the threshold over the first one, up to which it grows where calls lose nothing, which says little
BELOW = 1.03  # the threshold over what calls of many tiles lose: all of a bin stay, or none
CAREFUL = 0.6  # the power of what it would grow by, were errors in proportion to it: they may grow faster


class Errors(NamedTuple):
    """What a comparison has found, each [2]; no numbers where a gradient is 0."""

    whole: Tensor
    own: Tensor  # of it, what rounding adds
    tiles: Tensor  # and what tiles do


class Threshold(NamedTuple):
    """A threshold, and what the comparison before has found."""

    value: Tensor  # [1]: what a call may lose of the logits' gradient
    errors: Tensor  # [2], whole
    change: Tensor  # [1], the last one

    @classmethod
    def first(cls, accepted: float, device: torch.device) -> "Threshold":
        """Return the one to begin with."""
        value = torch.full((1,), FIRST * accepted, dtype=torch.float32, device=device)  # whatever the default dtype
        return cls(value, value.new_zeros(2), torch.zeros_like(value))

    def scaled(self, factor: float) -> "Threshold":
        """Return it times ``factor``, free to grow fast again."""
        return self._replace(value=self.value * factor, change=torch.zeros_like(self.change))

    def adapted(self, errors: Errors, lost: Tensor, accepted: float) -> "Threshold":
        """Return it changed by the errors of a call that lost so much, so that neither is above what is accepted.

        Errors of no gradient, or that are no numbers, say nothing. Where a call lost less than it might have, as its
        tiles are few, the threshold grows no further than its errors allow, and where it lost nothing only while it is
        small. It grows fast until it is found, and slowly from then on.
        """
        left = [(NEAR * accepted) ** 2 - own**2 - x**2 for own, x in zip(errors.own, SHARED, strict=True)]
        room = torch.stack(left).clamp(min=(ROOM * accepted) ** 2).sqrt()
        share = (errors.tiles / room).max()
        blind = self.value.clamp(min=BLIND * FIRST * accepted)
        aimed = (BELOW * lost / share).where(share > 0, torch.inf).where(lost > 0, blind) / self.value
        found = (self.change > 0) & (self.change < FOUND)
        growth = torch.full_like(self.value, CHANGE[1]).where(~found, SLOW)
        change = torch.minimum(aimed.where(aimed < 1, aimed**CAREFUL), growth).clamp(min=CHANGE[0])
        value = (self.value * change).clamp(LEAST * accepted, MOST * accepted)
        changed, known = Threshold(value, errors.whole, value / self.value), torch.stack(errors).isfinite().all()
        return Threshold(*(new.where(known, old) for new, old in zip(changed, self, strict=True)))
