"""How tokens lie on the ranks that share a vocabulary: the same on each, or each a part of the sequence.

W ranks, N tokens, C rows of a chunk, D hidden size.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lowtide.head.ranks import exchange as exchange
from lowtide.head.ranks.exchange import Reduced, Told
from lowtide.head.rows import take_rows


class SameTokens:
    """All tokens on every rank.

    A chunk's rows are [groups, rows]: here one group.
    """

    groups = 1

    def __init__(self, group: Any, leading: Sequence[int]) -> None:
        self._group, self.N = group, math.prod(leading)
        self.length = self.N  # rows of a group

    def arranged(self, x_N: Tensor, fill: float) -> Tensor:  # noqa: ARG002
        """Return values [N, ...] of all tokens as [groups, length, ...], ``fill`` where there is no token."""
        return x_N[None]

    def put_back(self, x_GL: Tensor) -> Tensor:
        """Undo `arranged`."""
        return x_GL[0]

    def order(self, step: int, piece: int) -> None:
        """Return where the rows of chunks of ``step`` rows a group stand among the N tokens: in order."""

    def reordered(self, step: int, piece: int, other: int) -> None:
        """Return where the rows of chunks of ``other`` rows a group stand among those of `order`: the order is one."""

    def mine(self, x: Tensor) -> Tensor:
        """Return of values [...] of all tokens those of the hidden states on this rank."""
        return x

    def begin_rows(self, input: Tensor, part: slice, dtype: torch.dtype, index: Tensor | None = None) -> Told:
        """Return the hidden states of a chunk [C, D], which are here: rows ``part`` of ``index``, None: of all."""
        return Told(take_rows(input, index, part, dtype), None)

    def keep(self) -> None:
        """As `SpreadTokens.keep`: they are here."""

    def let_go(self) -> None:
        """Undo `keep`."""

    def reduce(self, part_CD: Tensor) -> Reduced:
        """Begin to add up all ranks' parts of a chunk's gradient [C, D], in its memory."""
        return exchange.begin_sum(part_CD, self._group)


class SpreadTokens:
    """Each rank holds its part of one axis of tokens; chunks are gathered as they are needed, and never all at once.

    A chunk has the same rows of each rank's part, one group a rank; shorter parts are filled up with ignored tokens.
    """

    def __init__(self, group: Any, leading: Sequence[int], axis: int, device: torch.device) -> None:
        self._group, self.N, self._axis = group, math.prod(leading), axis
        self.groups = W = exchange.size_of(group)
        rank = exchange.rank_in(group)
        T = leading[axis]
        size = -(-T // W)  # DTensor's rule
        self._span = slice(min(rank * size, T), min((rank + 1) * size, T))
        beside = self.N // T if T else 0
        self.length = size * beside
        place = torch.arange(self.N, device=device).view(*leading)
        order = torch.full((W, self.length), self.N, device=device)
        for r in range(W):
            held = place.narrow(axis, min(r * size, T), max(0, min(size, T - r * size))).reshape(-1)
            order[r, : held.numel()] = held
        self._order_GL = order
        self._kept: list[tuple[slice, Tensor]] | None = None  # parts in order, each [W, rows, D]

    def arranged(self, x_N: Tensor, fill: float) -> Tensor:
        """Return values [N, ...] of all tokens as [groups, length, ...], ``fill`` where there is no token."""
        return torch.cat((x_N, x_N.new_full((1, *x_N.shape[1:]), fill)))[self._order_GL]

    def put_back(self, x_GL: Tensor) -> Tensor:
        """Undo `arranged`."""
        out = x_GL.new_zeros(self.N + 1, *x_GL.shape[2:])
        return out.index_copy_(0, self._order_GL.view(-1), x_GL.flatten(0, 1))[: self.N]

    def order(self, step: int, piece: int) -> Tensor:
        """Return where the rows of chunks of ``step`` rows a group stand among the N tokens; N: a token of none.

        Chunks are computed in pieces of ``piece`` rows a group, which follow one another.
        """
        return self._order_GL.view(-1)[self._slots(step, piece)]

    def reordered(self, step: int, piece: int, other: int) -> Tensor:
        """Return where the rows of chunks of ``other`` rows a group stand among those of `order`."""
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
        return x.narrow(self._axis, self._span.start, self._span.stop - self._span.start)

    def begin_rows(self, input: Tensor, part: slice, dtype: torch.dtype, index: Tensor | None = None) -> Told:  # noqa: ARG002
        """Begin to gather the hidden states of a chunk [C, D], the rows ``part`` of each rank's."""
        D, here = input.shape[-1], math.prod(input.shape[:-1])
        if self._kept and part.stop <= self._kept[-1][0].stop:
            pieces = [held[:, _within(part, its)] for its, held in self._kept]
            return Told(torch.cat(pieces, 1).view(-1, D), None)
        if part.stop <= here:
            mine = take_rows(input, None, part, dtype)
        else:
            mine = input.new_zeros(part.stop - part.start, D, dtype=dtype)
            if part.start < here:
                mine[: here - part.start] = take_rows(input, None, slice(part.start, here), dtype)
        told = exchange.begin_gather(mine, self._group)
        if self._kept is not None:
            self._kept.append((part, told.value))
        return told._replace(value=told.value.view(-1, D))

    def keep(self) -> None:
        """Gather each chunk once from here on: a second pass over them finds them here.

        Where nobody trains the hidden states, some ranks may train their weights and others not. These have no second
        pass, and would not come to a second gathering.
        """
        self._kept = []

    def let_go(self) -> None:
        """Undo `keep`."""
        self._kept = None

    def reduce(self, part_CD: Tensor) -> Reduced:
        """Begin to add up all ranks' parts of a chunk's gradient [C, D]; each rank gets its own rows of the sum."""
        return exchange.begin_scattered_sum(part_CD, self._group)


def _within(part: slice, of: slice) -> slice:
    """Return which rows of those ``of`` are in ``part``."""
    start, stop = (min(max(edge, of.start), of.stop) - of.start for edge in (part.start, part.stop))
    return slice(start, stop)
