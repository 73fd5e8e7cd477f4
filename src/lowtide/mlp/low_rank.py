"""Low-rank adapters of a projection (LoRA): their part of its output and of its gradients, added in place.

A projection ``x W^T`` with an adapter is ``x W^T + s (drop(x) A^T) B^T``. C rows of a tile, r the adapter's rank; A is
[r, in], B [out, r]. Tensors [C, r] are recomputed wherever they are read: that takes r multiply-adds per element of x,
and no memory.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from lowtide.mlp.products import Sum

# Elements: an adapter with another dtype than its projection, or with dropout, copies this much of its wider side.
PIECE = 2**24


class LowRank:
    """One projection's adapter during one pass, A and B in the dtype of the operands.

    ``of_a`` and ``of_b`` are the sums of their gradients, before s, or None: not needed. ``rows`` are those of b's.
    """

    def __init__(
        self, a: Tensor, b: Tensor, scale: float, dropout: float, seed: int,
        of_a: Sum | None = None, of_b: Sum | None = None, rows: slice | None = None,
    ) -> None:  # fmt: skip
        self.a, self.b, self._of_a, self._of_b, self._rows = a, b, of_a, of_b, rows
        self.scale, self.dropout, self.seed = scale, dropout, seed

    def add_output(self, x: Tensor, out: Tensor, start: int) -> None:
        """Add the adapter's output for the rows ``x`` [C, in], the first of which is row ``start`` of all."""
        for part in self._pieces(x):
            inner = self._dropped(x[part], start + part.start) @ self.a.T
            self._add(inner, self.b.T, out[part])

    def backward(self, grad: Tensor, x: Tensor | None, dx: Tensor | None, start: int) -> None:
        """Add the gradients that follow from the gradient [C, out] of the projection's output, rows from ``start`` on.

        ``x`` is the projection's input [C, in]; None: another call adds the gradients of A and B. ``dx`` is the
        gradient of x, to be added to; None: another call adds to it, or it is not needed.
        """
        of_a, of_b = (self._of_a, self._of_b) if x is not None else (None, None)
        for part in self._pieces(grad):
            dy = grad[part].to(self.a.dtype)
            first = start + part.start
            d_inner = dy @ self.b if of_a is not None or dx is not None else None
            if x is not None and (of_a is not None or of_b is not None):
                dropped = self._dropped(x[part], first)
                if of_b is not None:
                    of_b.add_product(dy.T, dropped @ self.a.T, self._rows)
                if of_a is not None and d_inner is not None:
                    of_a.add_product(d_inner.T, dropped)
            if dx is None or d_inner is None:
                continue
            if self.dropout:
                through = (d_inner @ self.a).mul_(self._factors(dx[part], first))
                dx[part].add_(through, alpha=self.scale)
            else:
                self._add(d_inner, self.a, dx[part])

    def _add(self, left: Tensor, right: Tensor, into: Tensor) -> None:
        if into.dtype == left.dtype:
            torch.addmm(into, left, right, alpha=self.scale, out=into)
        else:
            into.add_(left @ right, alpha=self.scale)

    def _dropped(self, x: Tensor, first: int) -> Tensor:
        x = x.to(self.a.dtype)
        return x * self._factors(x, first) if self.dropout else x

    def _factors(self, like: Tensor, first: int) -> Tensor:
        """Return 0 or ``1 / (1 - p)`` for each element of rows [c, in]: the same in every pass."""
        kept = like.new_empty(like.shape, dtype=self.a.dtype)
        if self.dropout == 1:
            return kept.zero_()
        generator = torch.Generator(like.device).manual_seed(self.seed + 3 * first)
        return kept.bernoulli_(1 - self.dropout, generator=generator).div_(1 - self.dropout)

    def _pieces(self, side: Tensor) -> Iterator[slice]:
        """Yield the rows of each piece: the same in every pass, since a piece's first row seeds its dropout."""
        step = rows = len(side)
        if self.dropout or side.dtype != self.a.dtype:
            step = PIECE // max(self.a.shape[1], self.b.shape[0], 1)
        step = max(1, min(step, rows))
        for first in range(0, max(1, rows), step):  # one empty piece if there are no rows
            yield slice(first, min(first + step, rows))
