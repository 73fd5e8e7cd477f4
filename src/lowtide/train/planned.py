"""A run's step in the planner's words."""

from __future__ import annotations

from typing import Any

import torch

from lowtide.errors import ArgumentValueError, message
from lowtide.memory import Adapters
from lowtide.memory.planner.adapters import PROJECTIONS, numbers_alone
from lowtide.memory.planner.shapes import read_shape
from lowtide.memory.stack import find_stack
from lowtide.train.config import TrainConfig

# Trainer's optimizers as the planner knows them.
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


def planned_settings(model: Any, config: TrainConfig, args: Any, packing: str) -> dict[str, Any]:
    """Return what `plan_memory` and `lowtide.memory.planner.job.Job` are both told of a run, by its name in both.

    Args:
        model: the run's, with its adapters and patched.
        config: the run's settings.
        args: Trainer's arguments.
        packing: "joined", "separate" or "none".

    Raises:
        ArgumentValueError: the planner does not know the optimizer.
    """
    return {
        "optimizer": planned_optimizer(args),
        "keep_gradients": args.gradient_accumulation_steps > 1,  # more than asked for, on fewer ranks than at the start
        "adapters": planned_adapters(model) if config.lora_rank else None,
        "attention_mask": packing == "separate" and attention_of(model) in _MASKED,
        "fused_mlp": has_levels(model),
        **planned_dtype(config, args),
    }


def planned_optimizer(args: Any) -> str:
    """Return Trainer's optimizer in the planner's words.

    Raises:
        ArgumentValueError: it does not know it.
    """
    name = str(getattr(args.optim, "value", args.optim))
    if name not in _OPTIMIZERS:
        expected = f"an optimizer that the planner knows, one of {', '.join(_OPTIMIZERS)}"
        hint = "Take one of them, or give --policy by hand."
        raise ArgumentValueError(message("memory_budget", expected, name, hint))
    return _OPTIMIZERS[name]


def planned_dtype(config: TrainConfig, args: Any) -> dict[str, Any]:
    """Return what the planner wants to know of the run's dtypes."""
    if config.weights == "bfloat16":
        return {"dtype": torch.bfloat16, "autocast": False}
    return {"dtype": torch.float32, "autocast": bool(args.bf16 or args.fp16)}


def planned_adapters(model: Any) -> Adapters | int:
    """Return peft's adapters as the planner knows them; how many numbers they have, where it does not."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    numbers = sum(p.numel() for p in trained.values())
    ranks = {len(p) for name, p in trained.items() if _LORA_A in name}
    targets = {name.partition(_LORA_A)[0].rpartition(".")[2] for name in trained if _LORA_A in name}
    if len(ranks) != 1 or not targets <= set(PROJECTIONS):
        return int(numbers)
    adapters = Adapters(ranks.pop(), tuple(name for name in PROJECTIONS if name in targets))
    shape = read_shape(model.config)
    known = not numbers_alone(shape) and adapters.numbers(shape) == numbers
    return adapters if known else int(numbers)


def attention_of(model: Any) -> str:
    """Return the name of transformers' implementation of attention that a model runs."""
    return str(getattr(model.config.get_text_config(), "_attn_implementation", None) or "")


def has_levels(model: Any) -> bool:
    """Return whether every layer has a fused MLP, whose level a policy can set."""
    stack = find_stack(model)
    return all(any(hasattr(m, "checkpoint_level") for m in layer.modules()) for layer in stack.layers.values())
