"""Cross entropy whose gradients leave small tiles of E out: see `choice` and docs/skipping.md.

The classes are in the order of `order`, in a copy of the weight; the weight's gradient is summed in that order, and put
back at the end, into the copy's memory. Where the upstream gradient is known in backward only, forward saves what each
tile sums to; which tiles stay then follows from these sums and the upstream gradients, and only those tiles of E are
recomputed.
"""

from typing import Any

import torch
from torch import Tensor

from lowtide.head.call import Gradients, Head, matmul_into
from lowtide.head.exponentials.losses import Chunk, CrossEntropy
from lowtide.head.kernels import exp_rows
from lowtide.head.kernels.gradient_gemms_hopper import room_for
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
        self._tokens: Any = loss.rows.index
        self.planes = 2 if head.softcap is None else 3
        self._tile_sizes = sizes_of_tiles(V, weight_VD.device)

    def hidden(self, part: slice) -> Tensor:
        """See `Exponentials.hidden`: what an ignored token's state holds would reach the choice of tiles."""
        return super().hidden(part).masked_fill_((self.y_n[part] < 0)[:, None], 0)

    def forward(self, factors: RowFactors | None) -> dict[str, Tensor]:
        """See `CrossEntropy.forward`; without factors also what backward needs: "tiles" and the order of "classes"."""
        self.remembered.skipped += 1
        if factors is not None:
            return super().forward(factors)
        self._saved = self.weight_VD.new_empty(self.head.tokens, 2, self.tiles)
        return super().forward(None) | {"tiles": self._saved, "classes": self.order}

    def finish(self, chunk: Chunk, factor_C: Tensor | None = None, scaled_CD: Tensor | None = None) -> None:
        """See `CrossEntropy.finish`; without a factor save what each tile sums to."""
        super().finish(chunk, factor_C, scaled_CD)
        if factor_C is None:
            saved = save_tiles(chunk.sums, *_of_stored(chunk), chunk.rows.miss, chunk.y_C, self._tile_sizes)
            self._saved.index_copy_(0, self._tokens[chunk.part], saved.to(self._saved.dtype))

    def in_chunks(self, factors: RowFactors, found: Tensor) -> None:
        """See `CrossEntropy.in_chunks`."""
        rows = min(self.plan.chunk_rows, self.plan.rows)
        sums = self.new(self.planes, rows, self.tiles)
        self.factor_n, into = factors()
        e, scaled = self._begin(rows, into)
        for chunk in self.chunks(rows):
            self.begin(chunk, found, sums, e)
            scaled_CD = None if scaled is None else scaled[: len(chunk.x_CD)]
            self.finish(chunk, self.factor_n[chunk.part], scaled_CD)
            s_C, y_C, rest_C = chunk.of_input
            entry_C = chunk.e_CV.gather(1, y_C.clamp(min=0).long()[:, None])[:, 0].float() + rest_C
            self._choose(chunk, entry_C, *_of_stored(chunk))
            if self._seen is not None:
                sizes = self._sizes_n[chunk.part]
                self._see(chunk, (s_C / sizes).where((s_C != 0) & (sizes != 0), 0))
            self._add(chunk, scaled_CD, into)
            del chunk  # and its memory, before the next is made
        self._end(into)

    def recompute(self, into: Gradients) -> None:
        """Add up the gradients, with a chunk's E over the whole vocabulary in memory."""
        self.factor_n = self.factor_n.where(self.y_n >= 0, 0)  # what flows back to an ignored token may be NaN
        rows, known = min(self.plan.chunk_rows, self.plan.rows), self.known
        e, scaled = self._begin(rows, into)
        for chunk in self.chunks(rows):
            part, C = chunk.part, len(chunk.x_CD)
            scaled_CD, chunk.e_CV = None if scaled is None else scaled[:C], e[:C, : self.width]
            self.prepare(chunk, scaled_CD)
            factor_C = torch.exp(known["lse"][part] - chunk.entries.reference)
            tiles = take_tiles(known["tiles"][self._tokens[part]], factor_C, self._tile_sizes)
            self._choose(chunk, chunk.entries.coefficient, *tiles)
            if self._comparison is None and self._seen is None and into.bias_V is None:
                self.listed = lists.list_tiles(self._flags)
            self.fill(chunk, self.weight_VD, chunk.e_CV, slice(0, self.width))
            if self._seen is not None:
                self._see(chunk, (1 / factor_C).where(chunk.of_input[0] != 0, 0))
            self._add(chunk, scaled_CD, into)
            del chunk
        self._end(into)

    def _begin(self, rows: int, into: Gradients) -> tuple[Tensor, Tensor | None]:
        """Return memory for a chunk's E and s x, and make what the gradients of all chunks share."""
        (V, D), new, known, trained = self.weight_VD.shape, self.weight_VD.new_empty, self.remembered, into.weight_VD
        e, scaled = new(rows, padded(V)), None if trained is None else new(rows, D).zero_()  # it is multiplied whole
        sizes = self.factor_n if self.transform.scale is None else self.factor_n * self.transform.scale
        self._sizes_n = sizes if self.terms.own is None else sizes * self.terms.own  # as gradients have them
        total = self._sizes_n.abs().sum()
        self._sum_of_sizes = total.where(total != 0, 1)
        known.total.zero_()
        self._reported = self.new(3).zero_()  # the sum over chunks: see `choose`
        self._comparison = Comparison(self.weight_VD, self.head.tokens, known.passes) if known.compares else None
        if known.compares:
            e.zero_()  # it is read whole
        self._seen = self.new(V).zero_() if known.sees else None  # the sums of the tokens' probabilities
        self._meeting, self._mass = room_for(e.device), new(rows, padded(self.tiles))
        self._shared_PD = self.new(*self.mean_PD.shape)  # what the rows of each tile of dW share
        return e, scaled

    def _choose(self, chunk: Chunk, entry_C: Tensor, masses_CP: Tensor, squares_CP: Tensor) -> None:
        """Decide which of a chunk's tiles are kept: see `choose`; ``entry_C`` are the targets' entries, unrounded."""
        s_C, y_C, _ = chunk.of_input
        self._mass_CP, threshold = self._mass[: len(y_C), : self.tiles], self.remembered.threshold
        of_rows = masses_CP, squares_CP, y_C, s_C / self._sum_of_sizes, entry_C
        kept, reported = choose(*of_rows, self._tile_sizes, threshold, self._mass_CP)
        self._reported += reported
        self._flags = kept.int()
        self._lists = lists.list_kept(self._flags, self.weight_VD.shape[1], self.remembered.total)

    def _see(self, chunk: Chunk, factor_C: Tensor) -> None:
        """Add up a chunk's probabilities, E times a factor of each row, and 1 at the target."""
        assert self._seen is not None
        exp_rows.add_column_sums(chunk.e_CV, factor_C, self._seen, self.used(chunk.part))
        times, y_C = torch.zeros_like(self._seen, dtype=torch.int32), chunk.of_input[1]
        self._seen += times.scatter_add_(0, y_C.clamp(min=0).long(), (y_C >= 0).int())

    def _add(self, chunk: Chunk, scaled_CD: Tensor | None, into: Gradients) -> None:
        """Add a chunk's gradients: from the tiles that are kept, and from what stands for the others."""
        e_CV, used, comparison, add = chunk.e_CV, self.used(chunk.part), self._comparison, chunk.part.start > 0
        if into.input_ND is not None:
            if comparison is not None:
                comparison.see_input(e_CV, self._tokens[chunk.part], *chunk.of_input)
            operands, ends = (e_CV, self.weight_VD, self._mass_CP, self.mean_PD), self.ends(chunk, into.input_ND)
            gemms_hopper.input_grad(*operands, ends, self._lists, self._meeting, used)
        if scaled_CD is not None and into.weight_VD is not None:
            if comparison is not None:
                comparison.see_weight(e_CV, scaled_CD, chunk.of_input[1], add=add)
            gemms_hopper.weight_grad(e_CV, scaled_CD, into.weight_VD, self._lists, add=add)
            matmul_into(self._mass_CP.t(), scaled_CD, self._shared_PD, add=add)
        if into.bias_V is not None:
            exp_rows.add_column_sums(e_CV, chunk.of_input[0], into.bias_V, used)

    def _end(self, into: Gradients) -> None:
        """Measure the errors, and put the gradients into the classes' own order."""
        errors, classes = None, self.order[1:].long()
        if self._comparison is not None:
            errors = self._comparison.errors(into.input_ND, into.weight_VD, self._shared_PD, self._tile_sizes)
        if self._seen is not None:
            seen = self._seen.nan_to_num(0, 0, 0).clamp(min=0)
            self.remembered.see(torch.empty_like(seen).index_copy_(0, classes, seen))
        if into.weight_VD is not None and self.plan.rows:
            narrow = self._weight_dtype == self.weight_VD.dtype
            out = self.weight_VD if narrow else torch.empty_like(into.weight_VD)
            ordered.put_back(into.weight_VD, self._shared_PD, self.order, out)
            into.weight_VD = out
        if into.bias_V is not None:
            into.bias_V = torch.empty_like(into.bias_V).index_copy_(0, classes, into.bias_V)
        self.remembered.end(self._reported, errors)


def _of_stored(chunk: Chunk) -> tuple[Tensor, Tensor]:
    """Return what a chunk's E, as it is stored, sums to in each tile, and its squares: see `ExpRows`."""
    tiles = chunk.entries
    return tiles.sums if tiles.masses is None else tiles.masses, tiles.squares
