"""The communication between ranks that share a vocabulary: the rest of the head has no collectives.

Every rank of a group calls these in the same order. Each returns once it is started: the device may still wait. Where a
group's GPUs are of one host and reach each other's memory, gathers and sums go by `peers`, the rest through
torch.distributed.
"""

from contextlib import suppress
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from lowtide.head.ranks.peers import LEAST_BYTES, Peers, memory_of, place_of, reach_each_other

_CANNOT = RuntimeError, OSError, ImportError, AttributeError, TypeError, ValueError  # of older versions of PyTorch too
_PEERS: "WeakKeyDictionary[Any, dict[torch.device, Peers | None]]" = WeakKeyDictionary()


def numbers_of_all(numbers: list[int], group: Any, device: torch.device) -> list[list[int]]:
    """Return each rank's whole numbers; the host waits for them."""
    mine = torch.tensor(numbers, device=device)
    gathered = [torch.zeros_like(mine) for _ in range(group.size())]
    dist.all_gather(gathered, mine, group=group)
    of_ranks: list[list[int]] = torch.stack(gathered).tolist()  # one wait for the device
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
    peers = _peers_for(x, group)
    if peers is not None:
        return Exchange(out, peers.begin_gather(x.contiguous(), out))
    # torch 2.13's name for what was all_gather_into_tensor
    all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return Exchange(out, all_gather(out.view(-1), x.contiguous().view(-1), group=group, async_op=True))


def rows_of_all_classes(z_CV: Tensor, rows: list[int], classes: list[int], group: Any) -> Tensor:
    """Return this rank's share of the rows [c, V] from all rows of this rank's classes; each rank's are these many."""
    if not sum(rows):
        return z_CV.new_empty(0, sum(classes))
    c, V_r = rows[group.rank()], z_CV.shape[1]
    sizes = [c * V for V in classes]
    out = _swapped(z_CV.contiguous().view(-1), [C * V_r for C in rows], sizes, group)
    pairs = zip(out.split_with_sizes(sizes), classes, strict=True)
    return torch.cat([block.view(c, V) for block, V in pairs], 1)


def classes_of_all_rows(g_cV: Tensor, rows: list[int], classes: list[int], group: Any) -> Tensor:
    """Undo `rows_of_all_classes`: return all rows of this rank's classes [C, V_r]."""
    V_r = classes[group.rank()]
    if not sum(rows):
        return g_cV.new_empty(0, V_r)
    blocks = torch.cat([block.reshape(-1) for block in g_cV.split_with_sizes(classes, 1)])
    out = _swapped(blocks, [len(g_cV) * V for V in classes], [C * V_r for C in rows], group)
    return out.view(sum(rows), V_r)


def _swapped(x: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
    """Send each rank its part of ``x``, of these lengths; return what each sent here, one after another."""
    out = x.new_empty(sum(received))
    dist.all_to_all_single(out, x, received, sent, group=group)
    return out


def begin_sum(part: Tensor, group: Any, dtype: torch.dtype | None = None) -> Exchange:
    """Begin to add up all ranks' ``part``, contiguous.

    Without ``dtype`` the sum is in its memory. With one it may be elsewhere, and may be rounded to that.
    """
    peers = _peers_for(part, group)
    if peers is not None:
        out = part if dtype in (None, part.dtype) else torch.empty_like(part, dtype=dtype)
        return Exchange(out, peers.begin_sum(part, out))
    return Exchange(part, dist.all_reduce(part, group=group, async_op=True))


def begin_scattered_sum(part_CD: Tensor, group: Any, dtype: torch.dtype | None = None) -> Exchange:
    """Begin to add up all ranks' ``part_CD``, contiguous; each rank gets its own rows of the sum.

    With ``dtype`` the sum may be rounded to that.
    """
    rows, D = part_CD.shape[0] // group.size(), part_CD.shape[1]
    peers = _peers_for(part_CD, group)
    if peers is not None:
        out = part_CD.new_empty(rows, D, dtype=dtype)
        return Exchange(out, peers.begin_scattered_sum(part_CD, out))
    out = part_CD.new_empty(rows, D)
    # torch 2.13's name for what was reduce_scatter_tensor
    reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return Exchange(out, reduce_scatter(out, part_CD, group=group, async_op=True))


def _peers_for(x: Tensor, group: Any) -> Peers | None:
    """Return what exchanges ``x`` by copy engines; None where torch.distributed is to. It is the same on every rank.

    At the first that is large the ranks of a group learn of each other where they are, and the host waits.
    """
    if not x.is_cuda or torch.cuda.is_current_stream_capturing():
        return None
    of_group = _PEERS.setdefault(group, {})
    if x.device not in of_group and x.nbytes >= LEAST_BYTES:
        of_group[x.device] = _made_peers(group, x.device)
    return of_group.get(x.device)


def _made_peers(group: Any, device: torch.device) -> Peers | None:
    """Return what exchanges by copy engines; None where any rank cannot: each step is taken by all ranks or by none."""
    places, memory, peers = numbers_of_all(place_of(device), group, device), None, None
    with suppress(*_CANNOT):
        memory = memory_of(group.size(), device) if reach_each_other(places) else None
    if not _on_all(memory is not None, group, device) or memory is None:
        return None
    with suppress(*_CANNOT):
        peers = Peers(group, memory)
    return peers if _on_all(peers is not None, group, device) else None


def _on_all(done: bool, group: Any, device: torch.device) -> bool:
    return all(of_rank for (of_rank,) in numbers_of_all([done], group, device))
