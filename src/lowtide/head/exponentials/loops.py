"""The loops over chunks whose GEMM's epilogue computes the rows: exponentials, or sums and gradients of logits.

A chunk is computed in pieces, between which ranks exchange a few numbers a row: while a piece's are under way, the next
one's GEMM runs. On one rank a chunk is one piece, and nothing is ahead of its turn.

N tokens, n rows, C rows of a piece, D hidden size, V classes of this rank, B classes of a block.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lowtide.head.call import Head
from lowtide.head.gradients import Gradients
from lowtide.head.kernels import configs, gradient_gemms_hopper
from lowtide.head.kernels.elementwise import take_counted
from lowtide.head.kernels.exp_rows import add_column_sums
from lowtide.head.kernels.gemm import ALL, Used
from lowtide.head.kernels.gradient_gemms_hopper import room_for
from lowtide.head.kernels.input_rows_hopper import InputRows, Room
from lowtide.head.lengths import padded
from lowtide.head.matmul import matmul_into, slices
from lowtide.head.plan import HeadPlan
from lowtide.head.ranks.exchange import Exchange
from lowtide.head.ranks.parallel import Alone
from lowtide.head.rows import Rows, rows_are_aligned


@dataclass(kw_only=True)
class Piece:
    """Some rows of a chunk, and what its stages leave for each other."""

    part: slice  # among the n rows
    at: slice  # among the chunk's
    closes: bool  # whether they are the chunk's last
    x_CD: Any = None  # hidden states; an exchange until they are needed
    y_C: Any = None  # int32 row of this rank's weight, more where another rank has the class, -1 where ignored
    own_C: Any = None  # class weights, where they are by row
    rows: Any = None  # kernels.exp_rows.Reports
    exchange: Any = None  # returns what was exchanged last


class Exponentials:
    """A head in one direction of a call: what its pieces share."""

    def __init__(self, head: Head, plan: HeadPlan, rows: Rows) -> None:
        self.head, self.plan, self.ranks, self.count = head, plan, head.ranks, rows.count
        self.index = None if head.ranks.spread else rows.index  # else the ranks have it
        self.weight_VD = aligned_rows(head.weight_VD, head.dtype)
        self.width = len(self.weight_VD)
        self.config = configs.of_device(head.input.device)
        self.ahead = 0 if self.ranks.alone else 1

    def begin(self, piece: Piece) -> Piece:
        """Begin to gather a piece's hidden states; in a copy, so that their memory can be freed."""
        head, part = self.head, piece.part
        if self.index is None or self.count is None:
            return replace(piece, x_CD=self.ranks.begin_rows(head.input, self.index, part, head.dtype))
        x_CD = self.new_rows(piece)
        take_counted(head.input, self.index[part], self.used(part), x_CD)
        return replace(piece, x_CD=Exchange(x_CD))

    def new_rows(self, piece: Piece) -> Tensor:
        """Return memory for a piece's hidden states."""
        return self.weight_VD.new_empty(piece.part.stop - piece.part.start, self.weight_VD.shape[1])

    def used(self, part: slice) -> Used:
        """Return how many of these rows the kernels compute."""
        return ALL if self.count is None else Used(self.count, part.start)

    @cached_property
    def room(self) -> Room:
        """Return where tiles of E W meet: no more than their product in float32 takes, or in blocks half of that."""
        rows = self.plan.product_rows // (1 if self.plan.schedule == "chunks" else 2) if self.ranks.alone else 0
        return room_for(self.head.input.device, rows * self.weight_VD.shape[1])

    def input_product(self, part: slice, e_CB: Tensor, w_BD: Tensor, out_CD: Tensor, *, add: bool) -> None:
        """Write ``E W`` (float32, contiguous) or add it; rows that are not used are left as they are."""
        if self.count is None:
            matmul_into(e_CB, w_BD, out_CD, add=add)
        else:
            ends = InputRows(out_CD, out_CD.stride(0), before=out_CD if add else None)
            gradient_gemms_hopper.input_grad(e_CB, w_BD, ends, self.room, self.used(part))

    def weight_product(self, part: slice, e_CB: Tensor, scaled_CD: Tensor, out_BD: Tensor, *, add: bool) -> None:
        """Write ``E^T S`` or add it, over the rows that are used."""
        if self.count is None:
            matmul_into(e_CB.t(), scaled_CD, out_BD, add=add)
        else:
            gradient_gemms_hopper.weight_grad(e_CB, scaled_CD, out_BD, self.used(part), add=add)

    def prepare(self, piece: Piece, scaled_CD: Tensor | None) -> Tensor:
        """Take up a chunk: return the s [C] of its rows, and write s x into ``scaled_CD`` where given."""
        raise NotImplementedError

    def fill(self, piece: Piece, w_BD: Tensor, e_CB: Tensor, first_class: int) -> None:
        """Write the gradient of the logits over each row's s, of the classes from ``first_class`` on."""
        raise NotImplementedError

    def finish_input(self, piece: Piece, product_CD: Tensor, out: Tensor, to_C: Tensor | None) -> None:
        """Write the input's gradient, given the product [C, D] (float32) of all entries and the weight.

        Each row to its place ``to_C`` in ``out``; None: in order.
        """
        raise NotImplementedError

    def pieces(self, chunk_rows: int, piece_rows: int) -> list[Piece]:
        """Return the pieces of all chunks, in order: whole groups of rows."""
        groups, found = self.ranks.groups, []
        chunk_rows, piece_rows = (max(1, rows // groups) * groups for rows in (chunk_rows, piece_rows))
        for chunk in slices(self.plan.rows, chunk_rows):
            C = chunk.stop - chunk.start
            found += [
                Piece(part=slice(chunk.start + at.start, chunk.start + at.stop), at=at, closes=at.stop == C)
                for at in slices(C, piece_rows)
            ]
        return found

    def in_stages(
        self, pieces: Iterable[Piece], *stages: Callable[[Piece], Piece], chunks: bool = False
    ) -> Iterator[Piece]:
        """Yield pieces after these stages, each stage's exchange begun a piece ahead of the next one's.

        With ``chunks`` those of a chunk are all yielded before the next chunk's last stage: they share memory.
        """
        for stage in stages:
            pieces = _ahead(map(stage, pieces), self.ahead, closed=chunks and stage is stages[-1])
        yield from pieces

    def recompute(self, into: Gradients) -> None:
        """Add up the gradients in blocks of the vocabulary: one GEMM for the entries, one for each gradient.

        Across ranks the input's begins to be summed before the weight's last GEMM of a chunk, and is waited for before
        the next chunk's sum begins.
        """
        plan, alone, (V, D) = self.plan, self.ranks.alone, self.weight_VD.shape
        pieces = self.pieces(plan.chunk_rows, plan.chunk_rows)
        longest = max((piece.at.stop for piece in pieces), default=0)
        new, product, under_way = self.weight_VD.new_empty, None, None
        e_buffer = new(longest, padded(plan.block_columns))
        scaled = None if into.weight_VD is None else new(longest, D)
        for piece in self.in_stages(pieces, self.begin):
            piece.x_CD = x_CD = aligned_rows(piece.x_CD.get(), self.head.dtype)
            C = len(x_CD)
            scaled_CD = None if scaled is None else scaled[:C]
            s_C = self.prepare(piece, scaled_CD)
            if into.input_ND is not None and (product is None or not alone):
                product = new(C, D, dtype=torch.float32)
            if product is not None and not V:
                under_way = self._put_input(piece, product.zero_(), into, under_way)
            for block in slices(V, plan.block_columns):
                w_BD, e_CB = self.weight_VD[block], e_buffer[:C, : block.stop - block.start]
                self.fill(piece, w_BD, e_CB, block.start)
                if product is not None:
                    self.input_product(piece.part, e_CB, w_BD, product[:C], add=block.start > 0)
                    if block.stop == V:
                        under_way = self._put_input(piece, product[:C], into, under_way)
                if scaled_CD is not None and into.weight_VD is not None:
                    add = piece.part.start > 0
                    self.weight_product(piece.part, e_CB, scaled_CD, into.weight_VD[block], add=add)
                if into.bias_V is not None:
                    add_column_sums(e_CB, s_C, into.bias_V[block], self.used(piece.part))
        if under_way is not None:
            under_way(into)

    def _put_input(
        self, piece: Piece, product_CD: Tensor, into: Gradients, before: Callable[[Gradients], None] | None
    ) -> Callable[[Gradients], None] | None:
        """Finish a chunk's input gradient; return what waits for its sum over the ranks, after the one ``before``."""
        if before is not None:
            before(into)
        if isinstance(self.ranks, Alone):
            assert into.input_ND is not None
            self.finish_input(piece, product_CD, *self.places(into.input_ND, piece.part))
            return None
        if self.width:
            self.finish_input(piece, product_CD, product_CD, None)
        return self.ranks.begin_sum(product_CD, piece.part, self.index)

    def places(self, input_ND: Tensor, part: slice) -> tuple[Tensor, Tensor | None]:
        """Return where these rows of the input's gradient go: into what, and their places in it; None: in order."""
        return (input_ND[part], None) if self.index is None else (input_ND, self.index[part])


def _ahead(pieces: Iterable[Piece], depth: int, *, closed: bool) -> Iterator[Piece]:
    """Yield pieces when ``depth`` more are made; with ``closed`` all that there are when a chunk's last is."""
    made: deque[Piece] = deque()
    for piece in pieces:
        made.append(piece)
        left = 0 if closed and piece.closes else depth
        del piece  # and with it its memory, when the next is made
        while len(made) > left:
            yield made.popleft()
    yield from made


def aligned_rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a matrix as TMA takes it: in ``dtype``, rows in order that start at multiples of 16 bytes."""
    if x.dtype == dtype and rows_are_aligned(x):
        return x
    return x.to(dtype, memory_format=torch.contiguous_format, copy=True)
