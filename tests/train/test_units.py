"""How accelerate comes to shard several layers as one unit of FSDP2."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn
from torch.distributed import fsdp

from lowtide.train.units import put_together


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
    monkeypatch.setattr(fsdp, "fully_shard", None)
    with pytest.raises(TypeError):
        accelerator.prepare(model)
    assert fsdp.fully_shard is None, "as it was"
