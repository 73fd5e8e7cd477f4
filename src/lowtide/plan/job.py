"""A training step that is planned: its arguments, the model's shape and the GPU."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from lowtide.errors import ArgumentValueError, message
from lowtide.head.plan import HeadPlan, plan_head
from lowtide.plan.arguments import PlanArguments
from lowtide.plan.four_bit import BYTES, SCALES
from lowtide.plan.gpus import Gpu, find_gpu
from lowtide.plan.settings import is_module
from lowtide.plan.shapes import ModelShape, read_shape


@dataclass(frozen=True, kw_only=True)
class Job(PlanArguments):
    """A training step with everything that its arguments leave open.

    Raises:
        ArgumentValueError: Weights in 4 bits without adapters, under autocast, or that compute in a wider dtype.
    """

    shape: ModelShape
    gpu: Gpu
    dtype: torch.dtype
    autocast: bool

    @classmethod
    def of(cls, model_or_config: Any, arguments: PlanArguments) -> Job:
        """Return the job of a model: as for `plan_memory`."""
        shape, gpu = read_shape(model_or_config), find_gpu(arguments.device)
        dtype: Any = arguments.dtype
        if dtype is None and is_module(model_or_config):
            dtype = next(model_or_config.parameters()).dtype
        if dtype is None:
            dtype = torch.bfloat16 if shape.four_bit else torch.float32
        dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        autocast = arguments.autocast
        if autocast is None:
            autocast = dtype == torch.float32 and not shape.four_bit
        return cls(**{**vars(arguments), "shape": shape, "gpu": gpu, "dtype": dtype, "autocast": autocast})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shape.four_bit and self.adapters is None:
            hint = "In Python pass adapters=lowtide.plan.Adapters(rank), to the command --lora-rank."
            raise ArgumentValueError(message("adapters", "LoRA for weights in 4 bits, which are frozen", "none", hint))
        if self.shape.four_bit and self.autocast:
            hint = "Their GEMMs run in the model's dtype: plan with dtype='bfloat16'."
            raise ArgumentValueError(message("autocast", "False for weights in 4 bits", "True", hint))
        if getattr(torch, self.shape.compute_dtype, self.dtype).itemsize > self.dtype.itemsize:
            dtype = str(self.dtype).removeprefix("torch.")
            expected = f"{dtype}, as it is planned in, for all GEMMs over weights in 4 bits run in it"
            hint = f"Set it in the config (transformers' default is float32), or plan in {self.shape.compute_dtype}."
            raise ArgumentValueError(message("bnb_4bit_compute_dtype", expected, self.shape.compute_dtype, hint))
        if self.autocast and self.dtype != torch.float32:
            raise ArgumentValueError(message("dtype", "float32 with autocast=True", str(self.dtype)))

    @cached_property
    def trained_adapters(self) -> int | None:
        """Return how many parameters adapters have, None where the model is trained."""
        from lowtide.plan.meta_model import meta_model

        if self.adapters is None:
            return None
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
        return self.size("link") or self.gpu.between

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
            self.options,
            weight_dtype=self.dtype,
            weight_frozen=self.adapters is not None,
            input_is_copied=self.autocast,
            capability=self.gpu.capability,
            device_bytes=self.gpu.memory_bytes,
        )
