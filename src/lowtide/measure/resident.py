"""The resident memory of this process, now and at its highest, and the same of the CUDA allocator."""

from __future__ import annotations

import os
import sys
from pathlib import Path, PurePosixPath

import torch

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")
_OWN_CGROUP = Path("/proc/self/cgroup")


def resident_bytes() -> int:
    """Return this process's resident memory now, in bytes; 0 where the system does not tell (neither /proc nor psutil).

    On Linux it counts pages of files that are mapped in, as the peak does.
    """
    if (value := _field_bytes(_STATUS, "VmRSS")) is not None:
        return value
    try:
        import psutil
    except ImportError:
        return 0
    return int(psutil.Process(os.getpid()).memory_info().rss)


def peak_resident_bytes() -> int:
    """Return the highest resident memory of this process, in bytes, since it began or since `reset_peak_resident`."""
    if (value := _field_bytes(_STATUS, "VmHWM")) is not None:
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


def available_bytes() -> int:
    """Return the host memory that can still be taken without swapping, in bytes; 0 where the system does not tell.

    The least of what the machine has (Linux's MemAvailable, elsewhere psutil's) and of what the control groups that a
    container or a scheduler put this process in leave, their file cache not counted as used.
    """
    machine = _field_bytes(_MEMINFO, "MemAvailable")
    if machine is None:
        try:
            import psutil
        except ImportError:
            return 0
        return int(psutil.virtual_memory().available)
    return min(machine, _left_in_cgroup(machine))


def _left_in_cgroup(unlimited: int) -> int:
    """Return what the control groups leave, version 2's files or version 1's; ``unlimited`` without a limit.

    A group's limit holds for all below it, so those above count too. Inside a container with a namespace of its own the
    root is its group; elsewhere (a scheduler's job, a service) /proc names it.
    """
    left = [unlimited]
    for controllers, root, limit, usage, cache in (
        ("", _CGROUP, "memory.max", "memory.current", "inactive_file"),
        ("memory", _CGROUP / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        for folder in _groups(root, controllers):
            try:
                most, used = (folder / limit).read_text().strip(), int((folder / usage).read_text())
                fields = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            except (OSError, ValueError):
                continue
            if most.isdigit():  # version 2 says "max" where there is none, version 1 a number near 2**63
                left.append(max(int(most) - used + int(fields.get(cache, 0)), 0))
    return min(left)


def _groups(root: Path, controllers: str) -> list[Path]:
    """Return the folders of this process's control group and of all above it, where ``root`` is the highest."""
    try:
        lines = [line.split(":", 2) for line in _OWN_CGROUP.read_text().splitlines()]
    except OSError:
        return [root]
    own = next((line[2] for line in lines if len(line) == 3 and controllers in line[1].split(",")), "/")
    group = PurePosixPath(own.lstrip("/"))
    if ".." in group.parts:  # of a group outside the namespace: nothing below the root is ours
        return [root]
    return [root / above for above in (group, *group.parents)]


def cuda_peak_bytes() -> int:
    """Return the most memory that tensors took on the current CUDA device since the last reset; 0 without CUDA."""
    return int(torch.cuda.max_memory_allocated()) if torch.cuda.is_available() else 0


def cuda_reserved_bytes() -> int:
    """Return the most that CUDA's allocator held of the device's memory since the last reset; 0 without CUDA."""
    return int(torch.cuda.max_memory_reserved()) if torch.cuda.is_available() else 0


def reset_cuda_peak() -> None:
    """Set the CUDA allocator's high-water mark back to what is allocated now; nothing without CUDA."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def _field_bytes(file: Path, name: str) -> int | None:
    """Return one field of a file of /proc that counts in kB, in bytes; None where there is no such file or field."""
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        field, _, rest = line.partition(":")
        if field == name:
            return int(rest.split()[0]) * 1024
    return None
