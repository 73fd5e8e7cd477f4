"""What calls may lose of the logits' gradient: it follows the errors of dX and dW that are measured.

All of it is on the device, float32. Errors are relative, of dX and dW [2]; what tiles add to them is nearly in
proportion to what the logits' gradient loses.
"""

from typing import NamedTuple

import torch
from torch import Tensor

FIRST = 0.012  # the first threshold over the error that is accepted
OWN = (0.8e-3, 1.4e-3)  # errors of bfloat16 in dX and dW that a comparison does not see
NEAR = 0.92  # of what is accepted, what is aimed at
CHANGE = (0.5, 2.0)  # of the threshold, from one comparison to the next
SLOW = 1.1  # the larger one, as soon as it was not that large: other calls may be unlike the one that is compared
LEAST, MOST = 1e-4, 2.0  # the threshold over the error that is accepted
BLIND = 5.0  # the threshold over the first one, up to which it grows where calls lose nothing, which says little
BELOW = 1.03  # the threshold over what calls of many tiles lose: all of a bin stay, or none
CAREFUL = 0.6  # the power of what it would grow by, were errors in proportion to it: they may grow faster


class Threshold(NamedTuple):
    """A threshold, and what the comparisons before have found."""

    value: Tensor  # [1]: what a call may lose of the logits' gradient
    errors: Tensor  # [2], of the last comparison
    least: Tensor  # [2], of all: bfloat16's own
    change: Tensor  # [1], the last one

    @classmethod
    def first(cls, accepted: float, device: torch.device) -> "Threshold":
        """Return the one to begin with."""
        pair = torch.zeros(2, device=device)
        value = torch.full((1,), FIRST * accepted, device=device)
        return cls(value, pair, pair, torch.zeros_like(value))

    def scaled(self, factor: float) -> "Threshold":
        """Return it times ``factor``, free to double again; errors that were measured stay known."""
        return self._replace(value=self.value * factor, change=torch.zeros_like(self.change))

    def adapted(self, errors: Tensor, lost: Tensor, accepted: float) -> "Threshold":
        """Return it changed by the errors of a call that lost so much, so that neither is above what is accepted.

        The least error seen is bfloat16's own, and the rest of what is aimed at is left for the tiles. Errors of no
        gradient, or that are no numbers, say nothing. Where a call lost less than it might have, as its tiles are few,
        the threshold grows no further than its errors allow, and where it lost nothing only while it is small. It may
        double as long as it has doubled each time, and grows slowly from then on.
        """
        least = torch.minimum(errors, self.least).where(self.least > 0, errors)
        aims = [NEAR * max(accepted**2 - own**2, (accepted / 3) ** 2) ** 0.5 for own in OWN]
        room = torch.stack([(aim**2 - x**2).clamp(min=(aim / 4) ** 2) for x, aim in zip(least, aims, strict=True)])
        share = ((errors.square() - least.square()).clamp(min=0) / room).sqrt().max()
        blind = self.value.clamp(min=BLIND * FIRST * accepted)
        aimed = (BELOW * lost / share).where(share > 0, torch.inf).where(lost > 0, blind) / self.value
        settled = (self.change > 0) & (self.change < 0.99 * CHANGE[1])
        growth = torch.where(settled, SLOW, CHANGE[1])
        change = torch.minimum(aimed.where(aimed < 1, aimed**CAREFUL), growth).clamp(min=CHANGE[0])
        value = (self.value * change).clamp(LEAST * accepted, MOST * accepted)
        changed, known = Threshold(value, errors, least, value / self.value), errors.isfinite().all()
        return Threshold(*(new.where(known, old) for new, old in zip(changed, self, strict=True)))
