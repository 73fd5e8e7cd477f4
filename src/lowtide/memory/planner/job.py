"""A training step that is planned: the model's shape, the batch, the GPU, dtypes and the optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from lowtide.errors import ArgumentValueError, message
from lowtide.head.options import HeadOptions
from lowtide.head.plan import HeadPlan, plan_head
from lowtide.memory.planner.adapters import Adapters
from lowtide.memory.planner.four_bit import BYTES, SCALES
from lowtide.memory.planner.gpus import Gpu
from lowtide.memory.planner.shapes import ModelShape


@dataclass(frozen=True)
class Job:
    """A training step that is planned; the fields are `plan_memory`'s arguments.

    Raises:
        ArgumentValueError: Weights in 4 bits without adapters, under autocast, or that compute in a wider dtype; a
            mixture of experts under autocast.
    """

    shape: ModelShape
    seq_len: int
    batch_size: int
    gpu: Gpu
    dtype: torch.dtype
    optimizer: str
    keep_gradients: bool = False
    head: HeadOptions | None = None
    autocast: bool = False
    adapters: int | Adapters | None = None
    attention_mask: bool = False
    fused_mlp: bool = True  # the MLPs are lowtide's, and have levels
    compile_layers: bool = False  # each layer goes through torch.compile by itself
    gpus: int = 1
    parallel: str = ""  # how several GPUs share the step: a name of `PARALLEL`
    link: float | None = None  # bytes per second that a GPU receives from the others; None: the GPU's own

    def __post_init__(self) -> None:
        if self.shape.four_bit and self.adapters is None:
            hint = "In Python pass adapters=lowtide.memory.Adapters(rank), to the command --lora-rank."
            raise ArgumentValueError(message("adapters", "LoRA for weights in 4 bits, which are frozen", "none", hint))
        if self.shape.four_bit and self.autocast:
            hint = "Their GEMMs run in the model's dtype: plan with dtype='bfloat16'."
            raise ArgumentValueError(message("autocast", "False for weights in 4 bits", "True", hint))
        if getattr(torch, self.shape.compute_dtype, self.dtype).itemsize > self.dtype.itemsize:
            dtype = str(self.dtype).removeprefix("torch.")
            expected = f"{dtype}, as it is planned in, for all GEMMs over weights in 4 bits run in it"
            hint = f"Set it in the config (transformers' default is float32), or plan in {self.shape.compute_dtype}."
            raise ArgumentValueError(message("bnb_4bit_compute_dtype", expected, self.shape.compute_dtype, hint))
        if self.shape.experts and self.autocast:
            hint = "Plan with dtype='bfloat16', or dtype='float32' for an upper bound."
            raise ArgumentValueError(message("autocast", "False for a mixture of experts", "True", hint))

    @property
    def lora(self) -> Adapters | None:
        """Return the adapters, None where there are none or only their number is known."""
        return self.adapters if isinstance(self.adapters, Adapters) else None

    @cached_property
    def trained_adapters(self) -> int | None:
        """Return how many parameters adapters have, None where the model is trained."""
        from lowtide.memory.planner.meta_model import meta_model

        if not isinstance(self.adapters, Adapters):
            return self.adapters
        settings: Any = {"fused_mlp": self.fused_mlp, "adapters": self.adapters}
        return meta_model(self.shape.config, self.dtype, **settings).adapter_params

    @property
    def tokens(self) -> int:
        """Return the tokens of a step."""
        return self.seq_len * self.batch_size

    @property
    def element(self) -> int:
        """Return the bytes of a parameter, and of a number of the residual stream."""
        return self.dtype.itemsize

    @property
    def operand(self) -> torch.dtype:
        """Return the dtype that GEMMs read and write."""
        return torch.bfloat16 if self.autocast else self.dtype

    @property
    def narrow(self) -> int:
        """Return the bytes of a number that a GEMM reads or writes."""
        return self.operand.itemsize

    @property
    def link_rate(self) -> float:
        """Return the bytes per second that a GPU receives from the others."""
        return self.gpu.between if self.link is None else self.link

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of the model's parameters, without adapters."""
        shape = self.shape
        return (shape.params - shape.packed_params) * self.element + shape.packed_bytes

    @property
    def dequantised_bytes(self) -> int:
        """Return the bytes of the largest weight that one GEMM dequantises, with its scales in float32; 0: none."""
        return int(self.shape.largest_linear * (self.narrow + SCALES)) if self.shape.four_bit else 0

    @property
    def dequantise_seconds(self) -> float:
        """Return the seconds that one weight of a GEMM takes to be dequantised: it is read, and written."""
        return (BYTES[self.shape.four_bit] + self.narrow) / self.gpu.bandwidth if self.shape.four_bit else 0.0

    @property
    def gemm_rate(self) -> float:
        """Return the FLOP per second of the GEMMs."""
        return self.gpu.gemm32 if self.operand == torch.float32 else self.gpu.gemm

    @cached_property
    def head_plan(self) -> HeadPlan:
        """Return what the output layer and its loss run, and their bytes."""
        return plan_head(
            self.tokens,
            self.shape.hidden,
            self.shape.vocab,
            self.operand,
            "cuda",
            self.head,
            weight_dtype=self.dtype,
            weight_frozen=self.adapters is not None,
            input_is_copied=self.autocast,
            capability=self.gpu.capability,
            device_bytes=self.gpu.memory_bytes,
        )
