"""One run at a time in an output folder: a second one would mix its checkpoints with those of the first."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from lowtide.errors import ArgumentValueError, message

LOCK = ".lock"  # in the folder, while a run is under way
_PATIENCE = 5.0  # seconds for a run that is just being ended, to be started again


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
