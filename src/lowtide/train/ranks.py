"""What the processes of a run share: its sequences, dealt out to however many there are, and a group to leave."""

from __future__ import annotations

import gc
import os
import time
from dataclasses import dataclass

import torch

from lowtide.errors import ArgumentValueError, message

_FIRST_SPEAKS_SECONDS = 3.0


@dataclass(frozen=True, kw_only=True)
class Shares:
    """How the streams of a run are dealt to its ranks, and a rank's to the batches of a step.

    A run that begins with ``rows`` blocks on each of so many ranks has that many streams for good. On another number of
    ranks each gets its part, some one more than others, and works on no more than ``rows`` at once: a step has the same
    blocks as before, in other batches.

    Attributes:
        streams: of the run.
        ranks: that share them now.
        rank: whose part this is.
        rows: the most blocks that a rank works on at once.

    Raises:
        ArgumentValueError: there are more ranks than streams.
    """

    streams: int
    ranks: int
    rank: int
    rows: int

    def __post_init__(self) -> None:
        if self.ranks > self.streams:
            expected = f"at most {self.streams} ranks, one for each of the run's sequences in a batch"
            hint = "Start fewer, or begin a new run with a larger --batch-size."
            raise ArgumentValueError(message("resume", expected, self.ranks, hint))

    @property
    def count(self) -> int:
        """This rank's streams."""
        return self.streams // self.ranks + (self.rank < self.streams % self.ranks)

    @property
    def first(self) -> int:
        """The first of them."""
        return self.rank * (self.streams // self.ranks) + min(self.rank, self.streams % self.ranks)

    @property
    def batches(self) -> int:
        """Batches that take one block of each stream: the same on all ranks, who meet after each."""
        fullest = -(-self.streams // self.ranks)
        return -(-fullest // self.rows)

    @property
    def sizes(self) -> list[int]:
        """Blocks of each of this rank's batches; 0 for one that it has nothing for."""
        return [self.count // self.batches + (i < self.count % self.batches) for i in range(self.batches)]


def launched_ranks() -> int:
    """Return how many processes the launcher has started for this run."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def launched_rank() -> int:
    """Return which of them this one is, also before there is a group."""
    return int(os.environ.get("RANK", "0"))


def is_first_rank() -> bool:
    """Return whether this process is the launcher's first, also before there is a group."""
    return launched_rank() == 0


def let_first_speak() -> None:
    """Wait on other ranks than the first: it says the error that all have, and the launcher then ends the others."""
    if not is_first_rank():
        time.sleep(_FIRST_SPEAKS_SECONDS)


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
