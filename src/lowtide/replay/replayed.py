"""Prepared calls: what a function does on a GPU, recorded once and repeated without the Python that decided it.

Before a call's first kernel stands Python: a plan, views, the arguments of each launch. All of it follows from the
arguments' shapes, strides and dtypes, and from those that are no tensors. The second call with the same ones is
recorded: every operator of PyTorch that runs, and every launch by `kernel_launch.Launcher`. From the record a
straight-line function is written, as a compiler would: it allocates, calls the same operators and launches the same
kernels in the same order, so results have the same bits. The pointer of a view is a pointer plus a number, views that
only launches read are not made, and memory is freed after its last use.

What cannot be repeated is not recorded: a number read from a tensor, a size that depends on one, another device.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lowtide.replay.facts import RECORDING, device_of, facts_of
from lowtide.replay.program import program_of
from lowtide.replay.tape import Tape

MOST_PROGRAMS = 256  # of one function

Compute = Callable[..., tuple[Tensor, ...]]


class Replayed:
    """A function of tensors and hashable values that returns new tensors, repeated from a record where possible.

    The numbers in its tensors decide nothing that it does, nor does autocast. No gradients are recorded around it.
    """

    def __init__(self, compute: Compute) -> None:
        self.compute = compute
        self._programs: dict[tuple[Any, ...], Compute | None] = {}  # None: called once; `compute`: cannot be repeated

    def __call__(self, *args: Any) -> tuple[Tensor, ...]:
        """Return the function's result."""
        return (self.function(args) or self.compute)(*args)

    def function(self, args: Sequence[Any]) -> Compute | None:
        """Return what computes a call with these arguments; None where it is never repeated, as in a dispatch mode."""
        facts = facts_of(args)
        if facts is None:
            return None
        found = self._programs.get(facts, False)
        if callable(found):
            return found
        device = device_of(args)
        if device is None:
            return None
        if found is None:
            return partial(self._record, facts, device)
        if len(self._programs) >= MOST_PROGRAMS:
            self._programs.clear()
        self._programs[facts] = None
        return self.compute

    def _record(self, facts: tuple[Any, ...], device: torch.device, *args: Any) -> tuple[Tensor, ...]:
        self._programs[facts] = self.compute  # stays where an error ends the recording
        results, program = record(self.compute, args, device)
        self._programs[facts] = program or self.compute
        return results


def record(compute: Compute, args: Sequence[Any], device: torch.device) -> tuple[tuple[Tensor, ...], Compute | None]:
    """Return a function's result on ``device``, and what repeats its work; None if that is impossible."""
    tape = Tape(args)
    RECORDING.tape = tape
    try:
        with tape:
            results = compute(*args)
    finally:
        RECORDING.tape = None
    outputs = [tape.value(out) for out in results]
    return results, _surrounded(program_of(tape, outputs, device), device) if tape.is_whole else None


def _surrounded(program: Compute, device: torch.device) -> Compute:
    """Return the program with kernels on its device and without autocast, for which nothing is done where it is so."""

    def run(*args: Any) -> tuple[Tensor, ...]:
        if _is_here(device) and not torch.is_autocast_enabled(device.type):
            return program(*args)
        with without_autocast(device):
            return program(*args)

    return run


@contextmanager
def without_autocast(device: torch.device) -> Iterator[None]:
    """Return a context without autocast in which kernels run on ``device``."""
    with torch.autocast(device_type=device.type, enabled=False), on_device(device):
        yield


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which kernels run on ``device``; also needed if that is current, for autograd's threads."""
    return _HERE if _is_here(device) else torch.cuda.device(device.index)


_HERE = nullcontext()
_MAIN = threading.main_thread().ident


def _is_here(device: torch.device) -> bool:
    """Return whether kernels run on ``device`` without a context: switching takes as long as a launch."""
    if device.type != "cuda":
        return True
    return threading.get_ident() == _MAIN and torch.cuda.current_device() == device.index
