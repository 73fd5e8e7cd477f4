"""Losses of rows from their exponentials: E of a piece's rows, its sums, and what ranks exchange of them.

Names: n rows, C rows of a piece, D hidden size, V classes of this rank. The equations are in `losses`.
"""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from lowtide.head.call import Head
from lowtide.head.exponentials.even import weighted_sum
from lowtide.head.exponentials.loops import Exponentials, Piece, aligned_rows
from lowtide.head.kernels import configs, exp_logits_hopper, exp_rows
from lowtide.head.kernels.exp_logits import NOT_STORED, ExpRows, Stored, exp_tile, shifted_exp_logits
from lowtide.head.kernels.exp_rows import Reports
from lowtide.head.kernels.exp_terms import RowTerms
from lowtide.head.kernels.gemm import LogitTransform, gemm_tiles, tiles_across
from lowtide.head.kernels.hopper import COLUMNS
from lowtide.head.plan import HeadPlan
from lowtide.head.ranks.parallel import Alone
from lowtide.head.rows import input_is_copied
from lowtide.head.terms.loss import Loss


class RowLosses(Exponentials):
    """The losses of all rows, a piece at a time, in chunks whose E is in memory or by sums alone.

    ``loss.y`` are int32 rows of this rank's weight, at least its rows where another rank has the class, -1 where
    ignored.
    """

    _sums: Tensor  # of tiles of a piece's E
    _s_C: Tensor  # of a chunk's rows: what scales their gradients

    def __init__(self, head: Head, loss: Loss, plan: HeadPlan) -> None:
        super().__init__(head, plan, loss.rows)
        alone, q, smoothing, softcap = self.ranks.alone, loss.class_weight, loss.label_smoothing, head.softcap
        assert not isinstance(softcap, Tensor)
        self.transform = LogitTransform(head.bias_V, head.scale, softcap)
        self.hopper = self.transform.is_plain and exp_logits_hopper.why_not_on(head.input.device) is None
        if self.hopper:
            self.config = configs.GemmConfig(columns=COLUMNS.value)
        self.tiles = tiles_across(self.width, self.config)
        self.y_n, self.q_V, self.own_n = loss.y, q, None if alone else loss.own_n
        uniform = None
        if smoothing:
            uniform = loss.y.new_zeros((), dtype=torch.float32)
            if head.bias_V is not None:
                uniform = head.bias_V.sum() if q is None else head.bias_V @ q
        self.terms = RowTerms(
            vocab=self.ranks.vocab, bias_V=head.bias_V, scale=head.scale, softcap=softcap,
            class_weight=q if alone else None, total_class_weight=loss.total, smoothing=smoothing, z_loss=loss.z_loss,
            uniform_D=weighted_sum(q, self.weight_VD) if smoothing else None, uniform_bias=uniform,
        )  # fmt: skip
        self._views: dict[int, tuple[Tensor, ...]] = {}
        self._of_stored: Tensor | None = None  # sums of rows of E as stored, of each tile, for a loss that skips some
        self._e: Tensor | None = None  # a chunk's E, whose sums and gradients are computed
        self._x: Tensor | None = None  # its hidden states, where they are gathered; s x takes their place

    def _new(self, *shape: int) -> Tensor:
        return torch.empty(*shape, dtype=torch.float32, device=self.head.input.device)

    def new_rows(self, piece: Piece) -> Tensor:
        """See `Exponentials.new_rows`."""
        return super().new_rows(piece) if self._x is None else self._x[piece.at]

    def exponentials(self, piece: Piece, w_VD: Tensor, e_CV: Tensor | None, rows: ExpRows) -> None:
        """Write E of a piece and some classes, or its sums."""
        used = self.used(piece.part)
        if self.hopper:
            exp_logits_hopper.exp_logits_hopper(piece.x_CD, w_VD, e_CV, rows, used=used)
            return
        transform = self.transform.of_classes(slice(rows.first_class, rows.first_class + len(w_VD)))
        gemm_tiles(exp_tile, piece.x_CD, w_VD, e_CV, rows, transform, self.config, used=used)

    def _shifted(self, piece: Piece, e_CV: Tensor | None, find_highest: tuple[bool, ...]) -> None:
        """Do the listed rows again, relative to another reference; the host never learns how many they are."""
        C = len(piece.y_C)
        rows = ExpRows.of(piece.rows.highest, piece.y_C, self._sums[:C], stored=self._stored(C))
        shifted_exp_logits(
            piece.x_CD, self.weight_VD, e_CV, rows, (piece.rows.listed, piece.rows.listed_count), self.transform,
            self.config, find_highest=find_highest,
        )  # fmt: skip

    def _stored(self, C: int) -> Stored:
        return NOT_STORED if self._of_stored is None else Stored(*self._of_stored[:, :C])

    def terms_of(self, piece: Piece) -> RowTerms:
        """Return the loss with the class weights of a piece's rows, where they are by row."""
        return self.terms._replace(own_weight=piece.own_C)

    def _begin_all_targets(self, y_n: Tensor) -> Callable[[], Tensor] | None:
        """Begin to exchange all targets' logits at once where all hidden states are here; None: piece by piece."""
        gathered = self.ranks.spread or self.index is not None or input_is_copied(self.head.input, self.head.dtype)
        if self.ranks.alone or gathered or not len(y_n):
            return None
        x_ND = self.ranks.begin_rows(self.head.input, None, slice(0, len(y_n)), self.head.dtype).get()
        numbers = self._new(2 if self.terms.smoothing else 1, len(y_n))
        count = torch.empty(1, dtype=torch.int32, device=y_n.device)
        exp_rows.target_logits(x_ND, self.weight_VD, y_n, self.terms, numbers[0], numbers[-1], count)
        return cache(self.ranks.begin_sum_of(numbers))

    def _begin_targets(
        self, y_n: Tensor, own_n: Tensor | None, at_once: Callable[[], Tensor] | None, piece: Piece
    ) -> Piece:
        """Begin to exchange the targets' logits, and with smoothing the weighted sums of all logits [1 or 2, C]."""
        piece.x_CD, piece.y_C = aligned_rows(piece.x_CD.get(), self.head.dtype), y_n[piece.part]
        piece.own_C = None if own_n is None else own_n[piece.part]
        piece.rows = target, _, _, _, _, count = self._memory(len(piece.y_C))
        if at_once is not None:
            part = piece.part
            piece.exchange = lambda: at_once()[:, part]
        else:
            exp_rows.target_logits(
                piece.x_CD, self.weight_VD, piece.y_C, self.terms, target[0], target[-1], count, self.used(piece.part)
            )
            piece.exchange = self.ranks.begin_sum_of(target)
        return piece

    def _memory(self, C: int) -> tuple[Tensor, ...]:
        """Return memory for the numbers of C rows: the host makes its views once a length where nothing is ahead."""
        views = self._views.get(C) if self.ranks.alone else None
        if views is None:
            numbers = self._new(4, C)
            make = torch.empty if self.ranks.alone else torch.zeros  # alone, a kernel writes the count first
            integers = make(2 * C + 1, dtype=torch.int32, device=self.head.input.device)
            views = (
                numbers[: 2 if self.terms.smoothing else 1],
                *numbers[2:].unbind(),
                *torch.split(integers, [C, C, 1]),
            )
            if self.ranks.alone:
                self._views[C] = views
        return views

    def _begin_sums(self, found: Tensor, piece: Piece) -> Piece:
        """Build a piece's E, or its sums alone, and begin to exchange these."""
        loss, lse, miss = found[:, piece.part].unbind()
        target, (_, s, rest, highest, listed, count) = piece.exchange(), piece.rows
        e_CV = self._e_of(piece.at)
        if self._e is not None:
            s = self._s_C[piece.at]
        piece.rows = rows = Reports(target[0], target[-1], loss, lse, miss, s, rest, highest, listed, count)
        sums = self._sums[: len(loss)]
        if self.width:
            of_rows = ExpRows.of(rows.target_logit, piece.y_C, sums, stored=self._stored(len(loss)))
            self.exponentials(piece, self.weight_VD, e_CV, of_rows)
        if isinstance(self.ranks, Alone):
            piece.exchange = sums
            return piece
        mine = self._new(2, len(loss))
        if self.width:
            exp_rows.sum_rows(sums, piece.y_C, rows, mine, e_CV=e_CV, used=self.used(piece.part))
            self._shifted(piece, None, (True, False))
            exp_rows.sum_rows(sums, piece.y_C, rows, mine, shifted=True)
        else:
            mine[0], mine[1] = 0, -torch.inf
        piece.exchange = self.ranks.begin_gather(mine)
        return piece

    def _finish(
        self, piece: Piece, factor_C: Tensor | None = None, e_CV: Tensor | None = None, scaled_CD: Tensor | None = None
    ) -> None:
        """Turn sums into losses and, with a factor, finish E and s x; then those rows that left the safe range."""
        alone, rows, terms = self.ranks.alone, piece.rows, self.terms_of(piece)
        sums = piece.exchange if alone else piece.exchange.get()
        if not alone:
            rows.listed_count.zero_()
        for shifted in (False, True):
            exp_rows.finish_rows(
                sums, piece.x_CD, piece.y_C, factor_C, rows, terms, e_CV=e_CV, scaled_CD=scaled_CD, shifted=shifted,
                used=self.used(piece.part),
            )  # fmt: skip
            if not shifted and (alone or e_CV is not None):
                self._shifted(piece, e_CV, (True, False) if alone else (False,))

    def _e_of(self, at: slice) -> Tensor | None:
        """Return E of some of the chunk's rows; None where there is none, or this rank has no classes."""
        return None if self._e is None or not self.width else self._e[at, : self.width]
