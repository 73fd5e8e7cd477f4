"""The exponential path where each rank holds a part of the vocabulary: the GEMMs of `exponentials/path` on V_r classes.

The targets' logits are known to the ranks that have them, and told to all once. A chunk is cut in pieces. Of each
piece E = exp(z - t) is built, and its sums, a few numbers a row, begin their way to all; what the exchange takes is
hidden behind the products of its neighbours. When all pieces are finished, the chunk's part of the hidden states'
gradient begins to be added up over the ranks, and the weight's product runs beside that. No exchange is waited for by
the host, and none depends on numbers.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lowtide.head.exponentials.blocks import aligned_rows, matmul_into, slices
from lowtide.head.exponentials.path import ExpHead, put_even_part
from lowtide.head.head_plan import HeadPlan, padded
from lowtide.head.schedules import CrossEntropyJob, Gradients, Rows, input_is_copied, rows_are_aligned
from lowtide.head.vocab.exchange import Reduced, Told
from lowtide.head.vocab.parallel import Ranks
from lowtide.head.vocab.products import chunks_of

ELSEWHERE = 2**30  # a class of no tile, and of no rank's weight


@dataclass(frozen=True, kw_only=True)
class _Piece:
    """Some rows of a chunk."""

    part: slice  # within each group of tokens
    at: slice  # within the chunk's rows
    opens: bool  # the chunk's first
    closes: bool  # and last


@dataclass(frozen=True, kw_only=True)
class _Taken:
    """A piece's hidden states and classes, and its targets' logits, which are under way."""

    piece: _Piece
    x_CD: Tensor
    y_C: Tensor
    targets: Told  # [W, 1 or 2, C], or the sum of these


@dataclass(frozen=True, kw_only=True)
class _Summed:
    """A piece whose E is built, and whose sums are under way."""

    taken: _Taken
    reports: Any
    told: Told  # [W, 2, C]


class ShardedExp:
    """One call, in either direction: what all its chunks share.

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

    def run(self, factor: Callable[[], Tensor] | None, into: Gradients, *, others_train: bool) -> Tensor:
        """Return each row's loss, logsumexp and that minus the target's logit [3, groups, length].

        With a factor also the gradients: from the same E, or from one built once more, as the plan says.

        Args:
            factor: Makes what each row's loss is multiplied with on its way to the gradients, or None. It is called
                when the first GEMM is under way: the host should not keep the device waiting.
            into: Takes the gradients.
            others_train: Whether other ranks may have a factor where this one has none.
        """
        found = torch.empty(3, *self.y_GL.shape, dtype=torch.float32, device=self.y_GL.device)
        plan, in_chunks = self.plan, self.plan.schedule == "chunks"
        if factor is not None and in_chunks:
            _Products(self, factor, into, found).run()
            return found
        # the same on every rank, also where others compute gradients and this one does not
        sizes = (plan.chunk_rows, plan.product_rows) if in_chunks else (plan.sum_rows, plan.sum_rows)
        pieces = self._pieces(*sizes)
        if factor is None and others_train and in_chunks and self.terms.smoothing:
            self._help_gather(pieces)
        before: _Summed | None = None
        for taken in self._ahead(pieces):
            summed = self.sum(taken, found, None, None)
            if before is not None:
                self.finish(before, found)
            before = summed
        if before is not None:
            self.finish(before, found)
        if factor is not None:
            self.rebuild(factor(), found[1], found[2], into)
        elif others_train and not in_chunks:
            pieces = self._pieces(plan.chunk_rows, plan.chunk_rows)
            for _ in range(2 if self.terms.smoothing else 1):
                self._help_gather(pieces)
        return found

    def _help_gather(self, pieces: list[_Piece]) -> None:
        """Gather hidden states once, as ranks do that compute gradients: this one has no use for them."""
        if self.ranks.spread:
            for _ in self._inputs(pieces):
                pass

    def rebuild(self, factor_GL: Tensor, lse_GL: Tensor, miss_GL: Tensor, into: Gradients) -> None:
        """Compute the gradients from what `run` found: E once more, a block of this rank's classes at a time."""
        head, plan = self.head, self.plan
        pieces = self._pieces(plan.chunk_rows, plan.chunk_rows)
        buffer = self._e_buffer(pieces, plan.block_columns)
        begun = self.begin(factor_GL, into, pieces)
        under_way: tuple[Reduced, int] | None = None
        for piece, x_CD in self._inputs(pieces):
            factor_C, lse_C, miss_C, y_C = self.of(piece, factor_GL, lse_GL, miss_GL, self.y_GL)
            own_C = None if self.own_GL is None else self.of(piece, self.own_GL)[0]
            scaled = None if into.weight_VD is None else torch.empty_like(x_CD).contiguous()
            reports = self.reports(piece, None, None, None)
            reference_C, coefficient_C = torch.empty_like(lse_C), torch.empty_like(lse_C)
            row_C = torch.arange(len(y_C), dtype=torch.int32, device=y_C.device).where(y_C >= 0, -1)
            head.thin.prepare_rows(
                lse_C, miss_C, x_CD, row_C, factor_C, reference_C, coefficient_C, reports,
                replace(self.terms, class_weight_V=own_C), self.V, scaled_CD=scaled,
            )  # fmt: skip
            reports.rest.masked_fill_(y_C >= self.width, 0)
            product = None if into.input_ND is None else lse_C.new_empty(x_CD.shape)
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
                if under_way is not None:  # it had all of this chunk's products to run beside
                    under_way[0].write(into.input_ND, under_way[1])
                self.finish_product(product, piece, reports, factor_C)
                under_way = self.tokens.reduce(product), piece.part.start
            begun = True
        if under_way is not None and into.input_ND is not None:
            under_way[0].write(into.input_ND, under_way[1])

    def _pieces(self, chunk_rows: int, piece_rows: int) -> list[_Piece]:
        """Return the pieces of all chunks, in order."""
        found, groups = [], self.tokens.groups
        for chunk in chunks_of(self.ranks, replace(self.plan, chunk_rows=chunk_rows)):
            parts = list(slices(chunk.stop - chunk.start, max(1, piece_rows // groups)))
            found += [
                _Piece(
                    part=slice(chunk.start + part.start, chunk.start + part.stop),
                    at=slice(part.start * groups, part.stop * groups),
                    opens=part is parts[0],
                    closes=part is parts[-1],
                )
                for part in parts
            ]
        return found

    def _e_buffer(self, pieces: list[_Piece], columns: int) -> Tensor:
        """Return memory for E of the longest chunk."""
        rows = max((piece.at.stop for piece in pieces), default=0)
        return self.job.input.new_empty(rows, padded(columns), dtype=self.job.dtype)

    def _inputs(self, pieces: list[_Piece]) -> Iterator[tuple[_Piece, Tensor]]:
        """Yield each piece with its hidden states [C, D], as TMA takes them; the next one's are under way by then."""
        begun = [self._begin_rows(piece) for piece in pieces[:1]]
        for i, piece in enumerate(pieces):
            begun += [self._begin_rows(after) for after in pieces[i + 1 : i + 2]]
            yield piece, aligned_rows(begun.pop(0).get())

    def _begin_rows(self, piece: _Piece) -> Told:
        return self.tokens.begin_rows(self.job.input, piece.part, self.job.dtype)

    def _taken(self, pieces: list[_Piece]) -> Iterator[_Taken]:
        if self.ranks.spread:  # each rank's are known where its hidden states are gathered, a piece at a time
            for piece, x_CD in self._inputs(pieces):
                (y_C,) = self.of(piece, self.y_GL)
                yield _Taken(piece=piece, x_CD=x_CD, y_C=y_C, targets=self._begin_targets([(x_CD, y_C)]))
            return
        at_once = not input_is_copied(self.job.input, self.job.dtype)
        whole = _Piece(part=slice(0, self.tokens.length), at=slice(0, 0), opens=True, closes=True)
        told = self._begin_targets(
            (x_CD, self.of(piece, self.y_GL)[0])
            for piece, x_CD in self._inputs([whole] if at_once and pieces else pieces)
        )
        of_all = told.get().sum(0)
        for piece, x_CD in self._inputs(pieces):
            (y_C,) = self.of(piece, self.y_GL)
            yield _Taken(piece=piece, x_CD=x_CD, y_C=y_C, targets=Told(of_all[None, :, piece.part], None))

    def _ahead(self, pieces: list[_Piece]) -> Iterator[_Taken]:
        """Yield the pieces, the next one's exchanges begun before each."""
        before = None
        for taken in self._taken(pieces):
            if before is not None:
                yield before
            before = taken
        if before is not None:
            yield before

    def _begin_targets(self, rows: Any) -> Told:
        """Begin to tell the logits of the targets that are here, and with smoothing the weighted sums of all."""
        found = [self._target_logits(x_CD, y_C) for x_CD, y_C in rows]
        numbers = 2 if self.terms.smoothing else 1
        nothing = torch.zeros(numbers, 0, dtype=torch.float32, device=self.y_GL.device)
        return self.ranks.begin_gather(torch.cat(found, 1) if len(found) > 1 else (found or [nothing])[0])

    def _target_logits(self, x_CD: Tensor, y_C: Tensor) -> Tensor:
        head, C = self.head, len(y_C)
        make = torch.empty if self.width else torch.zeros
        number = make(2 if self.terms.smoothing else 1, C, dtype=torch.float32, device=x_CD.device)
        if self.width and C:
            nothing = torch.empty(max(1, C), dtype=torch.int32, device=x_CD.device)
            reports = head.thin.Reports(
                target_logit=number[0], uniform_logit=number[-1], loss=number[0], lse=number[0], miss=number[0],
                s=number[0], rest=number[0], highest=nothing, listed=nothing, count=nothing,
            )  # fmt: skip
            own_row = y_C.where(y_C < self.width, 0 if self.terms.smoothing else -1)
            head.thin.target_logits(x_CD, head.weight_VD, own_row, reports, head.terms)
            if self.terms.smoothing:
                number[0].masked_fill_(y_C >= self.width, 0)
        return number

    def of(self, piece: _Piece, *numbers_GL: Tensor) -> list[Tensor]:
        """Return a piece's of each of these."""
        return [x[:, piece.part].reshape(-1).contiguous() for x in numbers_GL]  # a column reshapes to a strided view

    def reports(self, piece: _Piece, found: Tensor | None, logits: Tensor | None, s_C: Tensor | None) -> Any:
        """Return memory for what is known of each of a piece's rows: of what is known already, that itself.

        Args:
            piece: The piece.
            found: Takes losses, logsumexps and misses, where its rows lie there as here.
            logits: The targets', and with smoothing the weighted sums of all.
            s_C: Takes s.
        """
        C, device = piece.at.stop - piece.at.start, self.y_GL.device
        number = torch.empty(7, C, dtype=torch.float32, device=device)
        integer = torch.zeros(2, max(1, C) + 1, dtype=torch.int32, device=device)
        loss = number[:3] if found is None or self.tokens.groups > 1 else found[:, 0, piece.part]
        logits = number[3:5] if logits is None else logits
        return self.head.thin.Reports(
            loss=loss[0], lse=loss[1], miss=loss[2], target_logit=logits[0], uniform_logit=logits[-1],
            s=number[5] if s_C is None else s_C, rest=number[6], highest=integer[0], listed=integer[1, :-1],
            count=integer[1, -1:],
        )  # fmt: skip

    def sum(self, taken: _Taken, found: Tensor, e_CV: Tensor | None, s_C: Tensor | None) -> _Summed:
        """Build a piece's E, or its sums alone, and begin to tell them."""
        head, x_CD, y_C = self.head, taken.x_CD, taken.y_C
        reports = self.reports(taken.piece, found, taken.targets.get().sum(0), s_C)
        told = torch.empty(2, len(y_C), dtype=torch.float32, device=x_CD.device)
        if self.width:
            sums = torch.empty(len(y_C), head.tiles, dtype=torch.float32, device=x_CD.device)
            head._exponentials(x_CD, head.weight_VD, reports.target_logit, y_C, sum_CP=sums, e_CV=e_CV)
            self.thin.sum_shard_rows(sums, head.tiles, y_C, reports, told, e_CV=e_CV)
            self._shifted(taken, reports, sums, None, find_highest=(True, False))
            self.thin.sum_shard_rows(sums, head.tiles, y_C, reports, told, shifted=True)
        else:
            told[0], told[1] = 0, -torch.inf
        return _Summed(taken=taken, reports=reports, told=self.ranks.begin_gather(told))

    def finish(
        self,
        summed: _Summed,
        found: Tensor,
        factor_C: Tensor | None = None,
        e_CV: Tensor | None = None,
        scaled_CD: Tensor | None = None,
    ) -> None:
        """Turn all ranks' sums into losses and, with a factor, finish E and s x."""
        taken, reports, told = summed.taken, summed.reports, summed.told.get()
        part = taken.piece.part
        own_C = None if self.own_GL is None else self.of(taken.piece, self.own_GL)[0]
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
        self, taken: _Taken, reports: Any, sums: Tensor, e_CV: Tensor | None, find_highest: tuple[bool, ...]
    ) -> None:
        head, terms = self.head, self.terms
        head.gemm.shifted_exp_logits(
            taken.x_CD, head.weight_VD, reports.listed, reports.count, reports.highest, taken.y_C, head.config,
            head.programs, sum_CP=sums, bias_V=terms.bias_V, scale=terms.scale, softcap=terms.softcap, e_CV=e_CV,
            find_highest=find_highest,
        )  # fmt: skip

    def finish_product(self, product: Tensor, piece: _Piece, reports: Any, factor_C: Tensor) -> None:
        """Turn ``E W`` [C, D], float32, into this rank's part of the hidden states' gradient."""
        if not self.width:
            product.zero_()
            return
        (row_C,) = self.of(piece, self._row_GL)
        self.head.thin.finish_input_grad(
            product, product, self.head.weight_VD, row_C, reports.s, reports.rest, factor_C, self.shares
        )

    @cached_property
    def _row_GL(self) -> Tensor:
        """Rows of this rank's weight, any where the class is another rank's: nothing is added of them there."""
        return self.y_GL.where(self.y_GL < self.width, 0)

    def begin(self, factor_GL: Tensor, into: Gradients, pieces: list[_Piece]) -> bool:
        """Put smoothing's part, the same for every row of logits, into the weight's and the bias's gradient.

        Returns:
            bool: Whether the weight's gradient holds something to be added to.
        """
        if not self.terms.smoothing or not pieces:
            return False
        factor_GL = factor_GL.where(self.kept_GL, 0)
        mean_D = torch.zeros(self.job.weight_VD.shape[1], dtype=torch.float32, device=factor_GL.device)
        # where hidden states are gathered, all take part, also a rank whose weight is frozen
        read = self.ranks.spread or into.weight_VD is not None
        for piece, x_CD in self._inputs(pieces if read else []):
            self.head.thin.add_column_sums(x_CD, self.of(piece, factor_GL)[0], mean_D)
        if self.width:
            put_even_part(self.shares, self.width, factor_GL.sum(), mean_D, into, self.job.dtype)
        return into.weight_VD is not None


class _Products:
    """The gradients from the E that the sums are taken of: three GEMMs a chunk."""

    def __init__(self, exp: ShardedExp, factor: Callable[[], Tensor], into: Gradients, found: Tensor) -> None:
        self.exp, self._factor, self.into, self.found = exp, factor, into, found
        self.pieces = exp._pieces(exp.plan.chunk_rows, exp.plan.product_rows)
        self.e_buffer = exp._e_buffer(self.pieces, exp.width)
        rows, D = len(self.e_buffer), exp.job.weight_VD.shape[1]
        self.s_C = torch.empty(rows, dtype=torch.float32, device=self.e_buffer.device)
        self.scaled = None if into.weight_VD is None else self.e_buffer.new_empty(rows, D)
        # E W, summed over the ranks before it is rounded
        self.product = None if into.input_ND is None else self.s_C.new_empty(rows, D)
        self.open: list[_Piece] = []

    @cached_property
    def factor_GL(self) -> Tensor:
        """What each row's loss is multiplied with."""
        return self._factor()

    def run(self) -> None:
        """Go through all pieces: each is finished when the next one's E is built, or its chunk ends."""
        exp = self.exp
        self.begun = exp.terms.smoothing != 0 and exp.begin(self.factor_GL, self.into, self.pieces)
        before: _Summed | None = None
        for taken in exp._ahead(self.pieces):
            if before is not None and taken.piece.opens:
                self._finish(before)
                before = None
            rows = taken.piece.at
            summed = exp.sum(taken, self.found, self._e(rows), self.s_C[rows])
            if before is not None:
                self._finish(before)
            before = summed
        if before is not None:
            self._finish(before)

    def _e(self, rows: slice) -> Tensor | None:
        return self.e_buffer[rows, : self.exp.width] if self.exp.width else None

    def _finish(self, summed: _Summed) -> None:
        exp, taken = self.exp, summed.taken
        piece, e_CV = taken.piece, self._e(taken.piece.at)
        (factor_C,) = exp.of(piece, self.factor_GL)
        exp.finish(summed, self.found, factor_C, e_CV, None if self.scaled is None else self.scaled[piece.at])
        if self.product is not None:
            product = self.product[piece.at]
            if e_CV is not None:
                matmul_into(e_CV, exp.head.weight_VD, product, add=False)
            exp.finish_product(product, piece, summed.reports, factor_C)
        self.open.append(piece)
        if piece.closes:
            self._close(piece.at.stop)

    def _close(self, rows: int) -> None:
        """End a chunk: the weight's product while the input's is being summed, and then what that came to."""
        exp, into, e_CV = self.exp, self.into, self._e(slice(0, rows))
        summed: list[tuple[Reduced, int]] = []
        if self.product is not None:
            first = self.open[0].part.start
            if exp.tokens.groups == 1:  # the rows of all pieces lie one after another
                summed = [(exp.tokens.reduce(self.product[:rows]), first)]
            else:
                summed = [(exp.tokens.reduce(self.product[piece.at]), piece.part.start) for piece in self.open]
        if e_CV is not None and self.scaled is not None and into.weight_VD is not None:
            matmul_into(e_CV.t(), self.scaled[:rows], into.weight_VD, add=self.begun)
        if e_CV is not None and into.bias_V is not None:
            exp.head.thin.add_column_sums(e_CV, self.s_C[:rows], into.bias_V)
        for reduced, start in summed:
            if into.input_ND is not None:
                reduced.write(into.input_ND, start)
        self.open, self.begun = [], True
