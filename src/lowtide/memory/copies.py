"""Host memory beside a device: page-locked buffers under a budget, and copies to and from them beside its work."""

from __future__ import annotations

import contextlib
import math
import os
import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lowtide.errors import UnsupportedError, message
from lowtide.measure.resident import available_bytes
from lowtide.measure.units import gib_text

_LEFT_FREE = 1 << 30  # of what the host has free, for everything else
_LAYERS_HINT = "Offload fewer layers, keep='input' instead of 'attention', train on fewer tokens, or raise the budget."


class Side:
    """Copies to and from the host beside what a CUDA device computes: a stream for each direction, as its engines."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._out, self._back = (torch.cuda.Stream(device) for _ in range(2))  # type: ignore[no-untyped-call]

    def pin(self, nbytes: int) -> Tensor:
        """Return page-locked host memory, in whole pages, as uint8."""
        # Not torch's pinned allocator: it rounds up to powers of two and keeps what is freed, and this is a budget.
        page = 4096
        memory = torch.empty(-(-nbytes // page) * page + page, dtype=torch.uint8, device="cpu")
        start = -memory.data_ptr() % page
        aligned = memory[start : start + memory.numel() - page]
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        code = int(runtime.cudaHostRegister(aligned.data_ptr(), aligned.numel(), 0))
        if code:
            _clear_last_error(self._device)
            hint = "Offload fewer layers, or lower host_gib to what the system lets a process lock."
            raise UnsupportedError(message("offload", f"{nbytes} bytes of memory to lock", f"CUDA error {code}", hint))
        return aligned

    def unpin(self, memory: Tensor) -> None:
        """Unlock it, once no copy is under way."""
        torch.cuda.synchronize(self._device)  # rare: when batches grow, and at the end
        torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())  # type: ignore[no-untyped-call]

    def copy_out(self, host: Tensor, tensor: Tensor) -> Any:
        """Copy to the host after what computes now; return the event of its end."""
        return self._copy(self._out, host, tensor)

    def copy_back(self, tensor: Tensor, host: Tensor) -> Any:
        """Copy from the host after what computes now, or had the memory before; return the event of its end."""
        return self._copy(self._back, tensor, host)

    def _copy(self, stream: torch.cuda.Stream, to: Tensor, of: Tensor) -> Any:
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            to.copy_(of, non_blocking=True)
        return stream.record_event()

    def stream(self) -> Any:
        """Return the stream that computes now."""
        return torch.cuda.current_stream(self._device)

    def wait(self, event: Any, stream: Any) -> None:
        """Let a stream wait for an event from now on, but not the host."""
        stream.wait_event(event)

    def used_on(self, tensor: Tensor, stream: Any) -> None:
        """Keep a tensor's memory, when it is freed, until what the stream computes now is done.

        The allocator only has the stream that the tensor was made on.
        """
        tensor.record_stream(stream)

    def finish(self, event: Any) -> None:
        """Let the host wait for an event."""
        event.synchronize()


class Moved:
    """A tensor that moves between a device and its place in host memory.

    Args:
        host: The place, a view of a buffer of page-locked memory, of the tensor's shape and dtype.
        device: The device.
        side: Its copies.
    """

    tensor: Tensor | None = None  # on the device
    _done: Any = None  # the last copy, whichever way

    def __init__(self, host: Tensor, device: torch.device, side: Side) -> None:
        self.host, self._device, self._side = host, device, side

    @property
    def written(self) -> bool:
        """Whether the tensor on the device was written to since it was copied."""
        return self.tensor is not None and self.tensor._version != self._seen

    def out(self, tensor: Tensor) -> None:
        """Begin to copy a tensor to the host."""
        if tensor is not self.tensor:
            self._stream = self._side.stream()  # on which its memory was made, and is used again when it is freed
        self.tensor, self._seen = tensor, tensor._version
        self._done = self._side.copy_out(self.host, tensor)

    def let_go(self) -> None:
        """Free the device's memory once no copy needs it."""
        if self.tensor is not None:
            # Not the current stream, which may be another one by now: the memory goes to who allocates on its own.
            self._side.wait(self._done, self._stream)
            self.tensor = None

    def back(self) -> None:
        """Begin to copy to the device, unless it is there."""
        if self.tensor is None:
            self._stream = self._side.stream()
            self.tensor = torch.empty_like(self.host, device=self._device, pin_memory=False)
            self._done = self._side.copy_back(self.tensor, self.host)  # let_go has waited for the way out
            self._seen = self.tensor._version

    def get(self) -> Tensor:
        """Return the tensor that `back` brings to the device, for what computes now."""
        self.back()
        assert self.tensor is not None
        here = self._side.stream()
        self._side.wait(self._done, here)
        if here != self._stream:  # brought back from another one
            self._side.used_on(self.tensor, here)
        return self.tensor

    def finish(self) -> None:
        """Let the host wait for the last copy."""
        if self._done is not None:
            self._side.finish(self._done)


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
        side: What locks the memory.
        hint: What to do where it does not suffice.
    """

    def __init__(self, limit_bytes: int | None, side: Side, hint: str = _LAYERS_HINT) -> None:
        self.nbytes = 0
        self._limit_bytes, self._side, self._hint = limit_bytes, side, hint
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
        buffer = Buffer(slot, self._side.pin(nbytes), self._side.unpin)
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


def _clear_last_error(device: torch.device) -> None:
    """Clear the error that a failed call of the CUDA runtime leaves behind, which was raised already.

    It would be raised after the next launch of any kernel. PyTorch has no name for cudaGetLastError,
    and calls it after a launch of its own.
    """
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device=device)


def available() -> bool:
    """Whether there is a device to offload from."""
    return torch.cuda.is_available()


def side_for(device: torch.device) -> Side:
    """Return the side of a device.

    Raises:
        UnsupportedError: There is nothing to offload from.
    """
    if device.type != "cuda":
        hint = "Move the model and its inputs to a GPU, or offload nothing."
        raise UnsupportedError(message("offload", "a CUDA device", f"{device}", hint))
    return Side(device)


def is_dense(tensor: Tensor) -> bool:
    """Whether a tensor fills its memory without gaps, in whatever order: then a copy can have the same strides."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.numel() > 0 and span == tensor.numel()
