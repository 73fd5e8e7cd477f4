"""A checkpoint around one layer: what its graph would save is dropped in forward, and computed again in backward.

As ``torch.utils.checkpoint(use_reentrant=False)`` does it, with less than half of the host's time: no wrapper around
each of its hooks. A recompute ends with the last tensor that the graph needs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.autograd.graph import saved_tensors_hooks

from lowtide.errors import UnsupportedError, message
from lowtide.memory.surroundings import Surroundings

Run = Callable[[Tensor], Any]
Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


def recomputed(name: str, run: Run, hidden: Tensor, contexts: Contexts | None = None) -> Any:
    """Return ``run(hidden)`` with a graph that saves ``hidden``, and in backward runs it again for all else.

    ``hidden`` is saved through the hooks that surround the call.

    Args:
        name: The layer's name, for errors.
        run: The layer as a function of its hidden states; a second call runs it in the state of the first.
        hidden: These.
        contexts: Of the forward, and of each recompute.
    """
    return _Recompute(name, run, hidden, contexts or (nullcontext(), nullcontext())).forward(hidden)


class _End(Exception):
    """A recompute has computed all that the graph saved."""


class _Saved:
    """Stands in the graph for a tensor that is not there."""

    __slots__ = ("__weakref__", "kind", "tensor")

    def __init__(self, kind: tuple[Any, ...]) -> None:
        self.kind = kind
        self.tensor: Tensor | None = None


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
    def __init__(self, name: str, run: Run, hidden: Tensor, contexts: Contexts) -> None:
        self._name, self._run, (self._inside, self._inside_again) = name, run, contexts
        self._saved: list[weakref.ref[_Saved]] = []
        self._around = Surroundings(hidden)
        self._trains = hidden.requires_grad
        leaf = torch.empty(0, requires_grad=True)
        self._input: Any = _Input.apply(leaf, hidden).grad_fn  # type: ignore[no-untyped-call]

    def forward(self, hidden: Tensor) -> Any:
        """Run the layer; the graph of what it returns holds this object."""
        with saved_tensors_hooks(self.drop, self.get), self._inside:
            return self._run(hidden)

    def drop(self, tensor: Tensor) -> _Saved:
        """Return what stands for a tensor that the graph saves."""
        saved = _Saved((tensor.shape, tensor.dtype, tensor.device))
        self._saved.append(weakref.ref(saved))
        return saved

    def get(self, saved: _Saved) -> Tensor:
        """Return a tensor that the graph reads, once for each recompute."""
        if saved.tensor is None:
            self._again()
        tensor, saved.tensor = saved.tensor, None
        if tensor is None:
            expected, got = "a recompute that saves for backward what forward saved", "fewer tensors, or others"
            hint = "The layer takes another path in its recompute: set keep='all' for it."
            raise UnsupportedError(message(self._name, expected, got, hint))
        return tensor

    @_disable_dynamo  # backward may call it from compiled code
    def _again(self) -> None:
        """Run the layer again, for those of the graph's tensors that it still holds."""
        (hidden,) = self._input.saved_tensors
        left = iter(range(len(self._saved)))
        last = len(self._saved) - 1

        def keep(tensor: Tensor) -> Tensor:
            plain = tensor.detach() if tensor.requires_grad else tensor
            place = next(left, None)
            if place is None:
                raise _End
            saved = self._saved[place]()
            if saved is not None and saved.kind == (tensor.shape, tensor.dtype, tensor.device):
                saved.tensor = plain
            if place == last:
                raise _End
            return plain

        try:
            with saved_tensors_hooks(keep, _itself), torch.enable_grad(), self._around.restored(), self._inside_again:
                self._run(hidden.detach().requires_grad_(self._trains))
        except _End:
            pass


def _itself(tensor: Tensor) -> Tensor:
    return tensor
