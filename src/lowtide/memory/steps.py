"""Which parameters fused optimizers have stepped: their writes leave no version in some releases of PyTorch."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakTensorKeyDictionary

_STEPS = WeakTensorKeyDictionary()


def _count(optimizer: Any, *_: Any) -> None:
    for group in optimizer.param_groups:
        if group.get("fused"):  # the others' writes count as versions
            for parameter in group["params"]:
                if parameter.grad is not None:
                    _STEPS[parameter] = steps_of(parameter) + 1


register_optimizer_step_post_hook(_count)


def steps_of(tensor: Tensor) -> int:
    """Return how often a fused optimizer has stepped a tensor in this process."""
    steps: int = _STEPS.get(tensor, 0)  # type: ignore[no-untyped-call]
    return steps
