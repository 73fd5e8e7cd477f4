"""A pool of host memory: page-locked buffers that are reused step after step, under a budget."""

from __future__ import annotations

import math
import os
import weakref
from collections import defaultdict
from collections.abc import Callable

from torch import Tensor

from lowtide.errors import UnsupportedError, message
from lowtide.measure.resident import available_bytes
from lowtide.measure.units import gib_text

_LEFT_FREE = 1 << 30  # of what the host has free, for everything else
_LAYERS_HINT = "Offload fewer layers, keep='input' instead of 'attention', train on fewer tokens, or raise the budget."


class Buffer:
    """Bytes of host memory, returned to the system when nothing refers to them any more."""

    def __init__(self, slot: int, memory: Tensor, unpin: Callable[[Tensor], None]) -> None:
        self.slot, self.memory = slot, memory
        # Not at exit: the process's memory goes then anyway, and the device's driver may be gone before.
        weakref.finalize(self, unpin, memory).atexit = False

    @property
    def nbytes(self) -> int:
        """Its size."""
        return self.memory.numel()


class HostPool:
    """Buffers for what layers save, reused as soon as a graph releases them.

    Each slot (a layer's input, attention's output, its logsumexp) has buffers of its own, all of one size where the
    batches are. One that is too small is replaced, so there are never more than were in use at once.

    Args:
        limit_bytes: The most that it may hold, or None for what the host has free.
        pin: Returns page-locked memory of that many bytes, as uint8.
        unpin: Takes it back.
        hint: What to do where it does not suffice.
    """

    def __init__(
        self,
        limit_bytes: int | None,
        pin: Callable[[int], Tensor],
        unpin: Callable[[Tensor], None],
        hint: str = _LAYERS_HINT,
    ) -> None:
        self.nbytes = 0
        self._limit_bytes, self._pin, self._unpin, self._hint = limit_bytes, pin, unpin, hint
        self._free: dict[int, list[Buffer]] = defaultdict(list)
        self._closed = False

    def check(self, needed: int, what: str) -> None:
        """Raise unless the pool may hold ``needed`` bytes in all.

        Raises:
            UnsupportedError: It may not: the bytes, the budget and what to do.
        """
        free, limit = available_bytes(), math.inf if self._limit_bytes is None else self._limit_bytes
        # Without a limit, the processes that a launcher started on this machine share what is free.
        sharers = max(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), 1) if self._limit_bytes is None else 1
        if free:
            limit = min(limit, max(self.nbytes + (free - _LEFT_FREE) // sharers, 0))
        if needed > limit:
            whose = "host_gib" if limit == self._limit_bytes else "what the host has free, less 1 GiB"
            whose += f", for each of {sharers} processes" if sharers > 1 else ""
            got = f"{gib_text(limit)} GiB ({whose}), {gib_text(needed - limit)} GiB too little"
            expected = f"{gib_text(needed)} GiB of host memory for {what}"
            raise UnsupportedError(message("host_gib", expected, got, self._hint))

    def take(self, slot: int, nbytes: int) -> Buffer:
        """Return a buffer of at least ``nbytes``, a free one where one is large enough.

        Raises:
            UnsupportedError: A new one does not fit beside those in use.
        """
        free = self._free[slot]
        fitting = [buffer for buffer in free if buffer.nbytes >= nbytes]
        if fitting:
            best = min(fitting, key=lambda buffer: buffer.nbytes)
            free.remove(best)
            return best
        if free:  # too small for the batches that come now
            self.nbytes -= free.pop().nbytes
        self.check(self.nbytes + nbytes, "what the graphs that are alive save (more than one forward?)")
        buffer = Buffer(slot, self._pin(nbytes), self._unpin)
        self.nbytes += buffer.nbytes
        return buffer

    def give(self, buffer: Buffer) -> None:
        """Take a buffer back, or leave it to the system: graphs die in any thread at any time, also inside `take`."""
        if self._closed:
            self.nbytes -= buffer.nbytes
        else:
            self._free[buffer.slot].append(buffer)

    def close(self) -> None:
        """Return what is not in use to the system, and from now on whatever comes back."""
        self._closed = True
        self.nbytes -= sum(buffer.nbytes for free in self._free.values() for buffer in free)
        self._free.clear()
