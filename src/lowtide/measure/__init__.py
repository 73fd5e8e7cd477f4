"""Memory and time: what a run really allocated, its peak, and how long it took."""

from lowtide.measure.allocations import Allocation, Allocations, track_allocations
from lowtide.measure.child import ChildResult, run_child, run_command
from lowtide.measure.machine import describe_machine, source_commit
from lowtide.measure.resident import (
    available_bytes,
    cuda_peak_bytes,
    cuda_reserved_bytes,
    peak_resident_bytes,
    reset_cuda_peak,
    reset_peak_resident,
    resident_bytes,
)
from lowtide.measure.timing import Timing, kept_above, peak_above, time_side_by_side
from lowtide.measure.units import as_gib, gib, mib, parse_gib

__all__ = [
    "Allocation",
    "Allocations",
    "ChildResult",
    "Timing",
    "as_gib",
    "available_bytes",
    "cuda_peak_bytes",
    "cuda_reserved_bytes",
    "describe_machine",
    "gib",
    "kept_above",
    "mib",
    "parse_gib",
    "peak_above",
    "peak_resident_bytes",
    "reset_cuda_peak",
    "reset_peak_resident",
    "resident_bytes",
    "run_child",
    "run_command",
    "source_commit",
    "time_side_by_side",
    "track_allocations",
]
