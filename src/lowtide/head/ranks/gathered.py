"""Rows of all ranks' tensors in autograd's graph: gathered in forward, their gradients summed where they came from.

W ranks, R rows of each.
"""

from typing import Any

import torch
from torch import Tensor

from lowtide.errors import ArgumentValueError, message
from lowtide.graph import node
from lowtide.head.ranks import exchange as exchange
from lowtide.head.rows import looks_at_numbers


def gathered_rows(x: Tensor, group: Any) -> Tensor:
    """Return every rank's ``x`` [R, ...], which has the same shape on each, as [W * R, ...] in the order of the ranks.

    Its gradient on a rank is the sum of all ranks', rounded once: every rank has to run this backward.
    """
    gathered: Tensor = _GATHERED.apply(x, group)  # type: ignore[no-untyped-call]
    return gathered


def check_same(group: Any, device: torch.device, **numbers: int) -> None:
    """Raise on all ranks where these are not the same on each; on a GPU that would stop the host, and is not looked at.

    There ranks that differ wait for each other, or fail in the exchange.
    """
    if not looks_at_numbers(device):
        return
    of_ranks = exchange.numbers_of_all(list(numbers.values()), group, device)
    for name, seen in zip(numbers, zip(*of_ranks, strict=True), strict=True):
        if len(set(seen)) > 1:
            raise ArgumentValueError(message(name.replace("_", " "), "the same on every rank of the group", list(seen)))


def _gather(ctx: Any, x: Tensor, group: Any) -> Tensor:
    ctx.group, ctx.dtype = group, x.dtype
    return exchange.begin_gather(x, group).get().flatten(0, 1)


def _sum_to_each(ctx: Any, upstream: Tensor) -> Any:
    wide = upstream.to(torch.promote_types(ctx.dtype, torch.float32)).contiguous()
    return [exchange.begin_scattered_sum(wide, ctx.group).get().to(ctx.dtype)], ()


_GATHERED = node("GatheredRows", "the gathered keys", _gather, _sum_to_each)
