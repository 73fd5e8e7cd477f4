"""Turns of two processes that train at the same time: a file holds the name of the one that may."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

_POLL_SECONDS = 0.002


class Turns(TrainerCallback):  # type: ignore[misc]
    """Lets one of two processes train for a ``block`` of steps while the other waits.

    The file has the name of the process whose turn it is, ``own`` or ``other``; after `end_turns` both may train.
    """

    def __init__(self, file: Path, own: str, other: str, block: int) -> None:
        self._file, self._own, self._other, self._block = file, own, other, block
        self._done = 0

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Hand over the turn after a block, and wait for the next."""
        del state, control
        if self._done % self._block == 0:
            if self._done and not _ended(self._file).exists():
                if args.device.type == "cuda":
                    torch.cuda.empty_cache()  # the other one needs the memory
                give_turn(self._file, self._other)
            while self._file.read_text() != self._own and not _ended(self._file).exists():
                time.sleep(_POLL_SECONDS)
        self._done += 1


def give_turn(file: Path, name: str) -> None:
    """Write whose turn it is, whole at any moment."""
    aside = file.with_name(f"{file.name}.{os.getpid()}.{threading.get_ident()}")
    aside.write_text(name)
    aside.replace(file)


def end_turns(file: Path) -> None:
    """Let the other process train on: one has ended. It is a file of its own, which no turn overwrites."""
    _ended(file).touch()


def _ended(file: Path) -> Path:
    return file.with_name(f"{file.name}.ended")
