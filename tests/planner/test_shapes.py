"""Shapes are read from configs and from the models that they make, or refused with what the user can do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import lowtide
from lowtide.errors import ArgumentValueError
from lowtide.plan import Adapters, PlanArguments, plan_memory
from lowtide.plan.config import read_settings
from lowtide.plan.job import Job
from lowtide.train.shapes import DEFAULT, SHAPES

transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")

SMALL = {
    "num_hidden_layers": 3, "hidden_size": 42, "intermediate_size": 72, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 131, "tie_word_embeddings": False,
}  # fmt: skip
# Parameters: as counted in the published checkpoints, or in billions as their cards have them.
PUBLISHED = {
    "llama-3.2-1b": 1_235_814_400, "llama-3.2-3b": 3_212_749_824, "llama-3-8b": 8_030_261_248,
    "llama-3.1-8b": 8_030_261_248, "llama-3-70b": 70_553_706_496, "qwen3-0.6b": 596_049_920, "qwen3-1.7b": 1.72e9,
    "qwen3-4b": 4_022_468_096, "qwen3-8b": 8_190_735_360, "qwen3-14b": 14_768_307_200, "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624, "qwen3-next-80b-a3b": 80e9, "qwen3.5-35b-a3b": 35e9,
    "gpt-oss-20b": 20.9e9, "gpt-oss-120b": 116.8e9,
    "gemma-2-2b": 2_614_341_888, "gemma-3-270m": 268_098_176, "gemma-3-1b": 999_885_952, "gemma-3-4b": 3_880_099_328,
    "gemma-4-e2b": 5.1e9, "gemma-3-12b": 11_765_788_416, "gemma-3-27b": 27_009_002_240, "olmo-3-7b": 7_298_011_136,
    "olmo-3-32b": 32_234_279_936, "mistral-7b": 7_248_023_552, "mistral-small-24b": 23_572_403_200,
    "phi-4": 14_659_507_200, "smollm3-3b": 3_075_098_624, "glm-4.5-air": 106e9,
}  # fmt: skip


def job_of(config: Any) -> Job:
    return Job.of(config, PlanArguments(seq_len=64, dtype="bfloat16", device="h100"))


def on_meta(config: Any) -> Any:
    """A model without weights."""
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("name", [name for name in SHAPES if name != DEFAULT])
def test_named_shapes_have_the_published_parameters(name: str) -> None:
    params = sum(p.numel() for p in on_meta(transformers.AutoConfig.for_model(**SHAPES[name])).parameters())
    assert params == pytest.approx(PUBLISHED[name], rel=0.01)


def test_several_parts_for_text_are_refused() -> None:
    config = transformers.AutoConfig.for_model("musicgen")
    for given in (config, config.to_dict()):
        with pytest.raises(ArgumentValueError, match=r"^config: expected .* Multiple valid text configs"):
            plan_memory(given, 64, 1, 1)


def test_a_file_and_its_folder_are_read(tmp_path: Path) -> None:
    settings = {"model_type": "llama", **SMALL}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    assert read_settings(tmp_path) == read_settings(str(tmp_path / "config.json")) == read_settings(settings)


def test_the_text_part_of_a_config_is_read() -> None:
    text = {"model_type": "llama", **SMALL}
    whole = {"model_type": "llava", "text_config": text}
    assert read_settings(whole) == {**read_settings(text), "part_of": "llava"}
    (note,) = [note for note in plan_memory(whole, 64, 1, 1).notes if "llava" in note]
    assert "only the text part of llava is planned" in note


@pytest.mark.parametrize(
    ("model_type", "says"),
    [
        ("t5", r"'t5' \(Unrecognized configuration class.*transformers has no AutoModelForCausalLM for it"),
        ("git", r"'git' \(.* Measure"),
        ("xlm", r"'xlm' \(model: expected .*Policies are for the layers of one list"),
        ("mllama", r"'mllama_text_model' \(Unrecognized"),
    ],
)
def test_layers_that_do_not_run_without_weights_are_refused_with_a_way_on(model_type: str, says: str) -> None:
    with pytest.raises(ArgumentValueError, match=f"^model_type: expected a causal.*{says}.*with `lowtide profile`"):
        job_of(transformers.AutoConfig.for_model(model_type)).readings(None)


def test_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[1]")
    files = tmp_path / "config.json", tmp_path / "absent.json"
    for given in (3, None, ["llama"], torch.nn.Linear(2, 3), *files):
        with pytest.raises(ArgumentValueError, match=r"^config: expected"):
            job_of(given).readings(None)


@pytest.mark.parametrize(
    ("model_type", "settings", "fused"),
    [
        ("llama", {"hidden_act": "relu"}, False),
        ("llama", {"hidden_act": "gelu_pytorch_tanh"}, True),
        ("gemma3_text", {"hidden_activation": "gelu", "layer_types": ["full_attention"] * 3}, False),
        ("phi3", {"pad_token_id": 0}, True),
    ],
)
def test_mlps_that_a_patch_leaves_alone_have_no_levels(model_type: str, settings: dict[str, Any], fused: bool) -> None:
    config = transformers.AutoConfig.for_model(model_type, **{**SMALL, **settings})
    plan = plan_memory(config, 64, 2, 1, device="h100", dtype="float32")
    assert any("does not fuse every layer's MLP" in note for note in plan.notes) == (not fused)
    assert {policy.mlp_level is not None for policy in plan.policies} == {fused}
    model = transformers.AutoModelForCausalLM.from_config(config)
    lowtide.patch(model)
    assert {hasattr(layer.mlp, "checkpoint_level") for layer in model.model.layers} == {fused}


@pytest.mark.parametrize("change", [{"vocab_size": "many"}, {"model_type": None}, {"model_type": "nobody-knows-this"}])
def test_a_config_that_transformers_refuses_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ArgumentValueError, match=r"^config: expected"):
        read_settings({"model_type": "llama", **SMALL, **change})


@pytest.mark.parametrize("targets", [("lm_head",), ("nothing",)])
def test_adapters_of_no_layer_are_refused(targets: tuple[str, ...]) -> None:
    with pytest.raises(ArgumentValueError, match=r"^targets: expected names of the layers' projections, got rank 4 on"):
        plan_memory({"model_type": "llama", **SMALL}, 64, 1, 1, device="h100", adapters=Adapters(4, targets))
