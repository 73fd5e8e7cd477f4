"""What the layers of a model save for backward, and where."""

from typing import TYPE_CHECKING

from lowtide.lazy import on_first_use

__all__ = [
    "ActivationPolicy",
    "OptimizerOffload",
    "PolicyReport",
    "apply_policy",
    "offload_optimizer",
    "remove_policy",
]

if TYPE_CHECKING:
    from lowtide.memory.apply import PolicyReport, apply_policy, remove_policy
    from lowtide.memory.optimizer import OptimizerOffload, offload_optimizer
    from lowtide.memory.policy import ActivationPolicy
else:
    __getattr__, __dir__ = on_first_use(
        __name__,
        {
            "lowtide.memory.apply": ("PolicyReport", "apply_policy", "remove_policy"),
            "lowtide.memory.optimizer": ("OptimizerOffload", "offload_optimizer"),
            "lowtide.memory.policy": ("ActivationPolicy",),
        },
    )
