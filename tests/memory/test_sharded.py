"""FSDP2 around a model with a policy, or the other way round, in a group of one: gradients of the stock model.

On several ranks: `tests/distributed/fsdp_cases.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from lowtide.errors import UnsupportedError
from lowtide.memory import ActivationPolicy, apply_policy, remove_policy
from memory.models import (
    ATTENTION,
    GROUPED,
    INPUT,
    OFFLOADED_ATTENTION,
    OFFLOADED_INPUT,
    CountAttention,
    LazySide,
    Plain,
)

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="a group on a CPU needs gloo")


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def shard(model: Plain, mesh: DeviceMesh) -> None:
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh)


def counted_gradients(model: Any, ids: Tensor) -> tuple[int, dict[str, Tensor]]:
    model.zero_grad()
    with CountAttention() as counted:
        model(ids).backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return counted.calls, {name: g.full_tensor() if hasattr(g, "full_tensor") else g for name, g in gradients.items()}


@pytest.mark.parametrize(
    ("policy", "first"),
    [(OFFLOADED_ATTENTION, True), (INPUT, True), (ATTENTION, False), (OFFLOADED_INPUT, False)],
    ids=["offloaded attention, sharded", "input, sharded", "sharded, attention", "sharded, offloaded input"],
)
def test_fsdp2(policy: ActivationPolicy, first: bool, mesh: DeviceMesh, side: LazySide, ids: Tensor) -> None:
    model = Plain()
    _, want = counted_gradients(copy.deepcopy(model), ids)

    def check(calls: int) -> None:
        got = counted_gradients(model, ids)
        assert got[0] == calls
        torch.testing.assert_close(got[1], want, rtol=1e-5, atol=1e-7)

    if first:
        apply_policy(model, policy)
    shard(model, mesh)
    if not first:
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


def test_one_input_for_several_layers_is_refused(mesh: DeviceMesh, ids: Tensor) -> None:
    """Their weights are gathered for one layer's turn."""
    model = Plain()
    apply_policy(model, GROUPED)
    shard(model, mesh)
    with pytest.raises(UnsupportedError, match=r"^blocks\.0: expected with every > 1 a layer that holds its weights"):
        model(ids)
