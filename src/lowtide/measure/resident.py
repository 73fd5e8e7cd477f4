"""The resident memory of this process, now and at its peak, and the same of the CUDA allocator."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path, PurePosixPath

import torch

_STATUS = Path("/proc/self/status")
_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")
_OWN_CGROUP = Path("/proc/self/cgroup")


def resident_bytes() -> int:
    """Return this process's resident memory now, in bytes; 0 on a system with neither /proc nor psutil.

    On Linux it includes pages of mapped files, as the peak does.
    """
    if (value := _field_bytes(_STATUS, "VmRSS")) is not None:
        return value
    with suppress(ImportError):
        import psutil

        return int(psutil.Process().memory_info().rss)
    return 0


def peak_resident_bytes() -> int:
    """Return the peak resident memory of this process, in bytes, since its start or since `reset_peak_resident`."""
    if (value := _field_bytes(_STATUS, "VmHWM")) is not None:
        return value
    if sys.platform == "win32":
        return resident_bytes()
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, the others KiB


def reset_peak_resident() -> None:
    """Set the peak back to what is resident now, where the system can: on Linux."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # 5: reset VmHWM, see proc_pid_clear_refs(5)


def available_bytes() -> int:
    """Return the host memory that can be allocated without swapping, in bytes; 0 if the system does not report it.

    The minimum of what the machine has available (Linux's MemAvailable, elsewhere psutil's) and of what is left in the
    control groups of a container or a scheduler, whose file cache does not count as used.
    """
    if (machine := _field_bytes(_MEMINFO, "MemAvailable")) is not None:
        return min(machine, _left_in_cgroup(machine))
    with suppress(ImportError):
        import psutil

        return int(psutil.virtual_memory().available)
    return 0


def _left_in_cgroup(unlimited: int) -> int:
    """Return what is left in the control groups (version 2's files or version 1's); ``unlimited`` without a limit.

    A group's limit applies to all groups below it, so those above count too. Inside a container with its own namespace
    the root is its group; elsewhere (a scheduler's job, a service) /proc names it.
    """
    left = [unlimited]
    for controllers, root, limit, usage, cache in (
        ("", _CGROUP, "memory.max", "memory.current", "inactive_file"),
        ("memory", _CGROUP / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        for folder in _groups(root, controllers):
            with suppress(OSError, ValueError):
                most, used = (folder / limit).read_text().strip(), int((folder / usage).read_text())
                fields = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                if most.isdigit():  # without a limit: "max" in version 2, a number near 2**63 in version 1
                    left.append(max(int(most) - used + int(fields.get(cache, 0)), 0))
    return min(left)


def _groups(root: Path, controllers: str) -> list[Path]:
    """Return the folders of this process's control group and of all above it, up to ``root``."""
    try:
        lines = [line.split(":", 2) for line in _OWN_CGROUP.read_text().splitlines()]
    except OSError:
        return [root]
    own = next((line[2] for line in lines if len(line) == 3 and controllers in line[1].split(",")), "/")
    group = PurePosixPath(own.lstrip("/"))
    if ".." in group.parts:  # outside the namespace: no group below the root is ours
        return [root]
    return [root / above for above in (group, *group.parents)]


def reset_cuda_peak() -> None:
    """Set the CUDA allocator's peak back to what is allocated now; nothing where this process has not used CUDA."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.reset_peak_memory_stats()


def _field_bytes(file: Path, name: str) -> int | None:
    """Return a field in kB of a file of /proc, in bytes; None if there is no such file or field."""
    with suppress(OSError):
        for line in file.read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    return None
