"""How training ends before its time: a signal saves a checkpoint, a loss that is not finite saves none."""

from __future__ import annotations

import contextlib
import math
import re
import signal
import threading
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from transformers import TrainerCallback

from lowtide.errors import ArgumentValueError, LowtideError, message
from lowtide.train.ranks import in_group

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
            came = int(largest.item())
        if came:
            self.stopped = came
            control.should_training_stop = True
            control.should_save, control.should_evaluate = self._saves, False

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Restore the handlers."""
        del args, state, control
        self.close()

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


class FiniteLoss(TrainerCallback):  # type: ignore[misc]
    """Ends training, on all ranks, with an error where the logged loss or gradient norm is not finite.

    Gradients are averaged, so that one rank's NaN reaches all weights with that step. The error names the rank if the
    trainer is a `lowtide.train.trainers.Corrected` one.
    """

    def __init__(self) -> None:
        self._own: torch.Tensor | float = 0.0  # the sum of this rank's losses since the last log
        self._at = 0

    def add_batch(self, tokens: int, loss: torch.Tensor) -> None:
        """Add a batch's loss of this rank; of all ranks the mean is logged."""
        del tokens
        self._own = self._own + loss

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Take over the step of a resumed run."""
        del args, control
        self._at = state.global_step

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
        """Check what is logged.

        Raises:
            ArgumentValueError: it is not finite.
        """
        del control
        if "loss" not in logs:
            return
        own, self._own = self._own, 0.0
        self._check("training loss", logs["loss"], state.global_step, own)
        if not args.fp16:  # whose scaler leaves out the steps with gradients that overflow
            self._check("gradient norm", logs.get("grad_norm", 0.0), state.global_step, 0.0)
        self._at = state.global_step

    def _check(self, name: str, value: Any, step: int, own: torch.Tensor | float) -> None:
        value = float(value)
        if math.isfinite(value):
            return
        got = f"{value} at step {step}" if step == self._at + 1 else f"{value} in steps {self._at + 1} to {step}"
        if in_group():
            ranks: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(ranks, not math.isfinite(float(own)))
            if any(ranks):
                where = " and ".join(str(rank) for rank, bad in enumerate(ranks) if bad)
                got += f" on rank {where} of {len(ranks)}"
        hint = "Start again with a lower one, or in float32 (--bf16 false). "
        hint += "A resume repeats the same step from the last checkpoint."
        raise ArgumentValueError(message("--learning_rate", f"a {name} that stays finite", got, hint))
