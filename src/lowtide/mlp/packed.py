"""Weights that bitsandbytes stores in 4 bits, as the MLP's operators take them: dense only while a GEMM reads them."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Packed:
    """A frozen weight [out, in] in 4 bits.

    ``tensors`` are the packed values and the scales of their blocks; where these scales are quantised too ("double
    quantisation"), also the scales of theirs, their code and their mean. ``form`` has what else `dense` reads, as text,
    which an operator may take: type, block size, block size of the scales' scales (0: there are none), out, in.
    """

    tensors: tuple[Tensor, ...]
    form: str
    dtype: torch.dtype  # of the GEMM that reads the weight
    rows: slice | None = None  # of the weight, None: all

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
    def shape(self) -> tuple[int, int]:
        """Return [out, in]."""
        F, D = map(int, self.form.split()[3:])
        return (F if self.rows is None else len(range(F)[self.rows]), D)

    def numel(self) -> int:
        """Return how many values the weight has."""
        F, D = self.shape
        return F * D

    def __getitem__(self, rows: slice) -> "Packed":
        """Return these rows of the weight."""
        return dataclasses.replace(self, rows=rows)

    def dense(self) -> Tensor:
        """Return the weight in the GEMM's dtype, as bitsandbytes dequantises it; nothing keeps it."""
        from bitsandbytes import functional

        kind, *numbers = self.form.split()
        block, outer_block, F, D = map(int, numbers)
        data, scales, *outer = self.tensors
        start, stop, step = (self.rows or slice(None)).indices(F)
        shared = block * max(1, outer_block)  # values
        # No block may cross rows: bitsandbytes' AVX512 kernel has other scales for these, by where the first row is.
        apart = step == 1 and D % block == 0 and start * D % shared == 0 and (stop == F or stop * D % shared == 0)
        if apart and stop - start < F:  # rows that share no scale with others: those alone

            def part(tensor: Tensor, values: int) -> Tensor:
                return tensor.reshape(-1)[start * D // values : -(-stop * D // values)]

            data, scales = part(data.reshape(-1).view(torch.uint8), 2), part(scales, block)
            outer[:1] = [part(one, shared) for one in outer[:1]]
            F = stop - start
        state2 = offset = None
        if outer:
            state2 = functional.QuantState(outer[0], code=outer[1], blocksize=outer_block, dtype=torch.float32)
            offset = outer[2]
        state = functional.QuantState(
            scales, (F, D), blocksize=block, quant_type=kind, dtype=self.dtype, offset=offset, state2=state2
        )
        whole: Tensor = functional.dequantize_4bit(data.reshape(-1, 1), state).reshape(F, D)
        return whole if apart or self.rows is None else whole[self.rows]


Weight = Tensor | Packed
