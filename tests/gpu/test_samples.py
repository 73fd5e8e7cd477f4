"""Samples of weights on a GPU: one launch in forward and one in backward, and an assertion of the device."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from gpu.conftest import no_waits
from lowtide.memory import ActivationPolicy, apply_policy
from lowtide.samples.weights import Samples

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
LAYERS = 3


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        linear = partial(nn.Linear, 64, 64)
        self.layers = nn.ModuleList(nn.Sequential(linear(), nn.SiLU(), linear(bias=False)) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor, run: Callable[..., Any] = lambda layer, x: layer(x)) -> torch.Tensor:
        for layer in self.layers:
            x = run(layer, x)
        return x.square().sum()


def launches(step: Callable[[], Any]) -> list[str]:
    """Return the names of the kernels that a step launches, after two that compile and fill caches."""
    for _ in range(2):
        step()
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as seen:
        step()
        torch.cuda.synchronize()
    of_device = [e.name for e in seen.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return [name for name in of_device if not name.startswith("Mem")]


@pytest.mark.filterwarnings("ignore::UserWarning")  # of the profiler's own doing
def test_a_layer_under_a_policy_launches_two_kernels_more_than_in_a_checkpoint() -> None:
    model, x = Layers().cuda(), torch.randn(256, 64, device="cuda", requires_grad=True)
    stock = launches(lambda: model(x, partial(checkpoint, use_reentrant=False)).backward())
    apply_policy(model, ActivationPolicy(keep="input"))
    ours = launches(lambda: model(x).backward())
    assert sum("_sum_samples" in name for name in ours) == 2 * LAYERS, ours
    assert len(ours) == len(stock) + 2 * LAYERS, (ours, stock)


def test_samples_of_both_devices_and_several_dtypes() -> None:
    weights = [
        nn.Parameter(torch.randn(48, 32, dtype=dtype, device="cuda")) for dtype in (torch.float32, torch.bfloat16)
    ]
    weights.append(nn.Parameter(torch.randn(32, 48, device="cuda").t()))
    seen = Samples([*weights, nn.Parameter(torch.randn(5, 5))])
    assert not seen.changed()
    for p in weights:
        p.data = p.data.clone(memory_format=torch.contiguous_format)  # moved
    with no_waits():
        assert not seen.changed()
    torch.cuda.synchronize()


@pytest.mark.parametrize("change", ["w[3].zero_()", "w[:, 3].zero_()", "w.mul_(2)"])
def test_a_write_through_data_ends_in_an_assertion_of_the_device(change: str) -> None:
    """In a process of its own, for it ends the CUDA context."""
    code = f"""
import torch
from gpu.test_samples import Layers
from lowtide.memory import ActivationPolicy, apply_policy
model = Layers().cuda()
apply_policy(model, ActivationPolicy(keep="input"))
x = torch.randn(256, 64, device="cuda")
model(x).backward()
torch.cuda.synchronize()
print("as it should be")
loss = model(x)
w = model.layers[1][2].weight.data
{change}
loss.backward()
torch.cuda.synchronize()
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=env)
    assert ran.returncode != 0
    assert "as it should be" in ran.stdout, ran.stderr[-2000:]
    assert "written to through .data" in ran.stderr, ran.stderr[-2000:]
    assert "device-side assert" in ran.stderr
