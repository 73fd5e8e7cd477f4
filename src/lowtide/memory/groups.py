"""One saved input for several layers: those behind the first get theirs from a recompute of the layers before them.

The layers of a group are called one by one, each under a checkpoint of its own. What the first one's checkpoint saves
stays; the others save a promise. When backward reaches the last layer of a group, the ones before it run once and save
nothing, and the inputs that this yields wait until each layer's own recompute takes its one. So a layer's forward runs
three times in all, that of a group's last layer twice, and at most one layer's activations are alive. (Two runs would
do if the first of them kept the activations of the whole group: at the lengths that need groups, that is more than all
the inputs that they spare.)
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from lowtide.errors import UnsupportedError, message
from lowtide.memory.attention import Get, Store, stay
from lowtide.memory.hooks import OUT_OF_TURN
from lowtide.memory.surroundings import Surroundings

Run = Callable[[Tensor], Any]
Save = Callable[[Run, Tensor], Any]


def run_in_group(
    layer: nn.Module, name: str, run: Run, hidden: Tensor, *, save: Save, follows: bool, begin: Callable[[], Store]
) -> Any:
    """Run a layer whose policy has ``every`` above 1.

    Args:
        layer: The layer.
        name: Its name in the model.
        run: The layer as a function of its hidden states; a second call runs it in the state of the first.
        hidden: These.
        save: Runs it so that its graph saves them, and recomputes the rest.
        follows: Whether it is behind another layer of its group.
        begin: Returns what saves the input of a group.

    Raises:
        UnsupportedError: It is compiled, or its weights are gathered for its own turn alone, or its hidden states are
            not the output of the layer before.
    """
    if torch.compiler.is_compiling():
        refuse_compile(name, "every > 1", "every=1")
    if _is_gathered(layer):
        hint = "Take every=1, with offload=True if that is too much memory."
        got = "one of FSDP or ZeRO-3, which gathers them for its own turn alone"
        raise UnsupportedError(message(name, "with every > 1 a layer that holds its weights", got, hint))
    group = _Group.ending_in(hidden) if follows else None
    # Layers before the first that trains have no graph, and no group: that one saves its input.
    if group is None and follows and hidden.requires_grad:
        hint = "Take every=1 where the model or a hook changes hidden states between layers."
        expected = "the output of the layer before as hidden states, with every > 1"
        raise UnsupportedError(message(name, expected, "another tensor, or one written to since", hint))
    group = _Group(begin()) if group is None else group
    return group.run(layer, run, hidden, save)


@_disable_dynamo  # so that it is called where the compiler runs, and raises there
def refuse_compile(name: str, setting: str, instead: str) -> None:
    """Raise for a compiled layer, where a policy has a setting that runs in eager."""
    hint = f"Take {instead} for compiled layers, or compile their parts (layer.mlp.compile())."
    raise UnsupportedError(message(name, f"a layer in eager, with {setting}", "one under torch.compile", hint))


def _is_gathered(layer: nn.Module) -> bool:
    fsdp = is_fsdp_unit(layer) or "_is_fsdp_managed_module" in vars(layer)
    return fsdp or any(hasattr(p, "ds_id") for p in layer.parameters())


def is_fsdp_unit(module: nn.Module) -> bool:
    """Whether FSDP2 gathers a module's weights for its own turn."""
    return any(cls.__name__ == "FSDPModule" for cls in type(module).__mro__)


def _hidden_of(outputs: Any) -> Tensor | None:
    """Return the hidden states among a layer's outputs: the first floating-point tensor, as among its arguments."""
    leaves = (x for x in tree_leaves(outputs) if isinstance(x, Tensor) and x.is_floating_point())
    return next(leaves, None)


class _Group:
    """The layers of a group that have run in one forward.

    Args:
        store: Saves the first one's input.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._layers: list[tuple[nn.Module, Run, Surroundings]] = []
        self._inputs: list[Get | None] = []  # the first is what was saved; the others are there in backward alone
        self._output: weakref.ref[Tensor] | None = None
        self._version = 0

    @staticmethod
    def ending_in(hidden: Tensor) -> _Group | None:
        """Return the group whose last layer returned these hidden states, unmodified; None: there is none."""
        group = _by_output.get(_key(hidden))
        output = group._output() if group is not None and group._output is not None else None
        if group is None or output is None or _key(output) != _key(hidden) or hidden._version != group._version:
            return None
        same = output.shape == hidden.shape and output.stride() == hidden.stride()
        return group if same and output.storage_offset() == hidden.storage_offset() else None

    def run(self, layer: nn.Module, run: Run, hidden: Tensor, save: Save) -> Any:
        """Run a further layer; its backward gets its input from the group."""
        place, around = len(self._layers), Surroundings(hidden)

        def put(tensor: Tensor) -> Get:
            if not tensor.numel():  # the checkpoint's own, or a batch of nothing
                return stay(tensor)
            if not place:
                self._inputs[0] = self._store(tensor)
            return partial(self._input, place)

        self._inputs.append(None)
        # The checkpoint saves its inputs through the hooks that surround it; inside, its own take over.
        with saved_tensors_hooks(put, lambda get: get()):
            outputs = save(run, hidden)
        self._layers.append((layer, run, around))
        output = _hidden_of(outputs)
        if output is not None:
            self._output, self._version = weakref.ref(output), output._version
            _by_output[_key(output)] = self
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
        for i, (layer, run, around) in enumerate(self._layers[:place]):
            _turn_to(layer, over=False)
            # Layers may look at whether there is a graph: there is one, which saves nothing.
            with torch.enable_grad(), saved_tensors_hooks(_nothing, _nothing), around.restored():
                output = _hidden_of(run(hidden))
            assert output is not None
            hidden = output
            self._inputs[i + 1] = stay(hidden.detach())
        _turn_to(self._layers[place][0], over=True)


_by_output: weakref.WeakValueDictionary[int, _Group] = weakref.WeakValueDictionary()


def _nothing(_: object) -> Any:
    """Save nothing."""


def _key(tensor: Tensor) -> int:
    """Return what a tensor and views of the whole of it, which hooks make, have in common."""
    return id(tensor if tensor._base is None else tensor._base)


def _turn_to(layer: nn.Module, *, over: bool) -> None:
    hook = vars(layer).get(OUT_OF_TURN)
    if hook is not None:
        hook(over)
