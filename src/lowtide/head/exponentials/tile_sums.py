"""Token statistics without a chunk's logits: a GEMM whose tiles write sums, and one that writes a gradient.

n rows, C rows of a chunk, D hidden size, V vocabulary, K targets a token. The kernels: `kernels.stats`.
"""

from typing import Any

import torch
from torch import Tensor

from lowtide.head.call import Gradients, Head
from lowtide.head.exponentials.losses import Exponentials, Piece
from lowtide.head.kernels import stats
from lowtide.head.kernels.exp_rows import finish_input_grad
from lowtide.head.kernels.gemm import gemm_tiles
from lowtide.head.plan import HeadPlan
from lowtide.head.rows import Rows
from lowtide.head.terms.statistics import Upstream, entries_of, sum_of_equal


class TileStatistics(Exponentials):
    """Statistics of each row's logits, in either direction.

    ``y_nK`` are int64 classes of the whole vocabulary; below 0 where ignored: forward returns that of class 0.
    """

    gradient: stats.Gradient

    def __init__(self, head: Head, y_nK: Tensor, plan: HeadPlan, tokens: Rows) -> None:
        super().__init__(head, plan, tokens)
        self.y_nK = y_nK

    def forward(self, want: frozenset[str], topk: int) -> dict[str, Tensor]:
        """Return each row's "lse", "argmax", "top_logprob", "logprob" [n, K], and what is requested, float32.

        Classes are int64; with ``topk`` "topk_values" and "topk_ids" are [n, topk]. Of tokens that are not used all
        are 0.
        """
        self.topk = topk
        self.want, rows = [name for name in stats.WANTED if name in want], min(self.plan.chunk_rows, self.plan.rows)
        self.sums = stats.Sums.of(self._new(3 + len(self.want), rows, self.tiles), self.want)
        found = self._room(len(self.y_nK)) | self._room_for_highest(len(self.y_nK))
        self._find(rows, self.y_nK.clamp(min=0).contiguous(), found)
        return found

    def _room(self, n: int) -> dict[str, Tensor]:
        """Return memory for the numbers of n rows."""
        new: Any = self.head.input.new_empty if self.count is None else self.head.input.new_zeros
        found = {name: new(n, dtype=torch.float32) for name in ("lse", "top_logprob", *self.want)}
        return found | {"argmax": new(n, dtype=torch.int64), "logprob": new(self.y_nK[:n].shape, dtype=torch.float32)}

    def _room_for_highest(self, n: int) -> dict[str, Tensor]:
        values = self._new(n, self.topk).fill_(-torch.inf)  # a rank may have fewer classes
        return {"topk_values": values, "topk_ids": self.y_nK.new_zeros(n, self.topk)} if self.topk else {}

    def _find(self, rows: int, y_nK: Tensor, found: dict[str, Tensor]) -> None:
        """Write all rows' statistics, so many rows at a time."""
        for piece in self.chunks(rows):
            part = piece.part
            self._numbers_of(piece.x_CD, part, y_nK[part], {name: x[part] for name, x in found.items()})
            del piece  # before the next is made

    def _numbers_of(self, x_CD: Tensor, part: slice, y_CK: Tensor, found: dict[str, Tensor]) -> None:
        """Write a piece's statistics, of the classes here."""
        w_VD, transform, used = self.weight_VD, self.transform, self.used(part)
        gemm_tiles(stats.tile_stats, x_CD, w_VD, None, self.sums, transform, used=used)
        numbers = stats.RowStats(**{name: x for name, x in found.items() if name in stats.RowStats._fields})
        stats.merge_stats(
            self.sums, numbers, y_CK, x_CD, w_VD, transform=transform,
            first_class=self.head.ranks.first, vocab=self.head.ranks.vocab, used=used,
        )  # fmt: skip

        if self.topk:
            k = min(self.topk, self.width)
            values, ids = stats.highest_logits(x_CD, w_VD, self.sums, k, transform)
            found["topk_values"][:, :k], found["topk_ids"][:, :k] = values, ids.add_(self.head.ranks.first)

    def gradients(self, known: dict[str, Tensor], g: Upstream, into: Gradients) -> None:
        """Add the gradients, from what `forward` returned and upstream ones, that of "logprob" 0 where ignored."""
        self.gradient = gradient_of(self.head, self.y_nK, known, g)
        self.recompute(into)

    def prepare(self, piece: Piece, scaled_CD: Tensor | None) -> Tensor:
        """See `Exponentials.prepare`."""
        piece.rows = self.gradient.rows(piece.part)
        s: Tensor = piece.rows.s
        if scaled_CD is not None:
            torch.mul(piece.x_CD, s[:, None], out=scaled_CD)
            scaled_CD.masked_fill_((s == 0)[:, None], 0)  # whatever x holds
        return s

    def fill(self, piece: Piece, w_BD: Tensor, e_CB: Tensor, first_class: int) -> None:
        """See `Exponentials.fill`."""
        transform = self.transform.of_classes(slice(first_class, first_class + len(w_BD)))
        used = self.used(piece.part)
        gemm_tiles(stats.gradient_tile, piece.x_CD, w_BD, e_CB, piece.rows, transform, used=used)
        stats.put_entries(e_CB, piece.rows, self.head.ranks.first + first_class, used)

    def finish_input(self, piece: Piece, product_CD: Tensor, out: Tensor, to_C: Tensor | None) -> None:
        """See `Exponentials.finish_input`."""
        of_row, used = piece.rows, self.used(piece.part)
        finish_input_grad(
            product_CD, out, self.weight_VD, of_row.s, of_row.id[:, 1:], of_row.rest, self.head.ranks.first, to_C=to_C,
            used=used,
        )  # fmt: skip


def gradient_of(head: Head, y_nK: Tensor, known: dict[str, Tensor], g: Upstream) -> stats.Gradient:
    """Return what the logits' gradient is made of, by known numbers and upstream gradients; y below 0: ignored.

    A row's is divided by a power of two s, and s x stands for x: narrow entries are then near 1.
    """
    largest, scale = g.largest(head.ranks.vocab), 1.0 if head.scale is None else head.scale
    largest = largest * (scale if head.scale is None else head.scale.abs())
    s = (largest.view(torch.int32) & -0x800000).view(torch.float32)  # the power of two below it
    s = s.where(largest < torch.inf, largest)
    share = scale / s.where(s != 0, 1)
    g = g.of(lambda x: x * (share[:, None] if x.dim() == 2 else share))
    ids, entry, slope = entries_of(y_nK, known["argmax"], known, g)
    even = None if g.mean_logit is None else g.mean_logit / head.ranks.vocab
    if even is not None:
        entry += even[:, None]
    if head.softcap is not None:
        logprobs = torch.cat((known["top_logprob"][:, None], known["logprob"]), 1)
        entry *= 1 - ((logprobs + known["lse"][:, None]) / head.softcap).square()
    ids = ids.masked_fill((s == 0)[:, None], -1).int()
    rounded = entry.to(head.dtype)
    rest = (entry - rounded)[:, 1:].where(ids[:, 1:] >= 0, 0)
    if rest.shape[1] > 1:  # a class that is there twice has it twice
        rest = rest / sum_of_equal(y_nK, y_nK, torch.ones_like(rest))
    return stats.Gradient(
        s, known["lse"].contiguous(), torch.zeros_like(s) + slope, g.entropy, even, ids, rounded, rest.contiguous()
    )
