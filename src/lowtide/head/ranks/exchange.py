"""The communication between ranks that share a vocabulary: the rest of the head has no collectives.

Every rank of a group calls these in the same order. Each returns once it is started: the device may still wait.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


def number_of_all(number: int, group: Any, device: torch.device) -> list[int]:
    """Return each rank's whole number; the host waits for them."""
    of_ranks: list[int] = begin_gather(torch.tensor(number, device=device), group).get().tolist()
    return of_ranks


class Exchange(NamedTuple):
    """An exchange under way: host and device continue, and wait for it in `get`."""

    value: Tensor
    work: Any = None  # None: nothing is

    def get(self) -> Tensor:
        """Return its result, for the next operations."""
        if self.work is not None:
            self.work.wait()
        return self.value


def begin_gather(x: Tensor, group: Any) -> Exchange:
    """Begin to gather every rank's ``x`` [W, ...]."""
    out = x.new_empty(group.size(), *x.shape)
    if not out.numel():
        return Exchange(out)
    # torch 2.13's name for what was all_gather_into_tensor
    all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return Exchange(out, all_gather(out.view(-1), x.contiguous().view(-1), group=group, async_op=True))


def begin_sum(part: Tensor, group: Any) -> Exchange:
    """Begin to add up all ranks' ``part``, contiguous, in its memory."""
    return Exchange(part, dist.all_reduce(part, group=group, async_op=True))


def begin_scattered_sum(part_CD: Tensor, group: Any) -> Exchange:
    """Begin to add up all ranks' ``part_CD``, contiguous; each rank gets its own rows of the sum."""
    rows, D = part_CD.shape[0] // group.size(), part_CD.shape[1]
    out = part_CD.new_empty(rows, D)
    # torch 2.13's name for what was reduce_scatter_tensor
    reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return Exchange(out, reduce_scatter(out, part_CD, group=group, async_op=True))


def swapped(x: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
    """Send each rank its part of ``x``, of these lengths; return what each has sent here, one after another."""
    out = x.new_empty(sum(received))
    dist.all_to_all_single(out, x, received, sent, group=group)
    return out
