"""How a run ends before its time: SIGTERM saves, and a lost process is told from an error of one's own."""

from __future__ import annotations

import contextlib
import signal
import threading
from typing import Any

import torch
import torch.distributed as dist
from transformers import TrainerCallback

from lowtide.errors import LowtideError
from lowtide.train.ranks import in_group

# how gloo and NCCL say that the other end of a connection is no more
_LOST = ("connection closed by peer", "connection reset by peer", "broken pipe", "remote process exited", "nccl")


class Terminated(LowtideError, InterruptedError):
    """The run was asked to end by SIGTERM; the text says what was saved and how to go on."""

    exit_status = 143  # 128 + SIGTERM, as shells have it
    of_all_ranks = True  # one of them says it


class RankLost(LowtideError, ConnectionError):
    """Another process of the run has ended, and this one cannot go on alone."""


def is_lost_rank(error: BaseException) -> bool:
    """Return whether an error of a collective is that another process is gone."""
    if not in_group() or not isinstance(error, RuntimeError):
        return False
    return isinstance(error, dist.DistError) or any(sign in str(error).lower() for sign in _LOST)


class SaveAndStop(TrainerCallback):  # type: ignore[misc]
    """Ends training after the step in which SIGTERM came to any of the ranks, with a checkpoint.

    Further signals change nothing until then: clusters signal the ranks and the launcher, which signals the ranks
    again. SIGKILL ends a process at once.

    Args:
        saves: whether the run writes checkpoints at all.

    Attributes:
        stopped: that is how training ended.
    """

    def __init__(self, *, saves: bool) -> None:
        self.stopped = False
        self._saves, self._told = saves, False
        self._before: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Listen for the signal; Python lets the main thread alone do so."""
        del args, state, control
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._take)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Ask all ranks, so that they stop after the same step."""
        del state
        told = self._told
        if in_group():
            anyone = torch.tensor(int(told), device=args.device)
            dist.all_reduce(anyone, dist.ReduceOp.MAX)
            told = bool(anyone.item())  # waits for the step, as the log of its loss does next
        if told:
            self.stopped = control.should_training_stop = True
            control.should_save = self._saves

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Listen no more."""
        del args, state, control
        self.close()

    def close(self) -> None:
        """Give the signal back; also after an error."""
        if self._before is not None:
            with contextlib.suppress(ValueError):  # from another thread than the one that listened
                signal.signal(signal.SIGTERM, self._before)
            self._before = None

    def _take(self, number: int, frame: Any) -> None:
        del number, frame
        self._told = True
