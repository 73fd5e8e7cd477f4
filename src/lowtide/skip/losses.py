"""Cross entropy whose gradients leave small tiles of E out: see `choice` and docs/skipping.md.

The classes are in the order of `order`, in a copy of the weight; the weight's gradient is summed in that order, and put
back at the end, into the copy's memory. Where the upstream gradient is known in backward only, forward saves what each
tile sums to; which tiles stay then follows from these sums and the upstream gradients, and only those tiles of E are
recomputed.
"""

from functools import cached_property

import torch
from torch import Tensor

from lowtide.head.call import Gradients, Head
from lowtide.head.engine import matmul_into
from lowtide.head.exponentials.losses import CrossEntropy, Piece
from lowtide.head.kernels import exp_rows, hopper
from lowtide.head.kernels.exp_logits import ExpRows, Listed
from lowtide.head.kernels.gradient_gemms_hopper import InputRows, room_for
from lowtide.head.plan import HeadPlan, padded
from lowtide.head.terms.loss import Loss, RowFactors
from lowtide.skip.choice import choose, save_tiles, sizes_of_tiles, take_tiles
from lowtide.skip.comparison import Comparison
from lowtide.skip.kernels import gemms_hopper, lists, ordered
from lowtide.skip.kernels.ordered import COLUMNS
from lowtide.skip.memory import Remembered


class TiledCrossEntropy(CrossEntropy):
    """A loss whose rows' targets are places in the order."""

    def __init__(self, head: Head, loss: Loss, plan: HeadPlan, order: Tensor | None = None) -> None:
        """``order``: of the classes, where forward took another than the present one."""
        self.remembered: Remembered = head.remembered
        self.order = self.remembered.order if order is None else order
        (V, D), new = head.weight_VD.shape, head.input.new_empty
        self._weight_dtype = head.weight_VD.dtype
        weight_VD, self.mean_PD = new(V, D, dtype=head.dtype), new(-(-V // COLUMNS.value), D, dtype=head.dtype)
        ordered.put_in_order(head.weight_VD, self.order, weight_VD, self.mean_PD)
        bias_V = None if head.bias_V is None else head.bias_V.index_select(0, self.order[1:])
        super().__init__(head._replace(weight_VD=weight_VD, bias_V=bias_V), loss, plan)
        self._shared_PD: Tensor | None = None  # what the rows of each tile of dW share
        self._sums = self._new(0)
        self._tile_sizes = sizes_of_tiles(V, weight_VD.device)
        self._reported = self._new(3).zero_()  # the sum over chunks: see `choose`
        self._comparison: Comparison | None = None
        self._seen: Tensor | None = None  # the sums of the tokens' probabilities
        self._listed: Listed | None = None  # tiles of E that are computed, where others need not be

    def forward(self, factors: RowFactors | None) -> dict[str, Tensor]:
        """See `CrossEntropy.forward`; without factors also what backward needs: "tiles" and the order of "classes"."""
        self.remembered.skipped += 1
        if factors is not None:
            numbers = super().forward(factors)
            self._end(self._into)
            return numbers
        self._store_sums(min(self.plan.chunk_rows, self.plan.rows))
        self._saved = self.weight_VD.new_empty(self.head.tokens, 2, self.tiles)
        return super().forward(None) | {"tiles": self._saved, "classes": self.order}

    def gradients(self, factor_n: Tensor, into: Gradients, known: dict[str, Tensor]) -> None:
        """See `CrossEntropy.gradients`; what flows back to an ignored token may be NaN."""
        super().gradients(factor_n.where(self.y_n >= 0, 0), into, known)
        self._end(into)

    def _allocate(self, rows: int) -> None:
        super()._allocate(rows)
        assert self._e is not None
        self._begin(rows, self._e)
        self._store_sums(rows)

    def hidden(self, part: slice) -> Tensor:
        """See `Exponentials.hidden`: what an ignored token's state holds would reach the choice of tiles."""
        return super().hidden(part).masked_fill_((self.y_n[part] < 0)[:, None], 0)

    def _take_factors(self) -> None:
        begins = self._factors is not None
        super()._take_factors()
        if begins and self._scaled is not None:
            self._scaled.zero_()  # it is multiplied whole

    def _begin(self, rows: int, e_CV: Tensor) -> None:
        """Make what the gradients of chunks of so many rows share."""
        self.remembered.total.zero_()
        if self.remembered.compares:
            self._comparison = Comparison(self.weight_VD, self.head.tokens)
            e_CV.zero_()  # it is read whole
        if self.remembered.sees:
            self._seen = torch.zeros_like(self._new(self.width))
        self._meeting = room_for(e_CV.device)
        self._mass = self.mean_PD.new_empty(rows, padded(self.tiles))

    def _store_sums(self, rows: int) -> None:
        self._of_stored = self._new(1 if self.head.softcap is None else 2, rows, self.tiles)

    def _finish(
        self, piece: Piece, factor_C: Tensor | None = None, e_CV: Tensor | None = None, scaled_CD: Tensor | None = None
    ) -> None:
        super()._finish(piece, factor_C, e_CV, scaled_CD)
        sums, rows = self._sums[: len(piece.y_C)], piece.rows
        _, _, squares, masses, *_ = (*self._stored(len(piece.y_C)), sums)
        assert squares is not None
        assert self.index is not None
        if e_CV is None:
            saved = save_tiles(sums, masses, squares, rows.miss, piece.y_C, self._tile_sizes)
            self._saved.index_copy_(0, self.index[piece.part].long(), saved.to(self._saved.dtype))
        else:
            entry = e_CV.gather(1, piece.y_C.clamp(min=0).long()[:, None])[:, 0].float() + rows.rest
            self._choose(piece.y_C, rows.s, entry, masses, squares)
            if self._seen is not None:
                sizes = self._sizes()[piece.part]
                self._see(piece, e_CV, (rows.s / sizes).where((rows.s != 0) & (sizes != 0), 0))

    def _see(self, piece: Piece, e_CV: Tensor, factor_C: Tensor) -> None:
        """Add up a chunk's probabilities, E times a factor of each row, and 1 at the target."""
        assert self._seen is not None
        exp_rows.add_column_sums(e_CV, factor_C, self._seen, self.used(piece.part))
        times = torch.zeros_like(self._seen, dtype=torch.int32)
        self._seen += times.scatter_add_(0, piece.y_C.clamp(min=0).long(), (piece.y_C >= 0).int())

    def _sizes(self) -> Tensor:
        """Return the rows' factors with the logits' scale and the targets' class weights, as gradients have them."""
        sizes = self._factor_n if self.transform.scale is None else self._factor_n * self.transform.scale
        return sizes if self.terms.own is None else sizes * self.terms.own

    def _choose(self, y_C: Tensor, s_C: Tensor, entry_C: Tensor, masses_CP: Tensor, squares_CP: Tensor) -> None:
        """Decide which of a chunk's tiles are kept: see `choose`; ``entry_C`` are the targets' entries, unrounded."""
        self._mass_CP = self._mass[: len(y_C), : self.tiles]
        s_C, threshold = s_C / self._sum_of_sizes, self.remembered.threshold
        kept, reported = choose(masses_CP, squares_CP, y_C, s_C, entry_C, self._tile_sizes, threshold, self._mass_CP)
        self._reported += reported
        self._flags = kept.int()
        self._lists = lists.list_kept(self._flags, self.weight_VD.shape[1], self.remembered.total)

    @cached_property
    def _sum_of_sizes(self) -> Tensor:
        total = self._sizes().abs().sum()
        return total.where(total != 0, 1)

    def _input_rows(self, piece: Piece, e_CV: Tensor, ends: InputRows) -> None:
        if self._comparison is not None:
            self._comparison.see_input(e_CV, ends)
        gemms_hopper.input_grad(
            e_CV, self.weight_VD, self._mass_CP, self.mean_PD, ends, self._lists, self._meeting,
            self.used(piece.part),
        )  # fmt: skip

    def weight_product(self, part: slice, e_CB: Tensor, scaled_CD: Tensor, out_BD: Tensor, *, add: bool) -> None:
        """See `Exponentials.weight_product`."""
        if self._comparison is not None:
            self._comparison.see_weight(e_CB, scaled_CD, self.y_n[part])
        gemms_hopper.weight_grad(e_CB, scaled_CD, out_BD, self._lists, add=add)
        first = self._shared_PD is None
        if self._shared_PD is None:
            self._shared_PD = self._new(*self.mean_PD.shape)
        matmul_into(self._mass_CP.t(), scaled_CD, self._shared_PD, add=not first)

    def recompute(self, into: Gradients) -> None:
        """Add up the gradients, with a chunk's E over the whole vocabulary in memory."""
        (V, D), index, known = self.weight_VD.shape, self.index, self.known
        assert index is not None
        longest = min(self.plan.chunk_rows, self.plan.rows)
        new = self.weight_VD.new_empty
        e, scaled = new(longest, padded(V)), new(longest, D).zero_()
        self._begin(longest, e)
        for piece in self.chunks(longest):
            C = len(piece.x_CD)
            e_CV, scaled_CD = e[:C, :V], scaled[:C]
            self.prepare(piece, scaled_CD)
            reference, entry, s, rest = piece.rows
            factor = torch.exp(known["lse"][piece.part] - reference)
            sums, squares = take_tiles(known["tiles"][index[piece.part]], factor, self._tile_sizes)
            self._choose(piece.y_C, s, entry, sums, squares)
            if self._comparison is None and self._seen is None and into.bias_V is None:
                self._listed = lists.list_tiles(self._flags)
            self.fill(piece, self.weight_VD, e_CV, 0)
            if self._seen is not None:
                self._see(piece, e_CV, (1 / factor).where(s != 0, 0))
            if into.input_ND is not None:
                self._input_rows(piece, e_CV, self.ends(piece, s, rest, into.input_ND))
            self.add_to_head(piece.part, e_CV, scaled_CD, s, into, slice(None))

    def exponentials(self, piece: Piece, w_VD: Tensor, e_CV: Tensor | None, rows: ExpRows) -> None:
        """See `CrossEntropy.exponentials`."""
        if self._listed is None or not self.hopper:
            super().exponentials(piece, w_VD, e_CV, rows)
        else:
            used = self.used(piece.part)
            hopper.exp_logits_hopper(piece.x_CD, w_VD, e_CV, rows, used=used, listed=self._listed)

    def _end(self, into: Gradients) -> None:
        """Measure the errors, and put the gradients into the classes' own order."""
        errors = None
        if self._comparison is not None:
            errors = self._comparison.errors(into.input_ND, into.weight_VD, self._shared_PD, self._tile_sizes)
        classes = self.order[1:].long()
        if self._seen is not None:
            seen = self._seen.nan_to_num(0, 0, 0).clamp(min=0)
            self.remembered.see(torch.empty_like(seen).index_copy_(0, classes, seen))
        if into.weight_VD is not None and self._shared_PD is not None:
            narrow = self._weight_dtype == self.weight_VD.dtype
            out = self.weight_VD if narrow else torch.empty_like(into.weight_VD)
            ordered.put_back(into.weight_VD, self._shared_PD, self.order, out)
            into.weight_VD = out
        if into.bias_V is not None:
            into.bias_V = torch.empty_like(into.bias_V).index_copy_(0, classes, into.bias_V)
        self.remembered.end(self._reported, errors)
