"""Steps that tests plan; a shape is read once for all of them."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from lowtide.memory import ActivationPolicy
from lowtide.plan.gpus import GPUS
from lowtide.plan.job import Job
from lowtide.plan.layer_costs import LayerCosts
from lowtide.plan.shapes import ModelShape, read_shape
from lowtide.train.shapes import SHAPES

FLASH_STATES = 24  # bytes that flash attention saves of its dropout


@cache
def shape_of(name: str) -> ModelShape:
    return read_shape(SHAPES[name])


def job_of(name: str = "llama-3-8b", seq_len: int = 8192, **changes: Any) -> Job:
    settings: dict[str, Any] = {"gpu": GPUS["h100"], "dtype": torch.bfloat16, "optimizer": "sgd", "batch_size": 1}
    return Job(shape=shape_of(name), seq_len=seq_len, **{**settings, **changes})


def saved_by(job: Job, policy: ActivationPolicy) -> int:
    """Return the bytes that a layer saves."""
    return LayerCosts(job)[policy].saved
