"""Training a Llama twice from the same weights: with the logits in full, and with `linear_apply` on its head."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lowtide.bench.config import ApplyBenchConfig
from lowtide.bench.harness import Run, release
from lowtide.bench.ways import VOCABULARY
from lowtide.errors import ArgumentValueError, message
from lowtide.head.apply import linear_apply
from lowtide.measure.resident import cuda_peak_bytes, reset_cuda_peak
from lowtide.measure.units import mib
from lowtide.train.model import model_config
from lowtide.train.shapes import DEFAULT

CLIP, BETA, GROUP = 0.2, 0.04, 2
LEARNING_RATE = 3e-5

cross_entropy = partial(F.cross_entropy, reduction="none")  # of each token
Data = list[dict[str, Tensor]]
Loss = Callable[[Any, dict[str, Tensor]], Tensor]


def grpo(logits: Tensor, ids: Tensor, old: Tensor, reference: Tensor, advantage: Tensor) -> Tensor:
    """Return each token's term of GRPO's objective, to be minimised."""
    logp = -cross_entropy(logits, ids)
    ratio = (logp - old).exp()
    gain = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
    return BETA * ((reference - logp).exp() - (reference - logp) - 1) - gain


def _hidden(model: Any, batch: dict[str, Tensor]) -> Tensor:
    hidden: Tensor = model.model(input_ids=batch["ids"]).last_hidden_state
    return hidden[:, :-1]


def _stock(model: Any, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = model(input_ids=batch["ids"], labels=batch["ids"]).loss
    return loss


def _applied(model: Any, batch: dict[str, Tensor]) -> Tensor:
    losses: Tensor = linear_apply(cross_entropy, _hidden(model, batch), model.lm_head.weight, batch["ids"][:, 1:])
    return losses.mean()


def _masked_mean(terms: Tensor, mask: Tensor) -> Tensor:
    return (terms.where(mask, 0).sum(-1) / mask.sum(-1)).mean()


def _naive_grpo(model: Any, batch: dict[str, Tensor]) -> Tensor:
    logits = model(input_ids=batch["ids"]).logits[:, :-1].float()
    old, reference, advantage = (batch[name].flatten() for name in ("old", "reference", "advantage"))
    terms = grpo(logits.flatten(0, 1), batch["ids"][:, 1:].flatten(), old, reference, advantage)
    return _masked_mean(terms.view_as(batch["mask"]), batch["mask"])


def _applied_grpo(model: Any, batch: dict[str, Tensor]) -> Tensor:
    args = (batch["ids"][:, 1:], batch["old"], batch["reference"], batch["advantage"])
    terms = linear_apply(grpo, _hidden(model, batch), model.lm_head.weight, *args, mask=batch["mask"])
    return _masked_mean(terms, batch["mask"])


LOSSES: dict[str, dict[str, Loss]] = {
    "train": {"stock": _stock, "linear_apply": _applied},
    "grpo": {"naive": _naive_grpo, "linear_apply": _applied_grpo},
}


def compare(objective: str, run: Run[ApplyBenchConfig]) -> dict[str, Any]:
    """Train by an objective, "train" or "grpo", with each loss from the same weights on the same data.

    Returns:
        dict: both curves, and how they differ.

    Raises:
        ArgumentValueError: there is no such model.
    """
    config, device = run.config, run.device
    name = config.model if config.model != "auto" else "llama-3.2-1b" if device.type == "cuda" else DEFAULT
    settings = model_config(name, vocab_size=VOCABULARY)
    result: dict[str, Any] = {"model": name, "steps": config.steps, "batch": config.batch, "seq_len": config.seq_len}
    sizes = f"{config.steps} steps of {config.batch} x {config.seq_len} tokens"
    run.say(f"\n{objective}: {name}, {sizes}, {run.dtype}\n")
    curves: dict[str, list[float]] = {}
    for way, loss in LOSSES[objective].items():
        model = _model(settings, run.dtype, device, config.seed)
        data = _data(model, objective, config, device)
        result[way] = trained = _trained(model, loss, data)
        curve = curves[way] = trained["losses"]
        peak = f", peak {trained['peak_mib']:.0f} MiB" if device.type == "cuda" else ""
        run.say(f"{way:16}loss {curve[0]:.6f} to {curve[-1]:.6f}, {trained['seconds']:.1f} s{peak}\n")
        del model, data
        release(device)
    one, other = curves.values()
    differences = [abs(a - b) for a, b in zip(one, other, strict=True)]
    result["largest_difference"] = max(differences)
    result["largest_relative_difference"] = max(d / max(abs(a), 1e-6) for d, a in zip(differences, one, strict=True))
    run.say(f"the curves differ by {max(differences):.2e} at most\n")
    return result


def _model(settings: Any, dtype: torch.dtype, device: torch.device, seed: int) -> Any:
    from transformers import AutoModelForCausalLM, set_seed

    set_seed(seed)
    model = AutoModelForCausalLM.from_config(settings, dtype=dtype).to(device)
    if not isinstance(getattr(model, "lm_head", None), torch.nn.Linear) or not hasattr(model, "model"):
        raise ArgumentValueError(message("model", "a model with .model and .lm_head", type(model).__name__))
    return model.train()


def _data(model: Any, objective: str, config: ApplyBenchConfig, device: torch.device) -> Data:
    """Return a batch for each step: runs of a few words each, which can be learned; for GRPO with rewards."""
    generator = torch.Generator().manual_seed(config.seed)
    V, T = model.get_input_embeddings().num_embeddings, config.seq_len
    data = []
    for _ in range(config.steps):
        start = torch.randint(0, V, (config.batch, 1), generator=generator)
        stride = torch.randint(1, 4, (config.batch, 1), generator=generator)
        strays = torch.rand(config.batch, T, generator=generator) < 0.1
        noise = strays * torch.randint(0, V, (T,), generator=generator)
        batch = {"ids": ((start + stride * torch.arange(T) + noise) % V).to(device)}
        if objective == "grpo":
            batch |= _rollout(model, batch["ids"], generator)
        data.append(batch)
    return data


@torch.no_grad()
def _rollout(model: Any, ids: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """Return log-probabilities of an older and of a reference policy, advantages within groups, and a mask."""
    B, T = ids.shape[0], ids.shape[1] - 1
    logp = -linear_apply(cross_entropy, _hidden(model, {"ids": ids}), model.lm_head.weight, ids[:, 1:])
    shifted = [logp + 0.1 * torch.randn(B, T, generator=generator).to(logp.device) for _ in range(2)]
    reward = torch.randn(B, 1, generator=generator)
    group = min(GROUP, B)
    groups = reward[: B // group * group].view(-1, group)
    spread = groups.std(1, correction=0, keepdim=True) + 1e-4
    reward[: groups.numel()] = ((groups - groups.mean(1, keepdim=True)) / spread).view(-1, 1)
    mask = torch.arange(T).expand(B, T) >= T // 4
    return {
        "old": shifted[0], "reference": shifted[1], "advantage": reward.expand(B, T).contiguous().to(logp.device),
        "mask": mask.to(logp.device),
    }  # fmt: skip


def _trained(model: Any, loss: Loss, data: Data) -> dict[str, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    losses: list[Tensor] = []
    reset_cuda_peak()
    start = time.perf_counter()
    for batch in data:
        value = loss(model, batch)
        value.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.detach())
    curve = torch.stack(losses).tolist()  # waits for the device
    return {"losses": curve, "seconds": time.perf_counter() - start, "peak_mib": mib(cuda_peak_bytes())}
