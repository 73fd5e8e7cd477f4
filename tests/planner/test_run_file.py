"""Configs of fine-tuning runs, as what is planned of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from lowtide.errors import ArgumentValueError
from lowtide.plan import Adapters, plan_memory
from lowtide.plan.run_file import read_run
from promises import promise

pytestmark = promise("commands")
TRL = {"model_name_or_path": "llama-3-8b"}
AXOLOTL = {"base_model": "llama-3-8b", "sequence_len": 2048, "micro_batch_size": 2}
PLAIN = {"optimizer": "adamw", "keep_gradients": False}


def read(folder: Path, settings: dict[str, Any], deepspeed: dict[str, Any] | None = None) -> Any:
    if deepspeed is not None:
        (folder / "ds.json").write_text(json.dumps(deepspeed))
        settings = {**settings, "deepspeed": "ds.json"}
    (folder / "run.yaml").write_text(yaml.safe_dump(settings))
    return read_run(folder / "run.yaml")


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (TRL, {"seq_len": 1024, "batch_size": 8, **PLAIN}),
        (
            {**TRL, "max_length": 4096, "gradient_accumulation_steps": 4, "optim": "adamw_bnb_8bit", "bf16": False},
            {"seq_len": 4096, "batch_size": 8, "optimizer": "adamw-8bit", "keep_gradients": True, "autocast": False},
        ),
        (
            {**TRL, "use_peft": True, "lora_r": 8, "lora_target_modules": ["q_proj"], "dtype": "bfloat16"},
            {"seq_len": 1024, "batch_size": 8, "adapters": Adapters(8, ("q_proj",)), "dtype": "bfloat16", **PLAIN},
        ),
        (
            {**AXOLOTL, "adapter": "qlora", "load_in_4bit": True, "lora_r": 32, "lora_target_linear": True},
            {"seq_len": 2048, "batch_size": 2, "adapters": Adapters(32), **PLAIN},
        ),
        ({**AXOLOTL, "bf16": True, "fsdp": ["full_shard"]},
         {"seq_len": 2048, "batch_size": 2, "dtype": "bfloat16", "parallel": "fsdp2", **PLAIN}),
    ],
)  # fmt: skip
def test_what_a_run_says(settings: dict[str, Any], expected: dict[str, Any], tmp_path: Path) -> None:
    found = read(tmp_path, settings)
    assert found.model == "llama-3-8b"
    assert found.arguments == expected
    assert found.four_bit == ("load_in_4bit" in settings)
    assert found.checkpointed == ("base_model" not in settings)


def test_a_run_that_names_no_projections_adapts_those_of_peft(tmp_path: Path) -> None:
    adapters = read(tmp_path, {**TRL, "use_peft": True}).arguments["adapters"]
    assert adapters == Adapters(16, None)
    sizes: dict[str, Any] = {"hidden_size": 42, "num_hidden_layers": 3, "vocab_size": 99, "intermediate_size": 64}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8}
    given: dict[str, Any] = {"seq_len": 64, "device": "h100"}
    own, named = (
        plan_memory({"model_type": "qwen3", **sizes, **heads}, adapters=one, **given).job.model.adapter_params
        for one in (adapters, Adapters(16, ("q_proj", "v_proj")))
    )
    assert own == named
    with pytest.raises(ArgumentValueError, match=r"^targets: .* projections, got rank 16 on peft's"):
        plan_memory({"model_type": "smollm3", "pad_token_id": 0, **sizes, **heads}, adapters=adapters, **given)


def test_deepspeeds_config_beside_it(tmp_path: Path) -> None:
    for stage, way in ((3, "zero3"), (0, "ddp")):
        zero = {"stage": stage, "offload_param": None}
        deepspeed = {"zero_optimization": zero, "train_micro_batch_size_per_gpu": 2}
        found = read(tmp_path, {**TRL, "gradient_accumulation_steps": None}, deepspeed)
        assert (found.arguments["parallel"], found.arguments["batch_size"]) == (way, 2)


@promise("errors")
@pytest.mark.parametrize(
    ("settings", "deepspeed", "says"),
    [
        ({"max_length": 4}, None, "run: expected model_name_or_path, or base_model, got neither"),
        (
            {**TRL, "optim": "lion_32bit"},
            None,
            "optim: expected an optimizer that the planner has.*got lion_32bit",
        ),
        (TRL, {"zero_optimization": {"stage": 2}}, "stage: expected 0 or 3, got 2"),
        (TRL, {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}, "offload_param: expected none"),
        ({**TRL, "deepspeed": "gone.json"}, None, "run: expected a config in YAML or JSON, got .*gone.json"),
    ],
)
def test_what_is_refused(settings: dict[str, Any], deepspeed: Any, says: str, tmp_path: Path) -> None:
    with pytest.raises(ArgumentValueError, match=f"^{says}"):
        read(tmp_path, settings, deepspeed)


@promise("errors")
@pytest.mark.parametrize("text", ["[1]", "a: b: c", "\tx"])
def test_a_file_of_something_else_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(ArgumentValueError, match=r"^run: expected"):
        read_run(tmp_path / "run.yaml")
