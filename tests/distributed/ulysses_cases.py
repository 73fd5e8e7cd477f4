"""DeepSpeed's Ulysses around a patched model: each rank a shard of every sequence, and in attention some of the heads.

The loss is transformers' for sequence parallelism, the ranks' means weighed by their tokens. ZeRO-3 alone: DeepSpeed's
other stages scale the stock model's gradients otherwise.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
from torch import Tensor
from transformers.integrations.deepspeed import deepspeed_sp_compute_loss
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import lowtide
from distributed.launch import DEVICE, main
from distributed.models import VOCAB, fused, model_of
from distributed.zero_cases import RATE, alike, weights, zero
from lowtide.memory import ActivationPolicy, apply_policy

T = 22
SHAPE = {"num_hidden_layers": 3}


def whole_batch(stream: int) -> tuple[Tensor, Tensor]:
    """Ids and labels, of the second batch with none on the first rank, as in a long prompt."""
    g = torch.Generator().manual_seed(stream)
    ids = torch.randint(3, VOCAB, (2, T), generator=g)
    labels = ids.where(torch.rand(2, T, generator=g) > 0.3, -100)
    if stream == 1:
        labels[:, : T // dist.get_world_size() + 1] = -100
    return ids.to(DEVICE), labels.to(DEVICE)


def shard(ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Return what DeepSpeed's data loader gives this rank."""
    every = {
        "input_ids": ids,
        "shift_labels": F.pad(labels, (0, 1), value=-100)[:, 1:],
        "position_ids": torch.arange(T, device=ids.device).expand(2, -1),
    }
    return {name: x.chunk(dist.get_world_size(), 1)[dist.get_rank()].contiguous() for name, x in every.items()}


def heads_in_parts() -> None:
    """ZeRO-3, layers that save everything, attention's outputs or their inputs: losses and weights of one process."""
    deepspeed.init_distributed()
    ranks = dist.get_world_size()
    stock_attention = ALL_ATTENTION_FUNCTIONS["sdpa"]
    batches = [whole_batch(stream) for stream in range(3)]
    true = model_of(**SHAPE).double()
    optimizer, want = torch.optim.SGD(true.parameters(), lr=RATE), []
    for ids, labels in batches:
        loss = true(input_ids=ids, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        want.append(loss.detach().float())
    try:
        mpu = UlyssesSPAttentionHF.register_with_transformers(
            model_name_or_path=model_of(**SHAPE), core_attn_implementation="sdpa", sequence_parallel_size=ranks,
            micro_batch_size=2, seq_length_is_variable=True,
        )  # fmt: skip
        settings: Any = SimpleNamespace(sp_backend="deepspeed", sp_size=ranks)
        for keep, gradient in ((None, "forward"), ("attention", "recompute"), ("input", "forward")):
            ours = model_of(**SHAPE)
            report = lowtide.patch(ours, options=lowtide.HeadOptions(gradient=gradient))
            if keep is not None:
                apply_policy(ours, ActivationPolicy(keep=keep))
            engine = zero(ours, mpu=mpu)
            for (ids, labels), right in zip(batches, want, strict=True):
                loss = deepspeed_sp_compute_loss(None, engine, shard(ids, labels), False, settings)
                engine.backward(loss)
                engine.step()
                alike(f"{keep} loss", loss.detach(), right)
            found = weights(engine)
            for name, p in true.named_parameters():
                alike(f"{keep} {name}", found[name], p.detach().float(), 1e-4)
            fused(report, len(batches))
    finally:
        ALL_ATTENTION_FUNCTIONS["sdpa"] = stock_attention


if __name__ == "__main__":
    main(vars())
