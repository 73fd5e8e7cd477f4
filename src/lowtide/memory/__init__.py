"""What the layers of a model keep for backward, and where."""

from lowtide.memory.planner import plan_memory
from lowtide.memory.planner_report import MemoryPlan
from lowtide.memory.policy import ActivationPolicy

__all__ = ["ActivationPolicy", "MemoryPlan", "plan_memory"]
