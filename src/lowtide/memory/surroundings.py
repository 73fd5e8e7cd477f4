"""What surrounds one run of a layer in PyTorch, to run it again alike: the random state and autocast."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.utils.checkpoint import get_device_states, set_device_states


class Surroundings:
    """PyTorch's random state and autocast, as they are now; a layer's own state is `Snapshot`'s affair.

    Args:
        hidden: A tensor on the device that the layer runs on.
    """

    def __init__(self, hidden: Tensor) -> None:
        self._device = hidden.device.type
        self._random = torch.get_rng_state()
        self._on_devices = get_device_states(hidden)
        kinds = [kind for kind in dict.fromkeys(("cpu", self._device)) if torch.amp.is_autocast_available(kind)]
        self._autocast = [(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in kinds]

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Restore them inside, and the current ones afterwards."""
        devices, states = self._on_devices
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(devices, device_type=self._device))
            torch.set_rng_state(self._random)
            set_device_states(devices, states, device_type=self._device)
            for kind, dtype, enabled in self._autocast:
                # Casts of weights that a cache would hold have no graph here; backward may run under autocast too.
                stack.enter_context(torch.autocast(kind, dtype, enabled, cache_enabled=False))
            yield


@contextlib.contextmanager
def without_hooks(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Remove the hooks of parameters inside: they are for whole gradients, and not for those of a tile."""
    hooks = [(own, dict(own)) for p in parameters if (own := p._backward_hooks)]
    for own, _ in hooks:
        own.clear()
    try:
        yield
    finally:
        for own, were in hooks:
            own.update(were)
