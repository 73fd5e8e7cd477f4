"""What one rank of two does: FSDP2 around a model with a policy, or the other way round.

It trains on one half of a batch, and writes whether its gradients are those of the stock model on both halves.
"""

from __future__ import annotations

import copy
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from lowtide.memory import ActivationPolicy, apply_policy, offload, remove_policy
from memory.models import VOCAB, CountAttention, LazySide, Plain


def shard(model: Plain, mesh: Any) -> None:
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def gradients(model: Any, batches: list[Tensor]) -> dict[str, Tensor]:
    for batch in batches:
        (model(batch) / len(batches)).backward()
    found = {}
    for name, p in model.named_parameters():
        found[name] = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
        p.grad = None
    return found


def main() -> None:
    keep: Any = sys.argv[1]
    policy_first, offloaded = sys.argv[2] == "policy-first", sys.argv[3] == "offload"
    side = LazySide()
    if offloaded:
        import lowtide.memory.apply as apply

        apply.available = lambda: True
        offload.side_for = lambda device: side
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2,))
    model = Plain()
    stock = copy.deepcopy(model)
    policy = ActivationPolicy(keep=keep, offload=offloaded)
    batches = [torch.randint(3, VOCAB, (2, 11), generator=torch.Generator().manual_seed(k)) for k in range(2)]
    if policy_first:
        apply_policy(model, policy)
        shard(model, mesh)
    else:
        shard(model, mesh)
        apply_policy(model, policy)
    want = gradients(stock, batches)
    for _ in range(2):
        with CountAttention() as counted:
            got = gradients(model, [batches[rank]])
        assert counted.calls == (5 if keep == "attention" else 10), counted.calls
        for name, gradient in got.items():
            torch.testing.assert_close(gradient, want[name], rtol=1e-5, atol=1e-7, msg=name)
    assert (side.pinned > 0) == offloaded
    apply_policy(model, ActivationPolicy(keep="input"))  # again, on what is sharded now
    with CountAttention() as counted:
        gradients(model, [batches[rank]])
    assert counted.calls == 10
    remove_policy(model)
    with CountAttention() as counted:
        got = gradients(model, [batches[rank]])
    assert counted.calls == 5
    for name, gradient in got.items():
        torch.testing.assert_close(gradient, want[name], rtol=1e-5, atol=1e-7, msg=name)
    assert all(isinstance(block, FSDPModule) for block in model.blocks)
    assert side.pinned == 0
    dist.barrier()  # a rank that leaves first breaks the connections that the other may still read from
    dist.destroy_process_group()
    sys.stdout.write(f"rank {rank} is right\n")
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may still let tensors go, which aborts a process whose interpreter is being torn down


if __name__ == "__main__":
    main()
