"""The folder of a run: checkpoints that count once they are complete, a lock, and what could not be written."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
from accelerate.utils import parse_flag_from_env
from filelock import FileLock, Timeout
from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException
from transformers import TrainerCallback

from lowtide.errors import ArgumentValueError, LowtideError, message
from lowtide.measure.failures import is_out_of_memory
from lowtide.measure.units import mib
from lowtide.train.arguments import AUTO
from lowtide.train.ranks import in_group

COMPLETE = "complete"  # in a checkpoint, written last
_LOCK = ".lock"  # in the folder, while a run is under way
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
_ALMOST_FULL = 2**24  # bytes
_PATIENCE = 5.0  # seconds for a run that is just being ended, to be started again
# how PyTorch's archives report that the disk is full or the folder gone
_NOT_WRITTEN = ("PytorchStreamWriter", "iostream error", "file write failed", "Parent directory", "unexpected pos")


class SaveError(LowtideError, OSError):
    """Something could not be written; what was complete before still is."""


class WholeCheckpoints(TrainerCallback):  # type: ignore[misc]
    """Marks each checkpoint of a Trainer as complete once it is on the disk, and then removes older ones.

    A run that is killed while it writes one leaves no mark: `checkpoints` does not return it. Older ones are removed
    here, not by Trainer, which does so while the newest may not be on the disk yet.

    Args:
        resume: the command that resumes the run, for errors.
    """

    def __init__(self, resume: str = "") -> None:
        self._resume = resume
        self._most: int | None = None

    def on_init_end(self, args: Any, *_: Any, **__: Any) -> None:
        """Take over how many are to stay."""
        self._most, args.save_total_limit = args.save_total_limit, None

    def on_save(self, args: Any, state: Any, _control: Any, **_: Any) -> None:
        """Mark the checkpoint that was just written.

        Raises:
            SaveError: it could not be flushed to disk.
        """
        if in_group():
            dist.barrier()
        if not state.is_world_process_zero:
            return
        output = Path(args.output_dir)
        checkpoint = output / f"checkpoint-{state.global_step}"
        try:
            for path in (*sorted(checkpoint.rglob("*")), checkpoint):
                _flush(path)
            (checkpoint / COMPLETE).touch()
            _flush(checkpoint)
        except OSError as error:
            raise save_error(checkpoint, error, self._resume) from error
        best = Path(state.best_model_checkpoint or "").name
        for path in checkpoints(output)[: -self._most if self._most else 0]:
            if path.name != best:
                (path / COMPLETE).unlink()  # first: half a checkpoint is none
                shutil.rmtree(path, ignore_errors=True)


def checkpoints(output: Path) -> list[Path]:
    """Return the complete checkpoints of a run, oldest first."""
    folders = (p for p in output.glob("checkpoint-*") if (p / COMPLETE).is_file())
    found = [(int(m[1]), p) for p in folders if (m := _CHECKPOINT.fullmatch(p.name))]
    return [path for _, path in sorted(found)]


def checkpoint_to_resume(output: Path, given: str | None) -> Path | None:
    """Return the checkpoint that ``--resume_from_checkpoint`` names: itself, or with "true" or "auto" the newest.

    None: the run begins. With "auto" it does where the folder has no complete checkpoint.

    Raises:
        ArgumentValueError: there is none, it has no states, or the folder of a new run has checkpoints.
    """
    name, choice = "--resume_from_checkpoint", (given or "false").lower()
    path = next(reversed(checkpoints(output)), None)
    if choice == "false":
        if path is None:
            return None
        hint = f"Resume it with {name} {AUTO}, or name another folder."
        raise ArgumentValueError(
            message("--output_dir", "a folder without checkpoints", f"{output}, which holds a run", hint)
        )
    if choice == AUTO and path is None:
        return None
    if choice not in ("true", AUTO):
        path = Path(str(given)).expanduser()
    if path is None or not (path / COMPLETE).is_file():
        hint = f"{AUTO} takes the newest one of --output_dir, and begins the run if there is none."
        raise ArgumentValueError(message(name, "a complete checkpoint", path or f"none in {output}", hint))
    _check_states(path)
    return path


def _check_states(checkpoint: Path) -> None:
    """Raise where a checkpoint lacks the states of optimizer and schedule: Trainer would begin with new ones."""
    if parse_flag_from_env("ACCELERATE_USE_DEEPSPEED"):  # which checks its own
        return
    names = ["optimizer.bin", "optimizer_0"] if parse_flag_from_env("ACCELERATE_USE_FSDP") else ["optimizer.pt"]
    for states in (names, ["scheduler.pt"]):
        if not any((checkpoint / name).exists() for name in states):
            got = f"{checkpoint}, which has no {states[0]}"
            hint = "Resume with the engine that wrote it; --save_only_model saves what no run can go on from."
            raise ArgumentValueError(message("--resume_from_checkpoint", "a checkpoint with its states", got, hint))


@contextlib.contextmanager
def locked(output: Path) -> Iterator[None]:
    """Lock a run's folder for the block.

    The system releases the lock when the process ends, in whichever way.

    Raises:
        ArgumentValueError: another run holds it.
        SaveError: it could not be made.
    """
    try:
        output.mkdir(parents=True, exist_ok=True)
        lock = FileLock(output / _LOCK, timeout=_PATIENCE)
        lock.acquire()
    except Timeout as error:
        expected, got = "a folder in which no other run is under way", f"{output}, in which one is"
        raise ArgumentValueError(message("--output_dir", expected, got, "Wait for it, or name another.")) from error
    except OSError as error:
        raise save_error(output, error, "") from error
    try:
        yield
    finally:
        (output / _LOCK).unlink(missing_ok=True)
        lock.release()


def is_not_written(error: BaseException) -> bool:
    """Return whether an error is of files that could not be written; none of lowtide's own, and no want of memory."""
    if isinstance(error, LowtideError) or is_out_of_memory(error):
        return False
    if isinstance(error, CheckpointException):  # of all ranks
        return any(is_not_written(one) for one, _ in error.failures.values())
    if isinstance(error, RuntimeError):  # as torch.save raises it
        return any(sign in str(error) for sign in _NOT_WRITTEN)
    return isinstance(error, OSError | SafetensorError)


def save_error(path: Path, error: BaseException, resume: str) -> SaveError:
    """Return the error for something that could not be written: why, and what to do."""
    if isinstance(error, CheckpointException):
        error = next(one for one, _ in error.failures.values())
    reason = getattr(error, "strerror", None)
    if reason is None:  # PyTorch's and safetensors' writers do not say that a disk is full
        reason = str(error).partition("\n")[0]
        free = shutil.disk_usage(next(each for each in path.absolute().parents if each.exists())).free
        if free < _ALMOST_FULL:
            reason += f"; the disk has {mib(free):.1f} MiB left"
    after = next_step(path.parent, resume)
    return SaveError(f"could not write {path} ({reason}). Make room or choose another --output_dir. {after}")


def next_step(output: Path, resume: str) -> str:
    """Return what to do after a run that ended early; ``resume`` is the command that resumes it."""
    return f"Resume with: {resume}" if checkpoints(output) else "There is no checkpoint yet: start again."


def _flush(path: Path) -> None:
    """Wait until a file's or folder's contents are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
