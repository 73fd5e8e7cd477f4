"""The order of a chunk's tokens, and of all classes, in which tiles are worth computing or not.

V classes, n tokens. Classes lie by falling mean probability, so that most of the vocabulary is in tiles that hold
little, and tokens by their targets' places in that order.
"""

from dataclasses import replace

import torch
from torch import Tensor

from lowtide.head.call import Head
from lowtide.head.rows import Rows


def sorted_rows(
    head: Head, rows: Rows, y_N: Tensor, unit_N: Tensor, chunk_rows: int, order: Tensor | None
) -> tuple[Rows, Tensor, Tensor]:
    """Return the rows, their targets' places in the order (int32, -1 where ignored) and what they count.

    ``order``: of the classes, which forward has saved for backward; None: in forward.

    Those of a chunk are in the order of their targets: a tile of rows then has few, and tokens that are alike. Every
    chunk has its part of all targets, so that what a class gets of its own tokens and of the others meets in one sum,
    and not when it has been rounded. Ignored tokens are last.
    """
    order = head.remembered.order if order is None else order
    V, classes = len(order) - 1, order[1:].long()
    in_turn = torch.arange(V, dtype=order.dtype, device=order.device)
    place_of = torch.empty_like(in_turn).index_copy_(0, classes, in_turn)
    places = place_of.index_select(0, y_N.clamp(min=0)).where(y_N >= 0, V)
    places, index = places.sort(stable=True)
    valid = places < V
    count = valid.sum(dtype=torch.int32).view(1)
    if chunk_rows < len(places):
        spread = _spread(len(places), chunk_rows, count)
        places, valid, index = (torch.empty_like(x).index_copy_(0, spread, x) for x in (places, valid, index))
    return replace(rows, index=index, count=count), places.where(valid, -1), unit_N.index_select(0, index)


def _spread(n: int, chunk_rows: int, count: Tensor) -> Tensor:
    """Return the place of each of n sorted rows, of which the first ``count`` are valid and stay before the others."""
    row = torch.arange(n, device=count.device)
    chunk = row // chunk_rows
    length = torch.where(chunk < count // chunk_rows, chunk_rows, count % chunk_rows)
    within = (row % chunk_rows + chunk / (n // chunk_rows + 1)) / length
    return within.where(row < count, torch.inf).argsort(stable=True)
