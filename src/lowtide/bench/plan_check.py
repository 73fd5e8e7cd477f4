"""Real steps of a planned training, with random weights: what they take beside what was predicted."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lowtide.bench.models import compile_layers, make_optimizer, train_step
from lowtide.errors import UnsupportedError, message
from lowtide.measure.failures import is_out_of_memory
from lowtide.measure.machine import describe_machine
from lowtide.measure.resident import cuda_reserved_bytes
from lowtide.measure.timing import time_side_by_side
from lowtide.measure.units import gib
from lowtide.memory import apply_policy, offload_optimizer, remove_policy
from lowtide.models import patch
from lowtide.plan import MemoryPlan

WARM, STEPS = 2, 3


@dataclass(frozen=True, kw_only=True)
class PlanCheck:
    """A plan beside what real steps took.

    Attributes:
        predicted_bytes: the most that tensors take at once on the GPU, by the plan.
        peak_bytes: the same, measured.
        predicted_seconds: of a step, by the plan.
        seconds: of the median step, measured.
        reserved_bytes: that PyTorch's allocator held, with what it could not fill.
        machine: hardware and versions.
    """

    predicted_bytes: int
    peak_bytes: int
    predicted_seconds: float
    seconds: float
    reserved_bytes: int
    machine: dict[str, Any]

    def __str__(self) -> str:
        lines = [f"{'':10}{'predicted':>11}{'measured':>11}{'off by':>11}"]
        for name, predicted, measured, digits in (
            ("peak GiB", gib(self.predicted_bytes), gib(self.peak_bytes), 2),
            ("s a step", self.predicted_seconds, self.seconds, 3),
        ):
            off = predicted / measured - 1
            lines.append(f"{name:10}{predicted:>11.{digits}f}{measured:>11.{digits}f}{off:>+11.1%}")
        lines.append(f"PyTorch's allocator held {gib(self.reserved_bytes):.2f} GiB; {self.machine['gpu']}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return the figures, for JSON, bytes in GiB."""
        values = ((k.replace("_bytes", "_gib"), gib(v) if k.endswith("_bytes") else v) for k, v in vars(self).items())
        return dict(values)


def check_plan(settings: Mapping[str, Any], plan: MemoryPlan, *, warm: int = WARM, steps: int = STEPS) -> PlanCheck:
    """Build the model with random weights on the GPU, apply the plan's policies, and measure some steps.

    Raises:
        UnsupportedError: the plan is for weights in 4 bits; there is no GPU; the optimizer's library is missing, or
            memory ran out.
    """
    job = plan.job
    if job.shape.four_bit:
        hint = "Check the plan of the config without quantization_config."
        raise UnsupportedError(message("check", "weights in 16 or 32 bits", job.shape.four_bit, hint))
    if not torch.cuda.is_available():
        raise UnsupportedError(message("check", "a CUDA GPU on this machine", "none", "Leave it out to plan alone."))
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    try:
        model = planned_model(settings, plan, torch.device("cuda"))
        try:
            step = Step(model, plan)
            for _ in range(warm):
                step()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            timing = time_side_by_side({"step": step}, "cuda", warm=0, reps=steps)["step"]
        finally:
            remove_policy(model)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        expected = f"{gib(plan.peak_bytes):.2f} GiB, as predicted, to be free on this GPU"
        raise UnsupportedError(message("check", expected, str(error).partition(". ")[0])) from error
    return PlanCheck(
        predicted_bytes=plan.peak_bytes,
        peak_bytes=torch.cuda.max_memory_allocated() - before,
        predicted_seconds=plan.seconds,
        seconds=timing.median_ms / 1e3,
        reserved_bytes=cuda_reserved_bytes(),
        machine=describe_machine(),
    )


def planned_model(settings: Mapping[str, Any], plan: MemoryPlan, device: torch.device) -> Any:
    """Return the model with random weights, under the plan's policies, its layers compiled if the plan's are."""
    from transformers import AutoConfig, AutoModelForCausalLM

    job = plan.job
    torch.manual_seed(0)
    config = AutoConfig.for_model(**{**settings, "use_cache": False})
    attention = job.shape.attention or None
    try:
        with device:
            model = AutoModelForCausalLM.from_config(config, dtype=job.dtype, attn_implementation=attention).train()
    except ValueError as error:  # capped scores, for one
        why = str(error).partition(". ")[0]
        raise UnsupportedError(message("check", "a model that runs with PyTorch's fused attention", why)) from error
    if job.adapters is not None:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=job.adapters.rank, target_modules=job.adapters.target_modules))
    patch(model, options=job.options)
    offloaded = any(policy.offload for policy in plan.policies)
    apply_policy(model, plan.policies, host_gib=gib(plan.host_budget_bytes) if offloaded else None)
    if job.compile_layers:
        compile_layers(model)
    return model


class Step:
    """One training step of a plan, on random tokens."""

    def __init__(self, model: Any, plan: MemoryPlan) -> None:
        self.model, self.job = model, plan.job
        self.optimizer = make_optimizer(plan.job.optimizer, [p for p in model.parameters() if p.requires_grad])
        if plan.chosen.states:
            offload_optimizer(self.optimizer, model, gib=plan.states_gib, late=plan.chosen.late)
        self.ids = torch.randint(0, self.job.shape.vocab, (self.job.batch_size, self.job.seq_len), device="cuda")

    def loss(self) -> Tensor:
        """Return the loss, under autocast where the plan's weights are wide."""
        wide = self.job.autocast or (self.job.adapters is not None and self.job.narrow < 4)
        with torch.autocast("cuda", torch.bfloat16, enabled=wide):
            loss: Tensor = self.model(input_ids=self.ids, labels=self.ids).loss
        return loss

    def __call__(self) -> None:
        """Run it."""
        train_step(self.loss, self.optimizer, keep_gradients=self.job.keep_gradients)
