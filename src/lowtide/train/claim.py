"""One run at a time in an output folder: a second one would mix its checkpoints with those of the first."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from lowtide.errors import ArgumentValueError, message

_TAKEN = (errno.EWOULDBLOCK, errno.EACCES)
_PATIENCE = 5.0  # seconds for a run that is just being ended, to be started again
_PAUSE = 0.1

_held: set[int] = set()


@contextlib.contextmanager
def claimed(output: Path) -> Iterator[None]:
    """Lock a folder for the block. It is made if it does not exist, and then removed if it is left empty.

    The system releases the lock when the process ends, in whichever way. Windows, and file systems that do not lock
    folders, such as NFS, have no lock.

    Raises:
        ArgumentValueError: another run holds it.
        OSError: it could not be made.
    """
    missing = [path for path in (output, *output.parents) if not path.exists()]
    output.mkdir(parents=True, exist_ok=True)
    handle = _lock(output)
    try:
        yield
    finally:
        if handle is not None:
            _held.discard(handle)
            os.close(handle)
        for path in missing:
            with contextlib.suppress(OSError):  # not empty, or gone
                path.rmdir()


def _lock(folder: Path) -> int | None:
    """Return a handle that holds the lock of a folder; None where folders cannot be locked."""
    if sys.platform == "win32":
        return None
    import fcntl

    handle = os.open(folder, os.O_RDONLY)
    until = time.monotonic() + _PATIENCE
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _TAKEN and time.monotonic() < until:
                time.sleep(_PAUSE)
                continue
            os.close(handle)
            if error.errno not in _TAKEN:
                return None
            expected, got = "a folder in which no other run is under way", f"{folder}, in which one is"
            raise ArgumentValueError(message("output", expected, got, "Wait for it, or name another.")) from error
        _held.add(handle)
        return handle


def _let_go() -> None:
    """Close the handles that a forked process inherits, with which it would hold the locks after its parent's end."""
    for handle in _held:
        os.close(handle)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)
