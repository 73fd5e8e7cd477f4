"""The model of a run: pretrained weights from a folder, or random ones for a config."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lowtide.errors import ArgumentValueError, message
from lowtide.train.shapes import DEFAULT, SHAPES

_WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")


def has_weights(name: str) -> bool:
    """Return whether a ``--model`` is a folder with pretrained weights (and so with a tokenizer of its own)."""
    folder = Path(name).expanduser()
    return name not in SHAPES and any((folder / weights).is_file() for weights in _WEIGHTS)


def model_config(name: str, *, vocab_size: int) -> Any:
    """Return the `transformers` config that a ``--model`` names.

    Args:
        name: a built-in name, a .json file, or a folder with a config.json.
        vocab_size: the vocabulary of the default model, which has none of its own.

    Raises:
        ArgumentValueError: there is no such model, or its config cannot be used.
    """
    if name in SHAPES:
        shape = {"vocab_size": vocab_size, **SHAPES[name]} if name == DEFAULT else SHAPES[name]
        return _from_settings(shape, name)
    path = Path(name).expanduser()
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        got = f"{name}, a folder without one" if path.is_dir() else repr(name)
        expected = f"a folder with a config.json, a config as a .json file, or one of {', '.join(SHAPES)}"
        hint = "Models are not fetched from the network: download it first and name its folder."
        raise ArgumentValueError(message("model", expected, got, hint))
    try:
        settings = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ArgumentValueError(message("model", "a readable JSON config", f"{file} ({error})")) from error
    if not isinstance(settings, dict):
        raise ArgumentValueError(message("model", "a JSON object", f"something else in {file}"))
    return _from_settings(settings, str(file))


def build_model(name: str, config: Any, *, seed: int) -> Any:
    """Return the causal language model in float32: pretrained where the folder has weights, else freshly initialised.

    Raises:
        ArgumentValueError: the config describes no causal language model, or the weights cannot be read.
    """
    from transformers import AutoModelForCausalLM, set_seed

    set_seed(seed)
    try:
        if has_weights(name):
            import torch

            folder = Path(name).expanduser()
            return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
        return AutoModelForCausalLM.from_config(config)
    except Exception as error:  # wrong shapes, missing or broken files, unknown architectures: no common base
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ArgumentValueError(message("model", "a causal language model", f"{name} ({why})")) from error


def check_vocabulary(config: Any, tokens: int) -> None:
    """Raise where the tokenizer has ids that the model has no row for.

    Raises:
        ArgumentValueError: it has.
    """
    rows = config.get_text_config().vocab_size
    if tokens > rows:
        expected = f"a vocabulary of at least the tokenizer's {tokens} tokens"
        hint = "Name the model's own tokenizer with --tokenizer, or lower --vocab-size."
        raise ArgumentValueError(message("model", expected, f"{rows}", hint))


def _from_settings(settings: dict[str, Any], where: str) -> Any:
    """Return the config object of a dictionary like a config.json's."""
    from transformers import AutoConfig

    if "model_type" not in settings:
        raise ArgumentValueError(message("model", "a config with a model_type", f"{where}, which has none"))
    try:
        return AutoConfig.for_model(**settings)
    except Exception as error:  # transformers' checks of configs have no common base
        why = " ".join(str(error).split())[:200] or type(error).__name__
        hint = "Mend the config, or take a built-in name."
        raise ArgumentValueError(
            message("model", "a config that transformers accepts", f"{where}: {why}", hint)
        ) from error
