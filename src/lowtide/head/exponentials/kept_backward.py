"""Gradients in backward from the tiles of E that are kept: forward has saved what each tile sums to.

Which tiles are kept follows from these sums and the upstream gradients, and then those alone are computed, three GEMMs
over them: E, E W and E^T (s X). At some calls all of E is computed: where gradients are compared, where the order is
renewed, and where a bias gets its exact gradient.
"""

from lowtide.head.exponentials.loops import aligned_rows
from lowtide.head.exponentials.losses import CrossEntropy
from lowtide.head.gradients import Gradients
from lowtide.head.kernels import exp_rows, kept_sums
from lowtide.head.kernels.kept_tiles import Targets
from lowtide.head.lengths import padded


class KeptBackward(CrossEntropy):
    """A loss in backward, whose tiles forward saved: what is known has all tokens' "tiles" too."""

    def recompute(self, into: Gradients) -> None:
        """Add up the gradients, with a chunk's E over the whole vocabulary in memory."""
        kept, (V, D) = self.kept, self.weight_VD.shape
        assert kept is not None
        assert self.index is not None
        pieces = self.pieces(self.plan.chunk_rows, self.plan.chunk_rows)
        longest, new = max((piece.at.stop for piece in pieces), default=0), self.weight_VD.new_empty
        kept.take_factors(self.sizes())
        kept.allocate(longest)
        e, scaled, sums = new(longest, padded(V)), new(longest, D).zero_(), self._new(longest, kept.tiles)
        whole = kept.compares or self._seen is not None or into.bias_V is not None
        if kept.compares:
            e.zero_()  # it is read as a whole, with rows that are not used
        for piece in self.in_stages(pieces, self.begin):
            piece.x_CD, used = aligned_rows(piece.x_CD.get(), self.head.dtype), self.used(piece.part)
            C = len(piece.x_CD)
            e_CV, scaled_CD = e[:C, :V], scaled[:C]
            self.prepare(piece, scaled_CD)
            reference, entry, s, rest = piece.rows
            squares = kept.stored(C).squares
            assert squares is not None
            kept_sums.take_tiles(
                self.known["tiles"], self.index[piece.part], self.known["lse"][piece.part], reference, sums[:C],
                squares, V, used,
            )  # fmt: skip
            kept.find(Targets(piece.y_C, s, rest, entry), sums[:C], e_CV, used)
            self.fill(piece, self.weight_VD, e_CV, 0, None if whole else kept.listed())
            if into.bias_V is not None:
                exp_rows.add_column_sums(e_CV, s, into.bias_V, used)
            ends = None if into.input_ND is None else self.ends(piece, s, rest, into.input_ND)
            kept.settle(e_CV, ends, scaled_CD)
            if ends is not None:
                kept.input_grad(e_CV, ends, used)
            if into.weight_VD is not None:
                kept.weight_grad(e_CV, scaled_CD, into.weight_VD, used, add=piece.part.start > 0)
        kept.see_sum(into)
