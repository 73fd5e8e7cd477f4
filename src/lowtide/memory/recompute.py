"""A checkpoint around one layer: what its graph would save is dropped in forward, and recomputed in backward.

As ``torch.utils.checkpoint(use_reentrant=False)`` does it, with less than half of the host's time: there is no wrapper
around each of its hooks. A recompute ends with the last tensor that the graph needs.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.autograd.graph import saved_tensors_hooks

from lowtide.errors import UnsupportedError, message
from lowtide.memory.surroundings import Surroundings

Run = Callable[[Tensor], Any]
Inside = Callable[[], AbstractContextManager[Any]]
_make_saved_tensor = getattr(torch._C._autograd, "_make_saved_tensor", None)  # since torch 2.13


def recomputed(name: str, run: Run, hidden: Tensor, inside: Inside = nullcontext, again: Inside = nullcontext) -> Any:
    """Return ``run(hidden)`` with a graph that saves ``hidden``, and in backward runs it again for all else.

    ``hidden`` is saved through the hooks that surround the call.

    Args:
        name: The layer's name, for errors.
        run: The layer as a function of its hidden states; a second call runs it in the state of the first.
        hidden: These.
        inside: Returns the context of the forward.
        again: Returns that of each recompute.
    """
    recompute = _Recompute(name, run, hidden, again)
    with saved_tensors_hooks(recompute.drop, recompute.get), inside():
        return run(hidden)


class _End(Exception):
    """A recompute has computed all that the graph saved."""


class _Saved:
    """Stands in the graph for a tensor that is not there."""

    __slots__ = ("__weakref__", "kind", "tensor", "turn")

    def __init__(self, kind: tuple[Any, ...]) -> None:
        self.kind = kind
        self.tensor: Tensor | None = None
        self.turn: Any = None  # the backward for which the tensor is there


class _Input(torch.autograd.Function):
    """A node that saves a tensor, for no gradient of its own."""

    @staticmethod
    def forward(*_: Tensor) -> Tensor:
        return torch.empty(0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Any) -> None:
        del output
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(*_: Any) -> Any:
        raise AssertionError


class _Recompute:
    """One call of a layer: the graph of what it returns holds this object."""

    def __init__(self, name: str, run: Run, hidden: Tensor, again: Inside) -> None:
        self._name, self._run, self._inside = name, run, again
        self._saved: list[weakref.ref[_Saved]] = []
        self._lock = threading.RLock()
        self._around = Surroundings(hidden)
        self._input = _saved_input(hidden)
        # as torch.utils.checkpoint.set_checkpoint_early_stop(False) leaves it
        self._ends = getattr(torch.utils.checkpoint, "_enable_checkpoint_early_stop", None) is not False

    def drop(self, tensor: Tensor) -> _Saved:
        """Return what stands for a tensor that the graph saves."""
        saved = _Saved((tensor.shape, tensor.dtype, tensor.device))
        self._saved.append(weakref.ref(saved))
        return saved

    def get(self, saved: _Saved) -> Tensor:
        """Return a tensor that the graph reads, once for each recompute; one recompute serves one backward."""
        turn = _turn()
        with self._lock:  # backward may run in several threads
            if saved.tensor is None or turn is None or saved.turn != turn:
                self._again(turn)
            tensor, saved.tensor = saved.tensor, None
        if tensor is None:
            expected, got = "a recompute that saves for backward what forward saved", "fewer tensors, or others"
            hint = "The layer takes another path in its recompute: set keep='all' for it."
            raise UnsupportedError(message(self._name, expected, got, hint))
        return tensor

    @_disable_dynamo  # backward may call it from compiled code
    def _again(self, turn: Any) -> None:
        """Run the layer again, for those of the graph's tensors that it still holds."""
        hidden = self._input()  # a checkpoint around this one may run layers for it
        places, end = itertools.count(), len(self._saved)
        for reference in self._saved:  # what another backward has left
            if (saved := reference()) is not None:
                saved.tensor = None

        def keep(tensor: Tensor) -> Tensor:
            plain = tensor.detach() if tensor.requires_grad else tensor
            place = next(places)
            saved = self._saved[place]() if place < end else None
            if saved is not None and saved.kind == (tensor.shape, tensor.dtype, tensor.device):
                saved.tensor, saved.turn = plain, turn
            if self._ends and place >= end - 1:
                raise _End
            return plain

        try:
            with saved_tensors_hooks(keep, _itself), torch.enable_grad(), self._around.restored(), self._inside():
                self._run(hidden)
        except _End:
            pass


def _saved_input(hidden: Tensor) -> Callable[[], Tensor]:
    """Save a tensor through the hooks that surround the call; return what returns it."""
    if _make_saved_tensor is not None:
        unpack: Callable[[], Tensor] = _make_saved_tensor(hidden, is_output=False).unpack
        return unpack
    held = _Input.apply(torch.empty(0, requires_grad=True), hidden)  # type: ignore[no-untyped-call]
    # Hold the tensor: before torch 2.13 a node alone loses what it saved.
    return lambda: held.grad_fn.saved_tensors[0]


def _turn() -> Any:
    """Return what two reads for one backward have in common; None outside of any."""
    group = getattr(torch._C, "_get_graph_exec_group", lambda: None)()  # several backwards that share a recompute
    if group is not None:
        return group
    task = torch._C._current_graph_task_id()
    return None if task == -1 else task


def _itself(tensor: Tensor) -> Tensor:
    return tensor
