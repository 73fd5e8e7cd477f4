"""Imported by a rank before its run: it prints how far its memory grew by the model, and until that is shared out."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from lowtide.train.trainer import LowtideTrainer

from lowtide.measure.resident import peak_resident_bytes, resident_bytes
from lowtide.measure.units import mib
from lowtide.train import prepare

_evaluate, _read = LowtideTrainer.evaluate, prepare.read_by_first
_began: list[int] = []


def _reading(read: Callable[[], Any]) -> Any:
    _began.append(resident_bytes())
    model = _read(read)
    sys.stdout.write(f"spied read {mib(peak_resident_bytes() - _began[0]):.1f} MiB\n")
    return model


def _evaluating(self: Any, *args: Any, **kwargs: Any) -> Any:  # which comes before the first step
    sys.stdout.write(f"spied shared {mib(peak_resident_bytes() - _began[0]):.1f} MiB\n")
    return _evaluate(self, *args, **kwargs)


prepare.read_by_first = _reading
LowtideTrainer.evaluate = _evaluating
