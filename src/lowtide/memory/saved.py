"""Tensors of a layer, and how one is saved for backward where it is, with autograd's own check of its version."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import get_device_states, set_device_states

from lowtide.errors import UnsupportedError, message

Get = Callable[[], Tensor]  # returns a saved tensor
Store = Callable[[Tensor], Get]  # saves one


def tensors_in(values: Any) -> Iterator[Tensor]:
    """Yield the tensors of a layer's arguments or outputs: in tuples, lists and dictionaries."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, tuple | list | dict):
        for value in values.values() if isinstance(values, dict) else values:
            yield from tensors_in(value)


def hidden_states_of(outputs: Any) -> Tensor | None:
    """Return the hidden states among what a layer returns: the first floating-point tensor."""
    return next((x for x in tensors_in(outputs) if x.is_floating_point()), None)


def stay(tensor: Tensor) -> Get:
    """Save a tensor where it is; the returned function returns it, and raises if it was written to since."""
    saved = detached(tensor)
    before = saved._version

    def get() -> Tensor:
        if saved._version != before:
            raise changed_in_place()
        return saved.detach()  # an alias each time: what autograd attaches to it must not be attached to what is saved

    return get


def detached(tensor: Tensor) -> Tensor:
    """Return an alias that has the tensor's version counter and not its graph, also below autograd."""
    # There, the key that shares counters between a tensor and its views is switched off.
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def random_state(tensor: Tensor) -> Callable[[], None]:
    """Return what sets PyTorch's random state back to what it is now, on the CPU and on a tensor's device."""
    cpu, (devices, states), kind = torch.get_rng_state(), get_device_states(tensor), tensor.device.type

    def restore() -> None:
        torch.set_rng_state(cpu)
        set_device_states(devices, states, device_type=kind)

    return restore


def changed_in_place() -> UnsupportedError:
    """Return the error for a saved tensor that was written to between forward and backward."""
    expected = "tensors that stay unmodified from forward to backward"
    hint = "Write out of place in the layer (x = x + y, not x += y), or set keep='all' for it."
    return UnsupportedError(message("keep", expected, "one changed by an in-place operation", hint))
