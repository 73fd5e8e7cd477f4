"""What a model's name means: a folder, a config, a name on the Hub, or a built-in shape.

``shapes.json`` has the built-in ones, as their public configs have them, or as transformers' defaults do: enough to
build the model with random weights.
The default, "lowtide-small", has the tokenizer's vocabulary. It is so small that two CPU cores train it in two minutes
on enough text to learn more than the frequencies of words; the logits are its largest tensor by far.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from lowtide.errors import ArgumentValueError, did_you_mean, message

DEFAULT = "lowtide-small"
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")

SHAPES: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_suffix(".json").read_text())
VOCAB_SIZE: int = SHAPES[DEFAULT]["vocab_size"]  # also of the tokenizer that a run from random weights trains


def config_file(name: str) -> Path:
    """Return the config.json of a model's name that is no built-in one.

    Raises:
        ArgumentValueError: there is none.
    """
    found = pretrained_name(name) if name else None
    if isinstance(found, str):
        from huggingface_hub import hf_hub_download

        cached = os.environ.get("HF_HUB_OFFLINE", "1") != "0"
        try:
            return Path(hf_hub_download(found, "config.json", local_files_only=cached))
        except (OSError, ValueError) as error:
            expected = "a folder, a config.json, or a model of the Hub in its local cache"
            raise ArgumentValueError(message("model", expected, repr(name), f"hf download {name}")) from error
    file = Path(os.path.expanduser(name)) if found is None else found / "config.json"  # noqa: PTH111 (an unknown home)
    if name and file.is_file():
        return file
    got = f"{name}, a folder without one" if found is not None else repr(name)
    expected = f"a folder with a config.json, a config as a .json file, or one of {', '.join(SHAPES)}"
    hint = did_you_mean(name, SHAPES) or "Models are not downloaded: name a folder."
    raise ArgumentValueError(message("model", expected, got, hint))


def pretrained_name(name: str) -> Path | str | None:
    """Return what transformers loads a model from: a folder, or a name on the Hub; None for others."""
    path = Path(os.path.expanduser(name))  # noqa: PTH111 (an unknown home stays as it is)
    if path.is_dir() and name not in SHAPES:
        return path
    return name if _HUB_NAME.fullmatch(name) and not path.exists() else None


def has_weights(name: str) -> bool:
    """Return whether a model's name is one of pretrained weights, not of a shape alone."""
    found = pretrained_name(name)
    return isinstance(found, str) or (found is not None and any((found / file).is_file() for file in _WEIGHTS))


def model_config(name: str) -> Any:
    """Return the `transformers` config of a model's name.

    Raises:
        ArgumentValueError: there is no such model, or its config cannot be used.
    """
    from transformers import AutoConfig, PretrainedConfig

    where = name if name in SHAPES else str(config_file(name))
    try:
        return AutoConfig.for_model(**(SHAPES.get(name) or PretrainedConfig.get_config_dict(where)[0]))
    except Exception as error:  # transformers' checks of configs have no common base
        expected, hint = "a config that transformers accepts", "Fix the config, or take a built-in name."
        got = f"{where}: {' '.join(str(error).split())[:300]}"
        raise ArgumentValueError(message("model", expected, got, hint)) from error
