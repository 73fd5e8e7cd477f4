"""Optimizer states that travel together: flat blocks of them, on the GPU or in pinned host memory.

A few hundred MiB of states are one tensor each, so that a copy is one transfer, and so that the memory that a block
leaves behind is in one piece. `share_out` and `share_back` are the schedule, by which the planner counts too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from torch import Tensor

from lowtide.memory.copies import Moved, Side
from lowtide.memory.offload import IN_FLIGHT
from lowtide.memory.pinned import Buffer

MIN_BYTES = 64 * 2**10  # of a state that is worth a copy: step counters, and the states of norms, stay
BLOCK_BYTES = 256 * 2**20
ALIGNED = 512  # bytes: where PyTorch's allocator would begin a tensor

States = Mapping[Any, Any]  # an optimizer's ``state``: a dictionary for each parameter


def share_out(layer: int, layers: int) -> float:
    """Return the share of the bytes whose copies have begun when layer ``layer`` begins its forward.

    All have when the last layer but one begins, so that `IN_FLIGHT` layers remain for the last copy.
    """
    return min(1.0, (layer + 1) / max(1, layers - IN_FLIGHT + 1))


def layers_to_leave(layers: int) -> int:
    """Return the number of layers for which a block may be on its way out.

    The state of an embedding is one block, and takes several layers' time where sequences are short.
    """
    return max(IN_FLIGHT, min(2 * IN_FLIGHT, layers // 4))


def share_away(layer: int, layers: int) -> float:
    """Return the share that has left the GPU at the end of a layer's forward; behind the last layer all has."""
    return max(0.0, share_out(layer - layers_to_leave(layers), layers))


def share_back(done: int, layers: int) -> float:
    """Return the share that is on its way back, or there, when backward has done so many layers.

    With one layer left all is: the last copy has that layer's backward, and the embedding's.
    """
    return min(1.0, done / max(1, layers - 2)) if layers > 1 else 1.0


class Slot:
    """One state of one parameter: where it is in the optimizer, and in its block."""

    def __init__(self, param: Tensor, key: Any, tensor: Tensor) -> None:
        self.param, self.key = param, key
        self.shape, self.stride, self.dtype, self.device = tensor.shape, tensor.stride(), tensor.dtype, tensor.device
        self.nbytes = -(-tensor.numel() * tensor.element_size() // ALIGNED) * ALIGNED  # in its block
        self.host: Tensor | None = None  # a view of the block's host memory
        self.here: Tensor | None = None  # a view of the block on the device, while it is there

    @property
    def signature(self) -> Any:
        """What must not change, or the blocks are laid out anew."""
        return id(self.param), self.key, self.shape, self.stride, self.dtype, self.device

    def current(self, states: States) -> Tensor | None:
        """Return the optimizer's tensor, None where it has none of that kind (any more)."""
        entry = states.get(self.param)
        found = entry.get(self.key) if isinstance(entry, Mapping) else None
        fits = isinstance(found, Tensor) and found.shape == self.shape and found.dtype == self.dtype
        return found if fits else None

    def is_here(self, states: States) -> bool:
        """Return whether the optimizer has the view of the block that it was given."""
        return self.here is not None and self.current(states) is self.here


class Block:
    """Some states and their host memory.

    `where` they are: on the ``"device"``; ``"leaving"``: there, and being copied; on the ``"host"``; ``"coming"``:
    there, and being copied to the device. The optimizer has the device's tensors in the first two and the host's in the
    others, so that what it has is whole whenever it is read in the order of the device's work, and on the host after
    `finish`.
    """

    def __init__(self, slots: list[Slot], buffer: Buffer, side: Side) -> None:
        self.slots, self.buffer = slots, buffer
        self.nbytes = flat_bytes(slots)
        self.where: Literal["device", "leaving", "host", "coming"] = "device"
        self.point = 0  # the layer at which it began to leave
        self._side = side
        self._flat = Moved(buffer.memory[: self.nbytes].view(slots[0].dtype), slots[0].device, side)
        self._under_way: list[Moved] = []  # or done: the last copies, of the whole block or of its states one by one
        self._found: list[tuple[Slot, Tensor]] = []
        for slot, view in zip(slots, self._views(self._flat.host), strict=True):
            slot.host = view

    def __del__(self) -> None:
        self.forget()

    def _views(self, flat: Tensor) -> list[Tensor]:
        views, start = [], flat.storage_offset()
        for slot in self.slots:
            views.append(flat.as_strided(slot.shape, slot.stride, start))
            start += slot.nbytes // flat.element_size()
        return views

    def begin_out(self, states: States, point: int) -> None:
        """Begin to copy to the host."""
        found = [(slot, tensor) for slot in self.slots if (tensor := slot.current(states)) is not None]
        self._found = [(slot, tensor) for slot, tensor in found if tensor is not slot.host]
        if self._flat.tensor is not None and all(slot.is_here(states) for slot in self.slots):
            self._under_way = [self._flat]
            self._flat.out(self._flat.tensor)
        else:  # made by the optimizer, or by load_state_dict
            self._under_way = []
            for slot, tensor in self._found:
                if slot.host is not None:
                    self._under_way.append(Moved(slot.host, slot.device, self._side))
                    self._under_way[-1].out(tensor)
        self.where, self.point = "leaving", point

    def end_out(self, states: States) -> None:
        """Give the optimizer the host's tensors, and the device's memory free in the order of the device's work."""
        for moved in self._under_way:
            moved.let_go(again=True)
        for slot, tensor in self._found:
            if slot.current(states) is tensor:
                states[slot.param][slot.key] = slot.host
        self._gone("host")

    def begin_back(self) -> None:
        """Begin to copy to the device."""
        self._flat.back()
        self._under_way, self.where = [self._flat], "coming"

    def end_back(self, states: States) -> None:
        """Give the optimizer the device's tensors, wherever they are."""
        if self.where in ("device", "leaving"):
            here = self._side.stream()
            for moved in self._under_way:
                moved.wait(here)  # the optimizer is about to write to what is being copied
            self._under_way, self._found, self.where = [], [], "device"
            return
        for slot, view in zip(self.slots, self._views(self._flat.get()), strict=True):
            if slot.current(states) is slot.host:
                slot.here = view
                states[slot.param][slot.key] = view
        self._under_way, self.where = [], "device"

    def drop(self) -> None:
        """Leave a copy to the device unused: no step came, and the host's is as good."""
        self._flat.let_go()
        self._gone("host")

    def forget(self) -> None:
        """Leave the optimizer with what it has now, and no copy under way that the memory would have to wait for."""
        for moved in self._under_way:
            moved.let_go()
        self._gone("device")

    def finish(self) -> None:
        """Let the caller wait until what is on the host is whole."""
        if self.where in ("host", "coming"):  # the way back begins behind the way out
            for moved in self._under_way:
                moved.finish()

    def _gone(self, where: Literal["device", "host"]) -> None:
        self._flat.tensor, self._found, self.where = None, [], where
        for slot in self.slots:
            slot.here = None


def flat_bytes(slots: list[Slot]) -> int:
    """Return the bytes of a block of these states."""
    return sum(slot.nbytes for slot in slots)


def chosen(slots: list[Slot], limit: float) -> list[Slot]:
    """Return states of at most ``limit`` bytes, the largest first: copies that come last are short."""
    found: list[Slot] = []
    for slot in sorted(slots, key=lambda slot: -slot.nbytes):
        if slot.nbytes <= limit:
            found.append(slot)
            limit -= slot.nbytes
    return found


def in_blocks(slots: list[Slot]) -> list[list[Slot]]:
    """Return states in groups for a block each, of one device and dtype, of `BLOCK_BYTES` or of one larger state."""
    groups: list[list[Slot]] = []
    filled: dict[Any, tuple[list[Slot], int]] = {}  # the last group by device and dtype, with its bytes
    for slot in slots:
        group, size = filled.get((slot.device, slot.dtype), ([], 0))
        if not group or size + slot.nbytes > BLOCK_BYTES:
            group, size = [], 0
            groups.append(group)
        group.append(slot)
        filled[slot.device, slot.dtype] = group, size + slot.nbytes
    return sorted(groups, key=flat_bytes, reverse=True)
