"""One way through a training step: a model, patched or not, and what its layers keep. Runs in a process of its own."""

from __future__ import annotations

import contextlib
import importlib
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from lowtide.bench.policies import parse_policies
from lowtide.bench.rows import reason_of
from lowtide.head.options import HeadOptions
from lowtide.measure import cuda_peak_bytes, gib, peak_resident_bytes, reset_cuda_peak, time_side_by_side
from lowtide.memory import apply_policy
from lowtide.models import patch
from lowtide.train.model import model_config

STOCK = "stock"
LIGER = "liger"
KEEP_ATTENTION = "-attention"  # ends the name of a way whose checkpoint keeps attention's output
NO_CHECKPOINT = "-all"
OURS = "lowtide:"  # begins the name of a way; a policy follows
LEARNING_RATE = 1e-5
OUT_OF_MEMORY = "out of memory"

_KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


def measure(
    way: str, model: str, tokens: int, batch: int, warm: int, reps: int, dtype: str, device: str, sdpa: str, seed: int
) -> dict[str, Any]:
    """Return seconds, peak and loss of a step, or why there are none; run by `lowtide.measure.run_child`.

    Args:
        way: who: a name of the table.
        model: whose shape, as in ``lowtide train --model``.
        tokens: of a sequence.
        batch: sequences.
        warm: steps that do not count.
        reps: steps that count.
        dtype: of weights, gradients and optimizer states.
        device: where.
        sdpa: attention's kernel, or auto.
        seed: of weights and tokens.
    """
    try:
        return _measured(way, model, tokens, batch, warm, reps, getattr(torch, dtype), torch.device(device), sdpa, seed)
    except torch.cuda.OutOfMemoryError:
        return {"failed": OUT_OF_MEMORY}
    except Exception as error:
        return {"failed": reason_of(error)}


def _measured(
    way: str,
    name: str,
    tokens: int,
    batch: int,
    warm: int,
    reps: int,
    dtype: torch.dtype,
    device: torch.device,
    sdpa: str,
    seed: int,
) -> dict[str, Any]:
    model = build(way, name, dtype, device, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, model.config.vocab_size, (batch, tokens), generator=generator).to(device)
    losses: list[Tensor] = []

    def step() -> None:
        with contextlib.nullcontext() if sdpa == "auto" else sdpa_kernel(_KERNELS[sdpa]):
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())

    for _ in range(warm):
        step()
    reset_cuda_peak()
    timing = time_side_by_side({way: step}, device, warm=0, reps=reps)[way]
    seconds = timing.median_ms / 1e3
    peak = cuda_peak_bytes() if device.type == "cuda" else peak_resident_bytes()
    return {
        "seconds": seconds,
        "spread": timing.spread,
        "tokens_per_s": batch * tokens / seconds,
        "peak_gib": gib(peak),
        "first_loss": losses[0].item(),
        "loss": statistics.fmean(loss.item() for loss in losses[-1:]),
    }


def build(way: str, name: str, dtype: torch.dtype, device: torch.device, seed: int) -> Any:
    """Return the model of a way, with random weights, ready to train."""
    if way.startswith(LIGER):
        importlib.import_module("liger_kernel.transformers")._apply_liger_kernel(model_config(name).model_type)
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    with device:
        model = AutoModelForCausalLM.from_config(model_config(name), dtype=dtype, attn_implementation="sdpa").train()
    model.config.use_cache = False
    if way.startswith(OURS):
        patch(model, options=HeadOptions())
        apply_policy(model, parse_policies(way.removeprefix(OURS), model.config.num_hidden_layers))
    elif not way.endswith(NO_CHECKPOINT):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=_checkpoint(way))
    return model


def _checkpoint(way: str) -> dict[str, Any]:
    if not way.endswith(KEEP_ATTENTION):
        return {"use_reentrant": False}
    aten = torch.ops.aten
    kept = {
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
    }

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:  # noqa: ARG001
        return CheckpointPolicy.MUST_SAVE if op in kept else CheckpointPolicy.PREFER_RECOMPUTE

    contexts: Callable[[], Any] = partial(create_selective_checkpoint_contexts, policy)
    return {"use_reentrant": False, "context_fn": contexts}
