"""What a ``--model`` names: a folder, a config, or a built-in shape.

``shapes.json`` has the built-in ones, as their public configs have them: enough to build the model with random weights.
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

SHAPES: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_suffix(".json").read_text())


def config_file(name: str) -> Path:
    """Return the config.json of a ``--model`` that is no built-in name.

    Raises:
        ArgumentValueError: there is none.
    """
    found = pretrained_name(name) if name else None
    file = Path(os.path.expanduser(name)) if found is None else found  # noqa: PTH111 (an unknown home stays as it is)
    hint = "Models are not downloaded: name a folder."
    if isinstance(file, str):
        from huggingface_hub import hf_hub_download

        try:
            return Path(hf_hub_download(file, "config.json"))
        except (OSError, ValueError):
            hint = f"It is not in the Hub's local cache: hf download {name}"
    elif found is not None:
        file = file / "config.json"
    if name and isinstance(file, Path) and file.is_file():
        return file
    got = f"{name}, a folder without one" if isinstance(found, Path) else repr(name)
    expected = f"a folder with a config.json, a config as a .json file, or one of {', '.join(SHAPES)}"
    raise ArgumentValueError(message("model", expected, got, f"{did_you_mean(name, SHAPES)} {hint}".lstrip()))


def pretrained_name(name: str) -> Path | str | None:
    """Return what transformers loads a ``--model`` from: a folder, or a name on the Hub; None for others."""
    path = Path(os.path.expanduser(name))  # noqa: PTH111 (an unknown home stays as it is)
    if path.is_dir() and name not in SHAPES:
        return path
    return name if _HUB_NAME.fullmatch(name) and not path.exists() else None
