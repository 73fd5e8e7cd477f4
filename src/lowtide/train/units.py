"""Units of FSDP2 as a run has them: accelerate makes one of each layer, and NCCL exchanges them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn

from lowtide.distributed.copy_engines import exchange_by_copy_engines
from lowtide.memory.stack import find_stack


def adapt_units(accelerator: Any, layers: int, copy_engines: bool) -> None:
    """Let accelerate make one unit of so many layers where it would make one of each, and exchange as told."""
    prepare = accelerator.prepare

    def prepared(*objects: Any, **kwargs: Any) -> Any:
        models = [one for one in objects if isinstance(one, nn.Module)]
        with _sharding(models[0], layers) if models and layers > 1 else contextlib.nullcontext():
            found = prepare(*objects, **kwargs)
        for model in found if isinstance(found, tuple) else (found,):
            if copy_engines and isinstance(model, nn.Module):
                exchange_by_copy_engines(model, required=True)
        return found

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
