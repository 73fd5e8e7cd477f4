"""A plan for a trainer's step, from its arguments and its model alone: what each layer saves for backward."""

import os
from collections.abc import Iterator
from typing import Any

import torch

from lowtide.errors import ArgumentValueError, message
from lowtide.measure.units import as_gib, gib
from lowtide.memory import apply_policy, offload_optimizer
from lowtide.memory.policy import words_of
from lowtide.memory.stack import find_stack
from lowtide.plan import Adapters, MemoryPlan, plan_memory
from lowtide.plan.arguments import DDP, FSDP2, ZERO3
from lowtide.plan.config import quantised, read_settings
from lowtide.plan.run_file import optimizer_of

AUTO = "auto"
_AUTO_SHARE = 0.92  # of what is free: the allocator holds more than tensors take
_ROWS = 1000  # of a dataset whose sequences tell the length
_LORA_A = ".lora_A."
_PAIRS = {"DPOConfig", "RewardConfig"}  # TRL's arguments with a chosen and a rejected sequence in each row
_MASKED = ("sdpa", "eager")  # transformers' implementations of attention that take a mask for padding and packed rows


def step_length(args: Any, dataset: Any = None, tokenizer: Any = None) -> int | None:
    """Return the most tokens of a sequence by a trainer's arguments, or by its first rows; None where neither says.

    That is ``max_length`` (SFT, DPO), or the longest prompt plus a completion (GRPO).
    """
    if completion := getattr(args, "max_completion_length", None):
        prompt = _longest(dataset, "prompt", tokenizer)
        return None if prompt is None else prompt + int(completion)
    if length := getattr(args, "max_length", None):
        return int(length)
    return _longest(dataset, "input_ids", tokenizer)


def _longest(dataset: Any, column: str, tokenizer: Any) -> int | None:
    """Return the most tokens in a column of the first rows: ids, a text or messages; None where there are none."""

    def tokens(cell: Any) -> Any:
        if isinstance(cell, str):
            return tokenizer(cell)["input_ids"]
        if len(cell) and isinstance(cell[0], dict):
            return tokenizer.apply_chat_template(cell, add_generation_prompt=True, return_dict=True)["input_ids"]
        return cell

    try:
        return max(len(tokens(dataset[i][column])) for i in range(min(_ROWS, len(dataset))))
    except (AttributeError, KeyError, TypeError, ValueError, IndexError):
        return None


def planned_step(model: Any, args: Any, *, length: int | None = None) -> dict[str, Any]:
    """Return the arguments of `plan_memory` for a step of a trainer, beside the model's config and the budgets.

    Args:
        model: the trainer's, with its adapters, before anything wraps it.
        args: transformers' `TrainingArguments`, or TRL's.
        length: the most tokens of a sequence; None: `step_length`.

    Raises:
        ArgumentValueError: the length is not known, or the planner does not have the optimizer.
    """
    length = length or step_length(args)
    if length is None:
        raise ArgumentValueError(message("length", "the most tokens of a sequence", "None", "Pass it."))
    paired = any(kind.__name__ in _PAIRS for kind in type(args).__mro__)
    rows, packs = args.per_device_train_batch_size * (1 + paired), getattr(args, "packing", False)
    joined = getattr(args, "padding_free", False) or (packs and args.packing_strategy != "wrapped")
    weights = next(iter(model.parameters())).dtype
    four_bit = quantised(read_settings(model.config)).four_bit
    dtype = torch.bfloat16 if four_bit else weights
    # what transformers' models read
    attention = str(getattr(model.config.get_text_config(), "_attn_implementation", None) or "")
    return {
        "seq_len": length * rows if joined else length,
        "batch_size": 1 if joined else rows,
        "optimizer": optimizer_of(str(getattr(args.optim, "value", args.optim))),
        "keep_gradients": args.gradient_accumulation_steps > 1,
        "adapters": _adapters(model),
        "attention_mask": (joined or (rows > 1 and not packs)) and attention in _MASKED,
        "fused_mlp": _has_levels(model),
        "dtype": dtype,
        # weights in 4 bits are dequantised to their layers' dtype, whatever autocast does
        "autocast": bool(args.bf16 or args.fp16) and dtype == torch.float32 and not four_bit,
        **_sharing(args),
    }


class Budget:
    """A budget of memory of a trainer's step, and the plan that `apply` makes for it.

    Args:
        memory: GPU memory for tensors, such as ``"24GiB"``, or "auto": 92% of what is free.
        host: pinned host memory of each process that layers and optimizer states may be offloaded into.
        length: the most tokens of a sequence; None: as the trainer's arguments or rows say.
    """

    def __init__(self, memory: str, host: str | None, length: int | None) -> None:
        self._gib = None if memory == AUTO else as_gib("memory_budget", memory)
        self._host_gib = 0.0 if host is None else as_gib("host_budget", host)
        self._length = length
        self.plan: MemoryPlan | None = None

    def apply(self, model: Any, args: Any, dataset: Any = None, tokenizer: Any = None) -> str | None:
        """Plan for a trainer's batch, apply the policies, and return lines about it; None where no length is known yet.

        Raises:
            ArgumentValueError: nothing fits, with the nearest change that does; or the planner does not have the step.
        """
        length = self._length or step_length(args, dataset, tokenizer)
        if length is None:
            return None
        step = planned_step(model, args, length=length)
        budget = self._gib
        if budget is None and args.device.type == "cuda":
            free = torch.cuda.mem_get_info(args.device)[0] + torch.cuda.memory_reserved(args.device)
            budget = gib(_AUTO_SHARE * free)
        reference = _reference_gib(model, args, step)
        if reference and budget is not None:
            if budget <= reference:
                expected = f"more than the {reference:.2f} GiB that the reference model takes"
                raise ArgumentValueError(message("memory_budget", expected, f"{budget:.2f} GiB"))
            budget -= reference
        try:
            self.plan = plan_memory(model.config, **step, budget_gib=budget, host_gib=self._host_gib)
        except ArgumentValueError as error:
            text = str(error).replace("budget_gib", "memory_budget").replace("host_gib", "host_budget")
            raise ArgumentValueError(text) from error
        lines = list(_lines(self.plan, args))
        if reference and budget is not None:
            lines.append(f"         beside the reference model, which takes {reference:.2f} GiB")
        if args.gradient_checkpointing:
            args.gradient_checkpointing = False
            if hasattr(args, "activation_checkpointing"):  # its name in newer versions of transformers
                args.activation_checkpointing = False
            lines.append("         gradient_checkpointing is turned off: the plan recomputes what has to be")
        apply_policy(model, list(self.plan.policies), host_gib=self._host_gib or None)
        return "\n".join(lines)

    def offload_states(self, model: Any, args: Any, optimizer: Any) -> None:
        """Offload what the plan says of a trainer's optimizer states, once there is an optimizer."""
        plan = self.plan
        if plan is not None and plan.chosen.states:
            offload_optimizer(
                getattr(optimizer, "optimizer", optimizer),
                model,
                gib=plan.states_gib,
                host_gib=self._host_gib,
                late=plan.chosen.late,
                backwards_per_step=args.gradient_accumulation_steps,
            )


def _lines(plan: MemoryPlan, args: Any) -> Iterator[str]:
    """Yield what a plan expects, as lines to print."""
    yield (
        f"memory   {words_of(plan.chosen.groups)}: expected peak {gib(plan.peak_bytes):.2f} of "
        f"{gib(plan.budget_bytes):.2f} GiB, {plan.tokens_per_second:,.0f} tokens/s on {plan.job.gpu.name}"
    )
    if plan.chosen.states:
        yield f"         {gib(plan.chosen.states):.2f} GiB of the optimizer states are offloaded"
    if args.device.type != "cuda":
        yield "         no GPU here: the layers save what the plan says, and nothing holds the process to the budget"
    yield from (f"         {note}" for note in plan.notes)


def _adapters(model: Any) -> Adapters | None:
    """Return peft's adapters as the planner has them; None: there are none.

    Raises:
        ArgumentValueError: they have several ranks, or are not on the same projections of each layer.
    """
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not any(_LORA_A in name for name in trained):
        return None
    ranks = {len(p) for name, p in trained.items() if _LORA_A in name}
    targets = {name.partition(_LORA_A)[0].rpartition(".")[2] for name in trained if _LORA_A in name}
    pairs = len(targets) * len(find_stack(model).layers)  # of A and B, the same in every layer
    if len(ranks) != 1 or len(trained) != 2 * pairs:
        expected = "adapters of one rank on the same projections of each layer, and nothing else that is trained"
        raise ArgumentValueError(message("memory_budget", expected, f"{len(trained)} trained parameters"))
    return Adapters(ranks.pop(), tuple(sorted(targets)))


def _reference_gib(model: Any, args: Any, step: dict[str, Any]) -> float:
    """Return what a frozen copy of the model takes that TRL compares with: DPO, KTO, and GRPO and RLOO with a beta."""
    compares = not getattr(args, "precompute_ref_log_probs", True) or (
        hasattr(args, "num_generations") and bool(getattr(args, "beta", False))
    )
    if not compares or step["adapters"] is not None:
        return 0.0
    sharded = step.get("parallel", DDP) != DDP
    return gib(sum(p.nbytes for p in model.parameters()) / (args.world_size if sharded else 1))


def _sharing(args: Any) -> dict[str, Any]:
    """Return how several processes share the step, as the planner has it."""
    if args.world_size == 1:
        return {}
    plugin = getattr(args, "deepspeed_plugin", None)
    fsdp = getattr(args, "fsdp", None) or os.environ.get("ACCELERATE_USE_FSDP", "").lower() in ("1", "true")
    engine = FSDP2 if fsdp else ZERO3 if plugin is not None and plugin.zero_stage == 3 else DDP
    return {"gpus": args.world_size, "parallel": engine}


def _has_levels(model: Any) -> bool:
    """Return whether every layer has a fused MLP, whose level a policy can set."""
    layers = find_stack(model).layers.values()
    return all(any(hasattr(m, "checkpoint_level") for m in layer.modules()) for layer in layers)
