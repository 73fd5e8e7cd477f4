"""The exponential path on a part of the vocabulary: the gradients, from the E that the sums are taken of or a new one.

In both the hidden states' gradient begins to be added up over the ranks before the weight's last product, and is waited
for after it.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lowtide.head.exponentials.blocks import matmul_into, slices
from lowtide.head.exponentials.path import put_even_part
from lowtide.head.gradients import Gradients
from lowtide.head.ranks.exchange import Reduced
from lowtide.head.vocab.exp_pieces import Fetched, Piece, cut, inputs_of, of_piece
from lowtide.head.vocab.exp_sums import ExpShard, Summed


class _EvenPart:
    """Smoothing's part of the weight's and the bias's gradient, the same for every row of logits.

    It is made of the hidden states' sum times the rows' factors, which adds up as they pass by: to read them for it
    alone would be one gathering more where they are spread.
    """

    def __init__(self, shard: ExpShard, factor_GL: Tensor, into: Gradients) -> None:
        self._shard, self._into, self._some = shard, into, shard.terms.smoothing != 0
        if self._some:
            D = shard.job.weight_VD.shape[1]
            self._factor_GL = factor_GL.where(shard.kept_GL, 0)
            self._sum_D = torch.zeros(D, dtype=torch.float32, device=factor_GL.device)

    def add(self, piece: Piece, x_CD: Tensor) -> None:
        """Add a piece's hidden states [C, D]."""
        if self._some and self._into.weight_VD is not None:
            self._shard.head.thin.add_column_sums(x_CD, of_piece(piece, self._factor_GL)[0], self._sum_D)

    def put(self, *, begun: bool) -> bool:
        """Put it into the gradients, when all pieces are added; return whether the weight's holds something now."""
        shard = self._shard
        if not (self._some and shard.width):
            return begun
        total = self._factor_GL.sum()
        put_even_part(shard.shares, shard.width, total, self._sum_D, self._into, shard.job.dtype, add=begun)
        return True


class Products:
    """The gradients from the E that the sums are taken of: three GEMMs a chunk.

    Args:
        shard: The call.
        fetched: Its pieces.
        factor: As in `ShardedExp.run`.
        into: Takes the gradients.
        found: Takes losses, logsumexps and misses.
    """

    def __init__(
        self, shard: ExpShard, fetched: Fetched, factor: Callable[[], Tensor], into: Gradients, found: Tensor
    ) -> None:
        self.shard, self._fetched, self._factor, self.into, self.found = shard, fetched, factor, into, found
        self.pieces = cut(shard.ranks, shard.plan, shard.plan.chunk_rows, shard.plan.product_rows)
        self.e_buffer = shard.e_buffer(self.pieces, shard.width)
        rows, D = len(self.e_buffer), shard.job.weight_VD.shape[1]
        self.s_C = torch.empty(rows, dtype=torch.float32, device=self.e_buffer.device)
        self.scaled = None if into.weight_VD is None else self.e_buffer.new_empty(rows, D)
        # E W, summed over the ranks before it is rounded
        self.product = None if into.input_ND is None else self.s_C.new_empty(rows, D)
        self.open: list[Piece] = []
        self.begun = False

    @cached_property
    def factor_GL(self) -> Tensor:
        """What each row's loss is multiplied with."""
        return self._factor()

    @cached_property
    def _even(self) -> _EvenPart:
        return _EvenPart(self.shard, self.factor_GL, self.into)

    def run(self) -> None:
        """Go through all pieces: each is finished when the next one's E is built, or its chunk ends."""
        before: Summed | None = None
        for taken in self._fetched.ahead(self.pieces):
            if before is not None and taken.piece.opens:
                self._finish(before)
                before = None
            rows = taken.piece.at
            summed = self.shard.sum(taken, self.found, self._e(rows), self.s_C[rows])
            if before is not None:
                self._finish(before)
            before = summed
        if before is not None:
            self._finish(before)

    def _e(self, rows: slice) -> Tensor | None:
        return self.e_buffer[rows, : self.shard.width] if self.shard.width else None

    def _finish(self, summed: Summed) -> None:
        shard, taken = self.shard, summed.taken
        piece, e_CV = taken.piece, self._e(taken.piece.at)
        (factor_C,) = of_piece(piece, self.factor_GL)
        shard.finish(summed, self.found, factor_C, e_CV, None if self.scaled is None else self.scaled[piece.at])
        self._even.add(piece, taken.x_CD)
        if self.product is not None:
            product = self.product[piece.at]
            if e_CV is not None:
                matmul_into(e_CV, shard.head.weight_VD, product, add=False)
            shard.finish_product(product, piece, summed.reports, factor_C)
        self.open.append(piece)
        if piece.closes:
            self._close(piece)

    def _close(self, last: Piece) -> None:
        """End a chunk: the weight's product while the input's is being summed, and then what that came to."""
        shard, into, rows = self.shard, self.into, last.at.stop
        e_CV = self._e(slice(0, rows))
        summed: list[tuple[Reduced, int]] = []
        if self.product is not None:
            first = self.open[0].part.start
            if shard.tokens.groups == 1:  # the rows of all pieces lie one after another
                summed = [(shard.tokens.reduce(self.product[:rows]), first)]
            else:
                summed = [(shard.tokens.reduce(self.product[piece.at]), piece.part.start) for piece in self.open]
        if last is self.pieces[-1]:  # before the product, so that of a single chunk it is written and not added
            self.begun = self._even.put(begun=self.begun)
        if e_CV is not None and self.scaled is not None and into.weight_VD is not None:
            matmul_into(e_CV.t(), self.scaled[:rows], into.weight_VD, add=self.begun)
        if e_CV is not None and into.bias_V is not None:
            shard.head.thin.add_column_sums(e_CV, self.s_C[:rows], into.bias_V)
        for reduced, start in summed:
            if into.input_ND is not None:
                reduced.write(into, start)
        self.open, self.begun = [], True


class Rebuilt:
    """The gradients from what a first pass found: E once more, a block of this rank's classes at a time.

    Args:
        shard: The call.
        factor_GL: What each row's loss is multiplied with.
        lse_GL: Logsumexps.
        miss_GL: These minus the targets' logits.
        into: Takes the gradients.
    """

    def __init__(self, shard: ExpShard, factor_GL: Tensor, lse_GL: Tensor, miss_GL: Tensor, into: Gradients) -> None:
        self.shard, self.into = shard, into
        self._numbers_GL = factor_GL, lse_GL, miss_GL, shard.y_GL
        self.pieces = cut(shard.ranks, shard.plan, shard.plan.chunk_rows, shard.plan.chunk_rows)
        self.e_buffer = shard.e_buffer(self.pieces, shard.plan.block_columns)
        self._even = _EvenPart(shard, factor_GL, into)
        self._under_way: tuple[Reduced, int] | None = None

    def run(self) -> None:
        """Go through all chunks."""
        for piece, x_CD in inputs_of(self.shard.ranks, self.shard.job, self.pieces):
            self._even.add(piece, x_CD)
            self._add_chunk(piece, x_CD, begun=piece is not self.pieces[0])
        if self.pieces:
            self._even.put(begun=True)
        self._write()

    def _add_chunk(self, piece: Piece, x_CD: Tensor, *, begun: bool) -> None:
        shard, head, into = self.shard, self.shard.head, self.into
        factor_C, lse_C, miss_C, y_C = of_piece(piece, *self._numbers_GL)
        scaled = None if into.weight_VD is None else torch.empty_like(x_CD).contiguous()
        reports = shard.reports(piece, None, None, None)
        reference_C, coefficient_C = torch.empty_like(lse_C), torch.empty_like(lse_C)
        row_C = torch.arange(len(y_C), dtype=torch.int32, device=y_C.device).where(y_C >= 0, -1)
        terms = replace(shard.terms, class_weight_V=shard.class_weights_of(piece))
        head.thin.prepare_rows(
            lse_C, miss_C, x_CD, row_C, factor_C, reference_C, coefficient_C, reports, terms, shard.V,
            scaled_CD=scaled,
        )  # fmt: skip
        reports.rest.masked_fill_(y_C >= shard.width, 0)
        product = None if into.input_ND is None else lse_C.new_empty(x_CD.shape)
        blocks = list(slices(shard.width, shard.plan.block_columns))
        for block in blocks:
            w_BD, e_CB = head.weight_VD[block], self.e_buffer[: len(y_C), : block.stop - block.start]
            head._exponentials(
                x_CD, w_BD, reference_C, y_C, e_CV=e_CB, coefficient_C=coefficient_C, first_class=block.start
            )
            if product is not None:
                matmul_into(e_CB, w_BD, product, add=block.start > 0)
                if block is blocks[-1]:
                    self._reduce(product, piece, reports, factor_C)
            if scaled is not None and into.weight_VD is not None:
                matmul_into(e_CB.t(), scaled, into.weight_VD[block], add=begun)
            if into.bias_V is not None:
                head.thin.add_column_sums(e_CB, reports.s, into.bias_V[block])
        if product is not None and not blocks:
            self._reduce(product, piece, reports, factor_C)

    def _reduce(self, product: Tensor, piece: Piece, reports: Any, factor_C: Tensor) -> None:
        """Begin to add up a chunk's; the sum before it had all of this chunk's products to run beside."""
        self._write()
        self.shard.finish_product(product, piece, reports, factor_C)
        self._under_way = self.shard.tokens.reduce(product), piece.part.start

    def _write(self) -> None:
        """Wait for the sum that is under way, and write it where it belongs."""
        if self._under_way is not None and self.into.input_ND is not None:
            self._under_way[0].write(self.into, self._under_way[1])
            self._under_way = None
