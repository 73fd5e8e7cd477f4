"""The optimizer's part of a checkpoint, read into and written from accelerate's optimizers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from lowtide.train.states import WHOLE, load_optimizer, save_parts


def trained(seed: int) -> tuple[torch.nn.Linear, torch.optim.AdamW]:
    torch.manual_seed(seed)
    model = torch.nn.Linear(5, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(7, 5)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # a process alone writes parts here
@pytest.mark.parametrize("in_parts", [True, False])
def test_states_go_through_a_gradient_scaler(in_parts: bool, tmp_path: Path) -> None:
    """Of float16 runs: the wrapper's step would ask the scaler, which has seen no gradients yet."""
    Accelerator(cpu=True)
    model, optimizer = trained(0)
    if in_parts:
        wrapped: Any = AcceleratedOptimizer(optimizer, scaler=torch.amp.GradScaler("cpu"))
        save_parts(tmp_path, model, wrapped)
    else:
        torch.save(optimizer.state_dict(), tmp_path / WHOLE)
    fresh = torch.nn.Linear(5, 3)
    inner = torch.optim.AdamW(fresh.parameters())
    load_optimizer(tmp_path, fresh, AcceleratedOptimizer(inner, scaler=torch.amp.GradScaler("cpu")))
    want, got = optimizer.state_dict()["state"], inner.state_dict()["state"]
    assert got.keys() == want.keys()
    for entry, other in zip(got.values(), want.values(), strict=True):
        assert all(torch.equal(value, other[name]) for name, value in entry.items())
