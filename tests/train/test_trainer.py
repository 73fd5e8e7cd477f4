"""What LowtideTrainer does in Trainer's place, a part at a time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lowtide.train.trainer import LowtideTrainer


@pytest.mark.parametrize("writes", [True, False])
def test_of_a_shared_out_model_the_first_rank_alone_saves(writes: bool) -> None:
    """The others hold nothing, and an older Trainer would write that over the first one's file."""
    saved: list[dict[str, torch.Tensor]] = []

    def save(output_dir: str | None, state_dict: dict[str, torch.Tensor]) -> None:
        saved.append(state_dict)

    args = SimpleNamespace(should_save=writes)
    trainer: Any = SimpleNamespace(is_fsdp_enabled=True, model=torch.nn.Linear(3, 2), args=args, _save=save)
    LowtideTrainer.save_model(trainer, "nowhere")
    assert [sorted(state) for state in saved] == ([["bias", "weight"]] if writes else [])
