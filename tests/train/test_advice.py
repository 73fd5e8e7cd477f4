"""Out of memory: what would fit by the planner's figures, without a trainer's step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lowtide.train import advise
from promises import promise
from train.conftest import SHAPE

pytestmark = promise("errors")
ERROR = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.\nMore lines.")


def trainer(**more: Any) -> Any:
    args = {
        "per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "optim": "adamw_torch_fused", "bf16": False,
        "fp16": False, "world_size": 1, "device": torch.device("cpu"), "max_length": 64, "process_index": 0,
    }  # fmt: skip
    model = LlamaForCausalLM(LlamaConfig(**{k: v for k, v in SHAPE.items() if k != "model_type"}))
    return SimpleNamespace(args=SimpleNamespace(**args | more), model=model, state=SimpleNamespace(global_step=6))


def test_it_names_a_budget_a_batch_and_a_length() -> None:
    lines = str(advise(ERROR, trainer(), resume="Resume with: this.")).splitlines()
    assert lines[0] == "out of memory in step 7. CUDA out of memory. Tried to allocate 9 GiB."
    assert lines[1] == "What would fit, by the planner, of 4 x 64 tokens:"
    assert [line.split()[0] for line in lines[2:5]] == [
        "--memory-budget",
        "--per_device_train_batch_size",
        "--max_length",
    ]
    assert "--per_device_train_batch_size 2, and twice the steps accumulated" in lines[3]
    assert "--max_length 32" in lines[4]
    assert lines[5:] == ["Resume with: this."]


@pytest.mark.parametrize("kind", ["packed", "paired"])
def test_it_names_rows_of_the_arguments_not_of_the_plan(kind: str) -> None:
    """Packed rows are planned as one sequence, those of DPO as two."""
    one = trainer(**({"packing": True, "packing_strategy": "bfd"} if kind == "packed" else {}))
    if kind == "paired":
        one.args = type("DPOConfig", (SimpleNamespace,), {})(**vars(one.args))
    lines = str(advise(ERROR, one)).splitlines()
    assert lines[1].endswith(f"of {'1 x 256' if kind == 'packed' else '8 x 64'} tokens:")
    assert "--per_device_train_batch_size 2," in lines[3]
    assert "--max_length 32 " in lines[4]


def test_where_nothing_fits_the_planner_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowtide.train.advice.available_bytes", lambda: 1000)
    monkeypatch.setattr("lowtide.train.advice.resident_bytes", lambda: 1000)
    text = str(advise(ERROR, trainer(world_size=2, process_index=1)))
    assert text.startswith("out of memory on rank 1 in step 7.")
    assert "Nothing near it fits: expected at least" in text


@pytest.mark.parametrize(
    ("more", "says"),
    [({"optim": "lion"}, "an optimizer that the planner has"), ({"max_length": None}, "the most tokens of a sequence")],
)
def test_without_figures_it_says_what_is_missing(more: dict[str, Any], says: str) -> None:
    text = str(advise(ERROR, trainer(**more)))
    assert "The planner has no figures for it" in text
    assert says in text
    assert "lower --per_device_train_batch_size or --max_length" in text


def test_before_there_is_a_trainer_the_model_does_not_fit() -> None:
    assert "The model itself does not fit" in str(advise(ERROR, None))
