"""Which models are measured, their optimizers, and the table of a plan beside real steps (tests/gpu/test_plan.py)."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch

from lowtide.bench.plan import PlanCheck, check_plan, planned_model
from lowtide.bench.ways import language_part, make_optimizer
from lowtide.errors import ArgumentValueError, UnsupportedError
from lowtide.memory import Adapters, plan_memory
from lowtide.memory.planner import four_bit
from lowtide.memory.planner.optimizers import OPTIMIZERS
from lowtide.train.shapes import SHAPES


def transformers() -> Any:
    return pytest.importorskip("transformers")


def config_of(model_type: str, **settings: Any) -> Any:
    return transformers().AutoConfig.for_model(model_type, **settings)


SEQUENCE_TO_SEQUENCE = (
    "bart", "mbart", "marian", "pegasus", "plbart", "prophetnet", "whisper", "t5", "musicgen", "musicgen_melody",
    "florence2", "grounding-dino",
)  # fmt: skip
ENCODERS = ("bert", "roberta", "electra", "xlm", "reformer", "bert-generation", "distilbert")


@pytest.mark.parametrize("model_type", [*SEQUENCE_TO_SEQUENCE, *ENCODERS])
def test_sequence_to_sequence_models_and_encoders_are_refused(model_type: str) -> None:
    with pytest.raises(ArgumentValueError, match=f"model: expected a causal language model, got a {model_type}"):
        language_part(config_of(model_type))


def test_several_parts_for_text_are_an_error_of_lowtides() -> None:
    pair = transformers().EncoderDecoderConfig.from_encoder_decoder_configs(config_of("bert"), config_of("bert"))
    with pytest.raises(ArgumentValueError, match=r"got a encoder-decoder\. Sequence-to-sequence"):
        language_part(pair)
    config = config_of("musicgen")
    config.is_encoder_decoder = False
    with pytest.raises(ArgumentValueError, match="got a musicgen with several parts for text"):
        language_part(config)


@pytest.mark.parametrize(
    ("model_type", "settings"),
    [
        *((name, {"is_decoder": True}) for name in ("bert", "roberta", "bert-generation")),
        *((name, {}) for name in ("llama", "gpt2", "gpt_neox", "opt", "xlnet", "mamba")),
    ],
)
def test_causal_models_are_taken_and_encoders_whose_config_makes_them_causal(
    model_type: str, settings: dict[str, Any]
) -> None:
    config = config_of(model_type, **settings)
    assert language_part(config) is config


@pytest.mark.parametrize("model_type", ["llava", "gemma3", "qwen2_audio"])
def test_of_a_model_that_sees_or_hears_the_language_model_is_taken(model_type: str) -> None:
    config = config_of(model_type)
    assert language_part(config) is config.get_text_config()
    assert type(language_part(config)) in transformers().MODEL_FOR_CAUSAL_LM_MAPPING


CHECK = PlanCheck(
    predicted_bytes=11 * 2**30,
    peak_bytes=10 * 2**30,
    predicted_seconds=0.9,
    seconds=1.0,
    reserved_bytes=12 * 2**30,
    machine={"gpu": "NVIDIA Q1"},
)


def test_a_check_is_a_table() -> None:
    _, peak, seconds, held = str(CHECK).splitlines()
    assert peak.split() == ["peak", "GiB", "11.00", "10.00", "+10.0%"]
    assert seconds.split() == ["s", "a", "step", "0.900", "1.000", "-10.0%"]
    assert held == "PyTorch's allocator held 12.00 GiB; NVIDIA Q1"
    assert json.loads(json.dumps(CHECK.to_dict()))["peak_gib"] == 10


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_a_check_needs_a_gpu() -> None:
    plan = plan_memory(SHAPES["llama-3.2-1b"], 1024, 1, device="h100")
    with pytest.raises(UnsupportedError, match=r"^check: expected a CUDA GPU"):
        check_plan(SHAPES["llama-3.2-1b"], plan)


@pytest.mark.parametrize(
    ("change", "adapters", "said"),
    [
        (
            {"quantization_config": four_bit.config_of(nested=False)},
            Adapters(8),
            "check: expected weights in 16 or 32 bits, got 4",
        ),
        ({}, 5000, "check: expected adapters by their rank, got 5000 parameters. Plan with lowtide.memory.Adapters"),
    ],
)
def test_what_cannot_be_checked(change: dict[str, Any], adapters: Any, said: str) -> None:
    settings = {**SHAPES["llama-3.2-1b"], **change}
    plan = plan_memory(settings, 1024, 1, device="h100", adapters=adapters)
    with pytest.raises(UnsupportedError, match=re.escape(said)):
        check_plan(settings, plan)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_checked_plans_layers_are_compiled_as_planned(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers()
    few = {**SHAPES["llama-3.2-1b"], "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96}
    few |= {"vocab_size": 99, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    plan = plan_memory(few, 64, 1, device="h100", compile_layers=compiled)
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **settings: calls.append(settings))
    planned_model(few, plan, torch.device("cpu"))
    assert calls == [{"dynamic": False}] * 2 * compiled


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name not in ("adamw-8bit", "adamw")])
def test_an_optimizer_keeps_as_many_tensors_as_was_planned(name: str) -> None:
    weight = torch.nn.Parameter(torch.randn(7, 11))
    optimizer = make_optimizer(name, [weight])
    weight.grad = torch.randn_like(weight)
    optimizer.step()
    kept = [x for x in optimizer.state[weight].values() if isinstance(x, torch.Tensor) and x.shape == weight.shape]
    assert len(kept) == OPTIMIZERS[name].states
