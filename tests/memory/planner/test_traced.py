"""Layers that are traced on the meta device, beside real ones on the CPU and beside the formulas."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import pytest
import torch

import lowtide
from lowtide.bench.tiny import HEAD_DIMS, tiny_config
from lowtide.measure.allocations import track_allocations
from lowtide.memory import ActivationPolicy, apply_policy, plan_memory
from lowtide.memory.planner.gpus import GPUS
from lowtide.memory.planner.job import Job
from lowtide.memory.planner.kind_costs import LayerCosts
from lowtide.memory.planner.layer_costs import checkpoint_bytes
from lowtide.memory.planner.search import ladder
from lowtide.memory.planner.shapes import ModelShape, read_settings, read_shape, with_layers
from lowtide.memory.planner.traced import trace

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")  # what models of all ages say when they are built

B, T = 2, 96
# Experts, latent attention, scores that are stored, linear attention, state spaces, convolutions, several kinds of
# layers, norms behind attention, projections without gates.
COMPARED = [
    "deepseek_v3", "gpt_oss", "qwen3_next", "mamba2", "falcon_h1", "nemotron_h", "lfm2", "glm4_moe", "olmo2", "gpt2",
    "starcoder2", "llama4_text", "bamba",
]  # fmt: skip
MORE = {"lfm2": {"full_attn_idxs": None, "layer_types": ["conv", "full_attention", "conv", "full_attention"]}}


def settings_of(model_type: str, layers: int) -> dict[str, Any]:
    """A tiny model's config."""
    config_class = type(transformers.AutoConfig.for_model(model_type))
    settings = read_settings(tiny_config(config_class, head_dim=HEAD_DIMS[0], decoder=True))
    return with_layers({**settings, **MORE.get(model_type, {})}, layers)


def job_of(shape: ModelShape, **changes: Any) -> Job:
    return Job(shape, T, B, GPUS["h100"], torch.bfloat16, "sgd", **changes)


def planned(settings: dict[str, Any], policy: ActivationPolicy) -> int:
    """Return the bytes that all layers save, by the planner."""
    shape = read_shape(settings)
    each = LayerCosts(job_of(shape)).each(policy)
    return sum(each[kind].saved for kind in shape.kind_of)


def measured(settings: dict[str, Any], policy: ActivationPolicy) -> int:
    """Return the bytes that a model's forward leaves, everything that is made once made in an earlier one."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**settings))
    model = model.to(torch.bfloat16).train()
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


@pytest.mark.parametrize("model_type", COMPARED)
def test_layers_save_what_is_planned(model_type: str) -> None:
    """The layers that a model twice as deep has besides, by every policy."""
    few, more = settings_of(model_type, 4), settings_of(model_type, 8)
    shape = read_shape(few)
    assert shape.traced is not None
    for policy in ladder(job_of(shape), offload=False):
        found = measured(more, policy) - measured(few, policy)
        expected = planned(more, policy) - planned(few, policy)
        print(model_type, policy, found, expected, f"{expected / found - 1:+.3%}")
        assert found == pytest.approx(expected, rel=0.05), policy
