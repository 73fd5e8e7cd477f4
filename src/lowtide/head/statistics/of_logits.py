"""Records of the exponential path."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(kw_only=True)
class Upstream:
    """What each row's values are multiplied with on their way to the gradient."""

    logprob: Tensor | None = None  # [C, K]
    entropy: Tensor | None = None  # [C]
    lse: Tensor | None = None  # [C]
    mean_logit: Tensor | None = None  # [C]

    def part(self, rows: slice | Tensor) -> "Upstream":
        """Return the same for some of the rows."""
        return Upstream(**{name: None if x is None else x[rows] for name, x in vars(self).items()})

    def times(self, factor_C: Tensor) -> "Upstream":
        """Return each row's times its factor."""
        return Upstream(
            **{
                name: None if x is None else x * (factor_C[:, None] if x.dim() == 2 else factor_C)
                for name, x in vars(self).items()
            }
        )

    def largest(self, V: int) -> Tensor:
        """Return each row's largest magnitude [C], of what reaches a logit: the mean's is one V-th."""
        given = [
            x.abs().amax(1) if x.dim() == 2 else x.abs()
            for x in (self.logprob, self.entropy, self.lse)
            if x is not None
        ]
        if self.mean_logit is not None:
            given.append(self.mean_logit.abs() / V)
        return torch.stack(given).amax(0)


@dataclass(kw_only=True)
class Known:
    """What forward found for each row and backward needs."""

    lse: Tensor  # [C]
    entropy: Tensor | None  # [C], where its gradient is wanted
    ids: Tensor  # [C, 1 + K] the highest class, and the targets; the highest one again where a target is ignored
    logprobs: Tensor  # [C, 1 + K] of these

    def part(self, rows: slice | Tensor) -> "Known":
        """Return the same for some of the rows."""
        entropy = None if self.entropy is None else self.entropy[rows]
        return Known(lse=self.lse[rows], entropy=entropy, ids=self.ids[rows], logprobs=self.logprobs[rows])
