"""Sets of classes, one for each token, as pairs of a token and a class; and products with the rows of these alone.

n tokens, P pairs, those of a token one after another, D hidden size, V vocabulary, V_r classes of it on this rank.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lowtide.head.matmul import slices

NOTHING, NO_CLASS = -1, -2  # in the place of a class: a pad or a repetition; an id that is no class


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """Each token's set, its ids in ascending order. One that a token lists twice is a pair, then `NOTHING`.

    Numbers of pairs are [n, K], or [P] where tokens have different numbers of pairs: "[pairs]".
    """

    tokens: int  # n
    ids: Tensor  # int64 [pairs], of the whole vocabulary, or `NOTHING`, or `NO_CLASS`
    keys: Tensor  # int64 [P]: token and id as one number, in ascending order
    starts: Tensor | None  # int64 [n + 1]: where each token's pairs begin; None: each has K
    K: int
    vocab: int  # V

    @classmethod
    def of(cls, ids: Tensor, starts: Tensor | None, tokens: int, K: int, V: int, counts_n: Tensor | None) -> "Pairs":
        """Return the sets of listed ids [P], of which those outside [-1, V) are `NO_CLASS`.

        Of tokens where ``counts_n`` is False nothing is left.
        """
        ids = ids.masked_fill((ids < NOTHING) | (ids >= V), NO_CLASS)
        pairs = cls(tokens=tokens, ids=ids, keys=ids, starts=starts, K=K, vocab=V)
        if starts is None:
            ids = ids.view(tokens, K).sort(1).values
            keys = pairs.key(pairs.token, ids).view(-1)
            again = ids[:, 1:] == ids[:, :-1]
            ids[:, 1:].masked_fill_(again, NOTHING)
        else:
            token = torch.searchsorted(starts, torch.arange(len(ids), device=ids.device), right=True) - 1
            ids = ids.masked_fill((token < 0) | (token >= tokens), NOTHING)  # no token's, and stay where they are
            keys = pairs.key(token, ids).sort().values
            ids = keys - pairs.key(token, 0)
            again = keys[1:] == keys[:-1]
            ids[1:].masked_fill_(again, NOTHING)
        if counts_n is not None:
            ids.masked_fill_(~pairs.spread(counts_n), NOTHING)
        return replace(pairs, ids=ids, keys=keys)

    @cached_property
    def token(self) -> Tensor:
        """Return the token of each pair, to broadcast with [pairs]."""
        if self.starts is None:
            return torch.arange(self.tokens, device=self.ids.device)[:, None]
        return self.token_at(torch.arange(len(self.ids), device=self.ids.device))

    def token_at(self, places: Tensor) -> Tensor:
        """Return the tokens of the pairs at these places among all P."""
        if self.starts is None:
            return places // max(self.K, 1)
        return (torch.searchsorted(self.starts, places, right=True) - 1).clamp_(0, max(0, self.tokens - 1))

    def key(self, token: Tensor, ids: Tensor | int) -> Tensor:
        """Return the keys of ids of tokens."""
        return token * (self.vocab + 2) + (ids + 2)

    def shaped(self, x_P: Tensor) -> Tensor:
        """Return numbers [P] as [pairs]."""
        return x_P.view(self.tokens, self.K) if self.starts is None else x_P

    def spread(self, x_n: Tensor) -> Tensor:
        """Return each token's number, to broadcast with [pairs]."""
        return x_n[:, None] if self.starts is None else x_n.take(self.token)

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of each token's numbers."""
        if self.starts is None:
            return x.sum(1)
        return torch.segment_reduce(x, "sum", offsets=self.starts, unsafe=True, initial=0.0)

    def highest(self, x: Tensor) -> Tensor:
        """Return the highest of each token's numbers, -inf of none."""
        if self.starts is not None:
            return torch.segment_reduce(x, "max", offsets=self.starts, unsafe=True, initial=-torch.inf)
        return x.amax(1) if self.K else x.new_full((self.tokens,), -torch.inf)

    def lowest_id(self, chosen: Tensor) -> Tensor:
        """Return the lowest id of each token's chosen pairs, V of none."""
        if self.starts is None:
            ids = self.ids.masked_fill(~chosen, self.vocab)
            return ids.amin(1) if self.K else ids.new_full((self.tokens,), self.vocab)
        ids = (-self.ids.double()).masked_fill(~chosen, -self.vocab)  # which hold each id exactly
        return (-self.highest(ids)).clamp(max=self.vocab).long()

    def find(self, y_nT: Tensor) -> tuple[Tensor, Tensor]:
        """Return the place of each token's classes [n, T], any place where there is none, and whether there is one."""
        if not len(self.keys):
            return torch.zeros_like(y_nT), torch.zeros_like(y_nT, dtype=torch.bool)
        key = self.key(torch.arange(self.tokens, device=y_nT.device)[:, None], y_nT)
        at = torch.searchsorted(self.keys, key).clamp_(max=len(self.keys) - 1)
        return at, self.keys.take(at) == key


@dataclass(frozen=True, kw_only=True)
class Products:
    """What is computed with the rows of the weight that pairs list, here on this rank, in plain PyTorch."""

    pairs: Pairs
    ids: Tensor  # int32 [P]: rows of this rank's weight, negative where there is none
    x_nD: Tensor  # in the operands' dtype, rows contiguous
    weight_VD: Tensor
    wide: torch.dtype
    gathered: int  # bytes of rows that plain PyTorch gathers at a time

    def scores(self) -> Tensor:
        """Return each pair's dot product [P]; 0 where it has no row."""
        z, token = self.x_nD.new_zeros(len(self.ids), dtype=self.wide), self._tokens()
        for part in self._blocks():
            rows, here = self._rows(self.ids[part])
            z[part] = (rows * self.x_nD.index_select(0, token[part]).to(self.wide)).sum(1).where(here, 0)
        return z

    def input_grad(self, c_P: Tensor, out_nD: Tensor) -> None:
        """Write each token's sum of its rows times ``c_P`` into ``out_nD``."""
        total, token = torch.zeros_like(out_nD, dtype=self.wide), self._tokens()
        for part in self._blocks():
            rows, here = self._rows(self.ids[part])
            c = c_P[part, None]
            add_rows_(total, token[part], (c * rows.where(here[:, None], 0)).where(c != 0, 0))
        out_nD.copy_(total)

    def weight_grad(
        self, c_P: Tensor, out_RD: Tensor, bias_V: Tensor | None, slot_V: Tensor | None, *, add: bool
    ) -> None:
        """Write each class's sum of hidden states times ``c_P``, or add it, and the same of 1 into ``bias_V``.

        ``slot_V`` says which row of ``out_RD`` is a class's; None: its own.
        """
        ids, order = self.ids.sort(stable=True)
        c, token = c_P.take(order), self.pairs.token_at(order)
        total = (out_RD if add else out_RD.zero_()).to(self.wide)
        for part in self._blocks():
            v, g = ids[part].long(), c[part, None]
            g = g.where(v[:, None] >= 0, 0)
            v = v.clamp(min=0)
            if bias_V is not None:
                add_rows_(bias_V, v, g[:, 0])
            if total.numel():
                row = v if slot_V is None else slot_V.take(v).clamp(max=len(total) - 1)
                add_rows_(total, row, (g * self.x_nD.index_select(0, token[part]).to(self.wide)).where(g != 0, 0))
        if total is not out_RD:
            out_RD.copy_(total)

    def _tokens(self) -> Tensor:
        return self.pairs.token_at(torch.arange(len(self.ids), device=self.ids.device))

    def _blocks(self) -> Any:
        """Return the pairs of which plain PyTorch gathers rows at a time; of none where there are no rows."""
        D = max(1, self.x_nD.shape[1])
        return slices(len(self.ids) if len(self.weight_VD) else 0, max(1, self.gathered // (D * self.wide.itemsize)))

    def _rows(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        rows = self.weight_VD.index_select(0, ids.clamp(min=0)).to(self.x_nD.dtype).to(self.wide)
        return rows, ids >= 0


def add_rows_(total: Tensor, index: Tensor, rows: Tensor) -> None:
    """Add rows to those of ``total`` at ``index``, in one order: what index_add_ lacks on a GPU."""
    if total.is_cuda:
        total.index_put_((index,), rows, accumulate=True)
    else:
        total.index_add_(0, index, rows)
