"""The resident memory of this process, now and at its highest, and the same of the CUDA allocator."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")


def resident_bytes() -> int:
    """Return this process's resident memory now, in bytes; 0 where the system does not tell (neither /proc nor psutil).

    On Linux it counts pages of files that are mapped in, as the peak does.
    """
    value = _status_bytes("VmRSS")
    if value is not None:
        return value
    try:
        import psutil
    except ImportError:
        return 0
    return int(psutil.Process(os.getpid()).memory_info().rss)


def peak_resident_bytes() -> int:
    """Return the highest resident memory of this process, in bytes, since it began or since `reset_peak_resident`."""
    value = _status_bytes("VmHWM")
    if value is not None:
        return value
    if sys.platform == "win32":
        return resident_bytes()
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, the others KiB


def reset_peak_resident() -> bool:
    """Set the high-water mark back to what is resident now; return whether this system could (Linux only)."""
    try:
        _CLEAR_REFS.write_text("5")  # 5: reset VmHWM, see proc_pid_clear_refs(5)
    except OSError:
        return False
    return True


def cuda_peak_bytes() -> int:
    """Return the most memory that tensors took on the current CUDA device since the last reset; 0 without CUDA."""
    return int(torch.cuda.max_memory_allocated()) if torch.cuda.is_available() else 0


def reset_cuda_peak() -> None:
    """Set the CUDA allocator's high-water mark back to what is allocated now; nothing without CUDA."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def _status_bytes(name: str) -> int | None:
    """Return one field of /proc/self/status in bytes, None where there is no such file or field."""
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        field, _, rest = line.partition(":")
        if field == name:
            return int(rest.split()[0]) * 1024
    return None
