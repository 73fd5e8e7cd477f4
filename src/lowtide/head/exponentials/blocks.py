"""Gradients from a matrix that is built once more, a chunk of tokens and a block of the vocabulary at a time.

C rows of a chunk, D hidden size, V vocabulary, B classes of a block.
"""

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from lowtide.head.gradients import Gradients
from lowtide.head.head_plan import HeadPlan, padded


class Rebuilt(Protocol):
    """What is built: the gradient of the logits over each row's s, which multiplies hidden states and products."""

    def begin(self, part: slice, scaled: Tensor | None) -> Tensor:
        """Take up a chunk: return its s [C], and write s x into ``scaled`` where given."""
        ...

    def fill(self, w_BD: Tensor, e_CB: Tensor, first_class: int) -> None:
        """Write the chunk's entries of the classes from ``first_class`` on, whose weights are ``w_BD``."""
        ...

    def finish(self, product_CD: Tensor, out_CD: Tensor) -> None:
        """Write the input's gradient, given the product [C, D] (float32) of all entries and the weight."""
        ...


def rebuild_in_blocks(
    rebuilt: Rebuilt, plan: HeadPlan, weight_VD: Tensor, into: Gradients, *, begun: bool = False
) -> None:
    """Add up the gradients: one product for the entries, one each for the input's and the weight's gradient.

    Args:
        rebuilt: Builds the entries.
        plan: Chunks and blocks.
        weight_VD: The weight in the operands' dtype.
        into: Takes the gradients; ``bias_V`` is added to.
        begun: Whether the weight's gradient holds something already.
    """
    from lowtide.head.kernels.exp_rows import add_column_sums

    V, D = weight_VD.shape
    new = weight_VD.new_empty
    e_buffer = new(plan.chunk_rows, padded(plan.block_columns))
    scaled = None if into.weight_VD is None else new(plan.chunk_rows, D)
    product = None if into.input_ND is None else new(plan.chunk_rows, D, dtype=torch.float32)
    if into.weight_VD is not None and not plan.chunks:
        into.weight_VD.zero_()
    for part in plan.slices():
        C = part.stop - part.start
        scaled_CD = None if scaled is None else scaled[:C]
        s_C = rebuilt.begin(part, scaled_CD)
        for block in slices(V, plan.block_columns):
            w_BD, e_CB = weight_VD[block], e_buffer[:C, : block.stop - block.start]
            rebuilt.fill(w_BD, e_CB, block.start)
            if product is not None:
                matmul_into(e_CB, w_BD, product[:C], add=block.start > 0)
            if scaled_CD is not None and into.weight_VD is not None:
                matmul_into(e_CB.t(), scaled_CD, into.weight_VD[block], add=begun)
            if into.bias_V is not None:
                add_column_sums(e_CB, s_C, into.bias_V[block])
        if product is not None and into.input_ND is not None:
            rebuilt.finish(product[:C], into.input_ND[part])
        begun = True


def aligned_rows(x_CD: Tensor) -> Tensor:
    """Return hidden states as TMA takes them: rows that start at multiples of 16 bytes."""
    fits = x_CD.stride(1) == 1 and x_CD.stride(0) % 8 == 0 and x_CD.stride(0) > 0 and x_CD.data_ptr() % 16 == 0
    return x_CD if fits else x_CD.clone(memory_format=torch.contiguous_format)


def operand_rows(weight_VD: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weight in ``dtype``: a copy has its rows in order, whatever the weight's strides."""
    if weight_VD.dtype == dtype:
        return weight_VD
    return weight_VD.to(dtype, memory_format=torch.contiguous_format)


def slices(N: int, size: int) -> Iterator[slice]:
    """Yield the slices of ``size`` that make up N, the last one perhaps shorter."""
    for start in range(0, N, max(1, size)):
        yield slice(start, min(start + size, N))


def matmul_into(a: Tensor, b: Tensor, out: Tensor, *, add: bool) -> None:
    """Write ``a @ b`` into ``out``, or add it: summed in float32, rounded once."""
    if out.dtype == a.dtype:
        torch.addmm(out, a, b, out=out) if add else torch.mm(a, b, out=out)
    elif add:
        torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
    else:
        torch.mm(a, b, out_dtype=out.dtype, out=out)
