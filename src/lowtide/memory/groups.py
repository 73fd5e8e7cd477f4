"""One saved input for several layers: those behind the first get theirs from a recompute of the layers before them.

The layers of a group are called one by one, each under a checkpoint of its own. What the first one's checkpoint saves
stays; the others save a function that recomputes their input. When backward reaches the last layer of a group, the ones
before it run once and save nothing, and the inputs that this yields wait until each layer's own recompute takes its
one. So a layer's forward runs three times in all, that of a group's last layer twice, and at most one layer's
activations are alive. (Two runs would do if the first of them saved the activations of the whole group: at the lengths
that need groups, that is more than all the inputs that they spare.)
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import get_device_states, set_device_states

from lowtide.errors import UnsupportedError, message
from lowtide.memory.saved import Get, Store, stay, tensors_in, version

Run = Callable[[Tensor], Any]


class Group:
    """Consecutive layers of a model whose first one's input is what they save."""

    def __init__(self) -> None:
        self._latest: weakref.ref[_Chain] | None = None

    def __reduce__(self) -> Any:
        return Group, ()  # a copy of the model has forwards of its own

    def run(self, run: Run, hidden: Tensor, save: Callable[[Run, Tensor], Any], begin: Callable[[], Store]) -> Any:
        """Run one of the layers; a chain of them goes on where ``hidden`` is what the layer before returned.

        Elsewhere another chain begins, which saves this layer's input: at the first layer of the group, at the first
        that has a graph, and where the model or a hook changed the hidden states between two layers.

        Args:
            run: The layer as a function of its hidden states.
            hidden: These.
            save: Runs it under a checkpoint.
            begin: Returns what saves the input of a chain.
        """
        chain = self._latest() if self._latest is not None else None
        if chain is None or not chain.ends_in(hidden):
            chain = _Chain(begin())
            self._latest = weakref.ref(chain)
        return chain.run(run, hidden, save)

    def close(self) -> None:
        """Let the next layer begin a chain."""
        self._latest = None


class _Chain:
    """Layers that have run one after the other in one forward; the graphs of their outputs hold it.

    Args:
        store: Saves the first one's input.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._layers: list[tuple[Run, Callable[[], AbstractContextManager[None]]]] = []
        self._inputs: list[Get | None] = []  # the first is what was saved; the others are there in backward alone
        self._output: weakref.ref[Tensor] | None = None
        self._seen = 0

    def ends_in(self, hidden: Tensor) -> bool:
        """Whether hidden states are what the last layer returned, or a view of the whole of it, unmodified."""
        output = self._output() if self._output is not None else None
        if output is None or version(hidden) != self._seen or version(output) != self._seen:
            return False
        place = hidden.data_ptr(), hidden.dtype, hidden.shape, hidden.stride()
        same = place[0] != 0 and place == (output.data_ptr(), output.dtype, output.shape, output.stride())
        return hidden is output or same

    def run(self, run: Run, hidden: Tensor, save: Callable[[Run, Tensor], Any]) -> Any:
        """Run a further layer; its backward gets its input from the chain."""
        place, again = len(self._layers), random_state_and_autocast(hidden)

        def pack(tensor: Tensor) -> Get:
            if not tensor.numel():  # the checkpoint's own, or a batch of nothing
                return stay(tensor)
            if not place:
                self._inputs[0] = self._store(tensor)
            return partial(self._input, place)

        self._inputs.append(None)
        # The checkpoint saves its inputs through the hooks that surround it; inside, its own take over.
        with saved_tensors_hooks(pack, lambda get: get()):
            outputs = save(run, hidden)
        self._layers.append((run, again))
        output = first_floating_tensor(outputs)
        if output is not None:
            self._output, self._seen = weakref.ref(output), version(output)
        return outputs

    def _input(self, place: int) -> Tensor:
        """Return the input of a layer, once for each recompute of the layers before it."""
        if place and self._inputs[place] is None:
            self._recompute(place)
        get = self._inputs[place]
        assert get is not None
        if place:
            self._inputs[place] = None
        return get()

    def _recompute(self, place: int) -> None:
        """Run the layers before ``place`` again, and hold the inputs of those behind the first."""
        hidden = self._input(0)
        for i, (run, again) in enumerate(self._layers[:place]):
            # Layers may look at whether there is a graph: there is one, which saves nothing.
            with torch.enable_grad(), saved_tensors_hooks(_nothing, _nothing), again():
                output = first_floating_tensor(run(hidden))
            assert output is not None
            hidden = output
            self._inputs[i + 1] = stay(hidden.detach())


def _nothing(_: object) -> Any:
    """Save nothing."""


def random_state_and_autocast(hidden: Tensor) -> Callable[[], AbstractContextManager[None]]:
    """Return what makes contexts with PyTorch's random state and autocast as they are now."""
    kind, cpu, (devices, states) = hidden.device.type, torch.get_rng_state(), get_device_states(hidden)
    kinds = [kind for kind in {"cpu", kind} if torch.amp.is_autocast_available(kind)]
    casts = [(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in kinds]

    @contextlib.contextmanager
    def again() -> Iterator[None]:
        with torch.random.fork_rng(devices, device_type=kind), contextlib.ExitStack() as stack:
            torch.set_rng_state(cpu)
            set_device_states(devices, states, device_type=kind)
            for casts_of, dtype, enabled in casts:
                # Casts of weights that a cache would hold have no graph here; backward may run under autocast too.
                stack.enter_context(torch.autocast(casts_of, dtype, enabled, cache_enabled=False))
            yield

    return again


def first_floating_tensor(values: Any) -> Tensor | None:
    """Return the hidden states among what a layer takes or returns: the first floating-point tensor."""
    return next((x for x in tensors_in(values) if x.is_floating_point()), None)


def check_holds_weights(layer: nn.Module, name: str) -> None:
    """Raise where a layer's weights are gathered for its own turn alone.

    Raises:
        UnsupportedError: It is a unit of FSDP's, or its weights are ZeRO-3's.
    """
    fsdp = any(cls.__name__ in ("FSDPModule", "FullyShardedDataParallel") for cls in type(layer).__mro__)
    if fsdp or any(hasattr(p, "ds_id") for p in layer.parameters()):
        hint = "Take every=1, with offload=True if that is too much memory."
        got = "one of FSDP or ZeRO-3, which gathers them for its own turn alone"
        raise UnsupportedError(message(name, "with every > 1 a layer that holds its weights", got, hint))
