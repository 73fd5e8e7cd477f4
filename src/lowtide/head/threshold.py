"""The threshold below which tiles of the softmax are skipped: it follows the errors that are measured.

All of it is on the device, float32. Errors are relative, of dX and dW [2].
"""

from typing import NamedTuple

import torch
from torch import Tensor

FIRST = 0.012  # the first threshold over the error that is accepted
OWN = (0.8e-3, 1.4e-3)  # errors of bfloat16 in dX and dW that a comparison does not see
NEAR = 0.92  # of what is accepted, what is aimed at
OVER, UNDER = 1.3, 0.85  # over what is aimed at, from which the threshold stays below so much of what it was
FAR, FAR_CHANGE = 0.3, 1.6  # where the errors are that far below, and what it changes by
CHANGE = (0.5, 1.15)  # of the threshold, from one comparison to the next


class Threshold(NamedTuple):
    """A threshold, and what the comparisons before have found."""

    value: Tensor  # [1]
    errors: Tensor  # [2], of the last comparison
    least: Tensor  # [2], of all: bfloat16's own
    share: Tensor  # [2]: of what is left beside that, what the tiles' error takes
    change: Tensor  # [1], the last one
    highest: Tensor  # [1]: what it may be until it is relaxed

    @classmethod
    def first(cls, accepted: float, device: torch.device) -> "Threshold":
        """Return the one to begin with."""
        pair = torch.zeros(2, device=device)
        value = torch.full((1,), FIRST * accepted, device=device)
        return cls(value, pair, pair, pair, torch.zeros_like(value), torch.full_like(value, torch.inf))

    def begun_at(self, value: Tensor) -> "Threshold":
        """Return another threshold of which nothing is known."""
        return Threshold.first(1.0, value.device)._replace(value=value)

    def relaxed(self) -> "Threshold":
        """Return the same, which may be higher again."""
        return self._replace(highest=self.highest * 1.5)

    def adapted(self, errors: Tensor, accepted: float) -> "Threshold":
        """Return it changed by measured errors, so that neither is above what is accepted.

        The least error seen is bfloat16's own, and the rest of what is aimed at is left for the tiles. Errors of no
        gradient, or that are no numbers, say nothing. At most the threshold is what is accepted: it is one tile's share
        of the gradients, and grows where nothing can be left out. Where it went too far, as where many tiles are alike,
        it stays below until it is relaxed.
        """
        least = torch.minimum(errors, self.least).where(self.least > 0, errors)
        aims = [NEAR * max(accepted**2 - own**2, (accepted / 3) ** 2) ** 0.5 for own in OWN]
        room = torch.stack([(aim**2 - x**2).clamp(min=(aim / 4) ** 2) for x, aim in zip(least, aims, strict=True)])
        share = ((errors.square() - least.square()).clamp(min=0) / room).sqrt()
        most = torch.maximum(share, (self.share * share).sqrt()).max()
        change = torch.where(most < 1, (1 / most).sqrt(), 1 / most).clamp(*CHANGE)  # errors grow faster than it
        change = torch.where(most < FAR, FAR_CHANGE, change).view(1)
        highest = torch.where(most > OVER, torch.minimum(self.highest, self.value * UNDER), self.highest)
        value = torch.minimum((self.value * change).clamp(max=accepted), highest)
        changed, known = Threshold(value, errors, least, share, change, highest), errors.isfinite().all()
        return Threshold(*(new.where(known, old) for new, old in zip(changed, self, strict=True)))
