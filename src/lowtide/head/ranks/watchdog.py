"""The end of a process whose GPU waits for a rank that is gone: what NCCL's watchdog is to its own exchanges."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

USUAL = timedelta(minutes=10)  # NCCL's


def timeout_of(group: Any, device: torch.device) -> timedelta:
    """Return how long a rank of the group waits for the others."""
    try:
        timeout: timedelta = group._get_backend(device).options._timeout
    except (AttributeError, RuntimeError):  # of another backend
        return USUAL
    return timeout


def watch(progress: Callable[[], tuple[int, int] | None], timeout: timedelta, name: str) -> None:
    """Abort this process when what was begun has not advanced for ``timeout``, from a thread of its own.

    ``progress`` returns how many exchanges have begun and how many have ended; None ends the watch. It must not call
    CUDA, which could break a graph's capture.
    """
    arguments = (progress, timeout.total_seconds(), name)
    threading.Thread(target=_watch, args=arguments, name="lowtide's watchdog", daemon=True).start()


def _watch(progress: Callable[[], tuple[int, int] | None], seconds: float, name: str) -> None:
    last, since = None, time.monotonic()
    while (now := progress()) is not None:
        begun, ended = now
        if begun == ended or ended != last:
            last, since = ended, time.monotonic()
        elif time.monotonic() - since > seconds:
            sys.stderr.write(
                f"lowtide: {name} waited {seconds:.0f} s, its process group's timeout, for exchange {ended + 1} of"
                f" {begun} with the other ranks of a sharded vocabulary. One of them has ended, or does not call the"
                " same functions in the same order: see its own output. Where it was only slow, give init_process_group"
                " or new_group a longer timeout. This process is aborted.\n"
            )
            sys.stderr.flush()
            os.kill(os.getpid(), signal.SIGABRT)
        time.sleep(min(1.0, seconds / 8))
