"""A config's fields, from whatever has one, completed by transformers' defaults."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lowtide.errors import ArgumentTypeError, ArgumentValueError, message

_LAYER_TYPES = ("layer_types", "layers_block_type")


def read_settings(model_or_config: Any) -> dict[str, Any]:
    """Return a config's fields, completed by transformers' defaults.

    Args:
        model_or_config: As for `lowtide.plan.shapes.read_shape`.

    Raises:
        ArgumentTypeError: It is something else.
        ArgumentValueError: The config has no type, or transformers does not accept it or is not installed.
    """
    config: Any = getattr(model_or_config, "config", None) if is_module(model_or_config) else model_or_config
    if isinstance(config, (str, Path)):
        config = _read_file(Path(config).expanduser())
    config = _decoded(config)
    if callable(getattr(config, "get_text_config", None)):
        return _of_text(config.to_dict(), _text_part(config).to_dict())
    if not isinstance(config, Mapping):
        expected = "a transformers model or config, a dictionary, or the path of a config.json"
        raise ArgumentTypeError(message("model_or_config", expected, type(model_or_config).__name__))
    text = config["text_config"] if isinstance(config.get("text_config"), Mapping) else config
    if not isinstance(text.get("model_type"), str):
        raise ArgumentValueError(message("model_type", "the name of an architecture in the config", "none"))
    try:
        from transformers import AutoConfig
    except ImportError as error:
        hint = "pip install 'lowtide[hf]'"
        raise ArgumentValueError(message("model_or_config", "transformers, to read it", str(error), hint)) from error
    try:
        whole = AutoConfig.for_model(**(config if isinstance(config.get("model_type"), str) else text))
    except Exception as error:  # transformers' checks of configs have no common base
        why = " ".join(str(error).split())[:200] or type(error).__name__
        raise ArgumentValueError(message("model_or_config", "a config that transformers accepts", why)) from error
    return _of_text(whole.to_dict(), _text_part(whole).to_dict())


def _decoded(value: Any) -> Any:
    """Return JSON's values with the numbers that transformers writes as ``{"__float__": "Infinity"}``."""
    if isinstance(value, Mapping):
        if value.keys() == {"__float__"}:
            return float(value["__float__"])
        return {name: _decoded(one) for name, one in value.items()}
    return [_decoded(one) for one in value] if isinstance(value, list) else value


def _text_part(config: Any) -> Any:
    try:
        return config.get_text_config()
    except ValueError as error:  # it has several
        got, hint = f"{config.model_type}, which has several", "Pass the config of the one to plan."
        raise ArgumentValueError(message("model_or_config", "one part for text", got, hint)) from error


def _of_text(whole: Mapping[str, Any], text: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a model's text part, with the larger model's type as ``part_of`` where there is one."""
    settings = dict(text)
    if whole.get("model_type") != text.get("model_type"):
        settings["part_of"] = str(whole.get("model_type"))
        if whole.get("quantization_config"):  # of the whole alone
            settings["quantization_config"] = whole["quantization_config"]
        if settings.get("tie_word_embeddings") is None:  # of the whole alone, as its output layer is
            settings["tie_word_embeddings"] = whole.get("tie_word_embeddings")
    return settings


def _read_file(path: Path) -> Any:
    file = path / "config.json" if path.is_dir() else path
    try:
        settings = json.loads(file.read_text())
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
    lists = {name: value for name, value in settings.items() if _is_by_layer(name, value, old)}
    repeated = {name: (value * -(-layers // len(value)))[:layers] for name, value in lists.items()}
    return {**settings, **repeated, "num_hidden_layers": layers}


def _is_by_layer(name: str, value: Any, layers: int | None) -> bool:
    """Return whether a config's field has the kind of each layer: a name or a switch."""
    if not isinstance(value, list | tuple) or not value:
        return False
    kinds = all(isinstance(one, str) or one in (0, 1) for one in value)
    return name in _LAYER_TYPES or (kinds and "layer" in name and len(value) == layers)
