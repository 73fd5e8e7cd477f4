"""A training step that is planned: its arguments, the model and the GPU."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from lowtide.errors import ArgumentValueError, message
from lowtide.head.plan import HeadPlan, plan_head
from lowtide.plan.arguments import DDP, OPTIMIZERS, ZERO3, PlanArguments
from lowtide.plan.config import BYTES, Quantised, quantised, read_settings
from lowtide.plan.gpus import Gpu, find_gpu
from lowtide.plan.model import MetaModel, Reading, Run, meta_model, refused


@dataclass(frozen=True, kw_only=True)
class Job(PlanArguments):
    """A training step with everything that its arguments leave open.

    Raises:
        ArgumentValueError: Weights in 4 bits without adapters, under autocast, or that compute in a wider dtype; or
            what is not planned of several GPUs.
    """

    config: str  # the model's, as JSON
    quantised: Quantised
    gpu: Gpu
    dtype: torch.dtype
    autocast: bool

    @classmethod
    def of(cls, config: Any, arguments: PlanArguments) -> Job:
        """Return the job of a config: as for `plan_memory`."""
        settings, dtype, autocast = read_settings(config), arguments.dtype, arguments.autocast
        packed = quantised(settings)
        settings.pop("quantization_config", None)
        if dtype is None:
            dtype = torch.bfloat16 if packed.four_bit else torch.float32
        dtype = getattr(torch, str(dtype).removeprefix("torch."))
        if autocast is None:
            autocast = dtype == torch.float32 and not packed.four_bit
        found: dict[str, Any] = {"config": json.dumps(settings, default=str, sort_keys=True), "quantised": packed}
        found |= {"gpu": find_gpu(arguments.device), "dtype": dtype, "autocast": autocast}
        return cls(**{**vars(arguments), **found})

    def __post_init__(self) -> None:
        super().__post_init__()
        four_bit, computes, several = self.quantised.four_bit, self.quantised.computes, self.gpus > 1
        wider = getattr(torch, computes, self.dtype).itemsize > self.dtype.itemsize
        alone = f"For {self.gpus} GPUs by {self.parallel}, leave it out or change it; or plan for one GPU."
        shard = ", ".join(name for name, kind in OPTIMIZERS.items() if not kind.bytes_each)
        for applies, *words in (
            (self.autocast and (four_bit or self.dtype != torch.float32), "autocast",
             "False for weights in 4 or 16 bits, whose GEMMs run in the model's dtype", True),
            (four_bit and self.adapters is None, "adapters", "LoRA for weights in 4 bits, which are frozen", "none",
             "In Python pass adapters=lowtide.plan.Adapters(rank), to the command --lora-rank."),
            (wider, "bnb_4bit_compute_dtype",
             f"{self.dtype_name}, as it is planned in, for all GEMMs over weights in 4 bits run in it", computes,
             f"Set it in the config (transformers' default is float32), or plan in {computes}."),
            (several and self.size("host_gib"), "host_gib", "0: offloading is planned for one GPU alone",
             self.host_gib, alone),
            (several and self.parallel != DDP and OPTIMIZERS[self.optimizer].bytes_each, "optimizer",
             f"one that shards: {shard}", self.optimizer, alone),
            (several and self.parallel == ZERO3 and self.narrow > 2, "dtype",
             "16 bits or autocast: DeepSpeed's float32 training is not planned", self.dtype, alone),
        ):  # fmt: skip
            if applies:
                raise ArgumentValueError(message(*words))

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Return the config's fields."""
        return json.loads(self.config)  # type: ignore[no-any-return]

    @property
    def model_type(self) -> str:
        """Return the config's."""
        return str(self.settings["model_type"])

    @cached_property
    def model(self) -> MetaModel:
        """Return the model without weights, with its adapters.

        Raises:
            ArgumentValueError: transformers cannot build it, or it has no such projections.
        """
        with refused(self.model_type):
            return meta_model(self.config, self.dtype, fused_mlp=self.fused_mlp, adapters=self.adapters)

    def readings(self, level: int | None) -> tuple[Reading, ...]:
        """Return what a layer of each kind takes, with its fused MLP at a level.

        Raises:
            ArgumentValueError: The model does not run without weights.
        """
        frozen = self.adapters is not None
        autocast = self.autocast or (frozen and self.narrow == 2)
        run = Run(self.batch_size, self.seq_len, level or 0, frozen, self.keep_gradients, autocast, self.attention_mask)
        with refused(self.model_type):
            return self.model.readings(run)

    @property
    def levels(self) -> tuple[int | None, ...]:
        """Return the levels of its layers' fused MLPs that a policy can set."""
        return (0, 1) if self.fused_mlp and self.model.levels else (None,)

    @property
    def layers(self) -> int:
        """Return how many layers the model has."""
        return len(self.model.kind_of)

    @property
    def tokens(self) -> int:
        """Return the tokens of a step."""
        return self.seq_len * self.batch_size

    @property
    def dtype_name(self) -> str:
        """Return the dtype as torch names it."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def operand(self) -> torch.dtype:
        """Return the dtype that GEMMs read and write."""
        return torch.bfloat16 if self.autocast else self.dtype

    @property
    def narrow(self) -> int:
        """Return the bytes of a number that a GEMM reads or writes."""
        return int(self.operand.itemsize)

    @property
    def link_rate(self) -> float:
        """Return the bytes per second that a GPU receives from the others."""
        return self.size("link") or self.gpu.between

    @property
    def packed_params(self) -> int:
        """Return the parameters that are in 4 bits: those of all linear layers of the layers, and no experts."""
        return sum(self.model.linears) if self.quantised.four_bit else 0

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of the model's parameters, without adapters."""
        packed = int(self.packed_params * BYTES[self.quantised.four_bit])
        return (self.model.params - self.packed_params) * self.dtype.itemsize + packed

    @cached_property
    def head_plan(self) -> HeadPlan:
        """Return what the output layer and its loss run, and their bytes."""
        return plan_head(
            self.tokens,
            self.model.hidden,
            self.model.vocab,
            self.operand,
            "cuda",
            self.options,
            weight_dtype=self.dtype,
            weight_frozen=self.adapters is not None,
            capability=self.gpu.capability,
            device_bytes=self.gpu.memory_bytes,
        )
