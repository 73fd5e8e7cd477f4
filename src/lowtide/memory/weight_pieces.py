"""The frozen weights of one layer that travel together: one piece of host memory, and one of the GPU's.

Parameters are the host's tensors, but the GPU's between `Piece.enter` and `Piece.leave`. The GPU's piece is freed by
resizing its storage, not replaced: autograd saves views of weights (``weight.t()``), which are right again once it is
filled again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lowtide.errors import UnsupportedError, message
from lowtide.memory.offload import Side
from lowtide.memory.optimizer_blocks import ALIGNED
from lowtide.memory.pinned import Buffer


class Place:
    """One weight: its module, its name there, and where it is in its layer's piece."""

    def __init__(self, module: nn.Module, name: str, param: nn.Parameter) -> None:
        self.module, self.name, self.param = module, name, param
        self.nbytes = param.numel() * param.element_size()


class Piece:
    """The weights of one layer: on the host, and on the device between `begin` and `free`."""

    def __init__(self, places: list[Place], buffer: Buffer, side: Side, device: torch.device) -> None:
        self.places, self.nbytes = places, flat_bytes(places)
        self._buffer, self._side = buffer, side
        self._host = buffer.memory[: self.nbytes]
        self._flat = torch.empty(self.nbytes, dtype=torch.uint8, device=device)
        self._views = [list(_views(flat, places)) for flat in (self._host, self._flat)]
        self._event: Any = None  # of a copy that its stream has not waited for
        self._copied: Any = None  # of the last copy
        self._stream: Any = None
        self._here = self._entered = False
        with torch.no_grad():
            for place, view in zip(places, self._views[0], strict=True):
                view.copy_(place.param.data)
                place.param.data = view
                move_scales(place.param, device)
        self._flat.untyped_storage().resize_(0)

    def begin(self) -> None:
        """Begin the copy to the device, unless it is there."""
        if self._here:
            return
        self._stream = self._side.stream()
        self._flat.untyped_storage().resize_(self.nbytes)
        self._event = self._copied = self._side.copy_back(self._flat, self._host)
        self._here = True

    def enter(self) -> None:
        """Let the parameters be the device's tensors, for what computes from now on.

        Raises:
            UnsupportedError: One of them is to be trained.
        """
        if any(place.param.requires_grad for place in self.places):
            hint = "Call the handle's remove() before you set it to train."
            raise UnsupportedError(message("requires_grad", "False for offloaded weights", "True", hint))
        self.begin()
        here = self._side.stream()
        self._wait(here)
        if here != self._stream:
            self._side.used_on(self._flat, here)
        self._set(1)

    def leave(self) -> None:
        """Let the parameters be the host's tensors."""
        if self._entered:
            self._set(0)

    def free(self) -> None:
        """Free the device's memory in the order of the device's work."""
        if self._here:
            self._wait(self._stream)
            self._flat.untyped_storage().resize_(0)
            self._here = False

    def finish(self) -> None:
        """Let the host wait until nothing reads its memory."""
        if self._copied is not None:
            self._side.finish(self._copied)
            self._copied = None

    def end(self, device: torch.device | str | None) -> None:
        """Leave the parameters with memory of their own, on a device, or on the one where the layer runs."""
        self.leave()
        self.free()
        self.finish()
        with torch.no_grad():
            for place in self.places:
                to = torch.device(self._flat.device if device is None else device)
                data = place.param.data
                place.param.data = data.to(to) if to != data.device else data.clone()
                move_scales(place.param, to)

    def _set(self, device: int) -> None:
        for place, view in zip(self.places, self._views[device], strict=True):
            place.param.data = view
        self._entered = bool(device)

    def _wait(self, stream: Any) -> None:
        if self._event is not None:
            self._side.wait(self._event, stream)
            if stream == self._stream:
                self._event = None


def move_scales(param: Any, device: torch.device) -> None:
    """Move the scales of a weight of bitsandbytes' 4 bits, which are tensors beside it."""
    state = getattr(param, "quant_state", None)
    if state is not None:
        state.to(device)


def _views(flat: Tensor, places: Sequence[Place]) -> Iterator[Tensor]:
    start = 0
    for place in places:
        own = flat[start : start + place.nbytes].view(place.param.dtype)
        yield own.as_strided(place.param.shape, place.param.stride(), own.storage_offset())
        start += -(-place.nbytes // ALIGNED) * ALIGNED


def flat_bytes(places: Sequence[Place]) -> int:
    """Return the bytes of a piece of these weights."""
    return sum(-(-place.nbytes // ALIGNED) * ALIGNED for place in places)
