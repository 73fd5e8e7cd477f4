"""The folder of a run: checkpoints that count once they are complete, the model, and what a resume reads."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException
from transformers import TrainerCallback

from lowtide.errors import ArgumentValueError, LowtideError, message
from lowtide.measure.failures import is_out_of_memory
from lowtide.train.config import DEFAULT_ROOT, NEWEST_IF_ANY
from lowtide.train.files import RUN_FILE, why
from lowtide.train.parallel import in_group

LOCK = ".lock"  # in the folder, while a run is under way
MODEL = "model"
LOG_FILE = "log.jsonl"
TOKENS = "tokens.bin"
COMPLETE = "complete"  # in a checkpoint, written last
STAGING = ".incoming"  # inside the run's folder: a rename must not cross file systems
_RUN_FILE_ASIDE = f"{RUN_FILE}.new"
_LEFTOVERS = {RUN_FILE, _RUN_FILE_ASIDE, STAGING, LOG_FILE, TOKENS, f"{TOKENS}.json", f"{TOKENS}.part"}
_LEFTOVERS |= {"runs", "README.md"}  # of trackers, and TRL's card
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
_TRIAL = f"{STAGING}-trial-"  # begins the name of an empty folder that shows whether one can be made
_ALMOST_FULL = 2**24  # bytes
_PATIENCE = 5.0  # seconds for a run that is just being ended, to be started again
# how PyTorch's archives report that the disk is full or the folder gone
_NOT_WRITTEN = ("PytorchStreamWriter", "iostream error", "file write failed", "Parent directory", "unexpected pos")


class SaveError(LowtideError, OSError):
    """Something could not be written; what was complete before still is."""


class Complete(TrainerCallback):  # type: ignore[misc]
    """Marks a checkpoint as complete once all ranks have written it to disk, and then removes older ones.

    The newest ``keep`` stay, and the best; with None all do.
    """

    def __init__(self, keep: int | None) -> None:
        self._keep = keep

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Mark the checkpoint that was just written.

        Raises:
            SaveError: it could not be flushed to disk.
        """
        del control
        if in_group():
            import torch.distributed as dist

            dist.barrier()
        if not state.is_world_process_zero:
            return
        output = Path(args.output_dir)
        checkpoint = output / f"checkpoint-{state.global_step}"
        try:
            _flush_all(checkpoint)
            (checkpoint / COMPLETE).touch()
            _flush(checkpoint)
        except OSError as error:
            raise save_error(checkpoint, error) from error
        best = Path(state.best_model_checkpoint or "").name
        for path in checkpoints(output)[: -self._keep if self._keep else 0]:
            if path.name != best:
                (path / COMPLETE).unlink()  # first: half a checkpoint is none
                shutil.rmtree(path, ignore_errors=True)


def checkpoints(output: Path) -> list[Path]:
    """Return the complete checkpoints of a run, oldest first."""
    folders = (p for p in output.glob("checkpoint-*") if (p / COMPLETE).is_file())
    found = [(int(m[1]), p) for p in folders if (m := _CHECKPOINT.fullmatch(p.name))]
    return [path for _, path in sorted(found)]


def how_to_resume(output: Path) -> str:
    """Return what to do after a run that ended early."""
    if not checkpoints(output):
        return "There is no checkpoint yet: start again."
    return f"Resume with: lowtide train --resume_from_checkpoint true --output {output}"


def new_output(output: str | None, stamp: str) -> Path:
    """Return the folder for a new run, which is not made yet: the user's, or one named ``stamp`` in `DEFAULT_ROOT`.

    Raises:
        ArgumentValueError: it holds a run or other files already, or nothing can be written there.
    """
    path = Path(output).expanduser() if output else DEFAULT_ROOT / stamp
    expected = "a folder that is new or empty"
    try:
        found = {p.name for p in path.iterdir()} if path.is_dir() else set()
        found = {name for name in found if name != LOCK and not name.startswith(_TRIAL)}  # of another rank
        unfinished = [name for name in found - _LEFTOVERS if not _CHECKPOINT.fullmatch(name)]
        if found & {RUN_FILE, _RUN_FILE_ASIDE, TOKENS, f"{TOKENS}.part"} and not unfinished and not checkpoints(path):
            return path  # a run that ended before its first checkpoint
        if (path / RUN_FILE).exists():
            hint = f"Resume it with --resume_from_checkpoint true ({NEWEST_IF_ANY}, if a launcher starts it again), "
            hint += "or name another folder."
            raise ArgumentValueError(message("output", expected, f"{path}, which holds a run", hint))
        if path.exists() and (not path.is_dir() or found):
            raise ArgumentValueError(message("output", expected, f"{path}, which is neither", "Name another."))
        existing = next(p for p in (path, *path.absolute().parents) if p.exists())
        Path(tempfile.mkdtemp(prefix=_TRIAL, dir=existing)).rmdir()  # /proc grants access, and takes no folder
    except OSError as error:
        raise ArgumentValueError(message("output", expected, f"{path} ({error.strerror})", "Name another.")) from error
    return path


@contextlib.contextmanager
def claimed(output: Path) -> Iterator[None]:
    """Lock a folder for the block. It is made if it does not exist, and then removed if it is left empty.

    The system releases the lock when the process ends, in whichever way.

    Raises:
        ArgumentValueError: another run holds it.
        OSError: it could not be made.
    """
    missing = [path for path in (output, *output.parents) if not path.exists()]
    output.mkdir(parents=True, exist_ok=True)
    lock = FileLock(output / LOCK, timeout=_PATIENCE)
    try:
        lock.acquire()
    except Timeout as error:
        expected, got = "a folder in which no other run is under way", f"{output}, in which one is"
        raise ArgumentValueError(message("output", expected, got, "Wait for it, or name another.")) from error
    try:
        yield
    finally:
        (output / LOCK).unlink(missing_ok=True)
        lock.release()
        for path in missing:
            with contextlib.suppress(OSError):  # not empty, or gone
                path.rmdir()


def checkpoint_to_resume(output: str | None, given: str) -> Path:
    """Return the checkpoint that ``--resume_from_checkpoint`` names: itself, or with "true" or "auto" the newest.

    Raises:
        ArgumentValueError: there is none that is complete.
    """
    name = "--resume_from_checkpoint"
    if given.lower() not in ("true", NEWEST_IF_ANY):
        path = Path(given).expanduser()
        if not (path / COMPLETE).is_file() or not (path.parent / RUN_FILE).is_file():
            hint = "Give `true` for the newest one of --output."
            raise ArgumentValueError(message(name, "a complete checkpoint of a lowtide run", str(path), hint))
        return path
    if output:
        path = Path(output).expanduser()
    else:
        runs = sorted(DEFAULT_ROOT.glob(f"*/{RUN_FILE}"), key=lambda p: p.stat().st_mtime)
        path = runs[-1].parent if runs else DEFAULT_ROOT
    if not (path / RUN_FILE).is_file():
        raise ArgumentValueError(message(name, "a run's folder in --output", f"{path}, which has none"))
    if not (found := checkpoints(path)):
        hint = "Start again without it; --save_steps sets how often a checkpoint is written."
        raise ArgumentValueError(message(name, "a run with a checkpoint", f"{path}, which has none yet", hint))
    return found[-1]


def write_run_file(output: Path, content: dict[str, Any]) -> None:
    """Write what a resume needs beside the checkpoints, and remove what a killed run left incomplete.

    Raises:
        SaveError: it could not be written.
    """
    aside = output / _RUN_FILE_ASIDE
    try:
        output.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(output / STAGING, ignore_errors=True)
        for path in output.glob("checkpoint-*"):
            if not (path / COMPLETE).is_file():
                shutil.rmtree(path, ignore_errors=True)
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
        ArgumentValueError: it is not readable, or of an earlier version.
    """
    path = output / RUN_FILE
    try:
        content = json.loads(path.read_text())
        return {"config": dict(content["config"]), "sequences": int(content["sequences"]), "engine": content["engine"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        expected = "a run.json as this version writes it"
        raise ArgumentValueError(message("--resume_from_checkpoint", expected, f"{path} ({why(error)})")) from error


def write_folder(final: Path, write: Callable[[Path], object], *, publish: bool = True) -> None:
    """Let each rank ``write`` into a folder aside; one of them renames it once it is on the disk.

    Raises:
        SaveError: it could not be written.
    """
    staged = final.parent / STAGING / final.name
    try:
        write(staged)
        if publish:
            _flush_all(staged)
            if final.exists():  # an older whole one: saved again after a resume
                shutil.rmtree(old := staged.with_name(staged.name + ".old"), ignore_errors=True)
                final.rename(old)
            staged.rename(final)
            _flush(final.parent)
            shutil.rmtree(final.parent / STAGING, ignore_errors=True)
    except Exception as error:
        shutil.rmtree(staged, ignore_errors=True)
        if not is_not_written(error):
            raise
        raise save_error(final, error) from error


def is_not_written(error: BaseException) -> bool:
    """Return whether an error is of files that could not be written; none of lowtide's own, and no want of memory."""
    if isinstance(error, LowtideError) or is_out_of_memory(error):
        return False
    if isinstance(error, CheckpointException):  # of all ranks
        return any(is_not_written(one) for one, _ in error.failures.values())
    if isinstance(error, RuntimeError):  # as torch.save raises it
        return any(sign in str(error) for sign in _NOT_WRITTEN)
    return isinstance(error, OSError | SafetensorError)


def save_error(path: Path, error: BaseException) -> SaveError:
    """Return the error for something that could not be written."""
    reason = getattr(error, "strerror", None) or _system_reason(path, error)
    ways = f"Make room or choose another --output. {how_to_resume(path.parent)}"
    return SaveError(f"could not write {path} ({reason}). {ways}")


def _system_reason(path: Path, error: BaseException) -> str:
    """Return what the system would call an error of PyTorch's or safetensors' writers."""
    text = str(error)
    if found := re.search(r"\(os error (\d+)\)", text):
        return os.strerror(int(found[1]))
    folder = next(each for each in path.absolute().parents if each.exists())
    if shutil.disk_usage(folder).free < _ALMOST_FULL:
        return os.strerror(errno.ENOSPC)
    return os.strerror(errno.EIO) if any(sign in text for sign in _NOT_WRITTEN) else (text.splitlines() or ["?"])[0]


def _flush_all(folder: Path) -> None:
    for path in sorted(folder.rglob("*")):
        _flush(path)
    _flush(folder)


def _flush(path: Path) -> None:
    """Wait until a file's or folder's contents are on the disk."""
    if sys.platform == "win32" and path.is_dir():
        return  # folders cannot be opened there
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
