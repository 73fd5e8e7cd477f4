"""Layers that are traced on the meta device, beside real ones on the CPU."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import pytest
import torch

import lowtide
from lowtide.errors import ArgumentValueError
from lowtide.measure.allocations import track_allocations
from lowtide.memory import ActivationPolicy, apply_policy
from lowtide.plan import layer_costs, plan_memory
from lowtide.plan.gpus import GPUS
from lowtide.plan.job import Job
from lowtide.plan.layer_costs import LayerCosts
from lowtide.plan.search import ladder
from lowtide.plan.settings import read_settings, with_layers
from lowtide.plan.shapes import ModelShape, read_shape
from lowtide.plan.step_costs import StepCosts
from models.tiny import HEAD_DIMS, tiny_config
from models.type_case import types

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")  # what models of all ages say when they are built

B, T = 2, 96
HUGE = replace(GPUS["h200"], memory_gib=1e5)  # whose memory refuses no type
# Mixtures of experts (three kinds of routers), latent attention, scores that are stored, linear attention, state
# spaces, convolutions, layers of several kinds, norms behind attention, projections without gates, a norm that saves
# its input in float32 alone, keys that are broadcast to the queries' heads.
COMPARED = ["deepseek_v3", "qwen3_next", "mamba2", "cohere2"]
MORE_COMPARED = ["gpt_oss", "lfm2", "olmo2", "glm4_moe", "falcon_h1", "nemotron_h", "gpt2", "starcoder2", "falcon"]
MORE = {"lfm2": {"full_attn_idxs": None, "layer_types": ["conv", "full_attention", "conv", "full_attention"]}}
SAMPLE = ["gemma4", "llama4", "jetmoe"]
IN_FLOAT32 = {"xlnet", "xlstm"}  # do not run in bfloat16
# Their layers are not one list, or transformers has no causal model for their text part alone.
REFUSED = {"blt", "emu3", "git", "hrm_text", "mllama", "reformer", "xlm"}


def config_class(model_type: str) -> Any:
    return transformers.models.auto.configuration_auto.CONFIG_MAPPING[model_type]


def settings_of(model_type: str, layers: int) -> dict[str, Any]:
    """A tiny model's config."""
    settings = read_settings(tiny_config(config_class(model_type), head_dim=HEAD_DIMS[0], decoder=True))
    return with_layers({**settings, **MORE.get(model_type, {})}, layers)


def job_of(shape: ModelShape, **changes: Any) -> Job:
    return replace(Job(shape, T, B, GPUS["h100"], torch.bfloat16, "sgd"), **changes)


def planned(settings: dict[str, Any], policy: ActivationPolicy, dtype: torch.dtype = torch.bfloat16) -> int:
    """Return the bytes that all layers save, by the planner."""
    shape = read_shape(settings)
    each = LayerCosts(job_of(shape, dtype=dtype)).kinds(policy)
    return sum(each[kind].saved for kind in shape.kind_of)


def measured(settings: dict[str, Any], policy: ActivationPolicy, dtype: torch.dtype = torch.bfloat16) -> int:
    """Return the bytes that a model's forward leaves, everything that is made once made in an earlier one."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**settings))
    model = model.to(dtype).train()
    model.config.use_cache = False
    lowtide.patch(model)
    apply_policy(model, policy)
    ids = torch.randint(3, 500, (B, T))
    model(input_ids=ids, labels=ids).loss.backward()
    model.zero_grad()
    gc.collect()
    with track_allocations() as seen:
        loss = model(input_ids=ids, labels=ids).loss
    assert loss.requires_grad
    random_states = 0 if policy.keep == "all" else torch.get_rng_state().numel()  # of each checkpoint, of torch
    return seen.events[-1].total_bytes - random_states * read_shape(settings).layers


def compare(model_type: str, policies: list[ActivationPolicy], dtype: torch.dtype = torch.bfloat16) -> None:
    """Compare the bytes of the layers that a model twice as deep has besides."""
    few, more = settings_of(model_type, 4), settings_of(model_type, 8)
    for policy in policies:
        found = measured(more, policy, dtype) - measured(few, policy, dtype)
        assert planned(more, policy, dtype) - planned(few, policy, dtype) == pytest.approx(found, rel=0.03), policy


@pytest.mark.parametrize("model_type", COMPARED)
def test_layers_save_what_is_planned(model_type: str) -> None:
    shape = read_shape(settings_of(model_type, 4))
    compare(model_type, ladder(job_of(shape), offload=False)[:1])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_experts_in_another_dtype_save_what_is_planned(dtype: torch.dtype) -> None:
    compare("glm4_moe", [ActivationPolicy(mlp_level=1)], dtype)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", [*COMPARED, *MORE_COMPARED, "llama4_text", "bamba", "granitemoehybrid"])
def test_layers_save_what_is_planned_by_every_policy(model_type: str) -> None:
    compare(model_type, ladder(job_of(read_shape(settings_of(model_type, 4))), offload=False))


def test_a_layer_that_recomputes_saves_what_is_planned() -> None:
    """Its input in the dtype of the residual stream, which Mamba 2 widens."""
    compare("mamba2", [ActivationPolicy(keep="input")])
    compare("olmo2", [ActivationPolicy(keep="attention", mlp_level=1)])


def test_a_loop_over_tokens_is_read_in_short_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    """What three short ones give for a longer sequence and a larger batch is what that takes itself."""
    job = job_of(read_shape(settings_of("qwen3_next", 2)), seq_len=2048, batch_size=3)
    policy = ActivationPolicy(keep="all", mlp_level=0)
    monkeypatch.setattr(layer_costs, "MOST_OPERATORS", 10**6)
    itself = LayerCosts(job).kinds(policy)
    monkeypatch.setattr(layer_costs, "MOST_OPERATORS", 0)
    short = LayerCosts(job).kinds(policy)
    assert [one.saved for one in short] == pytest.approx([one.saved for one in itself], rel=0.001)
    assert [one.forward for one in short] == pytest.approx([one.forward for one in itself], rel=0.02)
    assert [one.backward_bytes for one in short] == pytest.approx([one.backward_bytes for one in itself], rel=0.05)


def test_layers_of_several_kinds_are_counted_where_they_are() -> None:
    """A dense layer before a mixture's: phases add up the layers that have run, each by its kind."""
    settings = settings_of("deepseek_v3", 4)
    shape = read_shape(settings)
    assert shape.kind_of == (0, 1, 1, 1)
    assert shape.layer_params[0] != shape.layer_params[1]
    costs = StepCosts(job_of(shape))
    kept, lean = ActivationPolicy(keep="all", mlp_level=0), ActivationPolicy(keep="input", mlp_level=0)
    dense, mixture = (cost.saved for cost in costs.layers.kinds(kept))
    small = costs.layers.kinds(lean)[0].saved
    phases = {str(phase): phase for phase in costs.phases([(lean, 2), (kept, 2)])}
    assert phases["head"].activations == 2 * small + 2 * mixture + 2 * 2 * B * T * shape.hidden
    assert phases["backward of layer 0"].activations == dense
    assert phases["backward of layer 0"].gradients == 2 * (sum(shape.layer_params[1:]) + shape.vocab_params)
    assert costs.layers[kept].saved == round((dense + 3 * mixture) / 4)


def test_sizes_are_read_by_the_names_of_every_type() -> None:
    settings = {"model_type": "gptj", "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256, "rotary_dim": 8}
    shape = read_shape(settings)
    assert (shape.heads, shape.head_dim, shape.positions) == (4, 16, 256)
    notes = plan_memory(settings, 128, 1, budget_gib=4, device="h100").notes
    assert any("eager" in note for note in notes)


def test_a_plan_of_layers_without_attention_has_no_policy_that_saves_it() -> None:
    config = tiny_config(config_class("mamba2"), head_dim=HEAD_DIMS[0], decoder=True)
    plan = plan_memory(config, 64, 1, 0.25, device="h100")
    assert {cost.policy.keep for cost in plan.ladder} == {"all", "input"}
    assert any("not every layer of mamba2 runs fused attention" in note for note in plan.notes)
    assert any("1 kind(s) of layers, traced in Mamba2ForCausalLM" in note for note in plan.notes)
    assert plan.to_dict()["model"]["kind_of"] == (0, 0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    exec(plan.lines(), {"model": model})


def test_another_dtype_is_named_where_a_model_needs_it() -> None:
    config = tiny_config(config_class("xlnet"), head_dim=HEAD_DIMS[0], decoder=True)
    with pytest.raises(ArgumentValueError, match=r"'xlnet'.* Plan it in float32: --dtype float32"):
        plan_memory(config, 64, 1, device="h100")
    plan_memory(config, 64, 1, device="h100", dtype="float32")


def test_weights_that_stay_quantised_are_refused_and_others_planned_in_16_bits() -> None:
    settings = settings_of("olmo2", 2)
    with pytest.raises(
        ArgumentValueError, match=r"quantization_config: expected unset.*got gptq. Plan its config without"
    ):
        read_shape({**settings, "quantization_config": {"quant_method": "gptq", "bits": 4}})
    plan = plan_memory({**settings, "quantization_config": {"quant_method": "fp8"}}, 64, 1, device="h100")
    assert plan.peak_bytes == plan_memory(settings, 64, 1, device="h100").peak_bytes
    assert "the checkpoint has fp8 weights: planned as loaded in bfloat16" in plan.notes


def outcome(model_type: str) -> str | None:
    """Return why a type is refused, "" for one that is planned, None for one that transformers cannot build here.

    By its default config, or where that makes no model, or has no plan, by a tiny one.
    """
    why: str | None = None
    tiny = (lambda size=size: tiny_config(config_class(model_type), head_dim=size, decoder=True) for size in HEAD_DIMS)
    for make in (config_class(model_type), *tiny):
        try:
            config = make()
            with torch.device("meta"):
                transformers.AutoModelForCausalLM.from_config(config)
        except Exception:  # noqa: S112 (a default config may be incomplete)
            continue
        try:
            plan_memory(config, 128, 1, device=HUGE, dtype="float32" if model_type in IN_FLOAT32 else None)
        except ArgumentValueError as error:
            why = str(error)
        else:
            return ""
    return why


@pytest.mark.parametrize("model_type", SAMPLE)
def test_a_type_is_planned(model_type: str) -> None:
    assert outcome(model_type) == ""


@pytest.mark.slow
def test_nearly_every_causal_type_is_planned() -> None:
    found = {model_type: outcome(model_type) for model_type in types("causal")}
    refused = {model_type: why for model_type, why in found.items() if why}
    planned = sum(why == "" for why in found.values())
    assert planned >= 0.95 * (planned + len(refused)), refused
    assert refused.keys() <= REFUSED
    for model_type, why in refused.items():
        assert model_type in why
        assert why.endswith("with `lowtide profile`.")
