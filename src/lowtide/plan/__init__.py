"""What a training step takes, and the fastest that fits in a budget of memory, by arithmetic alone."""

from typing import TYPE_CHECKING

from lowtide.lazy import on_first_use

__all__ = ["Adapters", "MemoryPlan", "PlanArguments", "plan_memory"]

if TYPE_CHECKING:
    from lowtide.plan.arguments import Adapters, PlanArguments
    from lowtide.plan.planning import plan_memory
    from lowtide.plan.report import MemoryPlan
else:
    __getattr__, __dir__ = on_first_use(
        __name__,
        {
            "lowtide.plan.arguments": ("Adapters", "PlanArguments"),
            "lowtide.plan.planning": ("plan_memory",),
            "lowtide.plan.report": ("MemoryPlan",),
        },
    )
