"""How many layers `lowtide train` puts into a unit of FSDP2, and how accelerate comes to shard them together."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import fsdp
from transformers import AutoConfig, AutoModelForCausalLM

from lowtide.train.config import TrainConfig
from lowtide.train.shapes import SHAPES
from lowtide.train.units import layers_together, put_together

GPU, CPU = torch.device("cuda"), torch.device("cpu")


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")


def model_named(name: str) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**SHAPES[name]))


def together(name: str, tokens: int, device: torch.device = GPU, **settings: Any) -> int:
    args = SimpleNamespace(device=device, gradient_checkpointing=settings.pop("checkpointing", False))
    return layers_together(TrainConfig(**settings), args, model_named(name), tokens)


def test_small_layers_of_few_tokens_are_put_together() -> None:
    """What a layer's GEMMs take is less than what the host takes: in the 1B at 8192 tokens, not at twice as many."""
    assert together("llama-3.2-1b", 8192) == 4
    assert together("llama-3.2-1b", 16384) == 1
    assert together("llama-3-8b", 8192) == 1
    assert together("llama-3-8b", 512) == 1, "four would take gigabytes"
    assert together("llama-3.2-1b", 16384, tensor_parallel=2) == 4, "a process computes half of a layer"


def test_where_they_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert together("llama-3.2-1b", 8192, CPU) == 1
    assert together("llama-3.2-1b", 8192, memory_budget="8GiB") == 1
    assert together("llama-3.2-1b", 8192, checkpointing=True) == 1
    assert together("llama-3.2-1b", 8192, memory_budget="8GiB", fsdp_layers=3) == 3
    assert together("llama-3.2-1b", 8192, fsdp_layers=1) == 1
    monkeypatch.delenv("ACCELERATE_USE_FSDP")
    assert together("llama-3.2-1b", 8192) == 1


@pytest.mark.parametrize(
    ("size", "units"), [(2, [[0, 1], [2, 3], [4]]), (5, [[0, 1, 2, 3, 4]]), (9, [[0, 1, 2, 3, 4]])]
)
def test_what_accelerate_shards(size: int, units: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """It calls ``fully_shard`` with each layer, then with others, all with the same arguments."""
    model = nn.ModuleDict({"first": nn.Linear(2, 2)})
    model["layers"] = layers = nn.ModuleList(nn.Sequential(nn.Linear(2, 2)) for _ in range(5))
    seen: list[Any] = []

    def record(modules: Any, **kwargs: Any) -> Any:
        assert kwargs == {"mesh": "a mesh"}
        seen.append(modules)
        return modules

    def prepare(one: Any, *others: Any, device_placement: Any = None) -> Any:
        from torch.distributed.fsdp import fully_shard

        if isinstance(one, nn.Module):
            for module in (*layers, one["first"], one):
                fully_shard(module, mesh="a mesh")
        return (one, *others, device_placement)

    monkeypatch.setattr(fsdp, "fully_shard", record)
    accelerator = SimpleNamespace(prepare=prepare)
    put_together(accelerator, size)
    assert accelerator.prepare(model, "an optimizer", device_placement=[True]) == (model, "an optimizer", [True])
    assert [[list(layers).index(layer) for layer in unit] for unit in seen[:-2]] == units
    assert seen[-2:] == [model["first"], model]
    assert accelerator.prepare("a loader") == ("a loader", None)
    assert fsdp.fully_shard is record
    monkeypatch.setattr(model, "__getitem__", None, raising=False)
    monkeypatch.setattr(fsdp, "fully_shard", None)
    with pytest.raises(TypeError):
        accelerator.prepare(model)
    assert fsdp.fully_shard is None, "as it was"
