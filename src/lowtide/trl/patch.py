"""`patch_trl` and `unpatch_trl`: TRL's trainers on lowtide's heads, for the whole process.

Stand-ins replace TRL's two autograd functions, after a check of what these compute; a report counts the calls.
"""

import importlib
import inspect
import sys
from collections import Counter
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from lowtide.distributed.zero import called_whole, mark_gathered
from lowtide.errors import UnsupportedError, message
from lowtide.head.options import HeadOptions, check_options
from lowtide.trl.calls import DivergenceCall, LogProbCall

_KNOWN = "TRL 1.16"
_TOLERANCE = 1e-4  # of float32 numbers near 1, summed over 7 classes
# Each function's module in TRL, its name there, and lowtide's record of a call.
_FUNCTIONS: tuple[tuple[str, str, Any], ...] = (
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
        >>> report.calls_lowtide.total(), report.calls_trl.total()  # until a trainer runs
        (0, 0)
        >>> lowtide.unpatch_trl()
    """

    version: str
    replaced: dict[str, list[str]] = field(default_factory=dict)
    calls_lowtide: Counter[str] = field(default_factory=Counter)
    calls_trl: Counter[str] = field(default_factory=Counter)
    why_trl: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        lines = [f"TRL {self.version}"]
        for function, names in self.replaced.items():
            calls = f"{self.calls_lowtide[function]} by lowtide, {self.calls_trl[function]} by TRL"
            lines += [f"{function}: calls computed {calls}", *(f"  replaced {name}" for name in names)]
        lines += [f"{times} x TRL's own: {why}" for why, times in self.why_trl.items()]
        return "\n".join(lines)


class StandIn:
    """An object with the ``apply`` of ``stock``, one of TRL's functions, whose calls are records of type ``call``."""

    def __init__(self, stock: Any, call: Any, report: TrlReport, options: HeadOptions | None) -> None:
        self.stock, self.call, self.report, self.options = stock, call, report, options
        self.active = True  # False after unpatch_trl, for code that kept this object

    def apply(self, *args: Any) -> Any:
        """Return what TRL's function returns."""
        call = self.call(*args)
        if not self.active:
            return self.stock.apply(*args)
        why_not, report = call.why_not(), self.report
        if not torch.compiler.is_compiling():  # a count in the graph would recompile it each time
            calls = report.calls_lowtide if why_not is None else report.calls_trl
            calls[self.stock.__name__] += 1
            report.why_trl.update([] if why_not is None else [why_not])
        if why_not is not None:
            return self.stock.apply(*args)
        return called_whole(lambda *given: self.call(*given).run(self.options), call)


# The active stand-ins: none, or one for each function, which share a report.
_stand_ins: list[StandIn] = []


def patch_trl(*, options: HeadOptions | None = None) -> TrlReport:
    """Make TRL's trainers compute log-probabilities, entropies and divergences with lowtide's heads.

    `SFTTrainer`, `DPOTrainer`, `KTOTrainer`, `GRPOTrainer`, `RLOOTrainer` and `DistillationTrainer` of TRL 1.16 get all
    of these from two autograd functions. This replaces both, in every module of TRL that refers to them, for trainers
    that exist and for those to come: ``ChunkedLogProbFunction`` by `lowtide.linear_token_stats`,
    ``ChunkedDivergenceFunction`` by `lowtide.linear_divergence`. No option of a trainer needs to be set, and none
    changes its meaning.

    Before anything is replaced, both compute a small call, and must agree with lowtide. A call with arguments that
    lowtide does not support goes to TRL's own function, and the report counts it with the reason.

    Patching again returns the same report and sets the new ``options``. Modules of TRL that are imported later refer to
    the replacements; call it again to see them in the report.

    Args:
        options: How the heads run: see `HeadOptions`. An explicit backend runs or raises, in the trainer's step:
            ``"exp"`` where `linear_token_stats` has it, never for divergences.

    Returns:
        TrlReport: What was replaced where. Its counts are live; print it.

    Raises:
        UnsupportedError: TRL is not installed, or its functions are not those that lowtide supports; also a
            `RuntimeError`. Nothing is replaced then.
        ArgumentTypeError: ``options`` is no HeadOptions; also a `TypeError`.

    Example:
        >>> report = lowtide.patch_trl(options=lowtide.HeadOptions(workspace_mib=256))
        >>> print(report)  # after training: who computed what
        >>> lowtide.unpatch_trl()
    """
    check_options(options)
    if not _stand_ins:
        report = TrlReport(_trl_version())
        stocks = [(_stock_function(*function, report.version), function[-1]) for function in _FUNCTIONS]
        _stand_ins.extend(StandIn(stock, call, report, options) for stock, call in stocks)
    for stand_in in _stand_ins:
        stand_in.options = options
        _replace(stand_in.stock, stand_in)
        places = [f"{module.__name__}.{name}" for module, name in _places(stand_in)]
        stand_in.report.replaced[stand_in.stock.__name__] = places
    return _stand_ins[0].report


def unpatch_trl() -> None:
    """Undo `patch_trl`: TRL's modules get their own functions back.

    Without a `patch_trl` before, nothing happens, so that cleaning up twice does no harm.

    Example:
        >>> report = lowtide.patch_trl()
        >>> lowtide.unpatch_trl()
    """
    for stand_in in _stand_ins:
        stand_in.active = False
        _replace(stand_in, stand_in.stock)
    _stand_ins.clear()


def _trl_version() -> str:
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


def _stock_function(module: str, name: str, call: Any, version: str) -> Any:
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
    if importlib.import_module("transformers.integrations.deepspeed").is_deepspeed_zero3_enabled():
        mark_gathered(small)  # TRL asks each weight
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


def _replace(old: Any, new: Any) -> None:
    for module, name in _places(old):
        setattr(module, name, new)


def _places(value: Any) -> list[tuple[ModuleType, str]]:
    """Return where TRL's modules hold ``value``, as far as they are imported."""
    return [
        (module, name)
        for key, module in sorted(sys.modules.items())
        if key == "trl" or key.startswith("trl.")
        for name, held in vars(module).items()
        if held is value
    ]
