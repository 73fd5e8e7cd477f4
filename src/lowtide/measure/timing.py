"""Times and memory of functions, compared interleaved: a GPU's clock drifts with its heat."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from lowtide.measure.allocations import track_allocations


@dataclass(frozen=True)
class Timing:
    """The times of one function in milliseconds, in order."""

    times_ms: tuple[float, ...]

    @property
    def median_ms(self) -> float:
        """The median, which one slow run does not change."""
        return statistics.median(self.times_ms)

    @property
    def spread(self) -> float:
        """The slowest over the fastest, minus 1."""
        return max(self.times_ms) / min(self.times_ms) - 1


def time_side_by_side(
    functions: Mapping[str, Callable[[], object]],
    device: str | torch.device,
    *,
    warm: int = 2,
    reps: int = 6,
    behind: Callable[[], object] | None = None,
) -> dict[str, Timing]:
    """Time the functions interleaved, each once per round, so that drifting clocks affect all of them alike: ``warm``
    rounds, then ``reps`` that count.

    On a GPU the time is the device's own, between two events around the call, with nothing else in flight: it includes
    the launch of the first kernel and every time the host waits inside the call. ``behind``, which runs before each
    function for long enough that the host gets ahead, hides the launch, as in training.
    """
    clock = _time_on_cuda if torch.device(device).type == "cuda" else _time_on_host
    times: dict[str, list[float]] = {name: [] for name in functions}
    for round_ in range(warm + reps):
        for name, function in functions.items():
            taken = clock(function, behind)
            if round_ >= warm:
                times[name].append(taken)
    return {name: Timing(tuple(taken)) for name, taken in times.items()}


def peak_above(function: Callable[[], object], device: str | torch.device) -> int:
    """Run a function once and return its peak memory in bytes, above what was there before.

    What stays allocated (gradients) counts; memory from before that is freed meanwhile counts negative. It is that of
    PyTorch's allocators. Run the function before for what it allocates once: compiled kernels, workspaces.
    """
    return _peak_and_kept(function, device)[0]


def kept_above(function: Callable[[], object], device: str | torch.device) -> int:
    """Run a function once and return the bytes allocated after it, above those before, its result still referenced.

    For a forward pass: its output and what it saves for backward, unless that was there before. Of CUDA's blocks of a
    MiB and more the unused rest counts. Run the function before, as for `peak_above`.
    """
    return _peak_and_kept(function, device)[1]


def _peak_and_kept(function: Callable[[], object], device: str | torch.device) -> tuple[int, int]:
    gc.collect()
    if torch.device(device).type != "cuda":
        with track_allocations(device) as seen:
            result = function()
            gc.collect()
        del result
        return seen.peak_bytes, seen.events[-1].total_bytes if seen.events else 0
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    result = function()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    gc.collect()
    kept = torch.cuda.memory_allocated(device)
    del result
    return int(peak) - int(before), int(kept) - int(before)


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
