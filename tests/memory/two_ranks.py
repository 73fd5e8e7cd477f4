"""FSDP2 on two ranks around a model with a policy, or the other way round: gradients of the stock model on both halves.

Each rank trains on one half of a batch. `distributed.launch` runs the cases.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from distributed.launch import main
from lowtide.memory import ActivationPolicy, apply_policy, copies, remove_policy
from memory.models import (
    ATTENTION,
    INPUT,
    OFFLOADED_ATTENTION,
    OFFLOADED_INPUT,
    VOCAB,
    CountAttention,
    LazySide,
    Plain,
)


def _shard(model: Plain) -> None:
    mesh = init_device_mesh("cpu", (2,))
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh)


def _gradients(model: Any, batches: list[Tensor]) -> dict[str, Tensor]:
    model.zero_grad()
    for batch in batches:
        (model(batch) / len(batches)).backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return {name: g.full_tensor() if hasattr(g, "full_tensor") else g for name, g in gradients.items()}


def _train(policy: ActivationPolicy, *, policy_first: bool) -> None:
    side, model = LazySide(), Plain()
    batches = [torch.randint(3, VOCAB, (2, 11), generator=torch.Generator().manual_seed(k)) for k in range(2)]
    want = _gradients(copy.deepcopy(model), batches)

    def check(calls: int) -> None:
        with CountAttention() as counted:
            got = _gradients(model, [batches[dist.get_rank()]])
        assert counted.calls == calls
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-7)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copies, "available", lambda: True)
        patch.setattr(copies, "side_for", lambda _: side)
        if policy_first:
            apply_policy(model, policy)
        _shard(model)
        if not policy_first:
            apply_policy(model, policy)
        for _ in range(2):
            check(5 if policy.keep == "attention" else 10)
        assert (side.pinned > 0) == policy.offload
        apply_policy(model, INPUT)  # again, on what is sharded now
        check(10)
        remove_policy(model)
        check(5)
        assert all(isinstance(block, FSDPModule) for block in model.blocks)
        assert side.pinned == 0


def offloaded_attention_then_sharded() -> None:
    _train(OFFLOADED_ATTENTION, policy_first=True)


def input_then_sharded() -> None:
    _train(INPUT, policy_first=True)


def sharded_then_attention() -> None:
    _train(ATTENTION, policy_first=False)


def sharded_then_offloaded_input() -> None:
    _train(OFFLOADED_INPUT, policy_first=False)


if __name__ == "__main__":
    main(vars())
