"""The frozen weights of one layer that travel together: one piece of host memory, and one of the GPU's.

Parameters are the host's tensors, but the GPU's between `Piece.enter` and `Piece.leave`. The GPU's piece is freed by
resizing its storage, not replaced: autograd saves views of weights (``weight.t()``), which are right again once it is
filled again.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lowtide.errors import UnsupportedError, message
from lowtide.memory.copies import Side
from lowtide.memory.optimizer_blocks import ALIGNED
from lowtide.memory.pinned import Buffer


class Piece:
    """The weights of one layer: on the host, and on the device between `begin` and `free`."""

    def __init__(self, params: Sequence[nn.Parameter], buffer: Buffer, side: Side, device: torch.device) -> None:
        self.params, self.nbytes = params, flat_bytes(params)
        self._buffer, self._side = buffer, side
        self._event: Any = None  # of a copy that its stream has not waited for
        self._copied: Any = None  # of the last copy
        self._stream: Any = None
        self._here = self._entered = False
        self._host = buffer.memory[: self.nbytes]
        # A storage for each, since savers take those that share one for the same weight.
        self._on_host = [_as(p, _alone(self._host[part])) for p, part in _parts(params)]
        with torch.no_grad():
            for p, view in zip(params, self._on_host, strict=True):
                p.data = view.copy_(p.data)
                move_scales(p, device)
        self._flat = torch.empty(self.nbytes, dtype=torch.uint8, device=device)
        self._on_device = [_as(p, self._flat[part]) for p, part in _parts(params)]
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
        if torch.is_grad_enabled() and any(p.requires_grad for p in self.params):
            hint = "Call the handle's remove() before you set it to train."
            raise UnsupportedError(message("requires_grad", "False for offloaded weights", "True", hint))
        self.begin()
        here = self._side.stream()
        self._wait(here)
        if here != self._stream:
            self._side.used_on(self._flat, here)
        self._set(self._on_device)
        self._entered = True

    def leave(self) -> None:
        """Let the parameters be the host's tensors."""
        if self._entered:
            self._set(self._on_host)
            self._entered = False

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

    def end(self, device: torch.device | None) -> None:
        """Leave the parameters with memory of their own, on a device, or on the one where the layer runs."""
        self.leave()
        self.free()
        self.finish()
        to = self._flat.device if device is None else device
        with torch.no_grad():
            for p in self.params:
                p.data = p.data.to(to) if to != p.device else p.data.clone()
                move_scales(p, to)

    def _set(self, views: Sequence[Tensor]) -> None:
        for p, view in zip(self.params, views, strict=True):
            p.data = view

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


def _parts(params: Iterable[Tensor]) -> Iterator[tuple[Tensor, slice]]:
    """Yield weights, each with its part of their piece."""
    start = 0
    for p in params:
        yield p, slice(start, start + p.nbytes)
        start += -(-p.nbytes // ALIGNED) * ALIGNED


def _alone(memory: Tensor) -> Tensor:
    """Return the same bytes as a storage of their own."""
    array: Any = (ctypes.c_uint8 * memory.numel()).from_address(memory.data_ptr())
    array.memory = memory  # lives as long
    return torch.frombuffer(array, dtype=torch.uint8)


def _as(p: Tensor, memory: Tensor) -> Tensor:
    """Return memory as a tensor of a weight's dtype, shape and strides."""
    return memory.view(p.dtype).as_strided(p.shape, p.stride())


def flat_bytes(params: Iterable[Tensor]) -> int:
    """Return the bytes of a piece of these weights."""
    return sum(-(-p.nbytes // ALIGNED) * ALIGNED for p in params)
