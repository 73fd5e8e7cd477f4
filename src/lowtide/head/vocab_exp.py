"""The exponential path where each rank holds a part of the vocabulary: the GEMMs of `exp_path` on V_r classes.

A chunk: the target's logit, known to the rank that has it, is told to all; E = exp(z - t) and its sums; the sums are
told to all; from then on each rank goes on by itself. Rows whose sum left the safe range have their logsumexp told
once more, in numbers that are exchanged for every row, since no host knows which rows these are.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lowtide.head.exp_blocks import aligned_rows, matmul_into, slices
from lowtide.head.exp_path import ExpHead
from lowtide.head.head_plan import HeadPlan, padded
from lowtide.head.schedules import CrossEntropyJob, Gradients, Rows, rows_are_aligned
from lowtide.head.vocab_parallel import Ranks, Reduced, chunks_of

ELSEWHERE = 2**30  # a class of no tile


class ShardedExp:
    """One call, in either direction: what all its chunks share.

    Args:
        job: The call, on this rank's weight.
        plan: Chunks and blocks, the same on every rank.
        ranks: The others.
        own_GL: Each token's class weight, or None.
        total: Sum of all class weights, or None.
    """

    def __init__(
        self, job: CrossEntropyJob, plan: HeadPlan, ranks: Ranks, own_GL: Tensor | None, total: Tensor | None
    ) -> None:
        from lowtide.head.kernels import exp_shard

        if job.weight_VD.dtype == job.dtype and not rows_are_aligned(job.weight_VD):
            job = replace(job, weight_VD=job.weight_VD.clone(memory_format=torch.contiguous_format))
        nothing = job.input.new_empty(0, dtype=torch.int32)
        self.head = ExpHead(job, Rows(index=None, kept=None, target=nothing, unit=nothing), plan)
        self.job, self.plan, self.ranks, self.own_GL = job, plan, ranks, own_GL
        self.thin, self.V, self.width = exp_shard, ranks.shard.vocab, job.weight_VD.shape[0]
        self.terms = replace(self.head.terms, total_class_weight=total)
        # where a share of smoothing is divided by the classes that are here, so that it is one of all
        self.shares = replace(self.terms, smoothing=self.terms.smoothing * self.width / self.V)

    def run(self, y_GL: Tensor, kept_GL: Tensor, factor_GL: Tensor | None, into: Gradients) -> Tensor:
        """Return each row's loss, logsumexp and that minus the target's logit [3, groups, length].

        With a factor also the gradients: from the same E, or from one built once more, as the plan says.

        Args:
            y_GL: Row of this rank's weight, its number of rows where another rank has the class.
            kept_GL: Which tokens count.
            factor_GL: What each row's loss is multiplied with on its way to the gradients, or None.
            into: Takes the gradients.
        """
        job, plan = self.job, self.plan
        found = torch.zeros(3, *y_GL.shape, dtype=torch.float32, device=job.input.device)
        at_once = factor_GL is not None and plan.schedule == "chunks"
        rows = plan.chunk_rows if at_once else plan.sum_rows
        chunks = chunks_of(self.ranks, replace(plan, chunk_rows=rows))
        buffer = job.input.new_empty(_most(chunks, self.ranks) if at_once else 0, padded(self.width), dtype=job.dtype)
        begun = at_once and factor_GL is not None and self._begin(y_GL, kept_GL, factor_GL, into, chunks)
        for part in chunks:
            x_CD, y_C, kept_C = self._rows(y_GL, kept_GL, part)
            factor_C = factor_GL[:, part].reshape(-1) if at_once and factor_GL is not None else None
            e_CV = None if factor_C is None else buffer[: len(y_C), : self.width]
            scaled = None if factor_C is None or into.weight_VD is None else torch.empty_like(x_CD).contiguous()
            reports = self._losses(x_CD, y_C, kept_C, factor_C, e_CV, scaled, part)
            found[:, :, part] = torch.stack((reports.loss, reports.lse, reports.miss)).view(3, y_GL.shape[0], -1)
            if factor_C is None or e_CV is None:
                continue
            product = self._product(into, x_CD)
            reduced = None
            if product is not None:
                if self.width:
                    matmul_into(e_CV, self.head.weight_VD, product, add=False)
                reduced = self._reduced(product, y_C, reports.s, reports.rest, factor_C)
            if scaled is not None and into.weight_VD is not None and self.width:
                matmul_into(e_CV.t(), scaled, into.weight_VD, add=begun)
            if into.bias_V is not None and self.width:
                self.head.thin.add_column_sums(e_CV, reports.s, into.bias_V)
            if reduced is not None and into.input_ND is not None:
                reduced.write(into.input_ND, part.start)
            begun = True
        if factor_GL is not None and not at_once:
            self.rebuild(y_GL, kept_GL, factor_GL, found[1], found[2], into)
        return found

    def rebuild(
        self, y_GL: Tensor, kept_GL: Tensor, factor_GL: Tensor, lse_GL: Tensor, miss_GL: Tensor, into: Gradients
    ) -> None:
        """Compute the gradients from what `run` found: E once more, a block of this rank's classes at a time."""
        job, head, plan = self.job, self.head, self.plan
        chunks = chunks_of(self.ranks, plan)
        most = _most(chunks, self.ranks)
        buffer = job.input.new_empty(most, padded(plan.block_columns), dtype=job.dtype)
        begun = self._begin(y_GL, kept_GL, factor_GL, into, chunks)
        for part in chunks:
            x_CD, y_C, _ = self._rows(y_GL, kept_GL, part)
            factor_C, lse_C, miss_C = (x[:, part].reshape(-1) for x in (factor_GL, lse_GL, miss_GL))
            scaled = None if into.weight_VD is None else torch.empty_like(x_CD).contiguous()
            reports = self._reports(len(y_C))
            reference_C, coefficient_C = torch.empty_like(lse_C), torch.empty_like(lse_C)
            row_C = torch.arange(len(y_C), dtype=torch.int32, device=y_C.device).where(y_C >= 0, -1)
            own_C = None if self.own_GL is None else self.own_GL[:, part].reshape(-1).contiguous()
            head.thin.prepare_rows(
                lse_C, miss_C, x_CD, row_C, factor_C, reference_C, coefficient_C, reports,
                replace(self.terms, class_weight_V=own_C), self.V, scaled_CD=scaled,
            )  # fmt: skip
            reports.rest.masked_fill_(y_C >= self.width, 0)
            product = self._product(into, x_CD)
            for block in slices(self.width, plan.block_columns):
                w_BD, e_CB = head.weight_VD[block], buffer[: len(y_C), : block.stop - block.start]
                head._exponentials(
                    x_CD, w_BD, reference_C, y_C, e_CV=e_CB, coefficient_C=coefficient_C, first_class=block.start
                )
                if product is not None:
                    matmul_into(e_CB, w_BD, product, add=block.start > 0)
                if scaled is not None and into.weight_VD is not None:
                    matmul_into(e_CB.t(), scaled, into.weight_VD[block], add=begun)
                if into.bias_V is not None:
                    head.thin.add_column_sums(e_CB, reports.s, into.bias_V[block])
            if product is not None and into.input_ND is not None:
                reduced = self._reduced(product, y_C, reports.s, reports.rest, factor_C)
                reduced.write(into.input_ND, part.start)
            begun = True

    def _losses(
        self,
        x_CD: Tensor,
        y_C: Tensor,
        kept_C: Tensor,
        factor_C: Tensor | None,
        e_CV: Tensor | None,
        scaled: Tensor | None,
        part: slice,
    ) -> Any:
        """Build E and its sums, and exchange what makes losses of them."""
        head, ranks, terms = self.head, self.ranks, self.terms
        here_C = (y_C >= 0) & (y_C < self.width)
        reports = self._reports(len(y_C))
        own_C = None if self.own_GL is None else self.own_GL[:, part].reshape(-1).contiguous()
        sums = torch.zeros(len(y_C), max(1, head.tiles), dtype=torch.float32, device=x_CD.device)
        if self.width:
            own_row = y_C.where(here_C | ~kept_C, 0)  # that of another rank's class is not read
            head.thin.target_logits(x_CD, head.weight_VD, own_row, reports, head.terms)
        pieces = [reports.target_logit.where(here_C, 0)]
        if terms.smoothing:
            pieces.append(reports.uniform_logit)
        told = ranks.sum_of(torch.stack(pieces))
        reports.target_logit.copy_(told[0])
        if terms.smoothing:
            reports.uniform_logit.copy_(told[1])
        if self.width:
            head._exponentials(x_CD, head.weight_VD, reports.target_logit, y_C, sum_CP=sums, e_CV=e_CV)
        again_C = torch.empty_like(y_C)

        def finish(sum_C: Tensor, *, shifted: bool) -> None:
            self.thin.finish_shard_rows(
                sum_C.contiguous(), x_CD, y_C, factor_C, reports, again_C, own_C, terms, self.V, self.width,
                e_CV=e_CV, scaled_CD=scaled, shifted=shifted,
            )  # fmt: skip

        finish(ranks.sum_of(sums.sum(1)), shifted=False)
        others = torch.full_like(reports.loss, -torch.inf)
        if self.width:
            self._shifted(x_CD, y_C, reports, sums, None, find_highest=(True, False))
            from_highest = _from_ordered(reports.highest) + sums.sum(1).log()
            others = from_highest.where(again_C != 0, -torch.inf)
        others = ranks.logsumexp_of(others)
        if e_CV is not None and self.width:
            reports.highest.copy_(_to_ordered(torch.logaddexp(others, reports.target_logit)))
            self._shifted(x_CD, y_C, reports, sums, e_CV, find_highest=(False,))
        finish(others, shifted=True)
        return reports

    def _shifted(
        self, x_CD: Tensor, y_C: Tensor, reports: Any, sums: Tensor, e_CV: Tensor | None, find_highest: tuple[bool, ...]
    ) -> None:
        head, terms = self.head, self.terms
        head.gemm.shifted_exp_logits(
            x_CD, head.weight_VD, reports.listed, reports.count, reports.highest, y_C, head.config, head.programs,
            sum_CP=sums, bias_V=terms.bias_V, scale=terms.scale, softcap=terms.softcap, e_CV=e_CV,
            find_highest=find_highest,
        )  # fmt: skip

    def _reduced(self, product: Tensor, y_C: Tensor, s_C: Tensor, rest_C: Tensor, factor_C: Tensor) -> Reduced:
        """Turn ``E W`` into this rank's part of the hidden states' gradient, and begin to add up all ranks'."""
        if self.width:
            own_row = y_C.where(y_C < self.width, 0)  # where the rest is 0
            self.head.thin.finish_input_grad(
                product, product, self.head.weight_VD, own_row, s_C, rest_C, factor_C, self.shares
            )
        return self.ranks.tokens.reduce(product)

    def _begin(self, y_GL: Tensor, kept_GL: Tensor, factor_GL: Tensor, into: Gradients, chunks: list[slice]) -> bool:
        """Put smoothing's part, the same for every row of logits, into the weight's and the bias's gradient."""
        from lowtide.head.exp_path import put_even_part

        if not self.terms.smoothing or not chunks or not self.width:
            return False
        mean_D = torch.zeros(self.job.weight_VD.shape[1], dtype=torch.float32, device=factor_GL.device)
        if into.weight_VD is not None:
            for part in chunks:
                x_CD, _, kept_C = self._rows(y_GL, kept_GL, part)
                factor_C = factor_GL[:, part].reshape(-1).where(kept_C, 0)
                self.head.thin.add_column_sums(x_CD, factor_C, mean_D)
        put_even_part(self.shares, self.width, factor_GL.where(kept_GL, 0).sum(), mean_D, into, self.job.dtype)
        return into.weight_VD is not None

    def _rows(self, y_GL: Tensor, kept_GL: Tensor, part: slice) -> tuple[Tensor, Tensor, Tensor]:
        """Return a chunk's hidden states, 0 where ignored, its classes for the kernels, and which rows count."""
        kept_C, y_C = kept_GL[:, part].reshape(-1), y_GL[:, part].reshape(-1)
        x_CD = self.ranks.tokens.rows(self.job.input, part, self.job.dtype).where(kept_C[:, None], 0)
        return aligned_rows(x_CD), y_C.where(y_C < self.width, ELSEWHERE).where(kept_C, -1).int(), kept_C

    def _product(self, into: Gradients, x_CD: Tensor) -> Tensor | None:
        if into.input_ND is None:
            return None
        make = torch.empty if self.width else torch.zeros
        return make(x_CD.shape, dtype=torch.float32, device=x_CD.device)

    def _reports(self, C: int) -> Any:
        number = torch.zeros(7, C, dtype=torch.float32, device=self.job.input.device)
        integer = torch.zeros(3, max(1, C), dtype=torch.int32, device=self.job.input.device)
        return self.head.thin.Reports(
            target_logit=number[0], uniform_logit=number[1], loss=number[2], lse=number[3], miss=number[4],
            s=number[5], rest=number[6], highest=integer[0], listed=integer[1], count=integer[2, :1],
        )  # fmt: skip


def _most(chunks: list[slice], ranks: Ranks) -> int:
    """Return the rows of the longest chunk."""
    return (chunks[0].stop - chunks[0].start) * ranks.tokens.groups if chunks else 0


def _to_ordered(x: Tensor) -> Tensor:
    """As the kernels' function of this name."""
    i = x.view(torch.int32)
    return torch.where(i < 0, i ^ 0x7FFFFFFF, i)


def _from_ordered(i: Tensor) -> Tensor:
    return torch.where(i < 0, i ^ 0x7FFFFFFF, i).view(torch.float32)
