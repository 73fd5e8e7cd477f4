"""Files of what host memory does not hold: written from page-locked buffers and read back, beside all else."""

from __future__ import annotations

import contextlib
import os
import tempfile
import weakref
from collections import defaultdict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowtide.errors import UnsupportedError, message

_MOST = 1 << 30  # bytes of one call: Linux takes at most 2 GiB


class Disk:
    """Files in a folder, reused as soon as they are free. They have no names, so that none outlives the process.

    One thread writes and one reads, in the order in which they are asked to.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files = weakref.WeakSet[File]()
        self.writes, self.reads = (ThreadPoolExecutor(1, f"lowtide-{what}") for what in ("writes", "reads"))
        self._free: dict[int, list[File]] = defaultdict(list)
        self._returned: deque[File] = deque()
        self._closed = False

    @property
    def nbytes(self) -> int:
        """The size of the files."""
        return sum(file.nbytes for file in self.files)

    def take(self, slot: int, nbytes: int) -> File:
        """Return a file for so many bytes, a free one of that slot where one is large enough.

        Raises:
            UnsupportedError: The folder has no room for it.
        """
        self._collect()
        free = self._free[slot]
        free.sort(key=lambda file: file.nbytes)
        if free and free[-1].nbytes >= nbytes:
            return free.pop()
        if free:  # too small for the batches that come now
            free.pop(0).close()
        try:
            return File(self, slot, nbytes)
        except OSError as error:
            expected, got = f"room for {nbytes} more bytes in {self.folder}", error.strerror or str(error)
            raise UnsupportedError(
                message("disk", expected, got, "Make room there, or take another folder.")
            ) from error

    def give(self, file: File) -> None:
        """Take a file back. Graphs die in any thread: this only notes it, unless the disk is closed."""
        self._returned.append(file)
        if self._closed:
            self.close()

    def _collect(self) -> None:
        while self._returned:
            file = self._returned.popleft()
            self._free[file.slot].append(file)

    def settle(self) -> None:
        """Wait for all that was asked for so far, and for what follows from its end."""
        for thread in (self.writes, self.reads):
            thread.submit(lambda: None).result()

    def close(self) -> None:
        """Remove the files that are not in use, and from now on whatever comes back."""
        self._closed = True
        self._collect()
        for free in self._free.values():
            while free:
                free.pop().close()


class File:
    """A file without a name, whose room is there from the beginning."""

    def __init__(self, disk: Disk, slot: int, nbytes: int) -> None:
        self.slot, self.nbytes, self._disk = slot, nbytes, disk
        self._file = tempfile.TemporaryFile(dir=disk.folder, buffering=0)  # noqa: SIM115 (open as long as this)
        self._remove = weakref.finalize(self, self._file.close)
        try:
            os.posix_fallocate(self._file.fileno(), 0, nbytes)
        except BaseException:
            self._remove()
            raise
        disk.files.add(self)

    def give(self) -> None:
        """Return it to its disk. What is being done with it ends before what is asked for next."""
        self._disk.give(self)

    def close(self) -> None:
        """Remove it, once what it was asked for is done."""
        self._disk.files.discard(self)
        with contextlib.suppress(RuntimeError):  # the interpreter ends, and with it the file
            self._disk.writes.submit(self._disk.reads.submit, self._remove)

    def write(self, memory: Tensor, ready: Callable[[], object], then: Callable[[], object]) -> Future[Any]:
        """Write ``memory`` once ``ready`` returns, and call ``then``, whatever came of it."""

        def run() -> None:
            try:
                ready()
                self._write(memory)
            finally:
                then()

        return self._disk.writes.submit(run)

    def read(self, memory: Tensor, written: Future[Any], ready: Callable[[], object]) -> Future[Any]:
        """Fill ``memory`` with what was ``written``, once ``ready`` returns."""

        def run() -> None:
            written.result()
            ready()
            self._read(memory)

        return self._disk.reads.submit(run)

    def _write(self, memory: Tensor) -> None:
        """Write all of it to the disk, and let the system keep nothing of it in memory."""
        number = self._file.fileno()
        for at, part in _parts(memory):
            done = 0
            while done < len(part):
                done += os.pwrite(number, part[done:], at + done)
        os.fdatasync(number)
        os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)

    def _read(self, memory: Tensor) -> None:
        """Read as many bytes as there is memory."""
        for at, part in _parts(memory):
            done = 0
            while done < len(part):
                got = os.preadv(self._file.fileno(), [part[done:]], at + done)
                if not got:
                    raise OSError(f"a file in {self._disk.folder} ended at {at + done} of {self.nbytes} bytes")
                done += got


def _parts(memory: Tensor) -> list[tuple[int, memoryview]]:
    """Return the bytes of host memory in parts, and where each begins."""
    assert memory.dtype == torch.uint8
    array: Any = memory.numpy()
    whole = memoryview(array)
    return [(at, whole[at : at + _MOST]) for at in range(0, len(whole), _MOST)]
