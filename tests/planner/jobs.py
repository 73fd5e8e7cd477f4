"""Steps that tests plan; a shape is read once, and a plan made once, for all of them."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from lowtide.memory import ActivationPolicy
from lowtide.memory.policy import parse_policies
from lowtide.plan import MemoryPlan, PlanArguments, plan_memory
from lowtide.plan.job import Job
from lowtide.plan.search import Candidate
from lowtide.plan.step_costs import Groups, LayerCost, Phase, StepCosts, layer_costs
from lowtide.train.shapes import SHAPES

GIB = 2**30
FEW = {**SHAPES["llama-3.2-1b"], "num_hidden_layers": 4}
FLASH_STATES = 24  # bytes that flash attention saves of its dropout
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
PROJECTIONS = (*ATTENTION, "gate_proj", "up_proj", "down_proj")


def job_of(model: Any = "llama-3-8b", seq_len: int = 8192, **arguments: Any) -> Job:
    given: dict[str, Any] = {"device": "h100", "dtype": "bfloat16", "optimizer": "sgd", **arguments}
    return Job.of(SHAPES[model] if isinstance(model, str) else model, PlanArguments(seq_len=seq_len, **given))


def cost_of(job: Job, policy: ActivationPolicy) -> LayerCost:
    """What a layer of a model takes all of whose layers are of one kind."""
    (cost,) = layer_costs(job, policy)
    return cost


def one_of(costs: StepCosts, groups: Groups) -> Candidate:
    """A mixture with what it takes, all optimizer states on the GPU."""
    step = costs.step(groups)
    return Candidate(tuple(groups), costs.peak(step), step.host, step.seconds)


def groups_of(text: str) -> Groups:
    """A text's policies of several layers, as runs of equal ones."""
    policies: Any = parse_policies(text)
    return [(policy, len(list(equal))) for policy, equal in groupby(policies)]


def phases_of(job: Job, *groups: tuple[ActivationPolicy, int], **states: Any) -> dict[str, Phase]:
    return {str(phase): phase for phase in StepCosts(job).phases(groups, **states)}


PLANS: dict[str, MemoryPlan] = {}


def plan(model: Any = FEW, seq_len: int = 16384, budget: Any = 16, **arguments: Any) -> MemoryPlan:
    """A plan in 16 bits of an H100's step."""
    key = repr((model, seq_len, budget, arguments))
    if key not in PLANS:
        given = {"device": "h100", "dtype": "bfloat16", **arguments}
        PLANS[key] = plan_memory(model, seq_len, budget_gib=budget, **given)
    return PLANS[key]
