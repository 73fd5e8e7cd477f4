"""FSDP2 around a model that is profiled: sharded over the ranks, or with parameters and optimizer on the host."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from lowtide.memory.stack import find_stack

TIMEOUT = timedelta(minutes=5)  # until a rank gives up waiting for one that failed


def start_group(device: torch.device) -> None:
    """Join the process group; RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are in the environment."""
    # gloo beside NCCL: what lies on the host has collectives too
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timeout=TIMEOUT)


def shard(model: Any, sharding: str, device: torch.device, *, offload: bool) -> None:
    """Shard each decoder layer, and the rest, by FSDP2.

    Args:
        model: On the device.
        sharding: ``zero3``: weights, gradients and optimizer states; ``zero2``: weights are gathered once a step.
        device: Where it computes.
        offload: Whether what is sharded lies on the host, where the optimizer then runs.
    """
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    policy = CPUOffloadPolicy(pin_memory=device.type == "cuda") if offload else OffloadPolicy()
    kwargs: dict[str, Any] = {"mesh": mesh, "offload_policy": policy}
    for layer in find_stack(model).layers.values():
        fully_shard(layer, reshard_after_forward=sharding == "zero3", **kwargs)
    fully_shard(model, reshard_after_forward=None if sharding == "zero3" else False, **kwargs)  # None: its own choice


def leave() -> None:
    """End the process group, and the process: gloo's threads abort an interpreter that is being torn down."""
    if dist.is_initialized():
        dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
