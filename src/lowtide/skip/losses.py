"""Cross entropy whose gradients leave small tiles of E out: see `kernels.choice` and docs/skipping.md.

The classes are in the order of `order`, in a copy of the weight; the weight's gradient is summed in that order, and put
back at the end, into the copy's memory. Where the upstream gradient is known in backward only, forward saves what each
tile sums to; which tiles stay then follows from these sums and the upstream gradients, and those tiles of E alone are
computed again.
"""

from dataclasses import replace

import torch
from torch import Tensor

from lowtide.head.call import Head
from lowtide.head.exponentials.loops import Piece, aligned_rows
from lowtide.head.exponentials.losses import CrossEntropy
from lowtide.head.gradients import Gradients
from lowtide.head.kernels import configs, exp_logits_hopper, exp_rows
from lowtide.head.kernels.exp_logits import ExpRows, Listed
from lowtide.head.kernels.gemm import tiles_across
from lowtide.head.kernels.gradient_gemms_hopper import room_for
from lowtide.head.kernels.input_rows_hopper import InputRows
from lowtide.head.lengths import padded
from lowtide.head.matmul import matmul_into
from lowtide.head.plan import HeadPlan
from lowtide.head.terms.loss import Loss, RowFactors
from lowtide.skip.comparison import Comparison
from lowtide.skip.kernels import choice, gemms_hopper, lists, saved
from lowtide.skip.kernels.choice import Choice, Targets
from lowtide.skip.memory import numbered


class TiledCrossEntropy(CrossEntropy):
    """A loss whose rows' targets are places in the order."""

    def __init__(self, head: Head, loss: Loss, plan: HeadPlan, order: Tensor | None = None) -> None:
        """``order``: of the classes, where forward took another than the present one."""
        self.remembered = numbered(head.order)
        self.order = self.remembered.order if order is None else order
        (V, D), q, new = head.weight_VD.shape, loss.class_weight, head.input.new_empty
        self._weight_dtype = head.weight_VD.dtype
        ordered, self.mean_PD = new(V, D, dtype=head.dtype), new(-(-V // choice.COLUMNS.value), D, dtype=head.dtype)
        choice.put_in_order(head.weight_VD, self.order, ordered, self.mean_PD)
        bias_V = None if head.bias_V is None else self._ordered(head.bias_V)
        loss = loss if q is None else replace(loss, class_weight=self._ordered(q))
        super().__init__(head._replace(weight_VD=ordered, bias_V=bias_V), loss, plan)
        if not self.hopper:
            self.config = configs.GemmConfig()
            self.tiles = tiles_across(V, self.config)
        self._shared_PD: Tensor | None = None  # what the rows of each tile of dW share
        self._sums = self._new(0)
        self._lost = [self._new(3, 0)]  # of each chunk: `Choice.sums`
        self._comparison: Comparison | None = None
        self._seen: Tensor | None = None  # the sums of the tokens' probabilities
        self._listed: Listed | None = None  # tiles of E that are computed, where others need not be

    def _ordered(self, x_V: Tensor) -> Tensor:
        return x_V.index_select(0, self.order[1:])

    def forward(self, factors: RowFactors | None) -> dict[str, Tensor]:
        """See `CrossEntropy.forward`; without factors also what backward needs: "tiles" and the order of "classes"."""
        self.remembered.skipped += 1
        if factors is not None:
            numbers = super().forward(factors)
            self._end(self._into)
            return numbers
        self._store_sums(min(self.plan.sum_rows, self.plan.rows))
        self._saved = self.weight_VD.new_empty(self.head.tokens, 2, self.tiles)
        return super().forward(None) | {"tiles": self._saved, "classes": self.order}

    def gradients(self, factor_n: Tensor, into: Gradients, known: dict[str, Tensor]) -> None:
        """See `CrossEntropy.gradients`; what flows back to an ignored token may be NaN."""
        super().gradients(factor_n.where(self.y_n >= 0, 0), into, known)
        self._end(into)

    def _allocate(self, rows: int) -> None:
        super()._allocate(rows)
        assert self._x is not None
        assert self._e is not None
        self._x.zero_()  # tiles are multiplied whole
        self._begin(rows, self._e)

    def _begin(self, rows: int, e_CV: Tensor) -> None:
        """Make what the gradients of chunks of so many rows share."""
        device = e_CV.device
        self.remembered.total.zero_()
        if self.remembered.compares:
            self._comparison = Comparison(self.weight_VD, self.head.tokens)
            e_CV.zero_()  # it is read whole
        if self.remembered.sees:
            self._seen = torch.zeros_like(self._new(self.width))
        self._lists, self._flags = lists.lists_for(rows, self.tiles, device)
        self._meeting = room_for(device)
        self._mass = self.mean_PD.new_empty(rows, padded(self.tiles))
        self._of_targets = self._new(2, rows)
        self._store_sums(rows)

    def _store_sums(self, rows: int) -> None:
        self._of_stored = self._new(1 if self.head.softcap is None else 2, rows, self.tiles)

    def _finish(
        self, piece: Piece, factor_C: Tensor | None = None, e_CV: Tensor | None = None, scaled_CD: Tensor | None = None
    ) -> None:
        super()._finish(piece, factor_C, e_CV, scaled_CD)
        sums, stored, rows = self._sums[: len(piece.y_C)], self._stored(len(piece.y_C)), piece.rows
        if e_CV is None:
            assert self.index is not None
            saved.save_tiles(
                sums, stored, rows.miss, piece.y_C, self.index[piece.part], self._saved, self.width,
                self.used(piece.part),
            )  # fmt: skip
        else:
            masses = sums if stored.masses is None else stored.masses
            self._choose(piece, Targets(piece.y_C, rows.s, rows.rest), masses, e_CV)
            if self._seen is not None:
                sizes = self._sizes()[piece.part]
                self._see(piece, e_CV, (rows.s / sizes).where((rows.s != 0) & (sizes != 0), 0))

    def _see(self, piece: Piece, e_CV: Tensor, factor_C: Tensor) -> None:
        """Add up a chunk's probabilities, E times a factor of each row, and 1 at the target."""
        assert self._seen is not None
        exp_rows.add_column_sums(e_CV, factor_C, self._seen, self.used(piece.part))
        self._seen.index_add_(0, piece.y_C.clamp(min=0).long(), (piece.y_C >= 0).float())

    def _sizes(self) -> Tensor:
        """Return the rows' factors with the logits' scale and the targets' class weights, as gradients have them."""
        sizes = self._factor_n if self.terms.scale is None else self._factor_n * self.terms.scale
        return sizes if self.q_V is None else sizes * self.q_V[self.y_n.clamp(min=0)]

    def _choose(self, piece: Piece, targets: Targets, masses_CP: Tensor, e_CV: Tensor) -> None:
        """Decide which of a chunk's tiles are kept, by what rows of E sum to there."""
        C, used, squares = len(e_CV), self.used(piece.part), self._stored(len(e_CV)).squares
        R = -(-C // choice.ROWS.value)
        assert squares is not None
        self._targets = targets = targets._replace(alone=self._of_targets[0, :C], lost=self._of_targets[1, :C])
        self._mass_CP = self._mass[:C, : self.tiles]
        if len(self._lists.across) != R:  # a last chunk that is shorter
            self._lists, self._flags = lists.lists_for(C, self.tiles, e_CV.device)
        sums = self._new(3, R * -(-self.tiles // choice.TILES.value))
        self._lost.append(sums)
        chosen = Choice(self._flags, self._mass_CP, sums)
        choice.find_kept(masses_CP, squares, e_CV, targets, self.remembered.threshold, chosen, used)
        D = self.weight_VD.shape[1]
        lists.list_kept(self._flags, self._lists, self.remembered.total, e_CV, targets, D, used)

    def _input_rows(self, piece: Piece, e_CV: Tensor, ends: InputRows) -> None:
        if self._comparison is not None:
            self._comparison.see_input(e_CV, self._targets, ends)
        ends = ends._replace(rest=self._targets.lost)
        gemms_hopper.input_grad(
            e_CV, self.weight_VD, self._mass_CP, self.mean_PD, ends, self._lists, self._meeting,
            self.used(piece.part),
        )  # fmt: skip

    def weight_product(self, part: slice, e_CB: Tensor, scaled_CD: Tensor, out_BD: Tensor, *, add: bool) -> None:
        """See `Exponentials.weight_product`."""
        if self._comparison is not None:
            self._comparison.see_weight(e_CB, self._targets, scaled_CD)
        gemms_hopper.weight_grad(e_CB, scaled_CD, out_BD, self._lists, add=add)
        choice.add_targets(self._targets, scaled_CD, out_BD, self.used(part))
        first = self._shared_PD is None
        if self._shared_PD is None:
            self._shared_PD = self._new(*self.mean_PD.shape)
        matmul_into(self._mass_CP.t(), scaled_CD, self._shared_PD, add=not first)

    def _put_even(self, *, add: bool) -> bool:
        return add  # at the end, when the weight's gradient has been compared

    def recompute(self, into: Gradients) -> None:
        """Add up the gradients, with a chunk's E over the whole vocabulary in memory."""
        (V, D), index, known = self.weight_VD.shape, self.index, self.known
        assert index is not None
        pieces = self.pieces(self.plan.chunk_rows, self.plan.chunk_rows)
        longest = max((piece.at.stop for piece in pieces), default=0)
        new = self.weight_VD.new_empty
        e, scaled, sums = new(longest, padded(V)), new(longest, D).zero_(), self._new(longest, self.tiles)
        self._begin(longest, e)
        for piece in self.in_stages(pieces, self.begin):
            piece.x_CD, used = aligned_rows(piece.x_CD.get(), self.head.dtype), self.used(piece.part)
            C = len(piece.x_CD)
            e_CV, scaled_CD, squares = e[:C, :V], scaled[:C], self._stored(C).squares
            assert squares is not None
            self.prepare(piece, scaled_CD)
            reference, entry, s, rest = piece.rows
            saved.take_tiles(
                known["tiles"], index[piece.part], known["lse"][piece.part], reference, sums[:C], squares, V, used
            )
            self._choose(piece, Targets(piece.y_C, s, rest, entry), sums[:C], e_CV)
            if self._comparison is None and self._seen is None and into.bias_V is None:
                self._listed = lists.list_tiles(self._lists)
            self.fill(piece, self.weight_VD, e_CV, 0)
            if self._seen is not None:
                self._see(piece, e_CV, torch.exp(reference - known["lse"][piece.part]).where(s != 0, 0))
            if into.bias_V is not None:
                exp_rows.add_column_sums(e_CV, s, into.bias_V, used)
            if into.input_ND is not None:
                self._input_rows(piece, e_CV, self.ends(piece, s, rest, into.input_ND))
            if into.weight_VD is not None:
                self.weight_product(piece.part, e_CV, scaled_CD, into.weight_VD, add=piece.part.start > 0)

    def exponentials(self, piece: Piece, w_VD: Tensor, e_CV: Tensor | None, rows: ExpRows) -> None:
        """See `RowLosses.exponentials`."""
        if self._listed is None or not self.hopper:
            super().exponentials(piece, w_VD, e_CV, rows)
        else:
            used = self.used(piece.part)
            exp_logits_hopper.exp_logits_hopper(piece.x_CD, w_VD, e_CV, rows, used=used, listed=self._listed)

    def _end(self, into: Gradients) -> None:
        """Measure the errors, and put the gradients into the classes' own order."""
        errors = None
        if self._comparison is not None:
            errors = self._comparison.errors(into.input_ND, into.weight_VD, self._shared_PD)
        super()._put_even(add=True)
        classes = self.order[1:].long()
        if self._seen is not None:
            seen = self._seen.nan_to_num(0, 0, 0).clamp(min=0)
            self.remembered.see(torch.empty_like(seen).index_copy_(0, classes, seen))
        if into.weight_VD is not None and self._shared_PD is not None:
            narrow = self._weight_dtype == self.weight_VD.dtype
            out = self.weight_VD if narrow else torch.empty_like(into.weight_VD)
            choice.put_back(into.weight_VD, self._shared_PD, self.order, out)
            into.weight_VD = out
        if into.bias_V is not None:
            into.bias_V = torch.empty_like(into.bias_V).index_copy_(0, classes, into.bias_V)
        self.remembered.end(torch.cat(self._lost, 1), self._sizes().abs().sum(), errors)
