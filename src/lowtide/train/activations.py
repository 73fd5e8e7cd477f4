"""What each layer saves for backward in a run, planned for a budget or named, and where the optimizer states are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers import TrainerCallback

from lowtide.errors import ArgumentValueError, UnsupportedError, message
from lowtide.measure.units import gib, parse_gib
from lowtide.memory import ActivationPolicy, apply_policy, copies, offload_optimizer
from lowtide.memory.policy import layer_policies, words_of
from lowtide.memory.stack import find_stack
from lowtide.plan import Adapters, MemoryPlan, plan_memory
from lowtide.plan.arguments import OPTIMIZERS, PROJECTIONS
from lowtide.plan.shapes import read_shape
from lowtide.train.config import TrainConfig
from lowtide.train.parallel import reshards, uses_deepspeed, uses_fsdp
from lowtide.train.run_state import RunState

# Trainer's optimizers as the planner names them
_OPTIMIZERS = {
    "adamw_torch_fused": "adamw",
    "adamw_torch": "adamw-foreach",
    "adamw_bnb_8bit": "adamw-8bit",
    "adamw_8bit": "adamw-8bit",
    "paged_adamw_8bit": "adamw-8bit",
    "sgd": "sgd",
}
_LORA_A = ".lora_A."
_MASKED = ("sdpa", "eager")  # transformers' implementations of attention that take a mask for packed documents


def plan_and_apply(run: RunState) -> None:
    """Apply ``--policy``, or the plan for ``--memory-budget``, to the run's model; without either do nothing.

    Raises:
        ArgumentValueError: nothing fits in the budget, or the policy is not one for this model.
        UnsupportedError: the model, or the machine, cannot do what the policy says.
    """
    config, model = run.config, run.model
    if config.policy is not None:
        run.policies = layer_policies(config.policy, len(find_stack(model).layers))
        run.lines.append(f"policy   {config.policy}")
    elif config.memory_budget is not None:
        run.plan = plan_memory(
            model.config,
            budget_gib=parse_gib("memory_budget", config.memory_budget),
            host_gib=config.host_gib or 0,
            offload_states="auto" if config.offload_states else False,
            **planned_job(run),
        )
        run.policies = list(run.plan.policies)
        run.lines += _planned(run.plan, model, config, run.settings.args)
    if run.policies is not None:
        apply_policy(model, run.policies, host_gib=config.host_gib)


def current_policies(run: RunState, layers: int) -> Sequence[ActivationPolicy]:
    """Return what the layers of a run save."""
    if run.policies is not None:
        return run.policies
    args = run.settings.args
    checkpointed = args.gradient_checkpointing or getattr(args, "activation_checkpointing", False)
    return [ActivationPolicy(keep="input" if checkpointed else "all")] * layers


def planned_job(run: RunState) -> dict[str, Any]:
    """Return the arguments that `plan_memory` takes of a run.

    Raises:
        ArgumentValueError: the planner does not have the optimizer.
    """
    args, model, batch = run.settings.args, run.model, run.batch
    weights = getattr(torch, str(run.settings.model.dtype), model.config.dtype)  # "auto": as the checkpoint has them
    optimizer = planned_optimizer(args)
    adapters = _adapters(model) if any(_LORA_A in name for name, _ in model.named_parameters()) else None
    # What the planner has several GPUs for; of other runs it plans one that has all the weights.
    by_plan = adapters is None and OPTIMIZERS[optimizer].shards and not run.config.host_gib
    sharded = by_plan and uses_fsdp() and reshards()
    return {
        "seq_len": batch.seq_len,
        "batch_size": batch.rows,
        **({"gpus": args.world_size} if sharded else {}),
        "optimizer": optimizer,
        "keep_gradients": args.gradient_accumulation_steps > 1,
        "adapters": adapters,
        "attention_mask": batch.mask and _attention(model) in _MASKED,
        "fused_mlp": has_levels(model),
        "dtype": weights,
        # weights in 4 bits are dequantised to their layers' dtype, whatever autocast does
        "autocast": bool(args.bf16 or args.fp16) and weights == torch.float32 and not read_shape(model.config).four_bit,
    }


def planned_optimizer(args: Any) -> str:
    """Return the planner's name of Trainer's optimizer.

    Raises:
        ArgumentValueError: it has none.
    """
    name = str(getattr(args.optim, "value", args.optim))
    if name not in _OPTIMIZERS:
        expected = f"an optimizer that the planner has, one of {', '.join(_OPTIMIZERS)}"
        raise ArgumentValueError(message("memory_budget", expected, name, "Take one of them, or name a --policy."))
    return _OPTIMIZERS[name]


def has_levels(model: Any) -> bool:
    """Return whether every layer has a fused MLP, whose level a policy can set."""
    stack = find_stack(model)
    return all(any(hasattr(m, "checkpoint_level") for m in layer.modules()) for layer in stack.layers.values())


class OffloadStates(TrainerCallback):  # type: ignore[misc]
    """Offloads the states of Trainer's optimizer once there is one, those of a resumed run included.

    A plan decides how many bytes leave the GPU; without one all do.
    """

    def __init__(self, plan: MemoryPlan | None, host_gib: float | None) -> None:
        self._plan, self._host_gib = plan, host_gib

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: Any, optimizer: Any, **_: Any) -> None:
        """Add the hooks: of a step's backward passes the last one brings the states back."""
        del state, control
        plan = self._plan
        if plan is None or plan.chosen.states:
            offload_optimizer(
                optimizer,
                model,
                gib=None if plan is None else plan.states_gib,
                host_gib=self._host_gib,
                late=plan is not None and plan.chosen.late,
                backwards_per_step=args.gradient_accumulation_steps,
            )


def check_offload(config: TrainConfig) -> None:
    """Raise where ``--offload-states`` is given and cannot be done here.

    Raises:
        UnsupportedError: there is no GPU, or each process has only a shard of the parameters.
    """
    if not config.offload_states:
        return
    if not copies.available():
        hint = "On a CPU there is nothing to offload from: leave it out."
        raise UnsupportedError(message("offload_states", "a CUDA GPU", "none", hint))
    if uses_fsdp() or uses_deepspeed():
        hint = "FSDP and DeepSpeed offload by settings of their own."
        raise UnsupportedError(message("offload_states", "parameters that are whole on each GPU", "shards", hint))


def _planned(plan: MemoryPlan, model: Any, config: TrainConfig, args: Any) -> Iterator[str]:
    """Yield what a plan expects, as lines to print."""
    gpus = f"{'one' if plan.job.gpus == 1 else plan.job.gpus} {plan.job.gpu.name}"
    yield (
        f"policy   {words_of(plan.chosen.groups)}: expected peak {gib(plan.peak_bytes):.2f} of "
        f"{gib(plan.budget_bytes):.2f} GiB, {plan.tokens_per_second:,.0f} tokens/s on {gpus}"
    )
    if plan.chosen.states:
        late = ", and come back after backward" if plan.chosen.late else ""
        yield f"states   {gib(plan.chosen.states):.2f} GiB of the optimizer states are offloaded{late}"
    elif config.offload_states:
        yield "states   the optimizer states stay on the GPU: nothing faster fits with them on the host"
    if args.device.type != "cuda":
        yield (
            f"         no GPU here: planned for an {plan.job.gpu.name}. The layers save what it says, but nothing "
            "holds this process's memory to the budget"
        )
    if args.world_size > plan.job.gpus:
        yield "         planned for one device with all the weights; what sharding saves is not counted"
    if _has_dropout(model):
        yield "         dropout of adapters is not counted: its masks, and MLPs that it keeps from being fused"
    if _attention(model) == "eager":
        yield "         eager attention builds its scores, which are not counted"
    yield from (f"         {note}" for note in plan.notes)


def _adapters(model: Any) -> Adapters:
    """Return peft's adapters as the planner has them: all of the highest rank."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    ranks = {len(p) for name, p in trained.items() if _LORA_A in name}
    targets = {name.partition(_LORA_A)[0].rpartition(".")[2] for name in trained if _LORA_A in name}
    known = [name for name in PROJECTIONS if name in targets]  # in their usual order
    return Adapters(max(ranks), (*known, *sorted(targets.difference(known))))


def _has_dropout(model: Any) -> bool:
    return any(getattr(config, "lora_dropout", 0) for config in getattr(model, "peft_config", {}).values())


def _attention(model: Any) -> str:
    """Return the name of transformers' implementation of attention that a model runs."""
    return str(getattr(model.config.get_text_config(), "_attn_implementation", None) or "")
