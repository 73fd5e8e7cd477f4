"""The exponential path where ranks share the vocabulary: chunks in pieces, and what is exchanged between their GEMMs.

While a few numbers a row of one piece are under way, the next one's GEMM runs. Names: n rows, C rows of a chunk or a
piece, D hidden size, V classes of this rank, K targets a token.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import islice
from typing import Any, TypeVar

import torch
from torch import Tensor

from lowtide.head.call import Gradients, Head
from lowtide.head.exponentials.losses import Chunk, CrossEntropy, Exponentials, aligned_rows, target_logits
from lowtide.head.exponentials.tile_sums import TileStatistics
from lowtide.head.kernels import exp_rows
from lowtide.head.kernels.exp_logits import ExpRows
from lowtide.head.kernels.gemm import matrix
from lowtide.head.kernels.gradient_gemms_hopper import Room, room_for
from lowtide.head.plan import padded
from lowtide.head.rows import input_is_copied, slices
from lowtide.head.terms.loss import RowFactors
from lowtide.head.terms.statistics import merged, packed

_Begun = TypeVar("_Begun")


@dataclass(kw_only=True)
class Piece(Chunk):
    """Some rows of a chunk."""

    at: slice  # among the chunk's
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

    def pieces(self, chunk_rows: int, piece_rows: int) -> Iterator[Piece]:
        """Yield the pieces of all chunks, in order; their hidden states begin to be gathered a piece ahead."""
        for piece in ahead(self._begin_hidden(chunk_rows, piece_rows)):
            piece.x_CD = aligned_rows(piece.x_CD.get(), self.head.dtype)
            yield piece
            del piece  # and its memory, when the next is made

    def _begin_hidden(self, chunk_rows: int, piece_rows: int) -> Iterator[Piece]:
        for chunk in slices(self.plan.rows, chunk_rows):
            for at in slices(chunk.stop - chunk.start, piece_rows):
                part = slice(chunk.start + at.start, chunk.start + at.stop)
                x = self.ranks.begin_rows(self.head.input, self.index, part, self.head.dtype)
                yield Piece(part=part, at=at, x_CD=x)

    def chunks(self, rows: int) -> Iterator[Piece]:
        """See `Exponentials.chunks`."""
        return self.pieces(rows, rows)

    def recompute(self, into: Gradients) -> None:
        """Add up the gradients; the input's begins to be summed before the weight's last GEMM of a chunk.

        It is waited for before the next chunk's sum begins.
        """
        if self.width:
            super().recompute(into)
        else:
            for piece in self.chunks(self.plan.chunk_rows):  # as many exchanges as other ranks make
                if into.input_ND is not None:
                    self.prepare(piece, None)
                    nothing = torch.zeros_like(piece.x_CD, dtype=torch.float32)
                    self.put_input(piece.part, nothing, piece.of_input, into)
        self._wait_for_sums()

    def put_input(self, part: slice, product_CD: Tensor, of_input: Any, into: Gradients) -> None:
        """See `Exponentials.put_input`."""
        self._wait_for_sums()
        self._begin_sum(part, product_CD, of_input, into)

    def _begin_sum(self, part: slice, product_CD: Tensor, of_input: Any, into: Gradients) -> None:
        """Begin to add up all ranks' input gradients of some rows."""
        self.finish_input(part, product_CD, of_input, product_CD)
        self._under_way.append(self.ranks.begin_sum(product_CD, part, self.index, into.put_input))

    def _wait_for_sums(self) -> None:
        """Write the sums over ranks that were begun where they belong."""
        for write in self._under_way:
            write()
        self._under_way.clear()


class ShardedCrossEntropy(Sharded, CrossEntropy):
    """A loss in either direction."""

    searches: tuple[bool, ...] = ()
    _e: Tensor | None = None  # a chunk's E, where gradients are computed

    def sums_alone(self, found: Tensor) -> None:
        """See `CrossEntropy.sums_alone`."""
        plan = self.plan
        rows = plan.product_rows if plan.schedule == "chunks" else min(plan.chunk_rows, plan.rows)
        for piece in ahead(self._begun(rows, rows, found)):
            piece.sums = piece.received().t()
            self.finish(piece)
            del piece  # and its memory, when the next is made

    def in_chunks(self, factors: RowFactors, found: Tensor) -> None:
        """See `CrossEntropy.in_chunks`; a chunk's gradients begin when all of its pieces have their E."""
        plan, (V, D), new = self.plan, self.weight_VD.shape, self.weight_VD.new_empty
        rows = min(plan.chunk_rows, plan.rows)
        self._e, self.searches = new(rows, padded(V)), (False,) * bool(V)
        begun = self._begun(rows, plan.product_rows, found)
        for chunk in slices(plan.rows, rows):
            C = chunk.stop - chunk.start
            pieces = list(islice(begun, -(-C // plan.product_rows)))
            if chunk.start == 0:
                into = self.begin_gradients(*factors())
                scaled = None if into.weight_VD is None else new(rows, D)
                product = None if into.input_ND is None else self.new(rows, D)
            while pieces:
                piece = pieces.pop(0)
                part, at = piece.part, piece.at
                piece.sums = piece.received().t()
                self.finish(piece, self.factor_n[part], None if scaled is None else scaled[at])
                if product is not None:
                    product_CD = product[at]
                    if at.start == 0:
                        self._wait_for_sums()  # of the chunk before, which lie where this one's come
                    if V:
                        self.input_product(part, piece.e_CV, self.weight_VD, product_CD, add=False)
                    else:
                        product_CD.zero_()
                    self._begin_sum(part, product_CD, piece.of_input, into)
            if V:  # while the input's is summed over the ranks
                scaled_CD = None if scaled is None else scaled[:C]
                self.add_to_head(chunk, self._e[:C, :V], scaled_CD, found[-1, chunk], into, slice(None))
        self._wait_for_sums()
        self.end_gradients(into)

    def _begun(self, chunk_rows: int, piece_rows: int, found: Tensor) -> Iterator[Piece]:
        """Yield pieces with their E, or its sums alone, which the ranks exchange; their numbers are to be ``found``."""
        self._sums, self._found, self._all_targets = self.new(piece_rows, self.tiles), found, self._begin_all_targets()
        return map(self._begin_sums, ahead(map(self._begin_targets, self.pieces(chunk_rows, piece_rows))))

    def _begin_all_targets(self) -> Callable[[], Tensor] | None:
        """Begin to exchange all targets' logits at once where all hidden states are here; None: piece by piece."""
        x, n = self.head.input, len(self.y_n)
        if self.ranks.spread or self.index is not None or input_is_copied(x, self.head.dtype) or not n:
            return None
        targets, count = self.new(n), self.y_n.new_empty(1)
        target_logits(x.view(n, -1), self.weight_VD, self.y_n, self.transform, targets, count)
        return cache(self._begin_sum_of(targets))

    def _begin_sum_of(self, x: Tensor) -> Callable[[], Tensor]:
        gathered = self.ranks.begin_gather(x)
        return lambda: gathered.get().sum(0)

    def _begin_targets(self, piece: Piece) -> Piece:
        """Begin to exchange the targets' logits."""
        part, of_all = piece.part, self._all_targets
        self.make_numbers(piece, self._found)
        if of_all is None:
            self.write_target_logits(piece)
            piece.received = self._begin_sum_of(piece.rows.target_logit)
        else:
            piece.received = lambda: of_all()[part]
            piece.rows.listed_count.zero_()
        return piece

    def _begin_sums(self, piece: Piece) -> Piece:
        """Build a piece's E, or its sums alone, and begin to exchange these."""
        rows = piece.rows = piece.rows._replace(target_logit=piece.received())
        y_C, C = piece.y_C, len(piece.y_C)
        mine, sums = self.new(C), self._sums[:C]
        piece.entries = ExpRows(rows.target_logit, y_C, None, 0, sums, self.tiles)
        if self.width:
            piece.e_CV = None if self._e is None else self._e[piece.at, : self.width]
            self.write_exponentials(piece, self.weight_VD, piece.e_CV, piece.entries, self.transform)
            for shifted in (False, True):
                if shifted:
                    self.shift(piece, None, (True, False))
                exp_rows.sum_rows[(C,)](
                    matrix(sums), y_C, matrix(piece.e_CV), mine, rows, self.used(piece.part), C, SHIFTED=shifted,
                    BLOCK=exp_rows.block_of(self.tiles), num_warps=4,
                )  # fmt: skip
            rows.listed_count.zero_()
        else:
            mine.fill_(-torch.inf)
        piece.received = self.ranks.begin_gather(mine).get
        return piece


class ShardedStatistics(Sharded, TileStatistics):
    """Token statistics in either direction."""

    def find(self, rows: int, found: dict[str, Tensor]) -> None:
        """See `TileStatistics.find`."""
        for part, mine, received in ahead(map(self._begin_numbers, self.pieces(rows, rows))):
            for name, x in merged(mine, received()).items():
                found[name][part] = x
            del mine, received  # and their memory, when the next is made

    def _begin_numbers(self, piece: Piece) -> tuple[slice, dict[str, Tensor], Callable[[], Tensor]]:
        """Compute a piece's statistics of the classes here, and begin to exchange them."""
        C = len(piece.x_CD)
        found = self.room_of_numbers(C) | {"highest": self.new(C).fill_(-torch.inf)}
        if self.width:
            self.find_here(piece, found)
        return piece.part, found, self.ranks.begin_gather(packed(found)).get


def ahead(begun: Iterable[_Begun]) -> Iterator[_Begun]:
    """Yield each when one more is made: what was begun for it runs beside what is launched for that one."""
    before: _Begun | None = None
    for one in begun:
        if before is not None:
            yield before
        before = one
        del one  # and with it its memory, when the next is made
    if before is not None:
        yield before
