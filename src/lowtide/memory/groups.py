"""One saved input for several layers: those behind the first get theirs from a recompute of the layers before them.

Each layer of a group is called under a checkpoint of its own. The first one's saves its input; the others save a
function that recomputes theirs. When backward reaches the group's last layer, the ones before it run once and save
nothing but the inputs of the others, which wait until each layer's own recompute. So a layer runs three times in a
step, a group's last layer twice, and one layer's activations are alive at a time.
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

from lowtide.errors import UnsupportedError, message
from lowtide.graph import run_in_eager
from lowtide.memory.saved import Get, Store, hidden_states_of, random_state, stay

Run = Callable[[Tensor], Any]
Save = Callable[[Run, Tensor], Any]


class Group:
    """Consecutive layers of a model of which one input is saved."""

    def __init__(self) -> None:
        self._latest: weakref.ref[_Chain] | None = None

    def __reduce__(self) -> Any:
        return Group, ()  # a copy of the model has forwards of its own

    def run(self, run: Run, hidden: Tensor, save: Save, begin: Callable[[], Store], *, first: bool) -> Any:
        """Run one of the layers, under the checkpoint ``save``; ``begin`` returns what saves the input of a chain.

        A layer saves nothing where ``hidden`` is what the layer before returned. Elsewhere a chain begins: at the
        ``first`` layer, at the first that has a graph, and where the model or a hook has changed the hidden states.
        """
        chain = self._latest() if self._latest is not None and not first else None
        if chain is None or not chain.ends_in(hidden):
            chain = _Chain(begin())
            self._latest = weakref.ref(chain)
        return chain.run(run, hidden, save)


class _Chain:
    """Layers that have run one after the other in one forward, with the first one's input in ``store``."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._layers: list[tuple[Run, Callable[[], AbstractContextManager[None]]]] = []
        self._inputs: dict[int, Get] = {}  # the first is what was saved; the others are there in backward alone
        self._output: weakref.ref[Tensor] | None = None
        self._seen = 0  # the output's version

    def ends_in(self, hidden: Tensor) -> bool:
        """Whether hidden states are what the last layer returned, or a view of the whole of it, unmodified."""
        output = self._output() if self._output is not None else None
        if output is None or not hidden._version == output._version == self._seen:
            return False
        return hidden is output or (hidden.data_ptr() != 0 and _layout(hidden) == _layout(output))

    def run(self, run: Run, hidden: Tensor, save: Save) -> Any:
        """Run a further layer; its backward gets its input from the chain."""
        place, again = len(self._layers), random_state_and_autocast(hidden)

        def pack(tensor: Tensor) -> Get:
            if not tensor.numel():  # the checkpoint's own, or a batch of nothing
                return stay(tensor)
            if not place:
                self._inputs[0] = self._store(tensor)
            return partial(self._input, place)

        # The checkpoint saves its inputs through the hooks that surround it; inside, its own take over.
        with saved_tensors_hooks(pack, lambda get: get()):
            outputs = save(run, hidden)
        self._layers.append((run, again))
        output = hidden_states_of(outputs)
        if output is not None:
            self._output, self._seen = weakref.ref(output), output._version
        return outputs

    def _input(self, place: int) -> Tensor:
        """Return the input of a layer, once for each recompute of the layers before it."""
        if place not in self._inputs:
            self._recompute(place)
        get = self._inputs.pop(place) if place else self._inputs[0]
        return get()

    def _recompute(self, place: int) -> None:
        """Run the layers before ``place`` again, and hold the inputs of those behind the first."""
        hidden = self._input(0)
        for i, (run, again) in enumerate(self._layers[:place]):
            # Layers may look at whether there is a graph: there is one, which saves nothing.
            with torch.enable_grad(), saved_tensors_hooks(_nothing, _nothing), again():
                output = hidden_states_of(run(hidden))
            assert output is not None
            hidden = output
            self._inputs[i + 1] = stay(hidden.detach())


def _layout(x: Tensor) -> tuple[Any, ...]:
    return x.data_ptr(), x.dtype, x.shape, x.stride()


def _nothing(_: object) -> Any:
    pass


def random_state_and_autocast(hidden: Tensor) -> Callable[[], AbstractContextManager[None]]:
    """Return what makes contexts with PyTorch's random state and autocast as they are now."""
    device_type, restore = hidden.device.type, random_state(hidden)
    devices = [hidden.device] if device_type != "cpu" else []
    kinds = filter(torch.amp.is_autocast_available, {"cpu", device_type})
    casts = [(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in kinds]

    @contextlib.contextmanager
    def again() -> Iterator[None]:
        with torch.random.fork_rng(devices, device_type=device_type), contextlib.ExitStack() as stack:
            restore()
            for cast in casts:
                # Casts of weights that a cache would hold have no graph here; backward may run under autocast too.
                stack.enter_context(torch.autocast(*cast, cache_enabled=False))
            yield

    return again


def check_layer(layer: nn.Module, name: str) -> None:
    """Raise where a layer cannot run in another one's backward: compiled, or with weights gathered for its turn."""
    if torch.compiler.is_compiling():
        hint = "Take every=1 for compiled layers, or compile their parts (layer.mlp.compile())."
        _refuse(name, "a layer in eager, with every > 1", "one under torch.compile", hint)
    fsdp = any(cls.__name__ in ("FSDPModule", "FullyShardedDataParallel") for cls in type(layer).__mro__)
    if fsdp or any(hasattr(p, "ds_id") for p in layer.parameters()):
        hint = "Take every=1, with offload=True if that is too much memory."
        got = "one of FSDP or ZeRO-3, which gathers them for its own turn alone"
        _refuse(name, "with every > 1 a layer that holds its weights", got, hint)


@run_in_eager  # so that it is called where the compiler runs, and raises there
def _refuse(name: str, expected: str, got: str, hint: str) -> None:
    raise UnsupportedError(message(name, expected, got, hint))
