"""How a run ends before its time: SIGTERM and Ctrl-C save a checkpoint; a lost process is reported as one."""

from __future__ import annotations

import contextlib
import re
import signal
import threading
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from transformers import TrainerCallback

from lowtide.errors import LowtideError
from lowtide.train.files import why
from lowtide.train.parallel import in_group

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
# how gloo and NCCL report that the other end of a connection is closed, or does not answer
_CLOSED = ("connection closed by peer", "connection reset by peer", "broken pipe", "remote process exited")
_LOST = (*_CLOSED, "timed out waiting", "nccl")
_OF_GLOO = re.compile(r"^\[\S+:\d+\] | This is typically caused by .*")  # around the reason: its source, its guesses


class Terminated(LowtideError, InterruptedError):
    """A signal ended the run; the text says what was saved and how to resume."""

    of_all_ranks = True  # one of them prints it

    def __init__(self, text: str, number: int) -> None:
        super().__init__(text)
        self.exit_status = 128 + number  # as shells have it


class RankLost(LowtideError, ConnectionError):
    """Another process of the run has ended or does not answer, and this one cannot go on alone."""


def is_lost_rank(error: BaseException) -> bool:
    """Return whether an error of a collective is that another process is gone."""
    if not in_group() or not isinstance(error, RuntimeError):
        return False
    return isinstance(error, dist.DistError) or any(sign in str(error).lower() for sign in _LOST)


def lost_rank(error: BaseException, next_step: str) -> RankLost:
    """Return the error for a collective that `is_lost_rank`; ``next_step`` says what to do."""
    reason = _OF_GLOO.sub("", why(error)).rstrip(".")
    return RankLost(f"another process has ended or does not answer ({reason}). {next_step}")


class SaveAndStop(TrainerCallback):  # type: ignore[misc]
    """Ends training after the step in which SIGTERM or Ctrl-C came to any of the ranks, with a checkpoint.

    A second Ctrl-C ends the process at once. Further SIGTERMs change nothing: clusters signal the ranks and the
    launcher, which signals the ranks again.
    """

    def __init__(self, *, saves: bool) -> None:
        self.stopped = 0  # the signal that ended training
        self._saves, self._came = saves, 0
        self._before: dict[int, Any] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Handle the signals, which Python lets only the main thread do, and bound the wait for other ranks."""
        del state, control
        if in_group() and args.ddp_timeout != type(args).ddp_timeout:
            # transformers passes it to neither gloo's groups nor DeepSpeed's own
            for group in list(c10d._world.pg_map):
                c10d._set_pg_timeout(args.ddp_timeout_delta, group)
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._take) for number in _SIGNALS}

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Ask all ranks, so that they stop after the same step."""
        del state
        came = self._came
        if in_group():
            largest = torch.tensor(came, device=args.device)
            dist.all_reduce(largest, dist.ReduceOp.MAX)
            came = int(largest.item())  # waits for the step, as the log of its loss does next
        if came:
            self.stopped = came
            control.should_training_stop = True
            control.should_save, control.should_evaluate = self._saves, False

    def close(self) -> None:
        """Restore the handlers; also after an error."""
        for number, handler in self._before.items():
            with contextlib.suppress(ValueError):  # in another thread than the one that set them
                signal.signal(number, handler)
        self._before = {}

    def _take(self, number: int, frame: Any) -> None:
        del frame
        if number == signal.SIGINT and self._came == number:
            raise KeyboardInterrupt
        self._came = number
