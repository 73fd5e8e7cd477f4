"""What the layers of a model keep for backward, and where."""

from lowtide.memory.apply import apply_policy, remove_policy
from lowtide.memory.optimizer import OptimizerOffload, offload_optimizer
from lowtide.memory.planner.adapters import Adapters
from lowtide.memory.planner.plan import plan_memory
from lowtide.memory.planner.report import MemoryPlan
from lowtide.memory.policy import ActivationPolicy
from lowtide.memory.report import PolicyReport

__all__ = [
    "ActivationPolicy",
    "Adapters",
    "MemoryPlan",
    "OptimizerOffload",
    "PolicyReport",
    "apply_policy",
    "offload_optimizer",
    "plan_memory",
    "remove_policy",
]
