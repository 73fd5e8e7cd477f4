"""Fast launches of compiled Triton kernels: a third of Triton's own host time."""

import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor


# Triton's own versions of these two take 2 microseconds of host time each.
def blocks_of(n: int, size: int) -> int:
    """Return how many blocks of ``size`` values hold ``n``."""
    return -(-n // size)


def power_of_2(n: int) -> int:
    """Return the smallest power of 2 that is at least ``n``; 0 for 0."""
    return 1 << (n - 1).bit_length() if n else 0


@cache
def multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors of ``device``; 2 in Triton's interpreter."""
    if device.type != "cuda":
        return 2
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def why_no_triton(device: torch.device) -> str | None:
    """Return why no Triton kernel can run on ``device``, or None if they can."""
    if device.type != "cuda" or torch.version.hip is not None:
        return f"its kernels are for NVIDIA GPUs, and the tensors are on {device.type}"
    if torch.cuda.is_available() and find_spec("triton") is None:  # without a GPU it is a plan for another machine
        return "Triton is not installed"
    return None


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which kernels run on ``device``: none where it is current, except in autograd's threads."""
    if device.type != "cuda" or (threading.get_ident() == _MAIN and torch.cuda.current_device() == device.index):
        return nullcontext()
    return torch.cuda.device(device.index)


_MAIN = threading.main_thread().ident


class Launcher:
    """A Triton kernel with a cache of its compiled variants.

    Triton's own launch binds the arguments, derives the specialisation of each, and queries the driver for each
    pointer: 30 to 90 microseconds, ten times per chunk. Here the same facts are the cache's key, and pointers are
    passed as numbers. Call it as ``launcher[grid](*args, **constants)``, positional arguments first; an argument
    may be a record: a tuple of tensors, numbers, None and further tuples.

    The kernel is the result of ``triton.jit`` or ``gluon.jit``; Triton's interpreter runs it directly.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self._compiled: dict[tuple[Any, ...], Any] = {}
        params = getattr(kernel, "params", ())  # the interpreter's has none
        self._names = [param.name for param in params]
        self._free = frozenset(i for i, param in enumerate(params) if param.do_not_specialize)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        """Return a function that launches on ``grid``, on the current stream of the current device."""
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        if not self._names:
            self.kernel[grid](*args, **constants)
            return
        device = torch.cuda.current_device()
        facts: list[Any] = [device, *constants.values()]
        values = _described(args, self._free, facts)
        known = tuple(facts)
        compiled = self._compiled.get(known)
        fixed = [constants[name] for name in self._names[len(args) :]]
        if compiled is None:
            self._compiled[known] = self.kernel[grid](*args, **constants)
            return
        x, y, z = (*grid, 1, 1)[:3]
        metadata = compiled.function, compiled.packed_metadata, None, None, None  # no profiler's hooks
        # as Triton's own launcher: the public stream is an object
        compiled.run(x, y, z, torch._C._cuda_getCurrentRawStream(device), *metadata, *values, *fixed)


def _described(args: Sequence[Any], free: Collection[int], facts: list[Any]) -> list[Any]:
    """Return the values to launch with; add what Triton specialises on to ``facts``, except for ``free`` arguments."""
    values = list(args)
    for i, arg in enumerate(args):
        if isinstance(arg, Tensor):
            values[i] = pointer = arg.data_ptr()
            facts += (arg.dtype, pointer % 16 == 0)
        elif isinstance(arg, int):
            short = -(2**31) <= arg < 2**31
            facts += (short,) if i in free else (short, arg == 1, arg % 16 == 0)
        elif arg is None or isinstance(arg, float):
            facts.append(type(arg))
        elif isinstance(arg, tuple):  # a record: Triton specialises on all of its numbers
            values[i] = tuple(_described(arg, (), facts))
        else:  # a descriptor
            facts += (arg.base.dtype, *arg.block_shape)
    return values
