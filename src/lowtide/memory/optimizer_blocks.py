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
    """One state of one parameter: what it is in the optimizer, and its views of the block that has it."""

    host: Tensor
    here: Tensor | None = None  # on the device, while the block is there

    def __init__(self, param: Tensor, key: Any, tensor: Tensor) -> None:
        self.param, self.key = param, key
        self.shape, self.stride, self.dtype, self.device = tensor.shape, tensor.stride(), tensor.dtype, tensor.device
        self.nbytes = -(-tensor.nbytes // ALIGNED) * ALIGNED  # in its block

    @property
    def signature(self) -> Any:
        """What must not change, or the blocks are laid out anew."""
        return id(self.param), self.key, self.shape, self.stride, self.dtype, self.device

    def current(self, states: States) -> Any:
        """Return what the optimizer has; None where it has nothing."""
        return states.get(self.param, {}).get(self.key)


class Block:
    """Some states of one dtype, and their host memory.

    `where` they are: on the ``"device"``; ``"leaving"``: there, and being copied; on the ``"host"``, as at first;
    ``"coming"``: there, and being copied to the device. The optimizer has the device's tensors in the first two and the
    host's in the others, so that what it has is whole whenever it is read in the order of the device's work, and on the
    host after `finish`. Tensors that others have put in their place stay until `take`.
    """

    def __init__(self, slots: list[Slot], buffer: Buffer, side: Side) -> None:
        self.slots, self.nbytes, self.buffer = slots, flat_bytes(slots), buffer
        self.where: Literal["device", "leaving", "host", "coming"] = "host"
        self.point = 0  # the layer at which it began to leave
        self._flat = Moved(buffer.memory[: self.nbytes].view(slots[0].dtype), slots[0].device, side)
        for slot, view in zip(slots, self._views(self._flat.host), strict=True):
            slot.host = view

    def __del__(self) -> None:
        self._flat.let_go()

    def _views(self, flat: Tensor) -> list[Tensor]:
        views, start = [], flat.storage_offset()
        for slot in self.slots:
            views.append(flat.as_strided(slot.shape, slot.stride, start))
            start += slot.nbytes // flat.element_size()
        return views

    def take(self, states: States) -> bool:
        """Copy tensors that are not the block's into it, and give the optimizer the block's; False where one lacks."""
        for slot in self.slots:
            own, found = slot.host if slot.here is None else slot.here, slot.current(states)
            if not isinstance(found, Tensor) or (found.shape, found.dtype) != (own.shape, own.dtype):
                return False
            if found is not own:
                own.copy_(found)
                states[slot.param][slot.key] = own
        return True

    def begin_out(self, point: int) -> None:
        """Begin to copy to the host."""
        assert self._flat.tensor is not None
        self._flat.out(self._flat.tensor)
        self.where, self.point = "leaving", point

    def end_out(self, states: States) -> None:
        """Give the optimizer the host's tensors, and the device's memory free in the order of the device's work."""
        for slot in self.slots:
            if slot.here is not None and slot.current(states) is slot.here:
                states[slot.param][slot.key] = slot.host
        self.drop()

    def begin_back(self) -> None:
        """Begin to copy to the device."""
        self._flat.back()
        self.where = "coming"

    def end_back(self, states: States) -> None:
        """Give the optimizer the device's tensors, wherever they are."""
        flat = self._flat.get()  # waits for what is being copied, to which the optimizer is about to write
        if self.where in ("host", "coming"):
            for slot, view in zip(self.slots, self._views(flat), strict=True):
                slot.here = view
                if slot.current(states) is slot.host:
                    states[slot.param][slot.key] = view
        self.where = "device"

    def drop(self) -> None:
        """Leave the device: what is on the host is as good."""
        for slot in self.slots:
            slot.here = None
        self._flat.let_go()
        self.where = "host"

    def finish(self) -> None:
        """Let the caller wait until what is on the host is whole."""
        if self.where != "device":
            self._flat.finish()


def flat_bytes(slots: list[Slot]) -> int:
    """Return the bytes of a block of these states."""
    return sum(slot.nbytes for slot in slots)


def in_blocks(slots: list[Slot], limit: float) -> list[list[Slot]]:
    """Return states of at most ``limit`` bytes in groups for a block each.

    A group is of one dtype, and has `BLOCK_BYTES` or one larger state. The largest states and groups come
    first: copies that come last are short.
    """
    groups: list[list[Slot]] = []
    filled: dict[Any, tuple[list[Slot], int]] = {}  # the last group of a dtype, with its bytes
    for slot in sorted(slots, key=lambda slot: -slot.nbytes):
        if slot.nbytes > limit:
            continue
        limit -= slot.nbytes
        group, size = filled.get(slot.dtype, ([], BLOCK_BYTES))
        if size + slot.nbytes > BLOCK_BYTES:
            group, size = [], 0
            groups.append(group)
        group.append(slot)
        filled[slot.dtype] = group, size + slot.nbytes
    return sorted(groups, key=flat_bytes, reverse=True)
