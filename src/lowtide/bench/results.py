"""Result files: dated, named after the hardware, never over an older one, never half written."""

from __future__ import annotations

import datetime as dt
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lowtide.errors import ArgumentValueError, message
from lowtide.measure.machine import describe_machine, source_commit


@dataclass(frozen=True)
class Files:
    """The files of one run: ``json``, and plots whose names begin as its does."""

    json: Path

    @classmethod
    def prepare(cls, folder: str, stem: str, gpu: str | None) -> Files:
        """Return the first free name of that stem in the folder, which is made if need be.

        `ArgumentValueError` where the folder cannot be made or written.
        """
        root, stem = Path(folder), f"{stem}-{short_gpu(gpu)}"
        try:
            root.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=root):
                pass
        except OSError as error:
            raise ArgumentValueError(message("output", "a folder that can be written", f"{root} ({error})")) from error
        taken = {file.stem for file in root.glob(f"{stem}*.json")}
        name = next(n for n in (stem, *(f"{stem}-{i}" for i in range(2, len(taken) + 3))) if n not in taken)
        return cls(root / f"{name}.json")

    def plot(self, name: str, draw: Callable[[Path], object]) -> Path:
        """Return the path of a plot of that name, after ``draw`` has written it."""
        file = self.json.with_name(f"{self.json.stem}-{re.sub('[^A-Za-z0-9.]+', '-', name)}.png")
        replace(file, draw)
        return file

    def write_json(self, result: dict[str, Any]) -> None:
        """Write or replace the result."""
        text = json.dumps(result, indent=1, allow_nan=False, default=str) + "\n"
        replace(self.json, lambda file: file.write_text(text))


def begin(
    folder: str, benchmark: str, command: str, device: torch.device, packages: Iterable[str] = ()
) -> tuple[Files, dict[str, Any]]:
    """Return the files of a run, and what each result has first: command, date, commit, and the machine, with the
    versions of these packages ("" counts for nothing). Errors are those of `Files.prepare`.
    """
    machine, today = describe_machine(sorted({*packages} - {""})), dt.datetime.now(tz=dt.UTC).date().isoformat()
    files = Files.prepare(folder, f"{today}-{benchmark}", machine["gpu"] if device.type == "cuda" else None)
    return files, {"command": command, "date": today, "commit": source_commit(), "machine": machine}


def replace(target: Path, write: Callable[[Path], object]) -> None:
    """Let ``write`` fill a file beside the target, and rename it to the target, so that no half of it is seen."""
    beside = target.with_name(f".{os.getpid()}-{target.name}")
    try:
        write(beside)
        beside.replace(target)
    finally:
        beside.unlink(missing_ok=True)


def short_gpu(name: str | None) -> str:
    """Return a GPU's model for a file's name: ``h100`` for "NVIDIA H100 80GB HBM3"; ``cpu`` for None."""
    if name is None:
        return "cpu"
    words = re.split("[^a-z0-9]+", name.lower())
    return next((word for word in words if any(c.isdigit() for c in word)), words[-1])
