"""Real steps of a planned training, with random weights: what they take beside what was predicted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lowtide.bench.harness import release
from lowtide.bench.models import measure_steps, random_model
from lowtide.errors import UnsupportedError, message
from lowtide.measure.failures import is_out_of_memory
from lowtide.measure.machine import describe_machine
from lowtide.measure.text import table
from lowtide.measure.units import gib
from lowtide.memory import apply_policy, remove_policy
from lowtide.models import patch
from lowtide.plan import MemoryPlan


def check_plan(settings: Mapping[str, Any], plan: MemoryPlan, *, warm: int = 2, steps: int = 3) -> dict[str, Any]:
    """Build the model with random weights on the GPU, apply the plan's policies, and measure some steps.

    Returns:
        ``predicted_gib`` and ``peak_gib``, the most that tensors take at once; ``predicted_seconds`` and ``seconds`` of
        the median step; ``reserved_gib``, which PyTorch's allocator held; ``machine``, hardware and versions.

    Raises:
        UnsupportedError: the plan is for weights in 4 bits; there is no GPU; the optimizer's library is missing, or
            memory ran out.
    """
    job, device = plan.job, torch.device("cuda")
    if job.quantised.four_bit:
        hint = "Check the plan of the config without quantization_config."
        raise UnsupportedError(message("check", "weights in 16 or 32 bits", job.quantised.four_bit, hint))
    if not torch.cuda.is_available():
        raise UnsupportedError(message("check", "a CUDA GPU on this machine", "none", "Leave it out to plan alone."))
    release(device)
    before = torch.cuda.memory_allocated()
    try:
        model = planned_model(settings, plan, device)
        states = {"gib": plan.states_gib, "late": plan.chosen.late} if plan.chosen.states else None
        try:
            measured = measure_steps(
                model, job.optimizer, states, (job.batch_size, job.seq_len), warm=warm, reps=steps,
                wide=job.autocast or (job.adapters is not None and job.narrow < 4), keep_gradients=job.keep_gradients,
            )  # fmt: skip
        finally:
            remove_policy(model)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        expected = f"{gib(plan.peak_bytes):.2f} GiB, as predicted, to be free on this GPU"
        raise UnsupportedError(message("check", expected, str(error).partition(". ")[0])) from error
    return {
        "predicted_gib": gib(plan.peak_bytes),
        "peak_gib": measured["peak_gib"] - gib(before),
        "predicted_seconds": plan.seconds,
        "seconds": measured["seconds"],
        "reserved_gib": measured["reserved_gib"],
        "machine": describe_machine(),
    }


def check_text(check: Mapping[str, Any]) -> str:
    """Return what `check_plan` found as a table."""
    rows = [["", "predicted", "measured", "off by"]]
    for name, predicted, measured, digits in (
        ("peak GiB", check["predicted_gib"], check["peak_gib"], 2),
        ("s a step", check["predicted_seconds"], check["seconds"], 3),
    ):
        rows.append([name, f"{predicted:.{digits}f}", f"{measured:.{digits}f}", f"{predicted / measured - 1:+.1%}"])
    held = f"PyTorch's allocator held {check['reserved_gib']:.2f} GiB; {check['machine']['gpu']}"
    return f"{table(rows)}\n{held}"


def planned_model(settings: Mapping[str, Any], plan: MemoryPlan, device: torch.device) -> Any:
    """Return the model with random weights, under the plan's policies."""
    from transformers import AutoConfig

    job = plan.job
    config: Any = AutoConfig.for_model(**{**settings, "use_cache": False})
    model = random_model(config, job.dtype, device)
    if job.adapters is not None:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=job.adapters.rank, target_modules=job.adapters.target_modules))
    patch(model, options=job.options)
    offloaded = any(policy.offload for policy in plan.policies)
    apply_policy(model, plan.policies, host_gib=gib(plan.search.host_bytes) if offloaded else None)
    return model
