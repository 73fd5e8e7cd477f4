"""Every model type with the weights of its experts in one module, beside stock; and the modules on their own."""

import copy

import pytest
import torch

import lowtide
from lowtide.bench import models_case
from lowtide.models import experts_part
from lowtide.models.instance import part_of
from models.conftest import types_of
from models.test_joined_types import on_meta

pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore")  # what models of all ages say when they are built

OTHER = "its experts are not down(act(gate(x)) * up(x)) with SiLU or tanh-GELU, weighted and summed"
NOT_ONE = "gate and up of its experts are not one weight, gate_up_proj"
INPUTS = "its forward does not take hidden states, the experts of each token and their weights"
SHAPES = "the shapes of its weights are not those of gate and up together, and down"
BESIDE = "it has weights or buffers beside those of its experts"
# Each type: how many layers have fused experts, and why others are not.
TYPES = {
}
# Sampled for what is different about them: layouts, limits, biases, shared experts, routers.
SAMPLE = ["mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "deepseek_v3", "glm4_moe", "olmoe", "minimax", "jamba",
          "granitemoe", "deepseek_v4", "minimax_m3_vl_text", "aria_text", "llama4_text", "nemotron_h"]  # fmt: skip


def experts_of(model):
    return {name: module for name, module in model.named_modules() if experts_part.is_candidate(module)}
