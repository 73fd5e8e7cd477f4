"""Weights that a recompute reads are compared on the device, and the host never waits for it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lowtide
from gpu.conftest import no_waits
from lowtide.memory import ActivationPolicy, apply_policy
from lowtide.samples import Samples

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), lowtide.nn.SwiGLU(64, 96)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().sum()


def test_a_recomputed_step_does_not_wait_for_the_device() -> None:
    model = Stack().cuda()
    apply_policy(model, ActivationPolicy(keep="input"))
    x = torch.randn(256, 64, device="cuda")
    model(x).backward()
    with no_waits():
        model(x).backward()
    torch.cuda.synchronize()  # and nothing has asserted


def test_samples_of_both_devices_and_several_dtypes() -> None:
    weights = [
        nn.Parameter(torch.randn(48, 32, dtype=dtype, device="cuda")) for dtype in (torch.float32, torch.bfloat16)
    ]
    seen = Samples([*weights, nn.Parameter(torch.randn(5, 5))])
    assert not seen.changed()
    torch.cuda.synchronize()
