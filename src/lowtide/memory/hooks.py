"""Hooks of an offloading: on modules, tensors and optimizers, for as long as it lives, and not in their copies."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch._compile import _disable_dynamo
from torch.utils.hooks import RemovableHandle

from lowtide.errors import UnsupportedError, message

# An attribute of a layer: called with False before the layer runs again in a later one's backward, and with True before
# that backward goes on.
OUT_OF_TURN = "_lowtide_out_of_turn"


class Handle:
    """What hooks belong to, and what it works on.

    Args:
        owner: What it works on, and does not keep alive.
    """

    def __init__(self, owner: Any) -> None:
        self.owner = weakref.ref(owner)
        self.lock = threading.RLock()  # backward's hooks run in its threads, one for each device


class Hook:
    """Calls a handle's method with what the handle works on, under its lock, for as long as both live.

    Copies and pickles of what a hook is registered on have one that calls nothing.

    Args:
        method: The method; None: it calls nothing.
        given: What the method is called with first.
        gone: What is called instead where one of them is gone; None: nothing.
    """

    def __init__(
        self,
        method: Callable[..., Any] | None = None,
        *given: int,
        gone: Callable[[], object] | None = None,
    ) -> None:
        self._method = weakref.WeakMethod(method) if method is not None else None
        self._given, self._gone = given, gone

    @property
    def handle(self) -> Any:
        """The handle, None where it is gone."""
        method: Any = self._method() if self._method is not None else None
        return method and method.__self__

    @_disable_dynamo
    def __call__(self, *called_with: Any) -> Any:
        """Return what the method returns of the owner, what was given, and what the hook is called with."""
        method: Any = self._method() if self._method is not None else None
        owner = None if method is None else method.__self__.owner()
        if owner is None:
            return self._gone() if self._gone is not None else None
        with method.__self__.lock:
            return method(owner, *self._given, *called_with)

    def __reduce__(self) -> Any:
        return type(self), ()


def remove_hooks(hooks: list[RemovableHandle]) -> None:
    """Remove hooks, and forget them."""
    while hooks:
        hooks.pop().remove()


def refuse_capture(function: str, what: str) -> None:
    """Raise inside the capture of a CUDA graph.

    Raises:
        UnsupportedError: One is being captured; its replays would not find ``what``.
    """
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        hint = "Call remove() before the capture, or leave CUDA graphs out."
        got = f"a capture, whose replays would not find {what}"
        raise UnsupportedError(message(function, "a training step outside of CUDA graphs", got, hint))
