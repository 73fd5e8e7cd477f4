"""Imported by a rank before its run: it prints how many digits that rank's own losses and gradients have."""

from __future__ import annotations

import sys
from typing import Any

import torch
from lowtide.train.trainer import LowtideTrainer

_step = LowtideTrainer.training_step


def _has_more(tensor: Any) -> bool:
    """Return whether a tensor, or this rank's part of it, has digits that bfloat16 has not."""
    own = getattr(tensor, "to_local", lambda: tensor)().detach()
    return own.dtype == torch.float32 and bool((own.bfloat16().float() != own).any())


def _spied(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    loss = _step(self, model, *args, **kwargs)
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    finer = sum(map(_has_more, gradients))
    sys.stdout.write(f"spied loss {_has_more(loss)} gradients {len(gradients)} {finer}\n")
    return loss


LowtideTrainer.training_step = _spied
