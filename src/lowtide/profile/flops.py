"""The operations of a step's products, by formula, and what the device could do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lowtide.errors import LowtideError
from lowtide.memory.planner.gpus import DEFAULT, GPUS, known_as
from lowtide.memory.planner.job import Job
from lowtide.memory.planner.layer_costs import attention_flop, gemm_sizes
from lowtide.memory.planner.shapes import read_shape
from lowtide.profile.phases import BACKWARD, FORWARD, HEAD, HEAD_BACKWARD


def step_flop(
    settings: Mapping[str, Any], seq_len: int, batch_size: int, *, lora: bool
) -> tuple[dict[str, float], str | None]:
    """Return the operations of a step by kind of phase, and why there are none where the model is not one we can count.

    Two a multiplication; causal attention without the masked half; backward twice forward, which is what the model
    asks for: what is computed again does not count. Behind frozen weights the products have one gradient, not two.

    Args:
        settings: The model's config.
        seq_len: Tokens of a sequence.
        batch_size: Sequences.
        lora: Whether weights are frozen; the adapters' own products do not count.
    """
    try:
        shape = read_shape(settings)
    except LowtideError as error:
        return {}, str(error).partition(". ")[0]  # what the planner would do instead is being done
    job = Job(  # the formulas do not look at GPU, dtype and optimizer
        shape=shape, seq_len=seq_len, batch_size=batch_size, gpu=GPUS[DEFAULT], dtype=torch.bfloat16, optimizer="adamw"
    )
    products, attention = 2 * job.tokens * sum(map(sum, gemm_sizes(job))), attention_flop(job)
    head = 2.0 * job.tokens * shape.vocab_params
    gradients = 1 if lora else 2
    found = {
        FORWARD: shape.layers * (products + attention),
        HEAD: head,
        HEAD_BACKWARD: gradients * head,
        BACKWARD: shape.layers * (gradients * products + 2 * attention),
    }
    return found, None


def device_peak(device: torch.device, dtype: torch.dtype) -> float | None:
    """Return the FLOP a second that the data sheet of the device tells for a dtype, None where we know of none."""
    if device.type != "cuda":
        return None
    name = known_as(torch.cuda.get_device_name(device))
    if name is None:
        return None
    return GPUS[name].peak32 if dtype == torch.float32 else GPUS[name].peak
