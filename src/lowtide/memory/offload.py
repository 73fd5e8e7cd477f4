"""What layers save, in host memory from forward until shortly before backward.

A record holds what one call of one layer saves. As soon as a tensor is saved it is copied to a page-locked buffer on a
side stream; two layers later the compute stream waits for that copy, which has long been made, and the GPU's memory is
free. When backward reads a record, the one before it is brought back on another side stream, so that it is there when
backward gets to it. Two forwards before one backward have records of their own, and a record returns its memory when
its graph dies, used or not.

What the host has no room for goes on to files, that of the first layers: their backward comes last, and a file is read
while the layer behind its own computes.
"""

from __future__ import annotations

import math
import weakref
from collections import defaultdict, deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lowtide.errors import UnsupportedError, message
from lowtide.memory import copies
from lowtide.memory.attention import Get, changed_in_place, detached, stay
from lowtide.memory.disk import Disk, File
from lowtide.memory.pinned import Buffer, HostPool

ON_THE_WAY = 4  # layers to or from the disk: two being written, or one being read, one used, and one let go
IN_FLIGHT = 2  # layers whose copies may be under way: the one that runs and the one before it
ON_DEVICE = IN_FLIGHT  # the last layers that are offloaded stay: they would still be in flight when backward begins


class _Item:
    """One tensor that a record saves: on the device, in a buffer of the host's, or both."""

    _tensor: Tensor | None = None

    def __init__(self, tensor: Tensor, buffer: Buffer, pool: HostPool, side: copies.Side) -> None:
        self._side, self._pool, self._buffer = side, pool, buffer
        self._version, self._changed, self._device = tensor._version, False, tensor.device
        strides = tensor.stride() if copies.is_dense(tensor) else torch.empty(tensor.shape, device="meta").stride()
        self._nbytes, self._layout = tensor.nbytes, (tensor.dtype, tensor.shape, strides)
        self._host = self._in(buffer)
        self._tensor = detached(tensor)
        self._stream = side.stream()  # on which the device's memory was made, and is used again when it is freed
        self._done = side.copy_out(self._host, self._tensor)  # the last copy, whichever way

    def __del__(self) -> None:
        self.let_go()
        self._buffer.used = self._done
        self._pool.give(self._buffer)

    @property
    def host_bytes(self) -> int:
        """The size of its buffer."""
        return self._buffer.nbytes

    def _in(self, buffer: Buffer) -> Tensor:
        """Return the part of a buffer that has the tensor's values."""
        dtype, shape, strides = self._layout
        return buffer.memory[: self._nbytes].view(dtype).as_strided(shape, strides)

    def let_go(self) -> None:
        """Free the device's memory as soon as no copy needs it."""
        if self._tensor is None:
            return
        self._changed = self._changed or self._tensor._version != self._version
        # Not the current stream, which may be another one by now: the memory goes to who allocates on its own.
        self._side.wait(self._done, self._stream)
        self._tensor = None

    def bring_back(self) -> None:
        """Begin to copy to the device, unless it is there."""
        if self._tensor is None:
            self._stream = self._side.stream()
            self._tensor = torch.empty_strided(
                self._host.shape, self._host.stride(), dtype=self._host.dtype, device=self._device
            )
            self._done = self._side.copy_back(self._tensor, self._host)  # let_go has waited for the way out
            self._version = self._tensor._version

    def get(self) -> Tensor:
        """Return the tensor as it was saved."""
        self.bring_back()
        assert self._tensor is not None
        if self._changed or self._tensor._version != self._version:
            raise changed_in_place()
        here = self._side.stream()
        self._side.wait(self._done, here)
        if here != self._stream:  # brought back from another one
            self._side.used_on(self._tensor, here)
        return self._tensor.detach()


class _ItemOnDisk(_Item):
    """One that goes on to a file: it is in a buffer on its way there, and from the way back until it dies."""

    _reading: Future[Any] | None = None

    def __init__(
        self,
        tensor: Tensor,
        buffer: Buffer,
        pool: HostPool,
        side: copies.Side,
        file: File,
        take: Callable[[int], Buffer],
    ) -> None:
        """``take`` gives a buffer for the way back."""
        super().__init__(tensor, buffer, pool, side)
        self._file, self._take = file, take
        ready, then = partial(side.finish, self._done), partial(pool.give, buffer)
        self.written = file.write(buffer.memory[: self._nbytes], ready, then)

    def __del__(self) -> None:
        self.let_go()
        self._file.give()

    def let_go(self) -> None:
        """Also give the buffer back that a file was read into."""
        super().let_go()
        if self._reading is not None:
            reading, pool, buffer = self._reading, self._pool, self._buffer
            self._reading, buffer.used = None, self._done
            reading.cancel()
            reading.add_done_callback(lambda _: pool.give(buffer))

    def bring_back(self) -> None:
        """Begin to read it, unless it is there; `get` copies it to the device."""
        if self._tensor is None and self._reading is None:
            self._buffer = buffer = self._take(self._nbytes)
            self._host = self._in(buffer)
            ready = (lambda: None) if buffer.used is None else partial(self._side.finish, buffer.used)
            self._reading = self._file.read(buffer.memory[: self._nbytes], self.written, ready)

    def get(self) -> Tensor:
        """Return the tensor as it was saved."""
        self.bring_back()
        if self._tensor is None:
            assert self._reading is not None
            self._reading.result()
            super().bring_back()
        return super().get()


class Record:
    """What one call of one layer saves for its backward.

    Args:
        offloader: Whose buffers it uses.
        before: The record of the layer that ran before, whose backward comes next.
        turn: Its place among the layers whose tensors go to the host. None: they stay, as the last layers', which take
            part so that the ones before them come back in time.
    """

    def __init__(self, offloader: Offloader, before: Record | None, *, turn: int | None) -> None:
        self._items: list[_Item] = []
        self._offloader = offloader
        self._before = weakref.ref(before) if before is not None else None
        self._after: weakref.ref[Record] | None = None
        if before is not None:
            before._after = weakref.ref(self)
        self._turn = turn

    def put(self, tensor: Tensor) -> Get:
        """Save a tensor, and return the function by which backward gets it.

        Raises:
            UnsupportedError: It is of a class of its own, such as DTensor; or as `Offloader.store`.
        """
        if type(tensor) not in (Tensor, nn.Parameter):
            hint = "Take offload=False for this layer."
            raise UnsupportedError(message("offload", "plain tensors to save", type(tensor).__name__, hint))
        if self._turn is not None:
            item = self._offloader.store(tensor, slot=len(self._items), turn=self._turn)
            self._items.append(item)
            get = item.get
        else:
            get = stay(tensor)

        def prefetching() -> Tensor:
            back = get()
            after = self._after and self._after()
            before = self._before and self._before()
            if after:  # its backward is over, and retain_graph holds it
                after.let_go()
            if before:
                before.bring_back()
            return back

        return prefetching

    def let_go(self) -> None:
        """Free the device's memory of what is on the host."""
        for item in self._items:
            item.let_go()

    def bring_back(self) -> None:
        """Begin to copy everything back to the device."""
        for item in self._items:
            item.bring_back()


class Offloader:
    """What the layers of one model share: streams, host memory, and the order in which they ran.

    Args:
        limit_bytes: The most host memory, or None for what the host has free.
        layers: How many layers move what they save to the host.
        attention_layers: How many of them save attention's output besides their input.
        folder: Where what does not fit goes, that of the first layers, which backward needs last. None: it has to fit.
    """

    def __init__(self, limit_bytes: int | None, layers: int, attention_layers: int, folder: Path | None = None) -> None:
        self._settings = (limit_bytes, layers, attention_layers, folder)
        self._disk: Disk | None = None
        self._on_disk = 0  # layers
        self._writing: dict[int, deque[Future[Any]]] = defaultdict(deque)  # by slot
        self._held = weakref.WeakSet[_Item]()  # on the host until they die
        self._sides: dict[torch.device, copies.Side] = {}
        self._pool: HostPool | None = None
        self._largest: dict[int, int] = {}  # bytes by slot: 0 is the layer's input, the others are attention's
        self._in_flight: deque[weakref.ref[Record]] = deque()
        self._last: weakref.ref[Record] | None = None

    def __reduce__(self) -> Any:
        return Offloader, self._settings  # a copy of the model has buffers and streams of its own

    @property
    def host_bytes(self) -> int:
        """The host memory that is pinned now."""
        return self._pool.nbytes if self._pool is not None else 0

    @property
    def folder(self) -> Path | None:
        """Where the files are made that host memory has no room for."""
        return self._settings[-1]

    @property
    def disk_bytes(self) -> int:
        """The size of the files now."""
        return self._disk.nbytes if self._disk is not None else 0

    def begin(self, *, turn: int | None) -> Record:
        """Return the record for a layer that is about to run, and free the device's memory of the ones before."""
        while len(self._in_flight) >= IN_FLIGHT:
            record = self._in_flight.popleft()()
            if record is not None:
                record.let_go()
        record = Record(self, self._last() if self._last is not None else None, turn=turn)
        self._last = weakref.ref(record)
        self._in_flight.append(self._last)
        return record

    def store(self, tensor: Tensor, slot: int, turn: int) -> _Item:
        """Begin to copy a tensor to the host, and of the first layers on to the disk where not all fit.

        Raises:
            UnsupportedError: There is no device to offload from, or the host memory does not suffice: at the first
                layer of the first forward, if all layers save as much as this one.
        """
        side = self._sides.get(tensor.device)
        if side is None:
            side = self._sides[tensor.device] = copies.side_for(tensor.device)
        limit, layers, attention_layers, folder = self._settings
        if self._pool is None:
            self._pool = HostPool(limit, side.pin, side.unpin)
        nbytes = tensor.numel() * tensor.element_size()
        if nbytes > self._largest.get(slot, 0):
            largest = {**self._largest, slot: nbytes}
            total = sum(size * (attention_layers if at else layers) for at, size in largest.items())
            if folder is None:
                self._pool.check(total, f"{layers} offloaded layers")
            else:
                self._on_disk = self._beyond(total, sum(largest.values()))
            self._largest = largest
        if folder is None or (turn >= self._on_disk and self._holds(nbytes)):
            item = _Item(tensor, self._pool.take(slot, nbytes), self._pool, side)
            self._held.add(item)
            return item
        self._disk = self._disk or Disk(folder)
        file, take = self._disk.take(slot, nbytes), partial(self._take, slot, 1)
        item = _ItemOnDisk(tensor, self._take(slot, IN_FLIGHT, nbytes), self._pool, side, file, take)
        self._writing[slot].append(item.written)
        return item

    def _beyond(self, total: int, of_layer: int) -> int:
        """Return how many layers the host has no room for, beside those on their way to the disk or back."""
        assert self._pool is not None
        on_the_way, limit = ON_THE_WAY * of_layer, self._pool.most_bytes
        self._pool.check(on_the_way, f"{ON_THE_WAY} layers on their way to the disk")
        return 0 if total + on_the_way <= limit else math.ceil((total + on_the_way - limit) / of_layer)

    def _holds(self, nbytes: int) -> bool:
        """Return whether the host has room for so many bytes beside what stays there and the reserve for the disk.

        The reserve, `ON_THE_WAY` layers, counts in full and what is in it does not count again: which layers go to the
        disk does not depend on its speed.
        """
        assert self._pool is not None
        on_the_way = ON_THE_WAY * sum(self._largest.values())
        return sum(item.host_bytes for item in self._held) + nbytes + on_the_way <= self._pool.most_bytes

    def _take(self, slot: int, most: int, nbytes: int) -> Buffer:
        """Return a buffer once fewer than ``most`` of a slot are being written; reading tells what came of that."""
        writing = self._writing[slot]
        while len(writing) >= most:
            wait([writing.popleft()])
        assert self._pool is not None
        if self._disk is not None and not self._pool.has_room(nbytes):
            self._disk.settle()  # graphs that died may leave buffers that are being read into
        return self._pool.take(slot, nbytes)

    def close(self) -> None:
        """Return the host memory, that of graphs that are alive when they die."""
        if self._pool is not None:
            self._pool.close()
        if self._disk is not None:
            self._disk.close()
