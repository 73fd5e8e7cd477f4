"""How long things take, side by side: a GPU's clock changes with its heat, so what is compared is run in turns."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from lowtide.errors import ArgumentValueError, message
from lowtide.measure.allocations import track_allocations


@dataclass(frozen=True)
class Timing:
    """The times of one function.

    Attributes:
        times_ms: In the order they were taken, in milliseconds.
    """

    times_ms: tuple[float, ...]

    @property
    def median_ms(self) -> float:
        """The median: one slow run does not move it."""
        return statistics.median(self.times_ms)

    @property
    def spread(self) -> float:
        """The slowest over the fastest, less 1."""
        return max(self.times_ms) / min(self.times_ms) - 1


def time_side_by_side(
    functions: Mapping[str, Callable[[], object]],
    device: str | torch.device,
    *,
    warm: int = 2,
    reps: int = 6,
    behind: Callable[[], object] | None = None,
) -> dict[str, Timing]:
    """Time each function, all of them once a round, so that a drift of the clocks meets all alike.

    On a GPU the time is the device's own, between two events around the call, with nothing else in flight: the launch
    of the first kernel counts, and so does every wait of the host inside the call. The launch does not ``behind``
    something else, as in training, where the host is ahead of the device.

    Args:
        functions: What to run, by name; what they return is dropped.
        device: Where they run.
        warm: Rounds before the first one that counts.
        reps: Rounds that count.
        behind: What is run before each function, and not waited for: long enough for the host to get ahead. Where one
            function's heat would lower the next one's clock, all should stand behind the same.

    Returns:
        dict: A `Timing` for each name.

    Raises:
        ArgumentValueError: ``warm`` is negative or ``reps`` below 1.
    """
    if warm < 0:
        raise ArgumentValueError(message("warm", "a whole number of at least 0", str(warm)))
    if reps < 1:
        raise ArgumentValueError(message("reps", "a whole number of at least 1", str(reps)))
    clock = _time_on_cuda if torch.device(device).type == "cuda" else _time_on_host
    times: dict[str, list[float]] = {name: [] for name in functions}
    for round_ in range(warm + reps):
        for name, function in functions.items():
            taken = clock(function, behind)
            if round_ >= warm:
                times[name].append(taken)
    return {name: Timing(tuple(taken)) for name, taken in times.items()}


def peak_above(function: Callable[[], object], device: str | torch.device) -> int:
    """Run a function once and return the most bytes that it held at once above what was there before.

    What it leaves behind (gradients) counts; what was there before and is freed in between counts against it. CUDA's
    peak is that of PyTorch's allocator, in blocks of 512 bytes; a CPU's is every allocation that PyTorch made.

    Args:
        function: What to run. Run it before for what it keeps forever: compiled kernels, a BLAS library's workspace.
        device: The device whose memory is meant.
    """
    gc.collect()
    if torch.device(device).type != "cuda":
        with track_allocations(device) as seen:
            function()
        return seen.peak_bytes
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    function()
    torch.cuda.synchronize(device)
    return int(torch.cuda.max_memory_allocated(device)) - int(before)


def kept_above(function: Callable[[], object], device: str | torch.device) -> int:
    """Run a function once and return the bytes that are alive after it beyond those before, its result still held.

    Of a forward pass these are its output and all that backward will read and nobody else held. On CUDA they are
    PyTorch's allocator's, in blocks of 512 bytes, a large one's rest of less than a MiB with it.

    Args:
        function: What to run. Run it before for what it keeps forever, as for `peak_above`.
        device: The device whose memory is meant.
    """
    gc.collect()
    if torch.device(device).type != "cuda":
        with track_allocations(device) as seen:
            held = function()
            gc.collect()
        del held
        return seen.events[-1].total_bytes if seen.events else 0
    before = torch.cuda.memory_allocated(device)
    held = function()
    gc.collect()
    after = torch.cuda.memory_allocated(device)
    del held
    return int(after) - int(before)


def _time_on_host(function: Callable[[], object], behind: Callable[[], object] | None) -> float:
    if behind is not None:
        behind()
    start = time.perf_counter()
    function()
    return 1e3 * (time.perf_counter() - start)


def _time_on_cuda(function: Callable[[], object], behind: Callable[[], object] | None) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    if behind is not None:
        behind()
    start.record()
    function()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))
