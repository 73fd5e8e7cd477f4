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
from lowtide.train.files import hub_snapshot

DEFAULT = "lowtide-small"
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")

SHAPES: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_suffix(".json").read_text())


def config_file(name: str) -> Path:
    """Return the config.json of a ``--model`` that is no built-in name.

    Raises:
        ArgumentValueError: there is none.
    """
    path = Path(os.path.expanduser(name))  # noqa: PTH111 (an unknown home stays as it is)
    folder = model_folder(name) if name else None
    file = path if folder is None else folder / "config.json"
    if name and file.is_file():
        return file
    got = f"{name}, a folder without one" if folder is not None else repr(name)
    expected = f"a folder with a config.json, a config as a .json file, or one of {', '.join(SHAPES)}"
    hint = "Models are not downloaded: name a folder."
    if folder is None and _HUB_NAME.fullmatch(name):
        hint = f"It is not in the Hub's local cache: hf download {name}"
    raise ArgumentValueError(message("model", expected, got, f"{did_you_mean(name, SHAPES)} {hint}".lstrip()))


def model_folder(name: str) -> Path | None:
    """Return the folder of a ``--model``: a path, or a Hub model's snapshot in the local cache; None for others."""
    path = Path(os.path.expanduser(name))  # noqa: PTH111 (an unknown home stays as it is)
    if name in SHAPES or path.is_file():
        return None
    return path if path.is_dir() else hub_snapshot(name, "models")
