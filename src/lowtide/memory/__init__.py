"""What the layers of a model keep for backward, and where."""

from lowtide.memory.policy import ActivationPolicy

__all__ = ["ActivationPolicy"]
