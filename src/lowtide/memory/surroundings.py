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
        self._on = hidden.device
        self._random = _random_states(self._on)
        kinds = [kind for kind in dict.fromkeys(("cpu", self._on.type)) if torch.amp.is_autocast_available(kind)]
        self._autocast = [(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in kinds]

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Restore them inside, and the current ones afterwards."""
        now = _random_states(self._on)
        with contextlib.ExitStack() as stack:
            stack.callback(_set_random_states, self._on, now)
            _set_random_states(self._on, self._random)
            for kind, dtype, enabled in self._autocast:
                if enabled or torch.is_autocast_enabled(kind):
                    # Casts of weights that a cache would hold have no graph here; backward may run under autocast too.
                    stack.enter_context(torch.autocast(kind, dtype, enabled, cache_enabled=False))
            yield


def _random_states(device: torch.device) -> tuple[Tensor, list[Tensor]]:
    """Return the states of PyTorch's generators of the CPU and of a device."""
    if device.type == "cuda":
        return torch.get_rng_state(), [torch.cuda.get_rng_state(device)]
    return torch.get_rng_state(), get_device_states(torch.empty(0, device=device))[1] if device.type != "cpu" else []


def _set_random_states(device: torch.device, states: tuple[Tensor, list[Tensor]]) -> None:
    of_cpu, of_device = states
    torch.set_rng_state(of_cpu)
    if device.type == "cuda":
        torch.cuda.set_rng_state(of_device[0], device)
    elif of_device:
        set_device_states([device.index], of_device, device_type=device.type)


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
