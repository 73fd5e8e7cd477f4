"""What a resumed run is told of its optimizer now, in place of what its checkpoint says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.optim.lr_scheduler import LambdaLR

_OWN = ("weight_decay", "betas", "eps", "initial_lr")


@dataclass(frozen=True)
class Rates:
    """The learning rate, weight decay, betas and epsilon of an optimizer as it was made, and of its schedule the peaks.

    A checkpoint of an optimizer has them, and of a schedule its peak: loaded, they would stand against what the user
    says now, in silence. Those of a run that is given nothing new are the same numbers as before.

    Attributes:
        groups: of each group of parameters, those that it has.
        peaks: the learning rate of each that the schedule goes by; None of a schedule of another kind.
    """

    groups: tuple[dict[str, Any], ...]
    peaks: tuple[float, ...] | None

    @classmethod
    def of(cls, optimizer: Any, schedule: Any) -> Rates:
        """Return them of an optimizer into which nothing has been loaded."""
        groups = tuple({name: group[name] for name in _OWN if name in group} for group in optimizer.param_groups)
        inner = _inner(schedule)
        return cls(groups, tuple(map(float, inner.base_lrs)) if isinstance(inner, LambdaLR) else None)

    def restore(self, optimizer: Any, schedule: Any) -> None:
        """Put them into the optimizer, once it is loaded; a step's rate is the schedule's, which may be longer now."""
        for group, own in zip(optimizer.param_groups, self.groups, strict=True):
            group.update(own)
        inner = _inner(schedule)
        if self.peaks is None:
            return
        inner.base_lrs = list(self.peaks)
        rates = [peak * of(inner.last_epoch) for peak, of in zip(self.peaks, inner.lr_lambdas, strict=True)]
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        inner._last_lr = rates


def _inner(schedule: Any) -> Any:
    return getattr(schedule, "scheduler", schedule)  # accelerate's wrapper
