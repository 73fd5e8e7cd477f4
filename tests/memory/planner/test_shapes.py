"""Shapes are read from configs by the fields' names, and refused by the fields' names."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lowtide.errors import ArgumentTypeError, ArgumentValueError
from lowtide.memory import plan_memory
from lowtide.memory.planner.adapters import Adapters
from lowtide.memory.planner.shapes import read_settings, read_shape
from lowtide.train.shapes import DEFAULT, SHAPES

transformers = pytest.importorskip("transformers")

SMALL = {
    "num_hidden_layers": 3, "hidden_size": 42, "intermediate_size": 72, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 131, "tie_word_embeddings": False,
}  # fmt: skip
TYPES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"sliding_window": 16},
    "qwen2": {},
    "qwen3": {"tie_word_embeddings": True},
    "gemma": {"tie_word_embeddings": True},
    "gemma2": {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 16},
    "gemma3_text": {"layer_types": ["full_attention"] * 3},
    "mixtral": {"num_local_experts": 5, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_local_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    "phi3": {"pad_token_id": 0},
    "granite": {},  # not in the planner's own list: compared with the model that transformers builds
}
PUBLISHED = {  # parameters, as counted in the published checkpoints
    "llama-3.2-1b": 1_235_814_400,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "qwen3-0.6b": 596_049_920,
    "gemma-2-2b": 2_614_341_888,
    "gemma-3-270m": 268_098_176,
}


def on_meta(config: Any) -> Any:
    """A model without weights."""
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("model_type", TYPES)
def test_parameters_are_those_of_the_model(model_type: str) -> None:
    config = transformers.AutoConfig.for_model(model_type, **{**SMALL, **TYPES[model_type]})
    model, shape = on_meta(config), read_shape(config)
    assert shape.params == sum(p.numel() for p in model.parameters())
    assert shape.vocab_params == model.get_output_embeddings().weight.numel()
    layer = sum(p.numel() for p in model.model.layers[0].parameters())
    assert shape.layer_params == layer
    assert read_shape(model) == shape
    assert read_shape({"model_type": model_type, **SMALL, **TYPES[model_type]}) == shape


@pytest.mark.parametrize("name", PUBLISHED)
def test_named_shapes_have_the_published_parameters(name: str) -> None:
    assert read_shape(SHAPES[name]).params == PUBLISHED[name]


@pytest.mark.parametrize("name", [name for name in SHAPES if name != DEFAULT])
def test_named_shapes_are_read_without_transformers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = read_shape(SHAPES[name])
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    bare = read_shape(SHAPES[name])
    assert bare.params == whole.params
    assert bare.windows.count(0) == (0 if name.startswith("gemma") else whole.windows.count(0))


def test_windows_are_each_layer_s_own() -> None:
    assert read_shape({"model_type": "gemma2", **SMALL, **TYPES["gemma2"]}).windows == (16, 0, 16)
    assert read_shape({"model_type": "mistral", **SMALL, **TYPES["mistral"]}).windows == (16, 16, 16)
    assert read_shape({"model_type": "llama", **SMALL}).windows == (0, 0, 0)


@pytest.mark.parametrize(
    ("model_type", "settings", "why"),
    [
        ("llama", {"hidden_act": "relu"}, "their activation is relu"),
        ("llama", {"hidden_act": "gelu_pytorch_tanh"}, ""),
        ("llama", {}, ""),
        ("gemma", {"hidden_act": "relu", "hidden_activation": "silu"}, "their activation is relu"),
        ("gemma3_text", {"hidden_act": "relu", **TYPES["gemma3_text"]}, ""),
        ("gemma3_text", {"hidden_activation": "gelu", **TYPES["gemma3_text"]}, "their activation is gelu"),
        ("phi3", {"pad_token_id": 0}, ""),
        ("phi3", {"pad_token_id": 0, "hidden_act": "gelu"}, "their activation is gelu"),
    ],
)
def test_mlps_that_a_patch_leaves_alone_are_planned_as_they_are(
    model_type: str, settings: dict[str, Any], why: str
) -> None:
    """Their plan has no levels, and its lines run on the model."""
    config = transformers.AutoConfig.for_model(model_type, **{**SMALL, **settings})
    plan = plan_memory(config, 64, 2, 1, dtype="float32")
    assert plan.job.shape.stock_mlp == why
    assert plan.job.fused_mlp == (not why)
    assert (f"lowtide.patch does not fuse the MLPs, so that they have no levels: {why}" in plan.notes) == bool(why)
    assert {policy.mlp_level for policy in plan.policies} == {None if why else 0}
    model = transformers.AutoModelForCausalLM.from_config(config)
    exec(plan.lines(), {"model": model})
    assert {hasattr(layer.mlp, "checkpoint_level") for layer in model.model.layers} == {not why}


def test_projections_by_other_names_are_not_fused() -> None:
    """Of a type that the planner's list lacks, it looks at the model."""
    for model_type, settings in (("granite", {}), ("glm", {"attention_bias": False, "pad_token_id": 0})):
        model = on_meta(transformers.AutoConfig.for_model(model_type, **SMALL, **settings))
        assert not read_shape(model).stock_mlp
    model = on_meta(transformers.AutoConfig.for_model("granite", **SMALL))
    for layer in model.model.layers:
        layer.mlp.gate = layer.mlp.gate_proj
        del layer.mlp.gate_proj
    assert read_shape(model).stock_mlp == "they have no down_proj, gate_proj, up_proj"


def test_an_activation_that_the_config_names_elsewhere_is_noted_as_assumed() -> None:
    settings = {"model_type": "vaultgemma", **SMALL, "hidden_activation": "gelu"}  # not in the planner's own list
    for given, noted in ((settings, True), ({**settings, "hidden_act": "silu"}, False)):
        notes = plan_memory(given, 64, 1, 1, dtype="float32").notes
        assert any(note.startswith("the config has no hidden_act: assumes an activation") for note in notes) == noted
    assert not any("hidden_act" in note for note in plan_memory({"model_type": "llama", **SMALL}, 64, 1, 1).notes)


def test_several_parts_for_text_are_refused() -> None:
    config = transformers.AutoConfig.for_model("musicgen")
    for given in (config, config.to_dict()):
        with pytest.raises(ArgumentValueError, match="expected one part for text, got musicgen"):
            plan_memory(given, 64, 1, 1)


def test_adapters_of_stacked_projections_are_given_as_a_number() -> None:
    settings = {"model_type": "phi3", "pad_token_id": 0, **SMALL}
    with pytest.raises(ArgumentValueError, match="adapters: expected a number, for a model of stacked projections"):
        plan_memory(settings, 64, 1, 1, adapters=Adapters(4))
    plan_memory(settings, 64, 1, 1, adapters=4000)


def test_a_file_and_its_folder_are_read(tmp_path: Path) -> None:
    settings = {"model_type": "llama", **SMALL}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    assert read_shape(tmp_path) == read_shape(str(tmp_path / "config.json")) == read_shape(settings)


@pytest.mark.parametrize("name", ["llama-3.2-1b", "meta-llama/Llama-3.2-1B"])
def test_a_name_in_place_of_a_path_gets_a_hint(name: str) -> None:
    with pytest.raises(ArgumentValueError, match=r"config\.json, got .*fetched from the network.*lowtide plan --model"):
        plan_memory(name, 64, 1, 1)


def test_the_text_part_of_a_config_is_read() -> None:
    text = {"model_type": "llama", **SMALL}
    shape = read_shape({"model_type": "llava", "text_config": text})
    assert shape == replace(read_shape(text), part_of="llava")
    (note,) = [note for note in plan_memory(shape, 64, 1, 1).notes if "llava" in note]
    assert "only the text part of llava is planned" in note


def test_what_only_the_larger_models_config_has_is_read() -> None:
    """Qwen2-VL's text part has no word on tied embeddings: its output layer is the whole model's."""
    for tied in (True, False):
        config = transformers.AutoConfig.for_model("qwen2_vl", tie_word_embeddings=tied)
        for given in (config, config.to_dict()):
            assert read_settings(given)["tie_word_embeddings"] == tied
            with pytest.raises(ArgumentValueError, match=r"model_type: .*'qwen2_vl_text' \(Unrecognized"):
                read_shape(given)


@pytest.mark.parametrize(
    ("model_type", "says"),
    [
        ("t5", r"'t5' \(Unrecognized configuration class.*transformers has no AutoModelForCausalLM for it"),
        ("git", r"'git' \(.* Measure"),
        ("xlm", r"'xlm' \(not one list of layers: .*Policies are for the layers of one list"),
        ("mllama", r"'mllama_text_model' \(Unrecognized"),
    ],
)
def test_layers_that_do_not_run_without_weights_are_refused_with_a_way_on(model_type: str, says: str) -> None:
    with pytest.raises(ArgumentValueError, match=f"^model_type: expected a causal.*{says}.*with `lowtide profile`"):
        read_shape(transformers.AutoConfig.for_model(model_type))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"hidden_size": 0}, "hidden_size"),
        *(({name: None}, name) for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size")),
        ({"num_attention_heads": None}, "num_attention_heads"),
        ({"num_attention_heads": "6"}, "num_attention_heads"),
        ({"vocab_size": True}, "vocab_size"),
        ({"tie_word_embeddings": None}, "tie_word_embeddings"),
        ({"kv_lora_rank": 512}, "kv_lora_rank"),
        ({"cross_attention_layers": [3]}, "cross_attention_layers"),
        ({"layer_types": ["linear_attention"] * 3, "sliding_window": 4}, "layer_types"),
        ({"layer_types": ["full_attention"], "sliding_window": 4}, "layer_types"),
        ({"model_type": None}, "model_type"),
        ({"model_type": "nobody-knows-this"}, "model_type"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step"),
        ({"model_type": "mixtral"}, "num_local_experts"),
        ({"num_attention_heads": 6, "num_key_value_heads": 4}, "num_key_value_heads"),
        ({"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 5}, "num_experts_per_tok"),
    ],
)
def test_what_cannot_be_read_is_refused_by_its_name(
    change: dict[str, Any], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)  # whose own checks would come first
    with pytest.raises(ArgumentValueError, match=f"^{named}: expected"):
        read_shape({"model_type": "llama", **SMALL, **change})


def test_a_model_with_parts_that_are_not_planned_for_is_refused() -> None:
    model = on_meta(transformers.AutoConfig.for_model("llama", **SMALL))
    model.model.layers[1].extra = torch.nn.Linear(3, 4, device="meta")
    with pytest.raises(ArgumentValueError, match="'llama' with"):
        read_shape(model)
    del model.model.layers[1].extra
    model.model.embed_tokens.weight.requires_grad_(False)
    with pytest.raises(ArgumentValueError, match=r"embed_tokens\.weight frozen"):
        read_shape(model)


def test_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[1]")
    files = tmp_path / "config.json", tmp_path / "absent.json"
    for given in (3, None, ["llama"], torch.nn.Linear(2, 3), *files):
        error = ArgumentValueError if given in files else ArgumentTypeError
        with pytest.raises(error, match=r"^model_or_config: expected"):
            read_shape(given)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft asks transformers by an old name
@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gemma2"])
def test_adapters_are_counted_as_peft_makes_them(model_type: str) -> None:
    peft = pytest.importorskip("peft")
    config = transformers.AutoConfig.for_model(model_type, **{**SMALL, **TYPES[model_type]})
    model = transformers.AutoModelForCausalLM.from_config(config)
    made = peft.get_peft_model(model, peft.LoraConfig(r=5, target_modules="all-linear", task_type="CAUSAL_LM"))
    trained = sum(p.numel() for p in made.parameters() if p.requires_grad)
    assert Adapters(5).numbers(read_shape(config)) == trained
