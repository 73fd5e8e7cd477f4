"""Token statistics without a chunk's logits: a GEMM whose tiles write sums, and one that writes a gradient.

n rows, C rows of a chunk, D hidden size, V vocabulary, K targets a token. The kernels: `kernels.stats_logits`,
`kernels.stats_rows`, `kernels.stats_topk`.
"""

import torch
from torch import Tensor

from lowtide.head.call import Head
from lowtide.head.exponentials.losses import Exponentials, Piece
from lowtide.head.gradients import Gradients
from lowtide.head.kernels import stats_logits, stats_rows, stats_topk
from lowtide.head.kernels.exp_terms import finish_input_grad
from lowtide.head.kernels.gemm import gemm_tiles
from lowtide.head.kernels.stats_logits import Entries, Sums
from lowtide.head.kernels.stats_rows import RowStats
from lowtide.head.plan import HeadPlan
from lowtide.head.rows import Rows

# what each statistic needs of `stats_logits.tile_stats`
SUMS = {"entropy": "heat", "sum_sq_prob": "squares", "mean_logit": "total"}


class TileStatistics(Exponentials):
    """Statistics of each row's logits, in either direction.

    ``y_nK`` are int64 classes of the whole vocabulary; below 0 where ignored: forward returns that of class 0.
    """

    def __init__(self, head: Head, y_nK: Tensor, plan: HeadPlan, tokens: Rows) -> None:
        super().__init__(head, plan, tokens)
        self.y_nK = y_nK

    def forward(self, want: frozenset[str], topk: int) -> dict[str, Tensor]:
        """Return each row's "lse", "argmax", "top_logprob", "logprob" [n, K], and what is requested, float32.

        Classes are int64; with ``topk`` "topk_values" and "topk_ids" are [n, topk]. Of tokens that are not used all
        are 0.
        """
        n, rows, new = len(self.y_nK), self.plan.sum_rows, self.head.input.new_empty
        self.want, self.topk = [name for name in SUMS if name in want], topk
        asked = [SUMS[name] for name in self.want]
        self.sums = Sums.of(new(3 + len(asked), rows, self.tiles, dtype=torch.float32), asked)
        found = self._room(n)
        if topk:
            found |= {"topk_values": new(n, topk, dtype=torch.float32), "topk_ids": new(n, topk, dtype=torch.int64)}
        self._find(rows, self.y_nK.clamp(min=0).contiguous(), found)
        return found

    def _room(self, n: int) -> dict[str, Tensor]:
        """Return memory for the numbers of n rows."""
        new = self.head.input.new_empty if self.count is None else self.head.input.new_zeros
        found = {name: new(n, dtype=torch.float32) for name in ("lse", "top_logprob", *self.want)}
        found["argmax"] = new(n, dtype=torch.int64)
        return found | {"logprob": new(n, self.y_nK.shape[1], dtype=torch.float32)}

    def _find(self, rows: int, y_nK: Tensor, found: dict[str, Tensor]) -> None:
        """Write all rows' statistics, so many rows at a time."""
        for piece in self.chunks(rows):
            part = piece.part
            self._numbers_of(piece.x_CD, part, y_nK[part], {name: x[part] for name, x in found.items()})
            del piece  # before the next is made

    def _numbers_of(self, x_CD: Tensor, part: slice, y_CK: Tensor, found: dict[str, Tensor]) -> None:
        """Write a piece's statistics, of the classes here."""
        ranks, w_VD, used = self.head.ranks, self.weight_VD, self.used(part)
        gemm_tiles(stats_logits.tile_stats, x_CD, w_VD, None, self.sums, self.transform, self.config, used=used)
        out = RowStats(**{name: x for name, x in found.items() if name in RowStats._fields})
        stats_rows.merge_stats(
            self.sums, out, y_CK, x_CD, w_VD, transform=self.transform, first_class=ranks.first, vocab=ranks.vocab,
            used=used,
        )  # fmt: skip
        if self.topk:
            k = min(self.topk, self.width)
            values, ids = stats_topk.highest_logits(x_CD, w_VD, self.sums, self.config, k, self.transform)
            found["topk_values"][:, :k], found["topk_ids"][:, :k] = values, ids.add_(ranks.first)

    def gradients(self, known: dict[str, Tensor], upstream: dict[str, Tensor], into: Gradients) -> None:
        """Add the gradients, from what `forward` returned and upstream ones, that of "logprob" 0 where ignored."""
        C, device = self.plan.chunk_rows, self.head.input.device
        names = ["lse", "argmax", "top_logprob"]
        names += [name for name in ("entropy", "logprob") if name in upstream]
        self.known = RowStats(**{name: known[name].contiguous() for name in names})
        self.upstream = RowStats(**{name: x.float().contiguous() for name, x in upstream.items()})
        K = self.y_nK.shape[1] if "logprob" in upstream else 0
        self._targets = self.y_nK.int().contiguous() if K else None
        self.entries = Entries.empty(C, K, device, heat="entropy" in upstream, even="mean_logit" in upstream)
        if into.weight_VD is not None and not self.plan.chunks:
            into.weight_VD.zero_()
        self.recompute(into)

    def prepare(self, piece: Piece, scaled_CD: Tensor | None) -> Tensor:
        """See `Exponentials.prepare`."""
        part = piece.part
        stats_rows.prepare_stats(
            self.known.rows(part), self.upstream.rows(part), None if self._targets is None else self._targets[part],
            piece.x_CD, self.entries, self.head.ranks.vocab, transform=self.transform, scaled_CD=scaled_CD,
            used=self.used(part),
        )  # fmt: skip
        return self.entries.s

    def fill(self, piece: Piece, w_BD: Tensor, e_CB: Tensor, first_class: int) -> None:
        """See `Exponentials.fill`."""
        transform = self.transform.of_classes(slice(first_class, first_class + len(w_BD)))
        used = self.used(piece.part)
        gemm_tiles(stats_logits.gradient_tile, piece.x_CD, w_BD, e_CB, self.entries, transform, self.config, used=used)
        stats_rows.put_entries(e_CB, self.entries, self.head.ranks.first + first_class, used)

    def finish_input(self, piece: Piece, product_CD: Tensor, out: Tensor, to_C: Tensor | None) -> None:
        """See `Exponentials.finish_input`."""
        s, ids, rest, used = self.entries.s, self.entries.id[:, 1:], self.entries.rest, self.used(piece.part)
        finish_input_grad(product_CD, out, self.weight_VD, s, ids, rest, self.head.ranks.first, to_C=to_C, used=used)
