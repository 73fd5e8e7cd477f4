"""The gradients of a chunk from the tiles of E that are kept: see `kernels.kept_tiles` and docs/skipping.md.

The classes are in the order of `VocabularyOrder`, in a copy of the weight; the weight's gradient is summed in that
order, and put back at the end, into the copy's memory.
"""

from dataclasses import replace

import torch
from torch import Tensor

from lowtide.head.call import Head
from lowtide.head.exponentials.comparison import Comparison
from lowtide.head.gradients import Gradients
from lowtide.head.kernels import kept_gemms_hopper, kept_lists, kept_sums, kept_tiles
from lowtide.head.kernels.exp_logits import Listed, Stored
from lowtide.head.kernels.gemm import Used
from lowtide.head.kernels.gradient_gemms_hopper import room_for
from lowtide.head.kernels.input_rows_hopper import InputRows
from lowtide.head.kernels.kept_tiles import Choice, Targets
from lowtide.head.lengths import padded
from lowtide.head.matmul import matmul_into
from lowtide.head.rows import Rows
from lowtide.head.terms.loss import Loss
from lowtide.head.vocabulary_order import VocabularyOrder

ROWS, COLUMNS = kept_tiles.ROWS.value, kept_tiles.COLUMNS.value


class KeptTiles:
    """What the chunks of one call share."""

    def __init__(self, known: VocabularyOrder, head: Head, order: Tensor | None = None) -> None:
        """``order``: of the classes, where forward took another than the present one."""
        order = known.order if order is None else order
        assert order is not None
        self.given_dtype = head.weight_VD.dtype
        self.known, self.order, (V, D) = known, order, head.weight_VD.shape
        new = head.input.new_empty
        self.weight_VD = new(V, D, dtype=head.dtype)
        self.tiles = -(-V // COLUMNS)
        self.mean_PD = new(self.tiles, D, dtype=head.dtype)
        kept_tiles.put_in_order(head.weight_VD, self.order, self.weight_VD, self.mean_PD)
        self.head = head._replace(
            weight_VD=self.weight_VD, bias_V=None if head.bias_V is None else self._ordered(head.bias_V)
        )
        self._shared_PD: Tensor | None = None
        self._sums = [new(3, 0, dtype=torch.float32)]
        self._comparison: Comparison | None = None

    def _ordered(self, x_V: Tensor) -> Tensor:
        return x_V.index_select(0, self.order[1:])

    def loss(self, loss: Loss) -> Loss:
        """Return the loss with its class weights in order; its rows' targets are already."""
        q = loss.class_weight
        return loss if q is None else replace(loss, class_weight=self._ordered(q))

    def take_factors(self, factor_n: Tensor) -> None:
        """Take the rows' factors, to which masses are relative."""
        self.known.tokens = factor_n.abs().sum()

    def allocate(self, rows: int) -> None:
        """Make what gradients of chunks of so many rows share."""
        known, device = self.known, self.weight_VD.device
        assert known.total is not None
        known.total.zero_()
        if known.compares:
            self._comparison = Comparison(self.weight_VD, known.signs(self.weight_VD), self.head.tokens)
        self._lists, self._flags = kept_lists.lists_for(rows, self.tiles, device)
        self._shares, self._space = kept_lists.shares_for(rows, device)
        self._room = room_for(device)
        self._mass = self.mean_PD.new_empty(rows, padded(self.tiles))
        self._numbers = self.mean_PD.new_empty(2, rows, dtype=torch.float32)
        self._begin_sums(rows)

    def _begin_sums(self, rows: int) -> None:
        """Make what takes the sums of E as stored."""
        numbers = 1 if self.head.softcap is None else 2
        self._sums_of_stored = self.mean_PD.new_empty(numbers, rows, self.tiles, dtype=torch.float32)

    def stored(self, C: int) -> Stored:
        """Return what takes the sums of so many rows of E as stored."""
        return Stored(*self._sums_of_stored[:, :C])

    def masses(self, sums_CP: Tensor) -> Tensor:
        """Return what rows of E sum to, given the sums of the exponentials."""
        masses = self.stored(len(sums_CP)).masses
        return sums_CP if masses is None else masses

    def begin_saving(self, rows: int) -> None:
        """Make what `save` needs, so many rows at a time, and what it writes of all tokens."""
        self._begin_sums(rows)
        self.saved = self.mean_PD.new_empty(self.head.tokens, 2, self.tiles)

    def save(self, sums_CP: Tensor, miss_C: Tensor, y_C: Tensor, to_C: Tensor, used: Used) -> None:
        """Save what rows sum to in each tile, for `KeptBackward`."""
        stored, V = self.stored(len(sums_CP)), len(self.weight_VD)
        kept_sums.save_tiles(sums_CP, stored, miss_C, y_C, to_C, self.saved, V, used)

    @property
    def compares(self) -> bool:
        """Whether the gradients are compared with those from all tiles."""
        return self._comparison is not None

    def find(self, targets: Targets, masses_CP: Tensor, e_CV: Tensor, used: Used) -> None:
        """Decide which of a chunk's tiles are kept, by what rows of E sum to there; fill in ``targets``."""
        C, total, threshold = len(e_CV), self.known.total, self.known.threshold
        assert total is not None
        assert threshold is not None
        R = -(-C // ROWS)
        self._targets = targets = targets._replace(alone=self._numbers[0, :C], lost=self._numbers[1, :C])
        self._mass_CP = self._mass[:C, : self.tiles]
        lists = self._lists
        if len(lists.across) != R:  # a last chunk that is shorter
            lists, self._flags = kept_lists.lists_for(C, self.tiles, e_CV.device)
        self._lists_of_chunk = lists
        sums = masses_CP.new_empty(3, R * -(-self.tiles // kept_tiles.TILES.value))
        self._sums.append(sums)
        self._choice = choice = Choice(self._flags, self._mass_CP, sums)
        squares = self.stored(C).squares
        assert squares is not None
        kept_tiles.find_kept(masses_CP, squares, e_CV, targets, threshold.value, choice, used, self.known.seed)
        kept_lists.list_kept(
            self._flags, lists, self._shares, self._space, total, e_CV, targets, self.weight_VD.shape[1], used
        )

    def listed(self) -> Listed:
        """Return a chunk's tiles that are kept, as the exponentials' GEMM takes them."""
        return kept_lists.list_tiles(self._lists_of_chunk)

    def settle(self, e_CV: Tensor, ends: InputRows | None, scaled_CD: Tensor | None) -> None:
        """Take what is compared of a chunk's E, and then multiply the tiles that stay at random."""
        if self._comparison is not None:
            if ends is not None:
                self._comparison.see_input(e_CV, self._targets, ends)
            if scaled_CD is not None:
                self._comparison.see_weight(e_CV, self._targets, scaled_CD)
        if self.known.asked.unbiased:
            kept_tiles.multiply_drawn(self._flags, e_CV, self._targets)

    def input_grad(self, e_CV: Tensor, ends: InputRows, used: Used) -> None:
        """Write a chunk's input gradient."""
        ends = ends._replace(rest=self._targets.lost)
        kept_gemms_hopper.input_grad(
            e_CV, self.weight_VD, self._mass_CP, self.mean_PD, ends, self._lists_of_chunk, self._shares, self._room,
            used,
        )  # fmt: skip

    def weight_grad(self, e_CV: Tensor, scaled_CD: Tensor, sum_VD: Tensor, used: Used, *, add: bool) -> None:
        """Write or add a chunk's weight gradient; E is not what it was where it is compared."""
        kept_gemms_hopper.weight_grad(e_CV, scaled_CD, sum_VD, self._lists_of_chunk, add=add)
        kept_tiles.add_targets(self._targets, scaled_CD, sum_VD, used)
        first = self._shared_PD is None
        if self._shared_PD is None:
            self._shared_PD = self.mean_PD.new_empty(self.mean_PD.shape, dtype=torch.float32)
        matmul_into(self._mass_CP.t(), scaled_CD, self._shared_PD, add=not first)
        if self._comparison is not None:
            kept_tiles.leave_lost(self._choice, e_CV, self._targets)
            self._comparison.see_lost(e_CV, self._targets)

    def see_sum(self, into: Gradients) -> None:
        """Compare the weight's gradient, when all chunks are in it and nothing else."""
        if self._comparison is not None and into.weight_VD is not None and self._shared_PD is not None:
            self._comparison.see_sum(into.weight_VD, self._shared_PD)

    def end(self, into: Gradients) -> None:
        """Put the gradients into the classes' own order: the weight's into the memory of the ordered copy."""
        self.known.sums = torch.cat(self._sums, 1)
        if self._comparison is not None:
            self.known.adapt(self._comparison.errors(into.input_ND))
        if into.weight_VD is not None and self._shared_PD is not None:
            narrow = self.given_dtype == self.weight_VD.dtype
            out = self.weight_VD if narrow else torch.empty_like(into.weight_VD)
            kept_tiles.put_back(into.weight_VD, self._shared_PD, self.order, out)
            into.weight_VD = out
        if into.bias_V is not None:
            into.bias_V = torch.empty_like(into.bias_V).index_copy_(0, self.order[1:].long(), into.bias_V)
        self.known.end()


def see_rows(known: VocabularyOrder, sums_V: Tensor, y_n: Tensor, order: Tensor | None) -> None:
    """Take rows' probabilities: the column sums of p - 1 at the target, and how often a class is one."""
    times = torch.zeros(len(sums_V), dtype=torch.int32, device=y_n.device)
    times.scatter_add_(0, y_n.clamp(min=0).long(), (y_n >= 0).int())
    total = (sums_V + times).nan_to_num(0, 0, 0).clamp(min=0)
    if order is not None:
        total = torch.empty_like(total).index_copy_(0, order[1:].long(), total)
    known.see(total)


def sorted_rows(
    rows: Rows, y_N: Tensor, unit_N: Tensor, inverse: Tensor, chunk_rows: int
) -> tuple[Rows, Tensor, Tensor]:
    """Return the rows, their targets' places in the order (int32, -1 where ignored) and what they count.

    Those of a chunk are in the order of their targets: a tile of rows then has few, and tokens that are alike. Every
    chunk has its part of all targets, so that what a class gets of its own tokens and of the others meets in one sum,
    and not when it has been rounded. Ignored tokens are last.
    """
    V = len(inverse)
    places = inverse.index_select(0, y_N.clamp(min=0)).where(y_N >= 0, V)
    places, index = places.sort(stable=True)
    valid = places < V
    count = valid.sum(dtype=torch.int32).view(1)
    if chunk_rows < len(places):
        spread = _spread(len(places), chunk_rows, count)
        places, valid, index = (torch.empty_like(x).index_copy_(0, spread, x) for x in (places, valid, index))
    return replace(rows, index=index, count=count), places.where(valid, -1), unit_N.index_select(0, index)


def _spread(n: int, chunk_rows: int, count: Tensor) -> Tensor:
    """Return the place of each of n sorted rows, of which the first ``count`` are valid and stay before the others."""
    row = torch.arange(n, device=count.device)
    chunk = row // chunk_rows
    length = torch.where(chunk < count // chunk_rows, chunk_rows, count % chunk_rows)
    within = (row % chunk_rows + chunk / (n // chunk_rows + 1)) / length
    return within.where(row < count, torch.inf).argsort(stable=True)
