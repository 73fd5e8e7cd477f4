"""Stand-ins for TRL's two autograd functions, the report of their calls, and a check of what TRL's own compute."""

import importlib
import inspect
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lowtide.errors import UnsupportedError, message
from lowtide.head.options import HeadOptions
from lowtide.trl.calls import DivergenceCall, LogProbCall

_KNOWN = "TRL 1.16"
_TOLERANCE = 1e-4  # of float32 numbers near 1, summed over 7 classes
# Each function's module in TRL, its name there, and lowtide's record of a call.
FUNCTIONS: tuple[tuple[str, str, Any], ...] = (
    ("trl.kernels.chunked_logprob", "ChunkedLogProbFunction", LogProbCall),
    ("trl.kernels.chunked_divergence", "ChunkedDivergenceFunction", DivergenceCall),
)


@dataclass
class TrlReport:
    """What was replaced in TRL, and live counts of the calls since.

    The counts go on as trainers run. What runs inside ``torch.compile`` is not counted.

    Args:
        version: TRL's version.
        replaced: For each replaced function the places where TRL's modules refer to it, as of the last `patch_trl`.
        calls_lowtide: Calls that lowtide computed, by function.
        calls_trl: Calls that were handed to TRL's own function, by function.
        why_trl: How often each reason for handing a call to TRL came up.

    Example:
        >>> report = lowtide.patch_trl()
        >>> sorted(report.replaced)
        ['ChunkedDivergenceFunction', 'ChunkedLogProbFunction']
        >>> report.calls_lowtide, report.calls_trl  # until a trainer runs
        ({}, {})
        >>> lowtide.unpatch_trl()
    """

    version: str
    replaced: dict[str, list[str]] = field(default_factory=dict)
    calls_lowtide: dict[str, int] = field(default_factory=dict)
    calls_trl: dict[str, int] = field(default_factory=dict)
    why_trl: dict[str, int] = field(default_factory=dict)

    def count(self, function: str, why_trl: str | None) -> None:
        """Count one call: by lowtide, or by TRL for the reason given."""
        calls = self.calls_lowtide if why_trl is None else self.calls_trl
        calls[function] = calls.get(function, 0) + 1
        if why_trl is not None:
            self.why_trl[why_trl] = self.why_trl.get(why_trl, 0) + 1

    def __str__(self) -> str:
        lines = [f"TRL {self.version}"]
        for function, names in self.replaced.items():
            calls = f"{self.calls_lowtide.get(function, 0)} by lowtide, {self.calls_trl.get(function, 0)} by TRL"
            lines += [f"{function}: calls computed {calls}", *(f"  replaced {name}" for name in names)]
        lines += [f"{times} x TRL's own: {why}" for why, times in self.why_trl.items()]
        return "\n".join(lines)


class StandIn:
    """An object with the ``apply`` of one of TRL's functions, ``stock``; its other attributes are that function's.

    ``call`` is `LogProbCall` or `DivergenceCall`.
    """

    def __init__(self, stock: Any, call: Any, report: TrlReport, options: HeadOptions | None) -> None:
        self.__name__ = stock.__name__
        self.stock, self.call, self.report, self.options = stock, call, report, options
        self.active = True  # False after unpatch_trl, for code that kept this object

    def apply(self, *args: Any) -> Any:
        """Return what TRL's function returns."""
        call = self.call(*args)
        if not self.active:
            return self.stock.apply(*args)
        why_not = call.why_not()
        if not torch.compiler.is_compiling():  # a count in the graph would recompile it each time
            self.report.count(self.stock.__name__, why_not)
        return self.stock.apply(*args) if why_not is not None else call.run(self.options)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copying and pickling read some before there is a stock
            raise AttributeError(name)
        return getattr(self.stock, name)


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


def stock_function(module: str, name: str, call: Any, version: str) -> Any:
    """Return TRL's own function, after a check of its arguments and of its result for a small call.

    Raises:
        UnsupportedError: It is not there, takes other arguments, or computes something else than lowtide does.
    """
    where = f"{module}.{name}"
    hint = "This version of lowtide does not know this version of TRL: use another of either, or do without patch_trl."
    try:
        stock = getattr(importlib.import_module(module), name)
        got = _signature(stock.forward)[1:]  # without ctx
    except (ModuleNotFoundError, AttributeError) as error:
        raise UnsupportedError(message(where, f"as in {_KNOWN}", f"none in TRL {version}", hint)) from error
    expected = _signature(call)
    if got != expected:
        raise UnsupportedError(message(where, f"arguments {expected}", f"{got} in TRL {version}", hint))
    small = call.probe()
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        theirs, ours = stock.apply(*small), small.run(None)
    if len(theirs) != len(ours) or not all(map(_agree, theirs, ours)):
        raise UnsupportedError(message(where, f"to compute what it does in {_KNOWN}", f"{theirs} for {small}", hint))
    return stock


def _signature(function: Any) -> list[tuple[str, Any]]:
    """Return the names of a function's arguments, each with its default, or ``...`` where it has none."""
    parameters = inspect.signature(function).parameters.values()
    return [(p.name, ... if p.default is p.empty else p.default) for p in parameters]


def _agree(theirs: object, ours: object) -> bool:
    if not isinstance(theirs, Tensor) or not isinstance(ours, Tensor):
        return theirs is ours
    close = torch.allclose(theirs.double(), ours.double(), rtol=_TOLERANCE, atol=_TOLERANCE)
    return theirs.dtype == ours.dtype and theirs.shape == ours.shape and close
