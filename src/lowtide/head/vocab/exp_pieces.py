"""The exponential path on a part of the vocabulary: how chunks are cut in pieces, and what is fetched of each ahead.

Hidden states that are spread over the ranks, and the targets' logits, which the rank that has the class computes and
tells: of each piece they are on their way while the piece before is computed. C rows of a piece.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lowtide.head.exponentials.blocks import aligned_rows, slices
from lowtide.head.exponentials.path import ExpHead
from lowtide.head.head_plan import HeadPlan
from lowtide.head.ranks.exchange import Told
from lowtide.head.ranks.parallel import Ranks
from lowtide.head.rows import input_is_copied
from lowtide.head.schedules import CrossEntropyJob
from lowtide.head.vocab.products import chunks_of

ELSEWHERE = 2**30  # a class of no tile, and of no rank's weight


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Some rows of a chunk."""

    part: slice  # within each group of tokens
    at: slice  # within the chunk's rows
    opens: bool  # the chunk's first
    closes: bool  # and last


@dataclass(frozen=True, kw_only=True)
class Taken:
    """A piece's hidden states and classes, and its targets' logits, which are under way."""

    piece: Piece
    x_CD: Tensor
    y_C: Tensor
    targets: Callable[[], Tensor]  # waits on the device, and returns them [1 or 2, C]


def cut(ranks: Ranks, plan: HeadPlan, chunk_rows: int, piece_rows: int) -> list[Piece]:
    """Return the pieces of all chunks, in order."""
    found, groups = [], ranks.tokens.groups
    for chunk in chunks_of(ranks, replace(plan, chunk_rows=chunk_rows)):
        parts = list(slices(chunk.stop - chunk.start, max(1, piece_rows // groups)))
        found += [
            Piece(
                part=slice(chunk.start + part.start, chunk.start + part.stop),
                at=slice(part.start * groups, part.stop * groups),
                opens=part is parts[0],
                closes=part is parts[-1],
            )
            for part in parts
        ]
    return found


def of_piece(piece: Piece, *numbers_GL: Tensor) -> list[Tensor]:
    """Return a piece's of each of these."""
    return [x[:, piece.part].reshape(-1).contiguous() for x in numbers_GL]  # a column reshapes to a strided view


def inputs_of(ranks: Ranks, job: CrossEntropyJob, pieces: list[Piece]) -> Iterator[tuple[Piece, Tensor]]:
    """Yield each piece with its hidden states [C, D], as TMA takes them; the next one's are under way by then."""

    def begin(piece: Piece) -> Told:
        return ranks.tokens.begin_rows(job.input, piece.part, job.dtype)

    begun = [begin(piece) for piece in pieces[:1]]
    for i, piece in enumerate(pieces):
        begun += [begin(after) for after in pieces[i + 1 : i + 2]]
        yield piece, aligned_rows(begun.pop(0).get())


def _sum_of(told: Told) -> Tensor:
    return told.get().sum(0)


class Fetched:
    """What is told of the pieces before they are computed.

    Args:
        head: The kernels' call, on this rank's weight.
        ranks: The others.
        y_GL: As `ExpShard` has it.
    """

    def __init__(self, head: ExpHead, ranks: Ranks, y_GL: Tensor) -> None:
        self._head, self._ranks, self._y_GL = head, ranks, y_GL
        self._width = head.job.weight_VD.shape[0]
        self._numbers = 2 if head.terms.smoothing else 1  # of a row: with smoothing the weighted sum of all logits too

    def ahead(self, pieces: list[Piece]) -> Iterator[Taken]:
        """Yield the pieces, the next one's exchanges begun before each."""
        before = None
        for taken in self._in_order(pieces):
            if before is not None:
                yield before
            before = taken
        if before is not None:
            yield before

    def _in_order(self, pieces: list[Piece]) -> Iterator[Taken]:
        job, ranks = self._head.job, self._ranks
        if ranks.spread:  # each rank's are known where its hidden states are gathered, a piece at a time
            for piece, x_CD in inputs_of(ranks, job, pieces):
                (y_C,) = of_piece(piece, self._y_GL)
                told = self._begin_targets([(x_CD, y_C)])
                yield Taken(piece=piece, x_CD=x_CD, y_C=y_C, targets=partial(_sum_of, told))
            return
        at_once = not input_is_copied(job.input, job.dtype)
        whole = Piece(part=slice(0, ranks.tokens.length), at=slice(0, 0), opens=True, closes=True)
        told = self._begin_targets(
            (x_CD, of_piece(piece, self._y_GL)[0])
            for piece, x_CD in inputs_of(ranks, job, [whole] if at_once and pieces else pieces)
        )
        of_all = _sum_of(told)
        for piece, x_CD in inputs_of(ranks, job, pieces):
            (y_C,) = of_piece(piece, self._y_GL)
            yield Taken(piece=piece, x_CD=x_CD, y_C=y_C, targets=partial(of_all.narrow, 1, piece.part.start, len(y_C)))

    def _begin_targets(self, rows: Any) -> Told:
        """Begin to tell the logits of the targets that are here, and with smoothing the weighted sums of all."""
        found = [self._target_logits(x_CD, y_C) for x_CD, y_C in rows]
        nothing = torch.zeros(self._numbers, 0, dtype=torch.float32, device=self._y_GL.device)
        return self._ranks.begin_gather(torch.cat(found, 1) if len(found) > 1 else (found or [nothing])[0])

    def _target_logits(self, x_CD: Tensor, y_C: Tensor) -> Tensor:
        head, C, smoothing = self._head, len(y_C), self._numbers > 1
        make = torch.empty if self._width else torch.zeros
        number = make(self._numbers, C, dtype=torch.float32, device=x_CD.device)
        if self._width and C:
            nothing = torch.empty(max(1, C), dtype=torch.int32, device=x_CD.device)
            reports = head.thin.Reports(
                target_logit=number[0], uniform_logit=number[-1], loss=number[0], lse=number[0], miss=number[0],
                s=number[0], rest=number[0], highest=nothing, listed=nothing, count=nothing,
            )  # fmt: skip
            own_row = y_C.where(y_C < self._width, 0 if smoothing else -1)
            head.thin.target_logits(x_CD, head.weight_VD, own_row, reports, head.terms)
            if smoothing:
                number[0].masked_fill_(y_C >= self._width, 0)
        return number
