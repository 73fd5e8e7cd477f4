"""Units of FSDP2 with several layers: accelerate makes one of each layer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn

from lowtide.memory.stack import find_stack


def put_together(accelerator: Any, layers: int) -> None:
    """Let accelerate make one unit of so many layers where it would make one of each."""
    prepare = accelerator.prepare

    def prepared(*objects: Any, **kwargs: Any) -> Any:
        models = [one for one in objects if isinstance(one, nn.Module)]
        with _sharding(models[0], layers) if models else contextlib.nullcontext():
            return prepare(*objects, **kwargs)

    accelerator.prepare = prepared


@contextlib.contextmanager
def _sharding(model: nn.Module, size: int) -> Iterator[None]:
    """Have ``fully_shard``, called with each layer of a model in their order, shard every ``size`` as one."""
    from torch.distributed import fsdp

    layers, stock = list(find_stack(model).layers.values()), fsdp.fully_shard
    last_of = {id(unit[-1]): unit for unit in (layers[i : i + size] for i in range(0, len(layers), size))}

    def fully_shard(module: Any, **kwargs: Any) -> Any:
        if not any(module is layer for layer in layers):
            return stock(module, **kwargs)
        unit = last_of.get(id(module))
        return module if unit is None else stock(unit, **kwargs)

    fsdp.fully_shard = fully_shard  # accelerate imports it where it shards
    try:
        yield
    finally:
        fsdp.fully_shard = stock
