"""Folders that are whole or not there: everything is written aside, flushed to disk and renamed."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException

from lowtide.errors import ArgumentValueError, LowtideError, message
from lowtide.measure.failures import is_out_of_memory
from lowtide.train.config import DEFAULT_ROOT, RUN_FILE
from lowtide.train.ending import is_lost_rank
from lowtide.train.parallel import uses_deepspeed, zero_stage
from lowtide.train.ranks import launched_ranks
from lowtide.train.states import PARTS, WHOLE

_RUN_FILE_ASIDE = f"{RUN_FILE}.new"  # until it is whole
MODEL = "model"
MERGED = "merged"  # beside it, where adapters are merged into a copy
LOG_FILE = "log.jsonl"
BOARD = "tensorboard"
SCHEDULER = "scheduler.pt"
ZERO = "global_step"  # begins the name of DeepSpeed's folder in a checkpoint
STAGING = ".incoming"  # inside the run's folder: a rename must not cross file systems
_TRAINING_ONLY = (
    "optimizer*",
    "scheduler*",
    "scaler*",
    "rng_state*",
    "trainer_state*",
    "data_position*",
    "global_step*",
    "latest",
    "zero_to_*",
)
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")


# how PyTorch's archives say that the disk is full or the folder gone
_NOT_WRITTEN = ("PytorchStreamWriter", "iostream error", "file write failed", "Parent directory", "unexpected pos")


class SaveError(LowtideError, OSError):
    """Something could not be written; what was whole before still is."""


def checkpoints(output: Path) -> list[Path]:
    """Return the whole checkpoints of a run, oldest first."""
    folders = (p for p in output.glob("checkpoint-*") if p.is_dir())
    found = [(int(m[1]), p) for p in folders if (m := _CHECKPOINT.fullmatch(p.name))]
    return [path for _, path in sorted(found)]


def step_of(checkpoint: Path) -> int:
    """Return the number of optimizer steps behind a checkpoint."""
    return int(checkpoint.name.rpartition("-")[2])


def log_history(checkpoint: Path) -> list[dict[str, Any]]:
    """Return what Trainer had logged at a checkpoint.

    Raises:
        ArgumentValueError: it is not readable.
    """
    file = checkpoint / "trainer_state.json"
    try:
        return list(json.loads(file.read_text())["log_history"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        got, hint = f"{checkpoint}, where {file.name} cannot be read", "Remove it, to take an older one."
        raise ArgumentValueError(message("resume", "a whole checkpoint", got, hint)) from error


def check_states(checkpoint: Path, ranks: int) -> None:
    """Raise where the optimizer's part of a checkpoint is missing: Trainer would begin with a new one, in silence.

    Args:
        checkpoint: to go on from.
        ranks: that wrote it.

    Raises:
        ArgumentValueError: it is, Trainer's own state cannot be read, or DeepSpeed wrote it for another engine or
            number of ranks than are here.
    """
    log_history(checkpoint)
    divided = any(checkpoint.glob(f"{ZERO}*"))
    if divided != uses_deepspeed() or (divided and ranks != launched_ranks()):
        by = f"DeepSpeed's on {ranks} ranks" if divided else "PyTorch's"
        hint = "DeepSpeed divides states among ranks in a way of its own: go on with the same stage and ranks."
        got = f"{launched_ranks()} ranks with DeepSpeed" if uses_deepspeed() else f"{launched_ranks()} ranks without it"
        raise ArgumentValueError(message("parallel", f"an engine for {checkpoint}, {by}", got, hint))
    wrote, now = 3 if any(checkpoint.glob(f"{ZERO}*/zero_pp_rank_*_model_states.pt")) else 2, zero_stage()
    if divided and now is not None and (now == 3) != (wrote == 3):
        hint = "DeepSpeed's states are of one stage: go on with the same."
        expected = f"the stage for {checkpoint}, written by " + ("ZeRO-3" if wrote == 3 else "ZeRO-2 or less")
        raise ArgumentValueError(message("parallel", expected, f"ZeRO-{now}", hint))
    missing = [] if divided or (checkpoint / PARTS).is_dir() or (checkpoint / WHOLE).exists() else [WHOLE]
    missing += [] if (checkpoint / SCHEDULER).exists() else [SCHEDULER]
    if missing:
        got = f"{checkpoint}, which lacks {' and '.join(missing)}"
        raise ArgumentValueError(message("resume", "a whole checkpoint", got, "Remove it, to take an older one."))


@contextlib.contextmanager
def reading(checkpoint: str | None) -> Iterator[None]:
    """Let what fails while a checkpoint is read name it.

    Raises:
        ArgumentValueError: it cannot be read. Errors of lowtide's own, of memory and of a lost rank stay as they are.
    """
    try:
        yield
    except (Exception, CheckpointException) as error:
        if isinstance(error, LowtideError) or is_out_of_memory(error) or is_lost_rank(error):
            raise
        got, hint = f"{checkpoint}, which cannot be read ({why(error)})", "Remove it, to take an older one."
        raise ArgumentValueError(message("resume", "a whole checkpoint", got, hint)) from error


def publish(staged: Path, final: Path) -> None:
    """Give a folder that was written aside its final name, once its contents are on the disk.

    Raises:
        OSError: the disk would not take it.
    """
    for path in sorted(staged.rglob("*")):
        _flush(path)
    _flush(staged)
    if final.exists():  # an older whole folder of the same name: the run's model, saved again after a resume
        old = staged.with_name(staged.name + ".old")
        final.rename(old)
        staged.rename(final)
        shutil.rmtree(old, ignore_errors=True)
    else:
        staged.rename(final)
    _flush(final.parent)


def model_from_checkpoint(checkpoint: Path) -> Path:
    """Copy what is the model's out of a whole checkpoint, to where the run's model belongs, and return where.

    Raises:
        SaveError: it could not be written.
    """
    staged, final = checkpoint.parent / STAGING / MODEL, checkpoint.parent / MODEL
    try:
        clear_staging(checkpoint.parent)
        shutil.copytree(checkpoint, staged, ignore=shutil.ignore_patterns(*_TRAINING_ONLY))
        publish(staged, final)
        clear_staging(checkpoint.parent)
    except OSError as error:
        raise save_error(final, error) from error
    return final


def remove_old(output: Path, keep: int, best: int | None = None) -> None:
    """Remove all but the newest checkpoints, and the one of step ``best``.

    Each leaves its final name first, so that none is ever half there.
    """
    staging = output / STAGING
    staging.mkdir(exist_ok=True)
    for path in checkpoints(output)[:-keep]:
        if step_of(path) == best:
            continue
        doomed = staging / f"{path.name}.old"
        path.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def clear_logs(output: Path) -> None:
    """Remove what a run that ended before its first checkpoint had logged."""
    (output / LOG_FILE).unlink(missing_ok=True)
    shutil.rmtree(output / BOARD, ignore_errors=True)


def clear_staging(output: Path) -> None:
    """Remove what a killed run left half written."""
    shutil.rmtree(output / STAGING, ignore_errors=True)


def new_output(output: str | None, stamp: str) -> Path:
    """Return the folder for a new run, which is not made yet.

    Args:
        output: what the user asked for, None for a new folder under `DEFAULT_ROOT`.
        stamp: the name of that folder.

    Raises:
        ArgumentValueError: it holds a run or other files already, or nothing can be written there.
    """
    path = Path(output).expanduser() if output else DEFAULT_ROOT / stamp
    expected = "a folder that is new or empty"
    try:
        found = {p.name for p in path.iterdir()} if path.is_dir() else set()
        if found & {RUN_FILE, _RUN_FILE_ASIDE} and found <= {RUN_FILE, _RUN_FILE_ASIDE, STAGING, LOG_FILE, BOARD}:
            return path  # a run that ended before its first checkpoint
        if (path / RUN_FILE).exists():
            hint = "Go on with it with --resume, or name another folder."
            raise ArgumentValueError(message("output", expected, f"{path}, which holds a run", hint))
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise ArgumentValueError(message("output", expected, f"{path}, which is neither", "Name another."))
        existing = next(p for p in (path, *path.absolute().parents) if p.exists())
        if not existing.is_dir() or not os.access(existing, os.W_OK):
            raise ArgumentValueError(message("output", "a folder that can be written", f"{path}", "Name another."))
    except OSError as error:
        raise ArgumentValueError(message("output", expected, f"{path} ({error.strerror})", "Name another.")) from error
    return path


def run_to_resume(output: str | None) -> Path:
    """Return the folder of the run to go on with.

    Raises:
        ArgumentValueError: there is none, or no checkpoint in it.
    """
    if output:
        path = Path(output).expanduser()
    else:
        runs = sorted(DEFAULT_ROOT.glob(f"*/{RUN_FILE}"), key=lambda p: p.stat().st_mtime)
        path = runs[-1].parent if runs else DEFAULT_ROOT
    if not (path / RUN_FILE).is_file():
        hint = "Name the run's folder with --output, or leave --resume out to begin."
        raise ArgumentValueError(message("resume", "a folder with a run", f"{path}, which has none", hint))
    if not checkpoints(path):
        hint = "Begin again without --resume; --save-every sets how often one is written."
        raise ArgumentValueError(message("resume", "a run with a checkpoint", f"{path}, which has none yet", hint))
    return path


def write_run_file(output: Path, content: dict[str, Any]) -> None:
    """Write what a resume needs to know beside the checkpoints.

    Raises:
        SaveError: it could not be written.
    """
    aside = output / _RUN_FILE_ASIDE
    try:
        output.mkdir(parents=True, exist_ok=True)
        aside.write_text(json.dumps(content, indent=2) + "\n")
        _flush(aside)
        aside.rename(output / RUN_FILE)
    except OSError as error:
        with contextlib.suppress(OSError):  # leave no trace of a run that never was
            aside.unlink(missing_ok=True)
            output.rmdir()
        raise save_error(output / RUN_FILE, error) from error


def read_run_file(output: Path) -> dict[str, Any]:
    """Return what `write_run_file` wrote.

    Raises:
        ArgumentValueError: it is not readable.
    """
    path = output / RUN_FILE
    try:
        content = json.loads(path.read_text())
        return {**content, "config": dict(content["config"]), "data": str(content["data"])}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ArgumentValueError(message("resume", "a run.json as lowtide writes it", f"{path} ({error})")) from error


def is_not_written(error: BaseException) -> bool:
    """Return whether an error is of files that could not be written; none of lowtide's own, and no want of memory."""
    if isinstance(error, LowtideError) or is_out_of_memory(error):
        return False
    if isinstance(error, CheckpointException):  # of all ranks
        return any(is_not_written(one) for one, _ in error.failures.values())
    if isinstance(error, RuntimeError):  # as torch.save says it
        return any(sign in str(error) for sign in _NOT_WRITTEN)
    return isinstance(error, OSError | SafetensorError)


def save_error(path: Path, error: BaseException) -> SaveError:
    """Return the error for something that could not be written.

    safetensors and torch.save raise errors of their own for a full disk: `is_not_written` knows them.
    """
    why = (getattr(error, "strerror", None) or str(error).strip() or type(error).__name__).splitlines()[0]
    whole = checkpoints(path.parent)
    kept = (
        f"{whole[-1].name} is whole: go on from it with --resume"
        if whole
        else "No checkpoint is there yet: start again"
    )
    return SaveError(f"could not write {path} ({why}). Make room or choose another --output. {kept}.")


def why(error: BaseException) -> str:
    """Return an error of whatever kind in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def _flush(path: Path) -> None:
    """Wait until a file's or folder's contents are on the disk."""
    if sys.platform == "win32" and path.is_dir():
        return  # folders cannot be opened there
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
