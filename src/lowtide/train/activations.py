"""What each layer keeps for backward in a run: planned for a budget, or given by hand, and applied."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lowtide.head.options import HeadOptions
from lowtide.measure.units import gib, parse_gib
from lowtide.memory import ActivationPolicy, MemoryPlan, apply_policy, plan_memory
from lowtide.memory.policy_words import layer_policies, words_of
from lowtide.memory.stack import find_stack
from lowtide.train.config import TrainConfig
from lowtide.train.offloading import StatesAway
from lowtide.train.planned import attention_of, planned_settings


@dataclass(frozen=True)
class Chosen:
    """What was applied.

    Attributes:
        policies: one for each layer.
        lines: for a person to read.
        plan: where they are from; None where they were given by hand.
    """

    policies: Sequence[ActivationPolicy]
    lines: tuple[str, ...]
    plan: MemoryPlan | None = None


def choose_and_apply(model: Any, config: TrainConfig, args: Any, packing: str) -> Chosen | None:
    """Apply ``--policy``, or what is planned for ``--memory-budget``, to the model; None where neither is given.

    Args:
        model: the run's, patched, its adapters on it.
        config: the run's settings.
        args: Trainer's arguments.
        packing: "joined", "separate" or "none".

    Raises:
        ArgumentValueError: nothing fits in the budget, or the policy is not one for this model.
        UnsupportedError: the model, or the machine, cannot do what the policy says.
    """
    if config.policy is None and config.memory_budget is None:
        return None
    layers = len(find_stack(model).layers)
    host, plan = host_gib(config), None
    if config.policy is not None:
        policies, lines = layer_policies(config.policy, layers), [f"policy   {config.policy}"]
    else:
        budget = parse_gib("memory_budget", str(config.memory_budget))
        plan = plan_run(model, config, args, packing, budget_gib=budget, host=host)
        policies, lines = list(plan.policies), list(_planned(plan, model, config, args))
    apply_policy(model, policies, host_gib=host)
    return Chosen(policies, tuple(lines), plan)


def states_away(config: TrainConfig, chosen: Chosen | None) -> StatesAway | None:
    """Return what of the optimizer's states is to be offloaded; None for nothing."""
    if not config.offload_states:
        return None
    if chosen is None or chosen.plan is None:
        return StatesAway(host_gib=host_gib(config))
    plan = chosen.plan
    return StatesAway(plan.states_gib, host_gib(config), plan.chosen.late) if plan.chosen.states else None


def host_gib(config: TrainConfig) -> float | None:
    """Return ``--host-budget`` in GiB, None where there is none."""
    return parse_gib("host_budget", config.host_budget) if config.host_budget else None


def plan_run(
    model: Any, config: TrainConfig, args: Any, packing: str, *, budget_gib: float, host: float | None = None
) -> MemoryPlan:
    """Return the plan of a run's step on one device.

    Raises:
        ArgumentValueError: nothing fits, or the planner does not know the model or the optimizer.
    """
    return plan_memory(
        model.config,
        config.seq_len,
        config.batch_size,
        budget_gib,
        host or 0,
        options=HeadOptions(workspace_mib=config.workspace_mib),
        offload_states="auto" if config.offload_states else False,
        **planned_settings(model, config, args, packing),
    )


def current_policies(config: TrainConfig, chosen: Chosen | None, layers: int) -> Sequence[ActivationPolicy]:
    """Return what the layers of a run keep, whatever said so."""
    if chosen is not None:
        return chosen.policies
    return [ActivationPolicy(keep="input" if config.gradient_checkpointing else "all")] * layers


def _planned(plan: MemoryPlan, model: Any, config: TrainConfig, args: Any) -> tuple[str, ...]:
    """Return what a plan expects, for a person to read."""
    lines = [
        f"policy   {words_of(plan.chosen.groups)}: expected peak {gib(plan.peak_bytes):.2f} of "
        f"{gib(plan.budget_bytes):.2f} GiB, {plan.tokens_per_second:,.0f} tokens/s on one {plan.job.gpu.name}"
    ]
    if plan.chosen.states:
        late = ", and come back behind backward" if plan.chosen.late else ""
        lines.append(f"states   {gib(plan.chosen.states):.2f} GiB of the optimizer's are offloaded{late}")
    elif config.offload_states:
        lines.append("states   the optimizer's stay: nothing faster fits with them on the host")
    if args.device.type != "cuda":
        lines.append(
            f"         no GPU here: planned for an {plan.job.gpu.name}. The layers keep what it says, which saves this "
            "process's memory too, but nothing holds that to the budget"
        )
    if args.world_size > 1:
        lines.append("         planned for one device with all the weights; what sharding saves is not counted")
    if attention_of(model) == "eager":
        lines.append("         eager attention builds its scores, which are not counted")
    lines += [f"         {note}" for note in plan.notes]
    return tuple(lines)
