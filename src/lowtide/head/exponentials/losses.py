"""Cross entropy by unnormalised exponentials: two GEMMs per chunk besides the one that writes them, and thin kernels.

The GEMM that would write logits z writes E = exp(z - t) instead, t the target's logit, and its row sums r. Then
loss = log1p(r), and with s = g / (1 + r) and E_y = -r the gradients are dX = diag(s) (E W) and dW = E^T (diag(s) X):
see `kernels.exp_rows` for all the options and for ranks that each have some of the classes, and docs/algorithm.md for
the reasons.

Two schedules: with a chunk's E over the whole vocabulary, three GEMMs (6NDV operations); or row sums first, and E
recomputed in blocks of the vocabulary, four (8NDV), where memory is too short for chunks of enough rows, or where the
upstream gradient is known in backward only. Names: n rows, C rows of a piece, D hidden size, V classes of this rank.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from lowtide.head.call import Head
from lowtide.head.exponentials.even import Even
from lowtide.head.exponentials.loops import Piece
from lowtide.head.exponentials.row_losses import RowLosses
from lowtide.head.gradients import Gradients
from lowtide.head.kernels import exp_rows, gradient_gemms_hopper
from lowtide.head.kernels.exp_logits import ExpRows
from lowtide.head.kernels.exp_terms import finish_input_grad
from lowtide.head.kernels.input_rows_hopper import InputRows
from lowtide.head.lengths import padded
from lowtide.head.matmul import slices
from lowtide.head.plan import HeadPlan
from lowtide.head.terms.loss import Loss, RowFactors


class CrossEntropy(RowLosses):
    """A loss in either direction, its token weights left out; rows are in the order of ``ranks.order(plan)``."""

    def __init__(self, head: Head, loss: Loss, plan: HeadPlan) -> None:
        super().__init__(head, loss, plan)
        self._even: Even | None = None  # label smoothing's part of the gradients
        self._has_factors = False  # whether there are the rows' factors, and what takes the gradients
        self._begun = False  # whether the weight's gradient holds something
        self._under_way: list[Callable[[Gradients], None]] = []  # sums of the input's over the ranks: write them

    def forward(self, factors: RowFactors | None) -> dict[str, Tensor]:
        """Return each row's "loss", "lse" and "miss", that minus the target's logit; with ``factors`` add gradients.

        ``factors`` is called while the first GEMM runs: the device should not wait for the host.
        """
        plan, alone, in_chunks = self.plan, self.ranks.alone, self.plan.schedule == "chunks"
        if in_chunks and not (alone and factors is None):
            # across ranks the same on every one, also where others compute gradients and this one does not
            pieces = self.pieces(plan.chunk_rows, plan.chunk_rows if alone else plan.product_rows)
        else:
            pieces = self.pieces(plan.sum_rows, plan.sum_rows)
        if factors is not None and in_chunks:
            self._factors = factors
            self._allocate(max((piece.at.stop for piece in pieces), default=0))
        order = None if in_chunks else self.ranks.reordered(plan, plan.sum_rows)
        y_n, own_n = (x if x is None or order is None else x[order] for x in (self.y_n, self.own_n))
        assert y_n is not None
        found = torch.empty(3, len(y_n), dtype=torch.float32, device=y_n.device)
        at_once = self._begin_all_targets(y_n)
        self._sums = self._new(max((p.part.stop - p.part.start for p in pieces), default=0), self.tiles)
        begin_targets, begin_sums = partial(self._begin_targets, y_n, own_n, at_once), partial(self._begin_sums, found)
        stages: list[Callable[[Piece], Piece]] = [self.begin, begin_targets, begin_sums]
        if at_once is not None:  # nothing but sums is exchanged piece by piece: the first GEMM is not to wait
            stages = [lambda piece: begin_sums(begin_targets(self.begin(piece)))]
        for piece in self.in_stages(pieces, *stages, chunks=self._e is not None):
            if self._e is None:
                self._finish(piece)
            else:
                self._add_gradients(piece)
            del piece  # and with it its memory, when the next is made
        if order is not None:
            found = torch.empty_like(found).index_copy_(1, order, found)
        numbers = dict(zip(("loss", "lse", "miss"), found, strict=True))
        if self._e is not None:
            self._take_factors()  # also where there are no tokens
        elif factors is not None:
            del self._sums  # memory for the blocks
            self._views.clear()
            self.gradients(*factors(), numbers)
        return numbers

    def _allocate(self, rows: int) -> None:
        """Make a chunk's E of so many rows, whose gradients are computed too."""
        self._rows, (_, D) = rows, self.weight_VD.shape
        self._e = self.weight_VD.new_empty(rows, padded(self.width))
        self._s_C = self._new(rows)
        if self.ranks.alone and self.count is not None:
            self._x = self.weight_VD.new_empty(rows, D)

    def gradients(self, factor_n: Tensor, into: Gradients, known: dict[str, Tensor]) -> None:
        """Add the gradients, from E recomputed a block of the vocabulary at a time, normalised: its sums are known."""
        self._factor_n, self.known = factor_n, known
        self._begin_even(into)
        self._numbers = self._new(4 * self.plan.chunk_rows)
        self.recompute(into)
        self._put_even(add=True)

    def _begin_even(self, into: Gradients) -> None:
        """Begin label smoothing's part of the gradients, which stays out of the wide GEMMs."""
        if into.weight_VD is not None and not self.plan.chunks:
            into.weight_VD.zero_()
        if self.terms.uniform_D is not None and self.plan.chunks and self.width:
            self._even = Even(self.terms, self.q_V, self._factor_n.where(self.y_n >= 0, 0), into)

    def _add_even(self, piece: Piece) -> None:
        """Add a piece's hidden states, before they are scaled in place."""
        if self._even is not None:
            self._even.add(piece.x_CD, piece.part, self.used(piece.part))

    def _put_even(self, *, add: bool) -> bool:
        """Put it into the gradients; return whether the weight's holds something now, as it does with ``add``."""
        return add if self._even is None else self._even.put(self.head.dtype, add=add)

    def _take_factors(self) -> Gradients:
        """Return what takes the gradients; the first time find the rows' factors, and make what they need."""
        if not self._has_factors:
            self._factor_n, into = self._factors()
            self._has_factors, self._into, D, rows = True, into, self.weight_VD.shape[1], self._rows
            self._begin_even(into)
            self._scaled = None
            if into.weight_VD is not None:
                self._scaled = self.weight_VD.new_empty(rows, D) if self._x is None else self._x
            # E W: of a whole chunk where it is summed over the ranks before it is rounded
            rows = min(rows, self.plan.product_rows) if self.ranks.alone else rows
            self._product = None if into.input_ND is None or self._x is not None else self._new(rows, D)
        return self._into

    def _add_gradients(self, piece: Piece) -> None:
        """Finish a piece and its product with the weight; with a chunk's last its product with the hidden states."""
        into, e_CV = self._take_factors(), self._e_of(piece.at)
        factor_C = self._factor_n[piece.part]
        self._add_even(piece)
        self._finish(piece, factor_C, e_CV, None if self._scaled is None else self._scaled[piece.at])
        if into.input_ND is not None:
            self._input_grad(piece, e_CV, factor_C, into)
        if piece.closes:
            self._close(into, piece, last=piece.part.stop == self.plan.rows)

    def ends(self, piece: Piece, s_C: Tensor, rest_C: Tensor, input_ND: Tensor) -> InputRows:
        """Return what ends the rows of a piece's input gradient."""
        w_VD, (out, to_C) = self.weight_VD, self.places(input_ND, piece.part)
        ends = InputRows(out, out.stride(0), to_C, s_C, piece.y_C, rest_C, w_VD, w_VD.stride(0))
        return ends if self.terms.uniform_D is None else ends.even(*self.terms.even(self._factor_n[piece.part]))

    def _input_grad(self, piece: Piece, e_CV: Tensor | None, factor_C: Tensor, into: Gradients) -> None:
        """Write a piece's input gradient, in blocks of the plan's rows; or begin to sum this rank's part of it."""
        assert into.input_ND is not None
        alone, product, rows = self.ranks.alone, self._product, piece.rows
        if self._x is not None and e_CV is not None:
            self._input_rows(piece, e_CV, self.ends(piece, rows.s, rows.rest, into.input_ND))
            return
        assert product is not None
        if not alone and piece.at.start == 0:
            self._wait_for_sums(into)  # of the chunk before, which lie where this one's come
        out, to_C = self.places(into.input_ND, piece.part) if alone else (product[piece.at], None)
        if e_CV is None:
            product[piece.at].zero_()
        else:
            self._finished_products(piece, e_CV, factor_C, out, to_C)
        if not alone:
            self._under_way.append(self.ranks.begin_sum(out, piece.part, self.index))

    def _input_rows(self, piece: Piece, e_CV: Tensor, ends: InputRows) -> None:
        """Write a piece's input gradient by one kernel."""
        gradient_gemms_hopper.input_grad(e_CV, self.weight_VD, ends, self.room, self.used(piece.part))

    def _finished_products(
        self, piece: Piece, e_CV: Tensor, factor_C: Tensor, out: Tensor, to_C: Tensor | None
    ) -> None:
        """Write the rows of the input's gradient that this rank's classes give into ``out``, to their places there."""
        alone, product, rows, terms = self.ranks.alone, self._product, piece.rows, self.terms
        assert product is not None
        of_rows = e_CV, piece.y_C, rows.s, rows.rest, factor_C
        for part in slices(len(e_CV), self.plan.product_rows if alone else len(e_CV)):
            e, y, s, rest, g = of_rows if part.stop - part.start == len(e_CV) else (x[part] for x in of_rows)
            product_CD = product[: len(e)] if alone else out
            of_all = slice(piece.part.start + part.start, piece.part.start + part.stop)
            self.input_product(of_all, e, self.weight_VD, product_CD, add=False)
            places = (out[part], None) if to_C is None else (out, to_C[part])
            finish_input_grad(
                product_CD, places[0], self.weight_VD, s, y, rest, even=terms.even(g), to_C=places[1],
                used=self.used(of_all),
            )  # fmt: skip

    def _wait_for_sums(self, into: Gradients) -> None:
        """Write the sums over ranks that were begun where they belong."""
        for write in self._under_way:
            write(into)
        self._under_way.clear()

    def _close(self, into: Gradients, piece: Piece, *, last: bool) -> None:
        """End a chunk with its last piece: the weight's product, while the input's are being summed over the ranks."""
        C, stop = piece.at.stop, piece.part.stop
        e_CV, chunk = self._e_of(slice(0, C)), slice(stop - C, stop)
        if last:  # before the product, so that of a single chunk it is written and not added
            self._begun = self._put_even(add=self._begun)
        if e_CV is not None and self._scaled is not None and into.weight_VD is not None:
            self.weight_product(chunk, e_CV, self._scaled[:C], into.weight_VD, add=self._begun)
        if e_CV is not None and into.bias_V is not None:
            exp_rows.add_column_sums(e_CV, self._s_C[:C], into.bias_V, self.used(chunk))
        if last:
            self._wait_for_sums(into)
        self._begun = True

    def prepare(self, piece: Piece, scaled_CD: Tensor | None) -> Tensor:
        """See `Exponentials.prepare`."""
        part, C = piece.part, len(piece.x_CD)
        piece.y_C, piece.own_C = self.y_n[part], None if self.own_n is None else self.own_n[part]
        piece.rows = self._numbers[: 4 * C].view(4, C)
        exp_rows.prepare_rows(
            self.known["lse"][part], self.known["miss"][part], piece.x_CD, piece.y_C, self._factor_n[part],
            self.terms_of(piece), self.width, piece.rows, scaled_CD=scaled_CD, used=self.used(part),
        )  # fmt: skip
        self._add_even(piece)
        s_C: Tensor = piece.rows[2]
        return s_C

    def fill(self, piece: Piece, w_BD: Tensor, e_CB: Tensor, first_class: int) -> None:
        """See `Exponentials.fill`."""
        reference_C, coefficient_C = piece.rows[:2]
        self.exponentials(piece, w_BD, e_CB, ExpRows.of(reference_C, piece.y_C, None, coefficient_C, first_class))

    def finish_input(self, piece: Piece, product_CD: Tensor, out: Tensor, to_C: Tensor | None) -> None:
        """See `Exponentials.finish_input`."""
        (s_C, rest_C), even = piece.rows[2:], self.terms.even(self._factor_n[piece.part])
        finish_input_grad(
            product_CD, out, self.weight_VD, s_C, piece.y_C, rest_C, even=even, to_C=to_C, used=self.used(piece.part)
        )
