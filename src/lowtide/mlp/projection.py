"""A projection of the MLP, ``x W^T + b``, with an adapter or without: its GEMMs in one pass, and their gradients' sums.

With a low-rank adapter (LoRA) it is ``x W^T + b + s (drop(x) A^T) B^T``, and the adapter's part is added in place. C
rows of a tile, r the adapter's rank; A is [r, in], B [out, r]. Tensors [C, r] are recomputed wherever they are read:
that takes r multiply-adds per element of x, and no memory. W may be in 4 bits.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Elements: an adapter with another dtype than its projection, or with dropout, copies this much of its wider side.
PIECE = 2**24


class Packed(NamedTuple):
    """A frozen weight [out, in] that bitsandbytes stores in 4 bits: dense only while a GEMM reads it.

    ``tensors`` are the packed values and the scales of their blocks; where these scales are quantised too ("double
    quantisation"), also the scales of theirs, their code and their mean. ``form`` has what else `dense` reads, as text,
    which an operator may take: type, block size, block size of the scales' scales (0: there are none), out, in.
    """

    tensors: tuple[Tensor, ...]
    form: str
    dtype: torch.dtype  # of the GEMM that reads the weight

    @classmethod
    def of(cls, data: Tensor, state: Any, dtype: torch.dtype) -> "Packed":
        """Return the weight with these packed values and this `bitsandbytes.functional.QuantState`."""
        outer = state.state2
        data = data.detach()  # plain: an operator runs a Parameter of another class by way of the dispatcher
        tensors = (data, state.absmax, *(() if outer is None else (outer.absmax, outer.code, state.offset)))
        blocks = state.blocksize, 0 if outer is None else outer.blocksize
        return cls(tensors, " ".join(map(str, (state.quant_type, *blocks, *state.shape))), dtype)

    @classmethod
    def taken(cls, tensors: Iterator[Tensor], form: str, dtype: torch.dtype) -> "Packed":
        """Return a weight of this form, of the next of the ``tensors``."""
        return cls(tuple(itertools.islice(tensors, 5 if form.split()[2] != "0" else 2)), form, dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        """Return [out, in]."""
        return tuple(map(int, self.form.split()[3:]))

    def dense(self) -> Tensor:
        """Return the weight in the GEMM's dtype, as bitsandbytes dequantises it; nothing keeps it."""
        from bitsandbytes import functional

        kind, block, outer_block, *_ = self.form.split()
        data, scales, *outer = self.tensors
        state2 = offset = None
        if outer:
            of_scales, code, offset = outer
            state2 = functional.QuantState(of_scales, code=code, blocksize=int(outer_block), dtype=torch.float32)
        state = functional.QuantState(
            scales, self.shape, blocksize=int(block), quant_type=kind, dtype=self.dtype, offset=offset, state2=state2
        )
        whole: Tensor = functional.dequantize_4bit(data.reshape(-1, 1), state).reshape(self.shape)
        return whole


Weight = Tensor | Packed


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
    """The gradient of ``of``, summed over tiles in ``dtype``: for one tile a weight's own, else the wide one."""

    def __init__(self, of: Tensor, dtype: torch.dtype) -> None:
        self._of, self._dtype = of, dtype
        self._total: Any = None
        self._begun: list[slice | None] = []

    def add(self, left: Tensor, right: Tensor | None, rows: slice | None = None) -> None:
        """Add ``left @ right``, or without ``right`` the sum of all rows of ``left``, to these rows; None: to all."""
        if self._total is None:
            self._total = torch.empty(self._of.shape, dtype=self._dtype, device=self._of.device)
        place = self._total if rows is None else self._total[rows]
        begun = rows in self._begun
        self._begun.append(rows)
        if right is not None:
            multiply(left, right, place, add=begun)
        elif begun:
            place.add_(left.sum(0, dtype=self._dtype))
        else:
            torch.sum(left, 0, dtype=self._dtype, out=place)

    def finished(self, scale: float) -> Tensor:
        """Return ``scale`` times the sum, to which something was added, in the dtype of ``of``."""
        total, self._total = self._total, None
        scaled: Tensor = total if scale == 1 else total.mul_(scale)
        return scaled.to(self._of.dtype)


@dataclasses.dataclass
class ProjectionPass:
    """A projection during one pass. With ``rows`` it is these rows of one projection for gate and up."""

    stored: Weight
    bias: Tensor | None
    a: Any  # of its adapter, as B a tensor in the dtype of the operands; None: it has none
    b: Any
    scale: float
    dropout: float
    seed: int
    dtype: torch.dtype  # of the operands of the other GEMMs
    rows: slice | None
    sums: Sequence[Sum | None]  # of the gradients of W, b, A and B, the last two before s; None: not needed
    cast: Tensor | None = None  # W as the GEMMs read it

    @property
    def weight(self) -> Tensor:
        """Return W in the operands' dtype; cast when first read, so that the first GEMM need not wait for all casts.

        One in 4 bits is dequantised for each GEMM, and freed after it.
        """
        if self.cast is not None:
            return self.cast
        packed = isinstance(self.stored, Packed)
        weight: Any = self.stored.dense() if packed else self.stored  # type: ignore[union-attr]
        weight = (weight if self.rows is None else weight[self.rows]).to(self.dtype)
        self.cast = None if packed else weight
        return weight  # type: ignore[no-any-return]

    def output(self, x: Tensor, out: Tensor | None, start: int) -> Tensor:
        """Return the output of the rows ``x`` [C, in], from row ``start`` of all on, in ``out`` if it is given."""
        if self.bias is None:
            out = torch.mm(x, self.weight.T, out=out)
        else:
            out = torch.addmm(self.bias.to(x.dtype), x, self.weight.T, out=out)
        for part in self._pieces(x):
            self._add(self._dropped(x[part], start + part.start) @ self.a.T, self.b.T, out[part])
        return out

    def add_bias(self, grad: Tensor) -> None:
        """Add the output's gradient [C, out] to that of the bias."""
        if self.sums[1] is not None:
            self.sums[1].add(grad, None, self.rows)

    def backward(self, grad: Tensor, x: Tensor | None, dx: Tensor | None, start: int, *, add: bool = False) -> None:
        """Add the gradient [C, out] of the output to those of W, A and B; write or add it to ``dx``, that of x.

        ``x`` None: another call adds those of W, A and B. ``dx`` None: another call's too, or not needed.
        """
        of_weight, _, of_a, of_b = self.sums
        if x is not None and of_weight is not None:
            of_weight.add(grad.T, x, self.rows)
        if dx is not None:
            multiply(grad, self.weight, dx, add=add)
        for part in self._pieces(grad):
            dy, first = grad[part].to(self.a.dtype), start + part.start
            d_inner = dy @ self.b
            if x is not None and (of_a is not None or of_b is not None):
                dropped = self._dropped(x[part], first)
                if of_b is not None:
                    of_b.add(dy.T, dropped @ self.a.T, self.rows)
                if of_a is not None:
                    of_a.add(d_inner.T, dropped)
            if dx is None:
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
        """Yield the rows of each piece of the adapter's part: the same in every pass, as the first seeds dropout."""
        if self.a is None:
            return
        step = rows = len(side)
        if self.dropout or side.dtype != self.a.dtype:
            step = PIECE // max(self.a.shape[1], self.b.shape[0], 1)
        step = max(1, min(step, rows))
        for first in range(0, max(1, rows), step):  # one empty piece if there are no rows
            yield slice(first, min(first + step, rows))


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
