"""Profiles that were taken before, beside those of now: of another day, another version, or one after the other."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lowtide.errors import ArgumentValueError, message

_SAME = (
    "model", "seq_len", "batch_size", "dtype", "device", "optimizer", "lora", "offload_params", "sharding", "gpus",
)  # fmt: skip
_MACHINE = ("gpu", "cpu", "torch", "transformers")


def read_profiles(names: Sequence[str]) -> list[dict[str, Any]]:
    """Return what earlier runs of ``lowtide profile`` wrote as json.

    Raises:
        ArgumentValueError: A file that cannot be read, or is something else.
    """
    found = []
    for name in names:
        try:
            told = json.loads(Path(name).expanduser().read_text())
        except (OSError, ValueError) as error:
            raise ArgumentValueError(
                message("include", "a json file of lowtide profile", f"{name} ({error})")
            ) from error
        if not isinstance(told, dict) or not {"settings", "implementations", "machine", "model"} <= told.keys():
            raise ArgumentValueError(message("include", "a json file of lowtide profile", name))
        found.append(told)
    return found


def include(told: dict[str, Any], earlier: Sequence[dict[str, Any]]) -> None:
    """Put earlier profiles' implementations before those of a profile that is about to begin.

    Raises:
        ArgumentValueError: One of them is of another job, so that nothing of it can be compared.
    """
    for other in earlier:
        for name in _SAME:
            here, there = told["settings"][name], other["settings"].get(name)
            if here != there:
                raise ArgumentValueError(message("include", f"a profile with {name} {here}, as now", there))
        machine, theirs = told["machine"], other["machine"]
        differs = [f"{name} {theirs.get(name)}" for name in _MACHINE if theirs.get(name) != machine.get(name)]
        for row in other["implementations"]:
            note = "; ".join(filter(None, [row.get("note"), f"measured on {', '.join(differs)}" if differs else None]))
            told["implementations"].append({**row, **({"note": note} if note else {})})
        told.setdefault("included", []).append(other["command"])
