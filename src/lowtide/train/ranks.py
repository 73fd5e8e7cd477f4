"""Leaving a process group so that the interpreter can be torn down afterwards."""

from __future__ import annotations

import gc
import os

import torch


def launched_ranks() -> int:
    """Return how many processes the launcher has started for this run."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_first_rank() -> bool:
    """Return whether this process is the launcher's first, also before there is a group."""
    return int(os.environ.get("RANK", "0")) == 0


def in_group() -> bool:
    """Return whether this process belongs to a process group."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def leave_group() -> None:
    """End the default process group, with its threads, once all ranks are here; nothing where there is none.

    gloo's threads hold the tensors of the last collectives, and NCCL's watch over them: if they are still there when
    the interpreter is finalised, letting go of a tensor aborts the process. A group's threads are joined when the last
    reference to it goes, and the model that DDP wraps has one: what made the group must be out of reach before.
    """
    if not in_group():
        return
    from accelerate.state import AcceleratorState, GradientState, PartialState

    gc.collect()  # trainer, model and callbacks know each other
    PartialState().wait_for_everyone()  # nobody closes a connection that another rank's last collective still uses
    torch.distributed.destroy_process_group()
    # accelerate remembers the group in the process, and would go on with it in a second run
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    gc.collect()
