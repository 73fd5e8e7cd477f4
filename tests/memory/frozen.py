"""What the tests of offloaded weights share: models whose weights are frozen, and where these are."""

from __future__ import annotations

from typing import Any

import pytest
import torch

LAYERS = 5


def adapted(model: Any) -> Any:
    """The model with LoRA, whose B is not 0."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(4)
    return peft.get_peft_model(model, peft.LoraConfig(r=3, target_modules="all-linear", init_lora_weights=False))


def inputs_trained(model: Any) -> Any:
    """A model of no library whose norms and head are trained, and all other weights frozen."""
    for name, p in model.named_parameters():
        p.requires_grad_("norm" in name or "head" in name)
    return model


def is_at_rest(handle: Any) -> bool:
    """Whether every parameter is the host's, and nothing is on the device."""
    pieces = handle._pieces
    freed = all(piece._flat.untyped_storage().size() == 0 for piece in pieces)
    made = not any(pending for piece in pieces for pending in piece._side.under_way)
    return freed and made and {p.data_ptr() for piece in pieces for p in piece.params} == hosts(handle)


def hosts(handle: Any) -> set[int]:
    """Where the host's tensors are."""
    return {view.data_ptr() for piece in handle._pieces for view in piece._on_host}
