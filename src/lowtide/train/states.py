"""The optimizer's part of a checkpoint, whatever shared it out: any engine of PyTorch's reads what any of them wrote.

One process and DDP write ``optimizer.pt``, as Trainer does. FSDP2 writes the folder ``optimizer`` by
`torch.distributed.checkpoint`: each rank its part, under the parameters' names.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from lowtide.train.ranks import in_group

WHOLE, PARTS = "optimizer.pt", "optimizer"
_KEY = "optimizer"


def save_parts(checkpoint: Path, model: Any, optimizer: Any) -> None:
    """Write each rank's part of the optimizer's states."""
    states = get_optimizer_state_dict(model, _inner(optimizer))
    save({_KEY: states}, checkpoint_id=checkpoint / PARTS, no_dist=not in_group())


def load_optimizer(checkpoint: Path, model: Any, optimizer: Any) -> None:
    """Give the optimizer its states of a checkpoint, each rank its part where the model is shared out.

    Args:
        checkpoint: the folder.
        model: as the engine has made it.
        optimizer: over the parameters of that.
    """
    optimizer = _inner(optimizer)
    if (checkpoint / PARTS).is_dir():
        told = {_KEY: get_optimizer_state_dict(model, optimizer)}
        load(told, checkpoint_id=checkpoint / PARTS, no_dist=not in_group())
        set_optimizer_state_dict(model, optimizer, told[_KEY])
        return
    whole = torch.load(checkpoint / WHOLE, map_location="cpu", weights_only=True)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    order = [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
    groups = [{**group, "params": [order[i] for i in group["params"]]} for group in whole["param_groups"]]
    named: Any = {"state": {order[i]: state for i, state in whole["state"].items()}, "param_groups": groups}
    set_optimizer_state_dict(model, optimizer, named, options=StateDictOptions(full_state_dict=True))


def _inner(optimizer: Any) -> Any:
    """Return what accelerate wraps: PyTorch makes empty states by a step, which a gradient scaler refuses."""
    return getattr(optimizer, "optimizer", optimizer)
