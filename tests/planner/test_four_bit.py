"""Plans of weights in 4 bits: their bytes beside bitsandbytes' own, what a GEMM dequantises, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from four_bit import in_four_bits
from lowtide.errors import ArgumentValueError
from lowtide.memory import ActivationPolicy
from lowtide.plan import Adapters, plan_memory
from lowtide.plan.four_bit import config_of
from lowtide.plan.gpus import GPUS
from lowtide.plan.job import Job
from lowtide.plan.layer_costs import LayerCosts
from lowtide.plan.shapes import read_shape
from lowtide.plan.step_costs import StepCosts
from lowtide.train.shapes import SHAPES

TINY: dict[str, Any] = {
    "vocab_size": 160, "hidden_size": 128, "intermediate_size": 384, "num_attention_heads": 4, "head_dim": 32,
    "num_key_value_heads": 2, "num_hidden_layers": 3,
}  # fmt: skip
LAYER = 4096 * (4096 + 1024 + 1024 + 4096) + 3 * 4096 * 14336  # of Llama-3-8B


def job(model: Any, *, nested: bool | None, **settings: Any) -> Job:
    """A step with adapters; ``nested`` None: over weights in bfloat16."""
    config = model if nested is None else {**model, "quantization_config": config_of(nested=nested)}
    return Job(read_shape(config), 2048, 1, GPUS["h100"], torch.bfloat16, "adamw", adapters=Adapters(16), **settings)


@pytest.mark.parametrize(("nested", "bits"), [(False, 4.5), (True, 4.127)])
def test_bytes_of_llama_3_8b(nested: bool, bits: float) -> None:
    planned, plain = job(SHAPES["llama-3-8b"], nested=nested), job(SHAPES["llama-3-8b"], nested=None)
    packed = 32 * LAYER
    assert planned.shape.packed_params == packed
    assert plain.weight_bytes - planned.weight_bytes == pytest.approx(packed * (2 - bits / 8), rel=1e-4)
    adapters = 4 * planned.trained_adapters
    assert StepCosts(planned).weights == planned.weight_bytes + adapters
    assert StepCosts(plain).weights == plain.weight_bytes + adapters


@pytest.mark.parametrize(
    ("model_type", "nested"), [("llama", True), ("phi3", False), ("mixtral", True), ("falcon_h1", False)]
)
def test_bytes_are_those_of_a_model(model_type: str, nested: bool) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("bitsandbytes")
    own = {"mlp_bias": True, "attention_bias": True} if model_type == "llama" else {"pad_token_id": 0}
    experts = (
        {"num_local_experts": 4, "num_experts": 4, "moe_intermediate_size": 192, "num_experts_per_tok": 2}
        if model_type.endswith(("moe", "mixtral"))
        else {}
    )
    config = transformers.AutoConfig.for_model(model_type, **TINY, **own, **experts)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    in_four_bits(model, torch.bfloat16, compress_statistics=nested)
    size = sum(p.nbytes for p in model.parameters())
    for module in model.modules():
        state = getattr(getattr(module, "weight", None), "quant_state", None)
        if state is not None:
            size += state.absmax.nbytes + (state.state2.absmax.nbytes if nested else 0)
    settings = {**config.to_dict(), "quantization_config": config_of(nested=nested)}
    planned = replace(job(settings, nested=nested), adapters=1).weight_bytes
    assert planned == pytest.approx(size, abs=2 * 4 * 7 * 3)  # a last block of scales that is not full, of each weight


@pytest.mark.parametrize("level", [0, 1])
def test_one_weight_is_dense_at_a_time(level: int) -> None:
    policy = ActivationPolicy(mlp_level=level)
    planned, plain = (job(SHAPES["llama-3-8b"], nested=nested) for nested in (True, None))
    planned, plain = (replace(one, seq_len=32768) for one in (planned, plain))  # the GPU's time, not the host's
    dense = 4096 * 14336 * (2 + 4 / 64)
    ours, theirs = LayerCosts(planned)[policy], LayerCosts(plain)[policy]
    assert ours.forward_bytes - theirs.forward_bytes == dense
    assert ours.backward_bytes - theirs.backward_bytes == dense
    assert ours.saved == theirs.saved
    assert ours.flop == theirs.flop
    each = LAYER * (0.5 + 1 / 64 + 4 / 2**14 + 2) / GPUS["h100"].bandwidth
    assert ours.forward - theirs.forward == pytest.approx(each, rel=0.02)
    again = 2 / 3 * 3 * 4096 * 14336 / LAYER * level
    assert ours.backward - theirs.backward == pytest.approx(each * (1 + again), rel=0.02)


def test_a_model_of_70_billion_fits_on_one_gpu() -> None:
    llama = {
        "model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
        "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False,
    }  # fmt: skip
    step: dict[str, Any] = {"seq_len": 4096, "batch_size": 1, "device": "h100", "adapters": Adapters(16)}
    with pytest.raises(ArgumentValueError, match=r"budget_gib.*: put the frozen weights into 4 bits .*, or take more"):
        plan_memory(llama, **step)
    plan = plan_memory({**llama, "quantization_config": config_of(nested=True)}, budget_gib=60, **step)
    assert "layers in 4 bits, double quantisation" in plan.title


@pytest.mark.parametrize(
    ("model", "more", "error"),
    [
        ({}, {"adapters": None}, "adapters: expected LoRA for weights in 4 bits, which are frozen, got none"),
        ({}, {"autocast": True, "dtype": "float32"}, "autocast: expected False for weights in 4 bits"),
        ({"llm_int8_skip_modules": ["lm_head", "model.layers.0.mlp"]}, {}, "modules, got model.layers.0.mlp"),
        ({"llm_int8_skip_modules": ["down_proj"]}, {}, "got down_proj. Plan its config without"),
        ({"llm_int8_skip_modules": []}, {}, "expected the output layer among llm_int8_skip_modules, got \\[\\]"),
        ({"llm_int8_skip_modules": ["vision_tower"]}, {}, "An output layer in 4 bits is not planned"),
        ({"bnb_4bit_compute_dtype": "float32"}, {"dtype": "bfloat16"}, "expected bfloat16, .* got float32. Set it"),
        ({"load_in_4bit": False, "load_in_8bit": True}, {}, "expected unset, .* got bitsandbytes in 8 bits"),
    ],
)  # fmt: skip
def test_what_is_refused(model: dict[str, Any], more: dict[str, Any], error: str) -> None:
    config = {**SHAPES["llama-3.2-1b"], "quantization_config": {**config_of(nested=False), **model}}
    with pytest.raises(ArgumentValueError, match=error):
        plan_memory(config, 64, 1, device="h100", **{"adapters": Adapters(4), **more})


def test_the_text_part_of_a_larger_model_is_in_4_bits_as_the_whole_is() -> None:
    pytest.importorskip("transformers")
    text = {"model_type": "gemma3_text", **TINY, "pad_token_id": 0}
    whole = {"model_type": "gemma3", "text_config": text}
    planned, plain = (read_shape({**whole, **more}) for more in ({"quantization_config": config_of(nested=True)}, {}))
    assert (planned.four_bit, plain.four_bit) == ("4 bits, double quantisation", "")
    assert planned.packed_params > 0
