"""What a run under a budget tells the planner of its adapters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lowtide.train.planned import planned_adapters
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from lowtide.memory import Adapters, plan_memory

SMALL = {
    "vocab_size": 61, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 3,
    "num_key_value_heads": 1, "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip
TARGETS = ("o_proj", "down_proj")


@pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6:FutureWarning")  # peft's calls
@pytest.mark.parametrize("model_type", ["phi3", "llama"])
def test_adapters_are_told_as_the_planner_takes_them(model_type: str) -> None:
    """Phi-3's queries, keys and values are one projection: adapters on others have the planner's names and sizes."""
    config: Any = AutoConfig.for_model(model_type, **SMALL)
    model = get_peft_model(
        AutoModelForCausalLM.from_config(config), LoraConfig(r=5, target_modules=list(TARGETS), task_type="CAUSAL_LM")
    )
    numbers = sum(p.numel() for p in model.parameters() if p.requires_grad)
    adapters = planned_adapters(model)
    assert adapters == (numbers if model_type == "phi3" else Adapters(5, TARGETS))
    plan = plan_memory(config, 64, 1, 1, dtype=torch.float32, adapters=adapters)
    assert plan.job.trained_adapters == numbers
