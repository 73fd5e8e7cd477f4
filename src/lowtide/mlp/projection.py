"""A projection of the MLP, ``x W^T + b``, with an adapter or without: its GEMMs in one pass, and their gradients' sums.

With a low-rank adapter (LoRA) it is ``x W^T + b + s (drop(x) A^T) B^T``, and the adapter's part is added in place. C
rows of a tile, r the adapter's rank; A is [r, in], B [out, r]. Tensors [C, r] are recomputed wherever they are read:
that takes r multiply-adds per element of x, and no memory.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lowtide.mlp.packed import Packed, Weight

# Elements: an adapter with another dtype than its projection, or with dropout, copies this much of its wider side.
PIECE = 2**24


class Adapter(NamedTuple):
    """An adapter of a projection: ``x W^T`` becomes ``x W^T + scale (drop(x) A^T) B^T``."""

    a: Tensor  # [r, in]
    b: Tensor  # [out, r], of the dtype of a
    scale: float
    dropout: float  # the probability p that an element of x is dropped; the others are divided by 1 - p


class Projection(NamedTuple):
    """A projection of the MLP."""

    weight: Weight  # [out, in]
    bias: Tensor | None  # [out]
    adapter: Adapter | None = None


class Sum:
    """The gradient of ``of``, summed over tiles in ``dtype``: for one tile a weight's own, else the wide one.

    ``rows`` are those of ``of`` that something is added to: gate's or up's, where they are one projection. None: all.
    """

    def __init__(self, of: Tensor, dtype: torch.dtype) -> None:
        self._of, self._dtype = of, dtype
        self._total: Tensor | None = None
        self._begun: list[slice | None] = []

    def add_product(self, a: Tensor, b: Tensor, rows: slice | None = None) -> None:
        """Add ``a @ b``, a weight's gradient."""
        place, add = self._place(rows)
        multiply(a, b, place, add=add)

    def add_rows(self, grad: Tensor, rows: slice | None = None) -> None:
        """Add the sum of all rows of ``grad``, a bias's gradient."""
        place, add = self._place(rows)
        if add:
            place.add_(grad.sum(0, dtype=self._dtype))
        else:
            torch.sum(grad, 0, dtype=self._dtype, out=place)

    def _place(self, rows: slice | None) -> tuple[Tensor, bool]:
        """Return the memory of these rows, and whether it has a sum already."""
        if self._total is None:
            self._total = torch.empty(self._of.shape, dtype=self._dtype, device=self._of.device)
        begun = rows in self._begun
        if not begun:
            self._begun.append(rows)
        return self._total if rows is None else self._total[rows], begun

    def finished(self, scale: float) -> Tensor:
        """Return ``scale`` times the sum, to which something was added, in the dtype of ``of``."""
        total, self._total = self._total, None
        assert total is not None
        if scale != 1:
            total.mul_(scale)
        return total if total.dtype == self._of.dtype else total.to(self._of.dtype)


class LowRank(NamedTuple):
    """One projection's adapter during one pass."""

    a: Tensor  # in the dtype of the operands, as b
    b: Tensor
    scale: float
    dropout: float
    seed: int
    of_a: Sum | None = None  # of the gradient, before s; None: not needed
    of_b: Sum | None = None
    rows: slice | None = None  # those of b's

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
        of_a, of_b = (self.of_a, self.of_b) if x is not None else (None, None)
        for part in self._pieces(grad):
            dy = grad[part].to(self.a.dtype)
            first = start + part.start
            d_inner = dy @ self.b if of_a is not None or dx is not None else None
            if x is not None and (of_a is not None or of_b is not None):
                dropped = self._dropped(x[part], first)
                if of_b is not None:
                    of_b.add_product(dy.T, dropped @ self.a.T, self.rows)
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


@dataclass
class ProjectionPass:
    """A projection during one pass, with the sums of the gradients that are needed.

    With ``rows`` it is these rows of one projection for gate and up.
    """

    stored: Weight
    bias: Tensor | None
    adapter: LowRank | None
    dtype: torch.dtype  # of the operands
    rows: slice | None
    of_weight: Sum | None
    of_bias: Sum | None
    cast: Tensor | None = None  # W as the GEMMs read it

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Return the elements of W, A and B."""
        a, b = (0, 0) if self.adapter is None else (self.adapter.a.numel(), self.adapter.b.numel())
        return self.stored.numel(), a, b

    @property
    def weight(self) -> Tensor:
        """Return W in the operands' dtype; cast when first read, so that the first GEMM need not wait for all casts.

        One in 4 bits is dequantised for each GEMM, and freed after it.
        """
        if isinstance(self.stored, Packed):
            return operand(self.stored.dense(), self.dtype)
        if self.cast is None:
            self.cast = operand(self.stored, self.dtype)
        return self.cast

    def output(self, x: Tensor, out: Tensor | None, start: int) -> Tensor:
        """Return the output of the rows from ``start`` on, in ``out`` if it is given."""
        bias, weight = self.bias, self.weight.T
        if bias is not None and bias.dtype != x.dtype:
            bias = bias.to(x.dtype)
        # not F.linear, which a user may have replaced since the forward
        out = torch.mm(x, weight, out=out) if bias is None else torch.addmm(bias, x, weight, out=out)
        if self.adapter is not None:
            self.adapter.add_output(x, out, start)
        return out

    def add_bias(self, grad: Tensor) -> None:
        """Add the output's gradient [C, out] to that of the bias."""
        if self.of_bias is not None:
            self.of_bias.add_rows(grad, self.rows)

    def backward(self, grad: Tensor, x: Tensor | None, dx: Tensor | None, start: int, *, add: bool = False) -> None:
        """Add the gradient [C, out] of the output to those of weight and adapter; write or add it to ``dx``.

        ``x`` None: another call adds those of weight and adapter. ``dx`` None: another call's too, or not needed.
        """
        if x is not None and self.of_weight is not None:
            self.of_weight.add_product(grad.T, x, self.rows)
        if dx is not None:
            multiply(grad, self.weight, dx, add=add)
        if self.adapter is not None:
            self.adapter.backward(grad, x, dx, start)


def operand(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a matrix as a GEMM reads it without its own copy: in its dtype, with contiguous rows or columns."""
    if tensor.dtype != dtype:
        tensor = tensor.to(dtype)
    (rows, columns), (along, across) = tensor.shape, tensor.stride()
    readable = (across == 1 and along >= columns) or (along == 1 and across >= rows)
    return tensor if readable else tensor.contiguous()


def multiply(a: Tensor, b: Tensor, out: Tensor, *, add: bool) -> None:
    """Write or add ``a @ b`` into ``out``, of the operands' dtype or another."""
    if out.dtype == a.dtype:
        torch.addmm(out, a, b, out=out) if add else torch.mm(a, b, out=out)
    elif a.is_cuda and out.dtype == torch.float32:
        if add:
            torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
        else:
            torch.mm(a, b, out_dtype=out.dtype, out=out)
    elif add:
        out.add_(a @ b)
    else:
        out.copy_(a @ b)
