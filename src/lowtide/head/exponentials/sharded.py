"""The exponential path where ranks share the vocabulary: chunks in pieces, and what is exchanged between their GEMMs.

While a few numbers a row of one piece are under way, the next one's GEMM runs. Names: n rows, C rows of a piece, D
hidden size, V classes of this rank, K targets a token.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import Any

import torch
from torch import Tensor

from lowtide.head.call import Gradients, Head
from lowtide.head.exponentials.losses import CrossEntropy, Exponentials, Piece, aligned_rows
from lowtide.head.exponentials.tile_sums import TileStatistics
from lowtide.head.kernels import exp_rows
from lowtide.head.kernels.gemm import matrix
from lowtide.head.kernels.gradient_gemms_hopper import Room, room_for
from lowtide.head.plan import HeadPlan
from lowtide.head.ranks import Exchange
from lowtide.head.rows import input_is_copied, slices
from lowtide.head.terms.loss import Loss
from lowtide.head.terms.statistics import merged, packed


@dataclass(kw_only=True)
class Part(Piece):
    """Some rows of a chunk."""

    closes: bool  # whether they are the chunk's last
    memory: Any = None  # of its rows' numbers
    received: Any = None  # returns what was exchanged last


class Sharded(Exponentials):
    """A head in one direction of a call, on one of the ranks; rows are in the order of ``ranks.order(plan)``."""

    def __init__(self, head: Head, *of_call: Any) -> None:
        super().__init__(head, *of_call)
        self.ranks: Any = head.ranks
        if head.ranks.spread:  # the ranks have it
            self.index = None
        self._under_way: list[Callable[[], None]] = []  # sums of the input's gradient over the ranks: write them

    @cached_property
    def room(self) -> Room:
        """Return where tiles of E W meet: the least there can be."""
        return room_for(self.head.input.device, 0)

    def pieces(self, chunk_rows: int, piece_rows: int) -> Iterator[Part]:
        """Yield the pieces of all chunks, in order, whose hidden states begin to be gathered a piece ahead."""
        return ahead(map(self._begin_hidden, self._cut(chunk_rows, piece_rows)))

    def _cut(self, chunk_rows: int, piece_rows: int) -> Iterator[Part]:
        for chunk in slices(self.plan.rows, chunk_rows):
            C = chunk.stop - chunk.start
            for at in slices(C, piece_rows):
                part = slice(chunk.start + at.start, chunk.start + at.stop)
                yield Part(part=part, at=at, closes=at.stop == C)

    def _begin_hidden(self, piece: Part) -> Part:
        if self.ranks.spread:
            piece.x_CD = self.ranks.begin_rows(self.head.input, None, piece.part, self.head.dtype)
        else:
            piece.x_CD = Exchange(self.hidden(piece.part))
        return piece

    def chunks(self, rows: int) -> Iterator[Piece]:
        """See `Exponentials.chunks`."""
        for piece in self.pieces(rows, rows):
            piece.x_CD = aligned_rows(piece.x_CD.get(), self.head.dtype)
            yield piece

    def recompute(self, into: Gradients) -> None:
        """Add up the gradients; the input's begins to be summed before the weight's last GEMM of a chunk.

        It is waited for before the next chunk's sum begins.
        """
        super().recompute(into)
        self._wait_for_sums()

    def _recompute_chunk(self, piece: Piece, e: Tensor, scaled: Tensor | None, into: Gradients) -> None:
        self._product = None  # that of the chunk before is being summed
        super()._recompute_chunk(piece, e, scaled, into)
        if not self.width and into.input_ND is not None:
            self._put_input(piece, torch.zeros_like(piece.x_CD, dtype=torch.float32), into)

    def _put_input(self, piece: Piece, product_CD: Tensor, into: Gradients) -> None:
        self._wait_for_sums()
        if self.width:
            self.finish_input(piece, product_CD, product_CD, None)
        self._under_way.append(self.ranks.begin_sum(product_CD, piece.part, self.index, into.put_input))

    def _wait_for_sums(self) -> None:
        """Write the sums over ranks that were begun where they belong."""
        for write in self._under_way:
            write()
        self._under_way.clear()


class ShardedCrossEntropy(Sharded, CrossEntropy):
    """A loss in either direction."""

    def __init__(self, head: Head, loss: Loss, plan: HeadPlan) -> None:
        # E W of a whole chunk, which is summed over the ranks before it is rounded
        super().__init__(head, loss, replace(plan, product_rows=plan.chunk_rows))
        self._piece_rows = plan.product_rows

    def _begun(self, rows: int, found: Tensor) -> Iterator[Piece]:
        """See `CrossEntropy._begun`; those of a chunk are yielded when all have their E, for they share its memory."""
        piece_rows = self._piece_rows if self.plan.schedule == "chunks" else rows
        self._sums, of_all = self._new(piece_rows, self.tiles), self._begin_all_targets()
        pieces = self.pieces(piece_rows if self._e is None else rows, piece_rows)
        pieces = map(partial(self._begin_targets, of_all, found), pieces)
        if of_all is None:
            pieces = ahead(pieces)
        pieces = map(self._begin_sums, pieces)
        if self._e is None:
            yield from ahead(pieces)
            return
        of_chunk: list[Part] = []
        for piece in pieces:
            of_chunk.append(piece)
            while piece.closes and of_chunk:
                yield of_chunk.pop(0)

    def _begin_all_targets(self) -> Callable[[], Tensor] | None:
        """Begin to exchange all targets' logits at once where all hidden states are here; None: piece by piece."""
        x, n = self.head.input, len(self.y_n)
        if self.ranks.spread or self.index is not None or input_is_copied(x, self.head.dtype) or not n:
            return None
        targets, count = self._new(n), self.y_n.new_empty(1)
        self.target_logits(x.view(n, -1), self.y_n, targets, count)
        return cache(self._begin_sum_of(targets))

    def _begin_sum_of(self, x: Tensor) -> Callable[[], Tensor]:
        gathered = self.ranks.begin_gather(x)
        return lambda: gathered.get().sum(0)

    def _begin_targets(self, of_all: Callable[[], Tensor] | None, found: Tensor, piece: Part) -> Part:
        """Begin to exchange the targets' logits."""
        part = piece.part
        piece.x_CD, piece.y_C = aligned_rows(piece.x_CD.get(), self.head.dtype), self.y_n[part]
        piece.rows = self._reports(piece, found)
        if of_all is None:
            of_rows = piece.rows.target_logit, piece.rows.listed_count, self.used(part)
            self.target_logits(piece.x_CD, piece.y_C, *of_rows)
            piece.received = self._begin_sum_of(piece.rows.target_logit)
        else:
            piece.received = lambda: of_all()[part]
            piece.rows.listed_count.zero_()
        return piece

    def _begin_sums(self, piece: Part) -> Part:
        """Build a piece's E, or its sums alone, and begin to exchange these."""
        piece.rows = piece.rows._replace(target_logit=piece.received())
        self._write_exponentials(piece)
        C = len(piece.y_C)
        mine = self._new(C)
        if self.width:
            sum_rows = partial(
                exp_rows.sum_rows[(C,)], matrix(piece.sums), piece.y_C, matrix(self._e_of(piece.at)), mine, piece.rows,
                self.used(piece.part), C, BLOCK=exp_rows.block_of(self.tiles), num_warps=4,
            )  # fmt: skip
            sum_rows(SHIFTED=False)
            super()._shift(piece, None)
            sum_rows(SHIFTED=True)
        else:
            mine.fill_(-torch.inf)
        piece.received = self.ranks.begin_gather(mine).get
        return piece

    def _finish(self, piece: Any, *given: Tensor | None) -> None:
        piece.sums = piece.received().t()
        piece.rows.listed_count.zero_()
        super()._finish(piece, *given)

    def _shift(self, piece: Piece, e_CV: Tensor | None, find_highest: tuple[bool, ...] = (False,)) -> None:
        if e_CV is not None:
            super()._shift(piece, e_CV, find_highest)

    def _add_input(self, piece: Piece, e_CV: Any, input_ND: Tensor) -> None:  # noqa: ARG002
        """Begin to sum this rank's part of a piece's input gradient."""
        assert self._product is not None
        product_CD, rows, part = self._product[piece.at], piece.rows, piece.part
        if piece.at.start == 0:
            self._wait_for_sums()  # of the chunk before, which lie where this one's come
        if e_CV is None:
            product_CD.zero_()
        else:
            self.input_product(part, e_CV, self.weight_VD, product_CD, add=False)
            self.put_even_parts(product_CD, rows.s, part)
            exp_rows.finish_input_grad(
                product_CD, product_CD, self.weight_VD, rows.s, piece.y_C, rows.rest, used=self.used(part)
            )
        self._under_way.append(self.ranks.begin_sum(product_CD, part, self.index, self._into.put_input))

    def _add_weight(self, piece: Any) -> None:
        """Add a chunk's, with its last piece: while the input's is summed over the ranks."""
        if piece.closes:
            super()._add_weight(piece)
        if piece.part.stop == self.plan.rows:
            self._wait_for_sums()


class ShardedStatistics(Sharded, TileStatistics):
    """Token statistics in either direction."""

    def _find(self, rows: int, y_nK: Tensor, found: dict[str, Tensor]) -> None:
        for piece in ahead(map(partial(self._begin_numbers, y_nK), self.pieces(rows, rows))):
            for name, x in merged(piece.memory, piece.received()).items():
                found[name][piece.part] = x
            del piece  # and with it its memory, when the next is made

    def _begin_numbers(self, y_nK: Tensor, piece: Part) -> Part:
        """Compute a piece's statistics of the classes here, and begin to exchange them."""
        x_CD, y_CK = aligned_rows(piece.x_CD.get(), self.head.dtype), y_nK[piece.part]
        C, found = len(y_CK), self._room(len(y_CK))
        if not self.width:
            for x in found.values():
                x.zero_()
        found |= {"highest": self._new(C).fill_(-torch.inf), **self._room_for_highest(C)}
        if self.width:
            self._numbers_of(x_CD, piece.part, y_CK, found)
        piece.memory = found
        piece.received = self.ranks.begin_gather(packed(found)).get
        return piece


def ahead(pieces: Iterable[Part]) -> Iterator[Part]:
    """Yield pieces when one more is made: what was begun for it runs beside what is launched for that one."""
    before: Part | None = None
    for piece in pieces:
        if before is not None:
            yield before
        before = piece
        del piece  # and with it its memory, when the next is made
    if before is not None:
        yield before
