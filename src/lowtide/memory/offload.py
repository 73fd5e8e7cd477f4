"""What layers save, in host memory from forward until shortly before backward.

A record holds what one call of one layer saves. As soon as a tensor is saved it is copied to a page-locked buffer on a
side stream; two layers later the compute stream waits for that copy, which has long been made, and the GPU's memory is
free. When backward reads a record, the one before it is brought back on another side stream, so that it is there when
backward gets to it. Two forwards before one backward have records of their own, and a record returns its memory when
its graph dies, used or not.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any

import torch
from torch import Tensor, nn

from lowtide.errors import UnsupportedError, message
from lowtide.memory import copies
from lowtide.memory.saved import Get, changed_in_place, detached, stay

IN_FLIGHT = 2  # layers whose copies may be under way: the one that runs and the one before it
ON_DEVICE = IN_FLIGHT  # the last layers that are offloaded stay: they would still be in flight when backward begins


class _Item(copies.Moved):
    """One tensor that a record saves: on the device, in a buffer of the host's, or both."""

    _changed = False

    def __init__(self, tensor: Tensor, buffer: copies.Buffer, pool: copies.HostPool, side: copies.Side) -> None:
        strides = tensor.stride() if copies.is_dense(tensor) else torch.empty(tensor.shape, device="meta").stride()
        host = buffer.memory[: tensor.nbytes].view(tensor.dtype).as_strided(tensor.shape, strides)
        super().__init__(host, tensor.device, side)
        self._pool, self._buffer = pool, buffer
        self.out(detached(tensor))

    def __del__(self) -> None:
        self.let_go()
        self._pool.give(self._buffer)

    def let_go(self) -> None:
        self._changed = self._changed or self.written
        super().let_go()

    def get(self) -> Tensor:
        """Return the tensor as it was saved."""
        self.back()
        if self._changed or self.written:
            raise changed_in_place()
        return super().get().detach()


class Record:
    """What one call of one layer saves for its backward.

    Args:
        offloader: Whose buffers it uses.
        before: The record of the layer that ran before, whose backward comes next.
        moves: Whether its tensors go to the host. Those of the last layers stay; their records take part so that the
            layers before them come back in time.
    """

    def __init__(self, offloader: Offloader, before: Record | None, *, moves: bool) -> None:
        self._items: list[_Item] = []
        self._offloader = offloader
        self._before = weakref.ref(before) if before is not None else None
        self._moves = moves

    def put(self, tensor: Tensor) -> Get:
        """Save a tensor, and return the function by which backward gets it.

        Raises:
            UnsupportedError: It is of a class of its own, such as DTensor; or as `Offloader.store`.
        """
        if type(tensor) not in (Tensor, nn.Parameter):
            hint = "Take offload=False for this layer."
            raise UnsupportedError(message("offload", "plain tensors to save", type(tensor).__name__, hint))
        if self._moves:
            item = self._offloader.store(tensor, slot=len(self._items))
            self._items.append(item)
            get = item.get
        else:
            get = stay(tensor)

        def prefetching() -> Tensor:
            back = get()
            before = self._before and self._before()
            if before:
                before.back()
            return back

        return prefetching

    def let_go(self) -> None:
        """Free the device's memory of what is on the host."""
        for item in self._items:
            item.let_go()

    def back(self) -> None:
        """Begin to copy everything back to the device."""
        for item in self._items:
            item.back()


class Offloader:
    """What the layers of one model share: streams, host memory, and the order in which they ran.

    Args:
        limit_bytes: The most host memory, or None for what the host has free.
        layers: How many layers move what they save to the host.
        attention_layers: How many of them save attention's output besides their input.
    """

    def __init__(self, limit_bytes: int | None, layers: int, attention_layers: int) -> None:
        self._settings = (limit_bytes, layers, attention_layers)
        self._sides: dict[torch.device, copies.Side] = {}
        self._pool: copies.HostPool | None = None
        self._largest: dict[int, int] = {}  # bytes by slot: 0 is the layer's input, the others are attention's
        self._in_flight: deque[weakref.ref[Record]] = deque()
        self._last: weakref.ref[Record] | None = None

    def __reduce__(self) -> Any:
        return Offloader, self._settings  # a copy of the model has buffers and streams of its own

    @property
    def host_bytes(self) -> int:
        """The host memory that is pinned now."""
        return self._pool.nbytes if self._pool is not None else 0

    def begin(self, *, moves: bool) -> Record:
        """Return the record for a layer that is about to run, and free the device's memory of the ones before."""
        while len(self._in_flight) >= IN_FLIGHT:
            record = self._in_flight.popleft()()
            if record is not None:
                record.let_go()
        record = Record(self, self._last() if self._last is not None else None, moves=moves)
        self._last = weakref.ref(record)
        self._in_flight.append(self._last)
        return record

    def store(self, tensor: Tensor, slot: int) -> _Item:
        """Begin to copy a tensor to the host.

        Raises:
            UnsupportedError: There is no device to offload from, or the host memory does not suffice: at the first
                layer of the first forward, if all layers save as much as this one.
        """
        side = self._sides.get(tensor.device)
        if side is None:
            side = self._sides[tensor.device] = copies.side_for(tensor.device)
        limit, layers, attention_layers = self._settings
        if self._pool is None:
            self._pool = copies.HostPool(limit, side)
        nbytes = tensor.nbytes
        if nbytes > self._largest.get(slot, 0):
            largest = {**self._largest, slot: nbytes}
            total = sum(size * (attention_layers if at else layers) for at, size in largest.items())
            self._pool.check(total, f"{layers} offloaded layers")
            self._largest = largest
        return _Item(tensor, self._pool.take(slot, nbytes), self._pool, side)

    def close(self) -> None:
        """Return the host memory, that of graphs that are alive when they die."""
        if self._pool is not None:
            self._pool.close()
