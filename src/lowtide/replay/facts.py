"""What decides the work of a call besides the numbers in its tensors."""

import sys
import threading
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

DEVICES = frozenset({"cuda"})  # where calls are repeated
_HOST = torch.device("cpu")
_HOOKS = ("launch_enter_hook", "launch_exit_hook")


class _Recording(threading.local):
    tape: Any = None  # lowtide.replay.tape.Tape


RECORDING = _Recording()  # what records this thread's operators and launches


class Repeatable:
    """An argument that a record is not to hold: calls with others of the same facts repeat it."""

    def facts(self) -> tuple[Any, ...] | None:
        """Return all that a call depends on; None where it cannot be repeated."""
        raise NotImplementedError


def facts_of(args: Sequence[Any]) -> tuple[Any, ...] | None:
    """Return all that a call depends on besides the numbers in its tensors; None where it is not to be repeated.

    Whether it can be repeated at all says `device_of`: once for all calls with the same facts.
    """
    if torch._C._len_torch_dispatch_stack() > 0 or RECORDING.tape is not None or launches_are_watched():
        return None
    kinds, facts = tuple(map(type, args)), list(args)
    try:
        for i, kind in enumerate(kinds):
            if kind is Tensor or kind is Parameter:
                x = args[i]
                facts[i] = (x.dtype, x.shape, x.stride(), x.data_ptr() % 16, x.device, x.requires_grad)
            elif issubclass(kind, Repeatable):
                facts[i] = its = args[i].facts()
                if its is None:
                    return None
    except RuntimeError:  # a tensor without strides or memory
        return None
    return kinds, matmul_precision(), *facts


def matmul_precision() -> str:
    """Return PyTorch's setting for float32 GEMMs on NVIDIA GPUs: "highest", "high" or "medium"."""
    cuda: Any = torch.backends.cuda.matmul
    if cuda.fp32_precision != "tf32":
        return "highest"
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # this backend alone was set
        return "high"


def device_of(args: Iterable[Any]) -> torch.device | None:
    """Return the device of a call that can be repeated: of all tensors, but for numbers on the host; None of others."""
    found = None
    for arg in args:
        if isinstance(arg, Tensor):
            if type(arg) not in (Tensor, Parameter) or arg.device not in (found or arg.device, _HOST):
                return None
            if arg.device.type in DEVICES:
                found = arg.device
            elif arg.dim() or arg.device.type != "cpu":
                return None
    return found


def launches_are_watched() -> bool:
    """Return whether something, as Triton's profiler does, gets each launch's facts from Triton itself."""
    knobs = sys.modules.get("triton.knobs")
    if knobs is None:
        return False
    return any(getattr(getattr(knobs.runtime, name, None), "calls", None) for name in _HOOKS)
