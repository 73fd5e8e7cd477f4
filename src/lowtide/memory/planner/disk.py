"""What offloaded layers have on a disk: those that host memory has no room for, as `lowtide.memory.offload` does it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from lowtide.memory.offload import ON_THE_WAY
from lowtide.memory.planner.runs import Run

RATE = 3e9  # bytes per second of an NVMe drive that writes, and of one that reads


class DiskSpace(NamedTuple):
    """What there is for offloaded layers beside host memory."""

    nbytes: int = 0
    rate: float = RATE  # bytes per second, written in forward and read in backward


NO_DISK = DiskSpace()


class Placed(NamedTuple):
    """Where what layers save is, in bytes, and the seconds that a step waits for the disk."""

    host: int
    disk: int = 0
    seconds: float = 0.0


def placed(runs: Sequence[Run], host_bytes: int, space: DiskSpace) -> Placed:
    """Return where runs of layers have what goes to the host: the first layers' on the disk, if not all fits there.

    Of host memory `ON_THE_WAY` layers' worth is for what is written and read. The disk has a layer's time for a layer:
    of forward to write it, of backward to read it.
    """
    total, moving = sum(run.on_host for run in runs), [run for run in runs if run.moves]
    each = max((run.of_layer for run in moving), default=0)
    if total <= host_bytes or not space.nbytes or ON_THE_WAY * each > host_bytes:
        return Placed(total)
    beyond = left = math.ceil((total + ON_THE_WAY * each - host_bytes) / each)
    if (beyond + 1) * each > space.nbytes:  # a layer more goes there where buffers of host memory do not fit each other
        return Placed(total)
    seconds, travels = 0.0, each / space.rate
    for run in moving:
        n = min(left, run.saving)
        seconds += n * sum(max(0.0, travels - time) for time in run.times)
        left -= n
    return Placed(min(total - (beyond - left - ON_THE_WAY) * each, host_bytes), (beyond - left) * each, seconds)
