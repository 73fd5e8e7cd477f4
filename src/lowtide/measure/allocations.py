"""Every allocation of PyTorch's allocators: inside custom operators, C++ kernels and backward too.

A `TorchDispatchMode` sees operators' outputs, and saved-tensor hooks see what autograd saves; neither sees the scratch
inside an operator. The allocators report to the profiler, so its memory events miss nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.autograd.profiler import profile


class Allocation(NamedTuple):
    """One event of the allocator."""

    bytes: int  # negative: freed
    total_bytes: int  # above the start's


@dataclass
class Allocations:
    """What happened inside `track_allocations`; filled when its block ends, empty until then."""

    events: list[Allocation] = field(default_factory=list)  # each allocation and free, in order of time
    largest_bytes: int = 0  # of a single allocation
    peak_bytes: int = 0  # above the start: frees of older memory count against it; never below 0


@contextmanager
def track_allocations(device: str | torch.device = "cpu") -> Iterator[Allocations]:
    """Record every allocation of PyTorch's allocator on one kind of device, ``"cpu"`` or ``"cuda"``, while the block
    runs, which this slows down.

    Memory outside PyTorch's allocators (NumPy, the BLAS library's own buffers, Triton's compiler) is not included; for
    that, measure `peak_resident_bytes` in a child process. CUDA sizes are rounded up to blocks of 512 bytes.

    Example:
        >>> x = torch.randn(64, 32, requires_grad=True)
        >>> with track_allocations() as seen:
        ...     x.square().sum().backward()
        >>> seen.largest_bytes == 64 * 32 * 4
        True
    """
    kind = torch.device(device).type
    seen = Allocations()
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # 5 prints two lines per profile to stderr
    # Without the CUDA activity: both allocators report to the CPU side, and CUPTI is slow to start.
    # Not torch.profiler.profile: some versions warn unless it accumulates events, and then make a Python object of each
    # when the block ends, which takes many times as long as the block.
    with profile(use_kineto=True, profile_memory=True) as profiler:
        yield seen
        if kind == "cuda":
            torch.cuda.synchronize()
    if profiler.kineto_results is None:
        raise RuntimeError("torch.profiler recorded no events: this build of PyTorch has no Kineto")
    events: list[Any] = profiler.kineto_results.events()  # Any: torch's stub lacks nbytes()
    memory = [e for e in events if e.nbytes() and str(e.device_type()) == f"DeviceType.{kind.upper()}"]
    total = 0
    for event in sorted(memory, key=lambda e: e.start_ns()):  # a stable sort: equal times keep the order of arrival
        size = event.nbytes()
        total += size
        seen.events.append(Allocation(size, total))
        seen.largest_bytes = max(seen.largest_bytes, size)
        seen.peak_bytes = max(seen.peak_bytes, total)
