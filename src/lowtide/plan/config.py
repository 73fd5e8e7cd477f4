"""A config's fields, from whatever has one, completed by transformers' defaults; and how its weights are quantised.

Of bitsandbytes' 4 bits: transformers puts the linear layers of all decoder layers into them; embedding, norms, biases,
a mixture's experts and the output layer stay in the model's dtype. The weights are frozen, and each GEMM dequantises
the one that it reads.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from lowtide.errors import ArgumentTypeError, ArgumentValueError, message

_LAYER_TYPES = ("layer_types", "layers_block_type")
BLOCK, OUTER_BLOCK = 64, 256  # weights that share a scale, and scales that share one: transformers sets neither
SINGLE, NESTED = "4 bits", "4 bits, double quantisation"
# Bytes of a weight: half a one and its part of a float32 scale; or of a scale of one byte, and of that one's scale.
BYTES = {"": 0.0, SINGLE: 1 / 2 + 4 / BLOCK, NESTED: 1 / 2 + 1 / BLOCK + 4 / (BLOCK * OUTER_BLOCK)}
SCALES = 4 / BLOCK  # bytes of a weight's part of the float32 scales, which double quantisation builds for each GEMM
_HEADS = {"lm_head", "embed_out", "output"}  # names of output layers
_INSIDE = ("layers", "self_attn", "mlp")  # parts of names of modules inside the layers
_DEQUANTISED = ("mxfp4", "fp8")  # of gpt-oss, and of DeepSeek-V3 and others


def read_settings(model_or_config: Any) -> dict[str, Any]:
    """Return a config's fields, completed by transformers' defaults; those of its text part.

    Args:
        model_or_config: A `transformers` model or config, a dictionary like a config.json's, or the path of one or of
            its folder.

    Raises:
        ArgumentTypeError: It is something else.
        ArgumentValueError: The config has no type, or transformers does not accept it or is not installed.
    """
    config: Any = getattr(model_or_config, "config", None) if is_module(model_or_config) else model_or_config
    if isinstance(config, (str, Path)):
        config = _read_file(Path(config).expanduser())
    if isinstance(config, Mapping):
        config = _made(config)
    if not callable(getattr(config, "get_text_config", None)):
        expected = "a transformers model or config, a dictionary, or the path of a config.json"
        raise ArgumentTypeError(message("model_or_config", expected, type(model_or_config).__name__))
    try:
        text = config.get_text_config()
    except ValueError as error:  # it has several
        got, hint = f"{config.model_type}, which has several", "Pass the config of the one to plan."
        raise ArgumentValueError(message("model_or_config", "one part for text", got, hint)) from error
    settings: dict[str, Any] = text.to_dict()
    if config.model_type != text.model_type:
        whole = config.to_dict()
        settings["part_of"] = config.model_type
        if whole.get("quantization_config"):  # of the whole alone
            settings["quantization_config"] = whole["quantization_config"]
        if settings.get("tie_word_embeddings") is None:  # of the whole alone, as its output layer is
            settings["tie_word_embeddings"] = whole.get("tie_word_embeddings")
    return settings


def _made(settings: Mapping[str, Any]) -> Any:
    """Return transformers' config of a dictionary; of its text part where the whole has no type."""
    if "model_type" not in settings and isinstance(text := settings.get("text_config"), Mapping):
        settings = {name: value for name, value in {**settings, **text}.items() if name != "text_config"}
    if not isinstance(settings.get("model_type"), str):
        raise ArgumentValueError(message("model_type", "the name of an architecture in the config", "none"))
    try:
        from transformers import AutoConfig
    except ImportError as error:
        hint = "pip install 'lowtide[hf]'"
        raise ArgumentValueError(message("model_or_config", "transformers, to read it", str(error), hint)) from error
    try:
        return AutoConfig.for_model(**settings)
    except Exception as error:  # transformers' checks of configs have no common base
        why = " ".join(str(error).split())[:200] or type(error).__name__
        raise ArgumentValueError(message("model_or_config", "a config that transformers accepts", why)) from error


def _decoded(value: dict[str, Any]) -> Any:
    """Return the number that transformers writes as ``{"__float__": "Infinity"}``; any other object as it is."""
    return float(value["__float__"]) if value.keys() == {"__float__"} else value


def _read_file(path: Path) -> Any:
    file = path / "config.json" if path.is_dir() else path
    try:
        settings = json.loads(file.read_text(), object_hook=_decoded)
    except (OSError, ValueError) as error:
        hint = (
            "Nothing is fetched from the network: pass transformers' config or model, or the path of a downloaded one."
            " Names such as llama-3.2-1b are for lowtide plan --model."
        )
        expected = "the path of a readable config.json"
        raise ArgumentValueError(message("model_or_config", expected, f"{file} ({error})", hint)) from error
    if not isinstance(settings, dict):
        raise ArgumentValueError(message("model_or_config", "a JSON object", f"something else in {file}"))
    return settings


def is_module(x: object) -> bool:
    """Return whether it is a model, without an import of torch."""
    return callable(getattr(x, "named_modules", None))


def with_layers(settings: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """Return a config's fields with another number of layers; their kinds repeat in the same order.

    Args:
        settings: As `read_settings` returns them.
        layers: How many.

    Raises:
        ArgumentValueError: Fewer than one.
    """
    if layers < 1:
        raise ArgumentValueError(message("layers", "at least 1", str(layers)))
    old = settings.get("num_hidden_layers")
    repeated: dict[str, Any] = {
        name: (value * -(-layers // len(value)))[:layers]
        for name, value in settings.items()
        if isinstance(value, list | tuple) and value
        if name in _LAYER_TYPES or ("layer" in name and len(value) == old)
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
    if (skipped := config.get("llm_int8_skip_modules")) is not None:
        parts = [str(name).split(".") for name in skipped]
        inside = any(one in _INSIDE or one.endswith("_proj") for name in parts for one in name)
        if inside or not _HEADS.intersection(name[-1] for name in parts):
            expected = "the output layer, and nothing inside the layers, among llm_int8_skip_modules"
            raise ArgumentValueError(message("quantization_config", expected, f"{[*skipped]}", hint))
    how = NESTED if config.get("bnb_4bit_use_double_quant") else SINGLE
    return Quantised(how, str(config.get("bnb_4bit_compute_dtype") or "").removeprefix("torch."))
