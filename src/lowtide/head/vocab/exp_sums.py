"""The exponential path on a part of the vocabulary: a piece's E and its sums, told to all, and what comes of all's.

C rows of a piece, V_r classes of this rank.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lowtide.head.exponentials.path import ExpHead
from lowtide.head.head_plan import HeadPlan, padded
from lowtide.head.ranks.exchange import Told
from lowtide.head.ranks.parallel import Ranks
from lowtide.head.rows import rows_are_aligned
from lowtide.head.schedules import CrossEntropyJob, Rows
from lowtide.head.vocab.exp_pieces import Piece, Taken, of_piece


@dataclass(frozen=True, kw_only=True)
class Summed:
    """A piece whose E is built, and whose sums are under way."""

    taken: Taken
    reports: Any
    told: Told  # [W, 2, C]


class ExpShard:
    """What all pieces of one call share, and what is computed of each.

    Args:
        job: The call, on this rank's weight.
        plan: Chunks and blocks, the same on every rank.
        ranks: The others.
        y_GL: int32: row of this rank's weight, `ELSEWHERE` where another rank has the class, -1 where ignored.
        kept_GL: Which tokens count.
        own_GL: Each token's class weight, or None.
        total: Sum of all class weights, or None.
    """

    def __init__(
        self,
        job: CrossEntropyJob,
        plan: HeadPlan,
        ranks: Ranks,
        y_GL: Tensor,
        kept_GL: Tensor,
        own_GL: Tensor | None,
        total: Tensor | None,
    ) -> None:
        from lowtide.head.kernels import exp_shard

        if job.weight_VD.dtype == job.dtype and not rows_are_aligned(job.weight_VD):
            job = replace(job, weight_VD=job.weight_VD.clone(memory_format=torch.contiguous_format))
        nothing = job.input.new_empty(0, dtype=torch.int32)
        self.head = ExpHead(job, Rows(index=None, kept=None, target=nothing, unit=nothing), plan)
        self.job, self.plan, self.ranks, self.tokens = job, plan, ranks, ranks.tokens
        self.thin, self.V, self.width = exp_shard, ranks.shard.vocab, job.weight_VD.shape[0]
        self.y_GL, self.kept_GL, self.own_GL = y_GL, kept_GL, own_GL
        self.terms = replace(self.head.terms, total_class_weight=total)
        # where a share of smoothing is divided by the classes that are here, so that it is one of all
        self.shares = replace(self.terms, smoothing=self.terms.smoothing * self.width / self.V)

    def e_buffer(self, pieces: list[Piece], columns: int) -> Tensor:
        """Return memory for E of the longest chunk."""
        rows = max((piece.at.stop for piece in pieces), default=0)
        return self.job.input.new_empty(rows, padded(columns), dtype=self.job.dtype)

    def class_weights_of(self, piece: Piece) -> Tensor | None:
        """Return the class weights of a piece's targets, None where there are none."""
        return None if self.own_GL is None else of_piece(piece, self.own_GL)[0]

    def reports(self, piece: Piece, found: Tensor | None, logits: Tensor | None, s_C: Tensor | None) -> Any:
        """Return memory for what is known of each of a piece's rows: of what is known already, that itself.

        Args:
            piece: The piece.
            found: Takes losses, logsumexps and misses, where its rows lie there as here.
            logits: The targets', and with smoothing the weighted sums of all.
            s_C: Takes s.
        """
        C, device = piece.at.stop - piece.at.start, self.y_GL.device
        # views by as few calls as can be: the host makes them for every piece
        loss, lse, miss, target, uniform, s, rest = torch.empty(7, C, dtype=torch.float32, device=device).unbind()
        longest = max(1, C)
        integers = torch.zeros(2 * longest + 1, dtype=torch.int32, device=device)
        highest, listed, count = torch.split(integers, [longest, longest, 1])
        if found is not None and self.tokens.groups == 1:
            loss, lse, miss = found[:, 0, piece.part].unbind()
        if logits is not None:
            target, uniform = logits[0], logits[-1]
        return self.head.thin.Reports(
            loss=loss, lse=lse, miss=miss, target_logit=target, uniform_logit=uniform, s=s if s_C is None else s_C,
            rest=rest, highest=highest, listed=listed, count=count,
        )  # fmt: skip

    def sum(self, taken: Taken, found: Tensor, e_CV: Tensor | None, s_C: Tensor | None) -> Summed:
        """Build a piece's E, or its sums alone, and begin to tell them."""
        head, x_CD, y_C = self.head, taken.x_CD, taken.y_C
        reports = self.reports(taken.piece, found, taken.targets(), s_C)
        told = torch.empty(2, len(y_C), dtype=torch.float32, device=x_CD.device)
        if self.width:
            sums = torch.empty(len(y_C), head.tiles, dtype=torch.float32, device=x_CD.device)
            head._exponentials(x_CD, head.weight_VD, reports.target_logit, y_C, sum_CP=sums, e_CV=e_CV)
            self.thin.sum_shard_rows(sums, head.tiles, y_C, reports, told, e_CV=e_CV)
            self._shifted(taken, reports, sums, None, find_highest=(True, False))
            self.thin.sum_shard_rows(sums, head.tiles, y_C, reports, told, shifted=True)
        else:
            told[0], told[1] = 0, -torch.inf
        return Summed(taken=taken, reports=reports, told=self.ranks.begin_gather(told))

    def finish(
        self,
        summed: Summed,
        found: Tensor,
        factor_C: Tensor | None = None,
        e_CV: Tensor | None = None,
        scaled_CD: Tensor | None = None,
    ) -> None:
        """Turn all ranks' sums into losses and, with a factor, finish E and s x."""
        taken, reports, told = summed.taken, summed.reports, summed.told.get()
        part = taken.piece.part
        own_C = self.class_weights_of(taken.piece)
        reports.count.zero_()
        for shifted in (False, True):
            self.thin.finish_shard_rows(
                told, taken.x_CD, taken.y_C, factor_C, reports, own_C, self.terms, self.V, self.width,
                e_CV=e_CV, scaled_CD=scaled_CD, shifted=shifted,
            )  # fmt: skip
            if e_CV is not None and not shifted:
                sums = torch.empty(len(e_CV), self.head.tiles, dtype=torch.float32, device=e_CV.device)
                self._shifted(taken, reports, sums, e_CV, find_highest=(False,))
        if self.tokens.groups > 1:
            losses = torch.stack((reports.loss, reports.lse, reports.miss))
            found[:, :, part] = losses.view(3, self.tokens.groups, part.stop - part.start)

    def _shifted(
        self, taken: Taken, reports: Any, sums: Tensor, e_CV: Tensor | None, find_highest: tuple[bool, ...]
    ) -> None:
        head = self.head
        head.gemm.shifted_exp_logits(
            taken.x_CD, head.weight_VD, reports.listed, reports.count, reports.highest, taken.y_C, head.config,
            head.programs, sum_CP=sums, transform=head.transform, e_CV=e_CV, find_highest=find_highest,
        )  # fmt: skip

    def finish_product(self, product: Tensor, piece: Piece, reports: Any, factor_C: Tensor) -> None:
        """Turn ``E W`` [C, D], float32, into this rank's part of the hidden states' gradient."""
        if not self.width:
            product.zero_()
            return
        (row_C,) = of_piece(piece, self._row_GL)
        self.head.thin.finish_input_grad(
            product, product, self.head.weight_VD, row_C, reports.s, reports.rest, factor_C, self.shares
        )

    @cached_property
    def _row_GL(self) -> Tensor:
        """Rows of this rank's weight, any where the class is another rank's: nothing is added of them there."""
        return self.y_GL.where(self.y_GL < self.width, 0)
