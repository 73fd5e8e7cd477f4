"""What the layers of a model keep for backward, and where."""

from lowtide.memory.apply import apply_policy, remove_policy
from lowtide.memory.policy import ActivationPolicy
from lowtide.memory.report import PolicyReport

__all__ = ["ActivationPolicy", "PolicyReport", "apply_policy", "remove_policy"]
