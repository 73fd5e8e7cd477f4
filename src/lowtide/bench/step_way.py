"""One way through a training step: a model, patched or not, and what its layers keep. Runs in a process of its own."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from lowtide.bench.policies import parse_policies, split_states
from lowtide.bench.rows import reason_of, release
from lowtide.head.options import HeadOptions
from lowtide.measure import cuda_peak_bytes, gib, peak_resident_bytes, reset_cuda_peak, time_side_by_side
from lowtide.memory import apply_policy, offload_optimizer
from lowtide.models import patch
from lowtide.train.model import model_config

STOCK = "stock"
LIGER = "liger"
KEEP_ATTENTION = "-attention"  # ends the name of a way whose checkpoint keeps attention's output
NO_CHECKPOINT = "-all"
OURS = "lowtide:"  # begins the name of a way; a policy follows
LEARNING_RATE = 1e-5
VOCABULARY = 1000  # of the model that has none of its own
OUT_OF_MEMORY = "out of memory"

_KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


def measure(
    way: str,
    model: str,
    lengths: list[int],
    batch: int,
    warm: int,
    reps: int,
    dtype: str,
    device: str,
    sdpa: str,
    seed: int,
) -> list[dict[str, Any]]:
    """Return seconds, peak and losses of a step at each length, or why there are none; `run_child` calls it.

    Args:
        way: who: a name of the table.
        model: whose shape, as in ``lowtide train --model``.
        lengths: tokens of a sequence, ascending: none is tried after one that did not fit.
        batch: sequences.
        warm: steps that do not count, at each length.
        reps: steps that count.
        dtype: of weights, gradients and optimizer states.
        device: where.
        sdpa: attention's kernel, or auto.
        seed: of weights and tokens.
    """
    rows: list[dict[str, Any]] = []
    try:
        built = build(way, model, getattr(torch, dtype), torch.device(device), seed)
        optimizer = torch.optim.AdamW(built.parameters(), lr=LEARNING_RATE, fused=True)
        states = split_states(way)[1]
        if states is not None:
            offload_optimizer(optimizer, built, **states)
    except Exception as error:
        return [{"tokens": tokens, "failed": reason_of(error)} for tokens in lengths]
    for tokens in lengths:
        try:
            rows.append({"tokens": tokens, **_steps(built, optimizer, tokens, batch, warm, reps, sdpa, seed)})
        except torch.cuda.OutOfMemoryError:
            left = lengths[len(rows) :]
            return [*rows, *({"tokens": longer, "failed": OUT_OF_MEMORY} for longer in left)]
        except Exception as error:
            rows.append({"tokens": tokens, "failed": reason_of(error)})
    return rows


def _steps(
    model: Any, optimizer: torch.optim.Optimizer, tokens: int, batch: int, warm: int, reps: int, sdpa: str, seed: int
) -> dict[str, Any]:
    device = next(model.parameters()).device
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

    release(device)
    for _ in range(warm):
        step()
    reset_cuda_peak()
    timing = time_side_by_side({"step": step}, device, warm=0, reps=reps)["step"]
    peak = cuda_peak_bytes() if device.type == "cuda" else peak_resident_bytes()
    return {
        "seconds": timing.median_ms / 1e3,
        "spread": timing.spread,
        "tokens_per_s": batch * tokens / timing.median_ms * 1e3,
        "peak_gib": gib(peak),
        "losses": [loss.item() for loss in losses],
    }


def build(way: str, name: str, dtype: torch.dtype, device: torch.device, seed: int) -> Any:
    """Return the model of a way, with random weights, ready to train."""
    config = model_config(name, vocab_size=VOCABULARY)
    if way.startswith(LIGER):
        importlib.import_module("liger_kernel.transformers")._apply_liger_kernel(config.model_type)
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").train()
    model.config.use_cache = False
    if way.startswith(OURS):
        patch(model, options=HeadOptions())
        policy = split_states(way.removeprefix(OURS))[0]
        apply_policy(model, parse_policies(policy, model.config.num_hidden_layers))
    elif not way.endswith(NO_CHECKPOINT):
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable(_checkpoint(way))  # the former name in transformers 5.23 and later
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
