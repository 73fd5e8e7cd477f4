"""Sequence parallelism: tokens spread over the ranks that share a vocabulary, each with its part of the sequence.

W ranks, N tokens, C rows of a chunk, D hidden size.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lowtide.head.ranks import exchange as exchange
from lowtide.head.ranks.exchange import Exchange
from lowtide.head.rows import take_rows


class SpreadTokens:
    """Each rank has its part of one axis of tokens; chunks are gathered one by one, as they are needed.

    A chunk has the same rows of each rank's part, one group a rank; shorter parts are filled up with ignored tokens.
    """

    def __init__(self, group: Any, leading: Sequence[int], axis: int, device: torch.device) -> None:
        self._group, self._axis = group, axis
        W, rank, N, T = group.size(), group.rank(), math.prod(leading), leading[axis]
        size = -(-T // W)  # DTensor's rule
        spans = [slice(min(r * size, T), min((r + 1) * size, T)) for r in range(W)]
        self._span = spans[rank]
        self.length = size * (N // T if T else 0)  # rows of a group
        self._order_GL = torch.full((W, self.length), N, device=device)  # place among the N; N: no token
        place = torch.arange(N, device=device).view(*leading)
        for row, span in zip(self._order_GL, spans, strict=True):
            held = place.narrow(axis, span.start, span.stop - span.start).reshape(-1)
            row[: held.numel()] = held
        self.kept: list[tuple[slice, Tensor]] | None = None  # gathered parts in order, each [W, rows, D]

    def order(self, step: int, piece: int) -> Tensor:
        """Return the indices of rows among the N tokens, in chunks of ``step`` rows per group; N: no token.

        Chunks are computed in pieces of ``piece`` rows a group, which follow one another.
        """
        return self._order_GL.view(-1)[self._slots(step, piece)]

    def reordered(self, step: int, piece: int, other: int) -> Tensor:
        """Return the indices of rows among those of `order`, in chunks of ``other`` rows per group."""
        slots, others = self._slots(step, piece), self._slots(other, other)
        return torch.empty_like(slots).scatter_(0, slots, torch.arange(len(slots), device=slots.device))[others]

    def _slots(self, step: int, piece: int) -> Tensor:
        """Return the places of chunks' rows, piece by piece, among all ranks' rows one after another."""
        slot_GL = torch.arange(self._order_GL.numel(), device=self._order_GL.device).view_as(self._order_GL)
        pieces = [
            slot_GL[:, at : min(at + piece, start + step)].reshape(-1)
            for start in range(0, self.length, step)
            for at in range(start, min(start + step, self.length), piece)
        ]
        return torch.cat(pieces) if pieces else slot_GL.view(-1)

    def mine(self, x: Tensor) -> Tensor:
        """Return of values [...] of all tokens those of the hidden states on this rank."""
        return x[(slice(None),) * self._axis + (self._span,)]

    def begin_rows(self, input: Tensor, part: slice, dtype: torch.dtype) -> Exchange:
        """Begin to gather the hidden states of a chunk [C, D], the rows ``part`` of each rank's."""
        D, here = input.shape[-1], math.prod(input.shape[:-1])
        if self.kept and part.stop <= self.kept[-1][0].stop:
            pieces = [held[:, _within(part, its)] for its, held in self.kept]
            return Exchange(torch.cat(pieces, 1).view(-1, D))
        if part.stop <= here:
            mine = take_rows(input, None, part, dtype)
        else:
            mine = input.new_zeros(part.stop - part.start, D, dtype=dtype)
            if part.start < here:
                mine[: here - part.start] = take_rows(input, None, slice(part.start, here), dtype)
        gathered = exchange.begin_gather(mine, self._group)
        if self.kept is not None:
            self.kept.append((part, gathered.value))
        return gathered._replace(value=gathered.value.view(-1, D))


def _within(part: slice, of: slice) -> slice:
    """Return which rows of those ``of`` are in ``part``."""
    start, stop = (min(max(edge, of.start), of.stop) - of.start for edge in (part.start, part.stop))
    return slice(start, stop)
