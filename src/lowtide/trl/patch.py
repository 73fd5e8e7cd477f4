"""`patch_trl` and `unpatch_trl`: TRL's trainers on lowtide's heads, for the whole process."""

import sys
from types import ModuleType
from typing import Any

from lowtide.head.options import HeadOptions, check_options
from lowtide.trl.stand_in import FUNCTIONS, StandIn, TrlReport, stock_function, trl_version

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
        report = TrlReport(trl_version())
        stocks = [(stock_function(*function, report.version), function[-1]) for function in FUNCTIONS]
        _stand_ins.extend(StandIn(stock, call, report, options) for stock, call in stocks)
    for stand_in in _stand_ins:
        stand_in.options = options
        _replace(stand_in.stock, stand_in)
        places = [f"{module.__name__}.{name}" for module, name in _places(stand_in)]
        stand_in.report.replaced[stand_in.__name__] = places
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
