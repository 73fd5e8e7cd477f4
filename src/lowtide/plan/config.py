"""A config's fields, from whatever has one, completed by transformers' defaults; and how its weights are quantised.

Of bitsandbytes' 4 bits: transformers puts the linear layers of all decoder layers into them; embedding, norms, biases,
a mixture's experts and the output layer stay in the model's dtype. The weights are frozen, and each GEMM dequantises
the one that it reads.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from lowtide.errors import ArgumentValueError, message
from lowtide.memory.policy import check_count

BLOCK, OUTER_BLOCK = 64, 256  # weights that share a scale, and scales that share one: transformers sets neither
SINGLE, NESTED = "4 bits", "4 bits, double quantisation"
# Bytes of a weight: half a one and its part of a float32 scale; or of a scale of one byte, and of that one's scale.
BYTES = {"": 0.0, SINGLE: 1 / 2 + 4 / BLOCK, NESTED: 1 / 2 + 1 / BLOCK + 4 / (BLOCK * OUTER_BLOCK)}
SCALES = 4 / BLOCK  # bytes of a weight's part of the float32 scales, which double quantisation builds for each GEMM
_HEADS = r"\b(lm_head|embed_out|output)\b"  # names of output layers, and of modules inside the layers:
_INSIDE = r"\b(layers|self_attn|mlp)\b|_proj\b"
_DEQUANTISED = ("mxfp4", "fp8")  # of gpt-oss, and of DeepSeek-V3 and others


def read_settings(config: Any) -> dict[str, Any]:
    """Return a config's fields, completed by transformers' defaults; those of its text part.

    Args:
        config: A `transformers` config, a dictionary like a config.json's, or the path of one or of its folder.

    Raises:
        ArgumentValueError: It is something else, has several parts for text, or transformers does not accept it.
    """
    from transformers import AutoConfig, PretrainedConfig

    hint = "Of a model pass model.config, of a config with several parts for text that of one."
    try:
        if isinstance(config, (str, Path)):
            hint = "Nothing is fetched from the network. Names such as llama-3.2-1b are for lowtide plan --model."
            config, _ = PretrainedConfig.get_config_dict(Path(config).expanduser(), local_files_only=True)
        if isinstance(config, Mapping):
            hint = ""
            config = AutoConfig.for_model(**config)
        text = config.get_text_config()
    except Exception as error:  # transformers' checks of configs have no common base
        why = " ".join(str(error).split())[:200] or type(error).__name__
        expected = "a config that transformers accepts, a dictionary like it, or the path of a config.json"
        raise ArgumentValueError(message("config", expected, why, hint)) from error
    settings: dict[str, Any] = text.to_dict()
    if config.model_type != text.model_type:
        whole = config.to_dict()
        settings["part_of"] = config.model_type
        for name in ("quantization_config", "tie_word_embeddings"):  # of the whole, as the output layer is
            if settings.get(name) is None and name in whole:
                settings[name] = whole[name]
    return settings


def with_layers(settings: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """Return a config's fields with another number of layers; their kinds repeat in the same order.

    Args:
        settings: As `read_settings` returns them.
        layers: How many.

    Raises:
        ArgumentValueError: Fewer than one.
    """
    check_count("layers", layers)
    old = settings.get("num_hidden_layers")
    repeated: dict[str, Any] = {
        name: (value * -(-layers // len(value)))[:layers]
        for name, value in settings.items()
        if isinstance(value, list | tuple) and value
        if name in ("layer_types", "layers_block_type") or ("layer" in name and len(value) == old)
    }
    if own := settings.get("per_layer_config"):  # of some layers, by their index
        repeated["per_layer_config"] = {layer: value for layer, value in own.items() if int(layer) < layers}
    return {**settings, **repeated, "num_hidden_layers": layers}


def nf4(*, nested: bool) -> dict[str, Any]:
    """Return the ``quantization_config`` of a model loaded in NF4."""
    return {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": nested,
    }


class Quantised(NamedTuple):
    """How a checkpoint has its weights."""

    four_bit: str = ""  # `SINGLE` or `NESTED`: the layers' linear layers are in 4 bits
    computes: str = ""  # the dtype that these compute in; empty: the model's
    loaded: str = ""  # the format of weights that are dequantised as they are loaded, and trained in the job's dtype


def quantised(settings: Mapping[str, Any]) -> Quantised:
    """Return how a config's weights are quantised.

    Raises:
        ArgumentValueError: In a way that is not planned: other than 4 bits, or not all linear layers of the layers
            and nothing else.
    """
    config = settings.get("quantization_config")
    if not config:
        return Quantised()
    config = config if isinstance(config, Mapping) else {"quant_method": config}
    hint = "Plan its config without quantization_config: an upper bound."
    if not config.get("load_in_4bit"):
        method = config.get("quant_method")
        method = str(getattr(method, "value", method))  # of transformers' enumeration
        if method in _DEQUANTISED:
            return Quantised(loaded=method)
        loaded = ", ".join(_DEQUANTISED)
        expected = f"unset, 4 bits by bitsandbytes, or weights that transformers can load in 16 bits ({loaded})"
        bits = " in 8 bits" if config.get("load_in_8bit") else ""
        raise ArgumentValueError(message("quantization_config", expected, f"{method}{bits}", hint))
    names = " ".join(config.get("llm_int8_skip_modules") or ["lm_head"])
    if re.search(_INSIDE, names) or not re.search(_HEADS, names):
        expected = "the output layer, and nothing inside the layers, among llm_int8_skip_modules"
        raise ArgumentValueError(message("quantization_config", expected, names, hint))
    how = NESTED if config.get("bnb_4bit_use_double_quant") else SINGLE
    return Quantised(how, str(config.get("bnb_4bit_compute_dtype") or "").removeprefix("torch."))
