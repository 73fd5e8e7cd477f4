"""How training ends before its time: a signal saves a checkpoint, a loss that is not finite saves none."""

from __future__ import annotations

import math
import re
import signal
import threading
from typing import Any

import torch
import torch.distributed as dist
from transformers import TrainerCallback

from lowtide.errors import ArgumentValueError, LowtideError, message
from lowtide.train.ranks import in_group

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
# how gloo and NCCL report that the other end of a connection is closed, or does not answer
_LOST = (
    "connection closed by peer", "connection reset by peer", "broken pipe", "remote process exited",
    "timed out waiting", "nccl",
)  # fmt: skip
_OF_GLOO = re.compile(r"^\[\S+:\d+\] | This is typically caused by .*")  # around the reason: its source, its guesses


class Terminated(LowtideError, InterruptedError):
    """A signal ended the run; the text says what was saved and how to resume."""

    def __init__(self, text: str, number: int) -> None:
        super().__init__(text)
        self.exit_status = 128 + number  # as shells have it


class RankLost(LowtideError, ConnectionError):
    """Another process of the run has ended or does not answer, and this one cannot go on alone."""


def lost_rank(error: BaseException, next_step: str) -> RankLost | None:
    """Return the error for a collective whose other process is gone; ``next_step`` says what to do. None for others."""
    of_ranks = isinstance(error, RuntimeError) and in_group()
    if not of_ranks or not (isinstance(error, dist.DistError) or any(sign in str(error).lower() for sign in _LOST)):
        return None
    reason = _OF_GLOO.sub("", " ".join(str(error).split())[:300]).rstrip(".")
    return RankLost(f"another process has ended or does not answer ({reason}). {next_step}")


class SaveAndStop(TrainerCallback):  # type: ignore[misc]
    """Ends a Trainer's training after the step in which SIGTERM or Ctrl-C came to any of the ranks, with a checkpoint.

    A second Ctrl-C ends the process at once. Further SIGTERMs change nothing: clusters signal the ranks and the
    launcher, which signals the ranks again.

    Args:
        saves: whether to write a checkpoint.

    Attributes:
        stopped: the signal that ended training; 0 where none did.
    """

    def __init__(self, *, saves: bool = True) -> None:
        self.stopped = 0
        self._saves, self._came = saves, 0
        self._before: dict[int, Any] = {}

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Handle the signals, which Python lets only the main thread do."""
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._take) for number in _SIGNALS}

    def on_step_end(self, args: Any, _state: Any, control: Any, **_: Any) -> None:
        """Ask all ranks, so that they stop after the same step."""
        self.stopped = self._came
        if in_group():
            largest = torch.tensor(self._came, device=args.device)
            dist.all_reduce(largest, dist.ReduceOp.MAX)
            self.stopped = int(largest.item())
        if self.stopped:
            control.should_training_stop = True
            control.should_save, control.should_evaluate = self._saves, False

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Restore the handlers; also to be called after an error."""
        while self._before:
            signal.signal(*self._before.popitem())

    def _take(self, number: int, _frame: Any) -> None:
        if number == signal.SIGINT and self._came == number:
            raise KeyboardInterrupt
        self._came = number


class FiniteLoss(TrainerCallback):  # type: ignore[misc]
    """Ends training, on all ranks, with an error where the logged loss or gradient norm is not finite.

    Gradients are averaged, so that one rank's NaN reaches all weights with that step.
    """

    def on_log(self, args: Any, state: Any, _control: Any, logs: dict[str, Any], **_: Any) -> None:
        """Check what is logged.

        Raises:
            ArgumentValueError: it is not finite.
        """
        if "loss" not in logs:
            return
        # a scaler of float16 leaves out the steps with gradients that overflow
        norm = 0.0 if args.fp16 else float(logs.get("grad_norm", 0.0))
        for name, value in (("training loss", float(logs["loss"])), ("gradient norm", norm)):
            if not math.isfinite(value):
                got = f"{value} by step {state.global_step}"
                hint = "Start again with a lower one, or in float32 (--bf16 false). "
                hint += "A resume repeats the same step from the last checkpoint."
                raise ArgumentValueError(message("--learning_rate", f"a {name} that stays finite", got, hint))
