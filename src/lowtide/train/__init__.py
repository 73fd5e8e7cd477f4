"""Training runs on transformers' `Trainer` and TRL's `SFTTrainer`: the settings, one run, and a run beside the stock.

Importing this imports neither torch nor transformers; the functions do when they are called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lowtide.train.config import TrainConfig

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

    from lowtide.train.result import Comparison, TrainResult

__all__ = ["TrainConfig", "compare", "train"]


def train(config: TrainConfig, *, console: Console | None = None) -> TrainResult:
    """Train a causal language model as the config says, save it, and return what was measured.

    Args:
        config: the run's settings.
        console: where progress and the result are printed; standard output without it.

    Raises:
        ArgumentValueError: a setting, the data or the model cannot be used; nothing was written then.
        SaveError: a checkpoint or the model could not be written; the last complete checkpoint is still there.
        Terminated: SIGTERM or Ctrl-C came; the step was finished and a checkpoint written.
        RankLost: another of the run's processes has ended or does not answer.
        OutOfMemory: a step, or the model, needs more memory than there is; the text says what would fit.
    """
    from lowtide.train.run import run

    return run(config, console=console)


def compare(config: TrainConfig, *, console: Console | None = None, json_file: Path | None = None) -> Comparison:
    """Train the same model on the same data with lowtide and without, in two interleaved processes, and compare.

    Args:
        config: the run's settings; ``patch`` and ``output`` have no meaning here and nothing is saved.
        console: where the table is printed; standard output without it.
        json_file: where to write the figures, with the hardware and the versions; None: nowhere.

    Returns:
        Comparison: both runs' losses, peaks and step times, and the largest difference of the losses.

    Raises:
        ArgumentValueError: a setting, the data or the model cannot be used.
        CompareError: one of the two runs failed.
    """
    from lowtide.train.comparison import compare_runs

    return compare_runs(config, console=console, json_file=json_file)
