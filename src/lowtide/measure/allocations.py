"""Every allocation that PyTorch's allocators really made: inside custom operators, C++ kernels and backward too.

A `TorchDispatchMode` sees operators' outputs and saved-tensor hooks see what autograd keeps; neither sees the scratch
inside an operator. The allocators themselves report to the profiler, so its memory events miss nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch.autograd.profiler import profile


@dataclass(frozen=True)
class Allocation:
    """One event of the allocator.

    Attributes:
        bytes: What it allocated; below 0 what it freed.
        total_bytes: What was live then, above what was live at the start.
    """

    bytes: int
    total_bytes: int


@dataclass
class Allocations:
    """What happened inside `track_allocations`; filled when its block ends, empty until then.

    Attributes:
        events: each allocation and free, in order of time.
        largest_bytes: the largest single allocation.
        peak_bytes: the most that was live at once, above what was live at the start (frees of older memory count
            against it; never below 0).
    """

    events: list[Allocation] = field(default_factory=list)
    largest_bytes: int = 0
    peak_bytes: int = 0


@contextmanager
def track_allocations(device: str | torch.device = "cpu") -> Iterator[Allocations]:
    """Record every allocation of PyTorch's allocator on one kind of device while the block runs.

    It sees the calling thread, the autograd threads of its backward passes and the scratch inside operators, custom
    ones included. Memory that never goes through PyTorch's allocators (NumPy, the BLAS library's own buffers, Triton's
    compiler) is not seen; for that, take `peak_resident_bytes` in a child process. CUDA sizes are those of the caching
    allocator, rounded up to its 512-byte blocks. Tracking slows the block down, so do not time it.

    Args:
        device: the kind of device to watch, ``"cpu"`` or ``"cuda"`` (its index is ignored).

    Yields:
        The `Allocations`, which are filled when the block ends.

    Example:
        >>> x = torch.randn(64, 32, requires_grad=True)
        >>> with track_allocations() as seen:
        ...     x.square().sum().backward()
        >>> seen.largest_bytes == 64 * 32 * 4
        True
    """
    kind = torch.device(device).type
    seen = Allocations()
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # 5 lets two lines a profile through to stderr
    # The CUDA activity is left out on purpose: both allocators report to the CPU side, and CUPTI is slow to start.
    # Not torch.profiler.profile: some versions warn unless it is told to accumulate events, and then it makes a Python
    # object of each when the block ends, which takes many times as long as the block.
    with profile(use_kineto=True, profile_memory=True) as profiler:
        yield seen
        if kind == "cuda":
            torch.cuda.synchronize()
    _fill(seen, profiler, kind)


def _fill(seen: Allocations, profiler: profile, kind: str) -> None:
    """Read the allocators' events of one kind of device out of a finished profile."""
    if profiler.kineto_results is None:
        raise RuntimeError("torch.profiler kept no events: this build of PyTorch has no Kineto")
    events: list[Any] = profiler.kineto_results.events()  # Any: torch's stub lacks nbytes()
    memory = [e for e in events if e.name() == "[memory]" and _kind(e.device_type()) == kind]
    total = 0
    for event in sorted(memory, key=lambda e: e.start_ns()):  # a stable sort: equal times keep the order of arrival
        size = event.nbytes()
        total += size
        seen.events.append(Allocation(size, total))
        seen.largest_bytes = max(seen.largest_bytes, size)
        seen.peak_bytes = max(seen.peak_bytes, total)


@cache
def _kind(device_type: object) -> str:
    """Return ``cpu`` for ``DeviceType.CPU``; the enum's module has no public name."""
    return str(device_type).rpartition(".")[2].lower()
