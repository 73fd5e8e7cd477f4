"""Units of FSDP2: how many layers each has, and accelerate's `prepare`, which makes one of each layer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn

from lowtide.errors import UnsupportedError, message
from lowtide.memory.planner.parallel import layers_per_unit
from lowtide.memory.stack import find_stack
from lowtide.train.config import TrainConfig
from lowtide.train.parallel import uses_fsdp


def layers_together(config: TrainConfig, args: Any, model: nn.Module, tokens: int) -> int:
    """Return how many layers of a model are one unit, for so many tokens of a process's batch.

    One by default on a CPU, which computes what it launches; within ``--memory-budget``, which single layers need the
    least of; and beside transformers' checkpointing, which runs layers' hooks again in backward.

    Raises:
        UnsupportedError: ``--fsdp-layers`` beside the latter: before torch 2.13, FSDP2 took its end for another's.
    """
    if (config.fsdp_layers or 1) > 1 and args.gradient_checkpointing:
        expected, hint = "--policy input in place of --gradient_checkpointing", "It recomputes the same layers."
        raise UnsupportedError(message("fsdp_layers", expected, str(config.fsdp_layers), hint))
    whole = config.memory_budget or args.gradient_checkpointing or args.device.type == "cpu"
    if config.fsdp_layers is not None or whole or not uses_fsdp():
        return config.fsdp_layers or 1
    layers = find_stack(model).layers.values()
    largest = max(sum(p.numel() for p in layer.parameters()) for layer in layers)
    return layers_per_unit(largest // config.group_size, tokens)


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
