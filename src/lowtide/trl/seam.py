"""Where TRL's trainers can be given another head, and whether it is as lowtide knows it."""

import importlib
import inspect
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from lowtide.errors import UnsupportedError, message
from lowtide.trl import divergence, logprob

_KNOWN = "TRL 1.16"
_TOLERANCE = 1e-4  # of float32 numbers near 1, summed over 7 classes


@dataclass(frozen=True)
class Seam:
    """One autograd function of TRL's that lowtide can stand in for."""

    name: str
    module: str  # where TRL defines it
    kind: ModuleType  # what lowtide does instead
    call: type[Any]  # its arguments


SEAMS = (
    Seam("ChunkedLogProbFunction", "trl.kernels.chunked_logprob", logprob, logprob.LogProbCall),
    Seam("ChunkedDivergenceFunction", "trl.kernels.chunked_divergence", divergence, divergence.DivergenceCall),
)


def trl_version() -> str:
    """Import TRL and return its version.

    Raises:
        UnsupportedError: It is not installed.
    """
    try:
        version: str = importlib.import_module("trl").__version__
    except ModuleNotFoundError as error:
        if error.name != "trl":
            raise
        raise UnsupportedError(message("trl", _KNOWN, "none installed", "pip install 'lowtide[trl]'")) from error
    importlib.import_module("trl.trainer.utils")  # first: the functions' modules and this one import each other
    return version


def stock_function(seam: Seam, version: str) -> Any:
    """Return TRL's own function, checked: its arguments, and its answer to a small call.

    Raises:
        UnsupportedError: It is not there, takes other arguments, or computes something else than lowtide knows.
    """
    where = f"{seam.module}.{seam.name}"
    hint = "This version of lowtide does not know this version of TRL: use another of either, or do without patch_trl."
    try:
        stock = getattr(importlib.import_module(seam.module), seam.name)
        got = _signature(stock.forward, skip=1)  # ctx
    except (ModuleNotFoundError, AttributeError) as error:
        raise UnsupportedError(message(where, f"as in {_KNOWN}", f"none in TRL {version}", hint)) from error
    expected = _signature(seam.call, skip=0)
    if got != expected:
        raise UnsupportedError(message(where, f"arguments {expected}", f"{got} in TRL {version}", hint))
    call = seam.kind.probe()
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        theirs, ours = stock.apply(*call), seam.kind.run(call, None)
    if len(theirs) != len(ours) or not all(map(_agree, theirs, ours)):
        raise UnsupportedError(message(where, "to compute what it does in TRL 1.16", f"{theirs} for {call}", hint))
    return stock


def _signature(function: Any, *, skip: int) -> list[tuple[str, Any]]:
    """Return the names of a function's arguments, each with its default, or ``...`` where it has none."""
    parameters = list(inspect.signature(function).parameters.values())[skip:]
    return [(p.name, ... if p.default is p.empty else p.default) for p in parameters]


def _agree(theirs: object, ours: object) -> bool:
    if not isinstance(theirs, Tensor) or not isinstance(ours, Tensor):
        return theirs is ours
    close = torch.allclose(theirs.double(), ours.double(), rtol=_TOLERANCE, atol=_TOLERANCE)
    return theirs.dtype == ours.dtype and theirs.shape == ours.shape and close
