"""What decides the work of a call besides the numbers in its tensors."""

import sys
import threading
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

DEVICES = frozenset({"cuda"})  # where calls are repeated
_HOOKS = ("launch_enter_hook", "launch_exit_hook")


class _Recording(threading.local):
    tape: Any = None  # lowtide.replay.tape.Tape


RECORDING = _Recording()  # what records this thread's operators and launches


def facts_of(args: Iterable[Any], *, connected: bool = False) -> tuple[Any, ...] | None:
    """Return all that a call depends on besides the numbers in its tensors; None where it is not to be repeated.

    With ``connected`` also what autograd, and checks of types, depend on.
    """
    if torch._C._len_torch_dispatch_stack() > 0 or RECORDING.tape is not None or launches_are_watched():
        return None
    facts: list[Any] = []
    add, device = facts.append, None
    for arg in args:
        kind = type(arg)
        if kind is Tensor or kind is Parameter:
            place, aligned = arg.device, arg.data_ptr() % 16
            if place.type in DEVICES:
                if device is None:
                    device = place
                elif device != place:
                    return None
            elif arg.dim() or place.type != "cpu":
                return None
            else:  # a number on the host
                aligned = -1
            add((arg.dtype, arg.shape, arg.stride(), aligned, arg.requires_grad))
        elif isinstance(arg, Tensor):
            return None
        else:
            add(arg)
            if connected:
                add(kind)
    if device is None:
        return None
    add(device)
    if connected:
        kind = device.type
        facts += (torch.is_grad_enabled(), torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
    return tuple(facts)


def launches_are_watched() -> bool:
    """Return whether something, as Triton's profiler does, gets each launch's facts from Triton itself."""
    knobs = sys.modules.get("triton.knobs")
    if knobs is None:
        return False
    return any(getattr(getattr(knobs.runtime, name, None), "calls", None) for name in _HOOKS)
