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

SUMS = {"entropy": "heat", "sum_sq_prob": "squares", "mean": "total"}  # what each needs of `stats_logits.tile_stats`


class TileStatistics(Exponentials):
    """Statistics of each row's logits, in either direction.

    ``y_nK`` are int64 classes of the whole vocabulary; below 0 where ignored: forward returns that of class 0.
    """

    def __init__(self, head: Head, y_nK: Tensor, plan: HeadPlan, tokens: Rows) -> None:
        super().__init__(head, plan, tokens)
        self.y_nK = y_nK

    def forward(self, want: frozenset[str], topk: int) -> dict[str, Tensor]:
        """Return each row's "lse", "top", "top_logprob", "logprob" [n, K], and what is requested, float32.

        Classes are int64; with ``topk`` "topk_values" and "topk_ids" are [n, topk]. Of tokens that are not used all
        are 0.
        """
        (n, K), rows, new = self.y_nK.shape, self.plan.sum_rows, self.head.input.new_empty
        wide = [name for name in SUMS if name in want]
        of_each = new if self.count is None else self.head.input.new_zeros
        found = {name: of_each(n, dtype=torch.float32) for name in ("lse", "top_logprob", *wide)}
        found |= {"top": of_each(n, dtype=torch.int64), "logprob": of_each(n, K, dtype=torch.float32)}
        out, highest = RowStats(**found), []
        if topk:
            highest = [new(n, topk, dtype=dtype) for dtype in (torch.float32, torch.int64)]
            found |= zip(("topk_values", "topk_ids"), highest, strict=True)
        self.asked = [SUMS[name] for name in wide]
        self.sums = Sums.of(new(3 + len(self.asked), rows, self.tiles, dtype=torch.float32), self.asked)
        self._find(rows, self.y_nK.clamp(min=0).contiguous(), out, highest)
        return found

    def _find(self, rows: int, y_nK: Tensor, out: RowStats, highest: list[Tensor]) -> None:
        """Write all rows' statistics, so many rows at a time."""
        w_VD, transform = self.weight_VD, self.transform
        for piece in self.chunks(rows):
            part, x_CD = piece.part, piece.x_CD
            self._sum_tiles(part, x_CD)
            stats_rows.merge_stats(
                self.sums, out.rows(part), self.width, y_nK[part], x_CD, w_VD, transform=transform,
                used=self.used(part),
            )  # fmt: skip
            if highest:
                values, ids = (x[part] for x in highest)
                stats_topk.highest_logits(x_CD, w_VD, self.sums, self.config, values, ids, transform=transform)
            del piece, x_CD  # before the next are made

    def _sum_tiles(self, part: slice, x_CD: Tensor) -> None:
        if self.width:
            tile, used = stats_logits.tile_stats, self.used(part)
            gemm_tiles(tile, x_CD, self.weight_VD, None, self.sums, self.transform, self.config, used=used)

    def gradients(self, known: dict[str, Tensor], upstream: dict[str, Tensor], into: Gradients) -> None:
        """Add the gradients, from what `forward` returned and upstream ones, that of "logprob" 0 where ignored."""
        C, device = self.plan.chunk_rows, self.head.input.device
        names = ["lse", "top", "top_logprob"]
        names += [name for name in ("entropy", "logprob") if name in upstream]
        self.known = RowStats(**{name: known[name].contiguous() for name in names})
        self.upstream = RowStats(**{name: x.float().contiguous() for name, x in upstream.items()})
        K = self.y_nK.shape[1] if "logprob" in upstream else 0
        self._targets = self.y_nK.int().contiguous() if K else None
        self.entries = Entries.empty(C, K, device, heat="entropy" in upstream, even="mean" in upstream)
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
