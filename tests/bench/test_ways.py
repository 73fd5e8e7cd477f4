"""Which models are measured: causal language models, and the one inside a model that sees or hears as well."""

from __future__ import annotations

from typing import Any

import pytest

from lowtide.bench.ways import language_part
from lowtide.errors import ArgumentValueError

transformers = pytest.importorskip("transformers")


def config_of(model_type: str, **settings: Any) -> Any:
    return transformers.AutoConfig.for_model(model_type, **settings)


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
    pair = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(config_of("bert"), config_of("bert"))
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
    assert type(language_part(config)) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
