"""Token statistics without a chunk's logits: a GEMM whose tiles write sums, and one that writes a gradient.

n rows, C rows of a chunk, D hidden size, V vocabulary, K targets a token. The kernels: `kernels.stats_logits`,
`kernels.stats_rows`, `kernels.stats_topk`.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from lowtide.head.call import Head
from lowtide.head.exponentials.loops import Exponentials, Piece, aligned_rows
from lowtide.head.gradients import Gradients
from lowtide.head.kernels import stats_logits, stats_rows, stats_topk
from lowtide.head.kernels.exp_terms import finish_input_grad
from lowtide.head.kernels.gemm import LogitTransform, gemm_tiles, tiles_across
from lowtide.head.kernels.stats_logits import Entries, Sums
from lowtide.head.kernels.stats_rows import RowStats
from lowtide.head.plan import HeadPlan
from lowtide.head.rows import Rows

SUMS = {"entropy": "heat", "sum_sq_prob": "squares", "mean": "total"}  # what each needs of `stats_logits.tile_stats`


class TileStatistics(Exponentials):
    """Statistics of each row's logits, in either direction; rows are in the order of ``ranks.order(plan)``.

    ``y_nK`` are int64 classes of the whole vocabulary; below 0 where ignored: forward returns that of class 0.
    """

    def __init__(self, head: Head, y_nK: Tensor, plan: HeadPlan, tokens: Rows) -> None:
        super().__init__(head, plan, tokens)
        assert not isinstance(head.softcap, Tensor)
        self.y_nK, self.tiles = y_nK, tiles_across(self.width, self.config)
        self.transform = LogitTransform(head.bias_V, head.scale, head.softcap)

    def forward(self, want: frozenset[str], topk: int) -> dict[str, Tensor]:
        """Return each row's "lse", "top", "top_logprob", "logprob" [n, K], and what is requested, float32.

        Classes are int64; with ``topk`` "topk_values" and "topk_ids" are [n, topk]. Of tokens that are not used all
        are 0.
        """
        (n, K), rows, new = self.y_nK.shape, self.plan.sum_rows, self.head.input.new_empty
        wide, self.topk = [name for name in SUMS if name in want], topk
        order = self.ranks.reordered(self.plan, rows)
        y_nK = self.y_nK.clamp(min=0)
        y_nK = (y_nK if order is None else y_nK[order]).contiguous()
        of_each = new if self.count is None else self.head.input.new_zeros
        found = {name: of_each(n, dtype=torch.float32) for name in ("lse", "top_logprob", *wide)}
        found |= {"top": of_each(n, dtype=torch.int64), "logprob": of_each(n, K, dtype=torch.float32)}
        out = RowStats(**found)
        if topk:
            found["topk_values"] = new(n, topk, dtype=torch.float32)
            found["topk_ids"] = new(n, topk, dtype=torch.int64)
        highest = [found[name] for name in ("topk_values", "topk_ids") if topk]
        self.asked = [SUMS[name] for name in wide]
        self.sums = Sums.of(new(3 + len(self.asked), rows, self.tiles, dtype=torch.float32), self.asked)
        begin_sums = partial(self._begin_sums, out, y_nK, highest)
        for piece in self.in_stages(self.pieces(rows, rows), self.begin, begin_sums):
            if not self.ranks.alone:
                part, every = piece.part, [gathered.get() for gathered in piece.exchange]
                parts = Sums.of(every[0].permute(1, 2, 0), self.asked)
                stats_rows.merge_stats(parts, out.rows(part), self.ranks.vocab, y_nK[part])
                if topk:
                    stats_topk.merge_highest(every[1], *(x[part] for x in highest))
            del piece  # and with it its memory, when the next is made
        if order is not None:
            found = {name: torch.empty_like(x).index_copy_(0, order, x) for name, x in found.items()}
        return found

    def _begin_sums(self, out: RowStats, y_nK: Tensor, highest: list[Tensor], piece: Piece) -> Piece:
        """Compute a piece's statistics of the classes here, and begin to exchange them where there are others."""
        part, w_VD, transform, used = piece.part, self.weight_VD, self.transform, self.used(piece.part)
        x_CD, y_CK = aligned_rows(piece.x_CD.get(), self.head.dtype), y_nK[part]
        if self.width:
            gemm_tiles(stats_logits.tile_stats, x_CD, w_VD, None, self.sums, transform, self.config, used=used)
        if self.ranks.alone:
            stats_rows.merge_stats(
                self.sums, out.rows(part), self.width, y_CK, x_CD, w_VD, transform=transform, used=used
            )
            if highest:
                values, ids = (x[part] for x in highest)
                stats_topk.highest_logits(x_CD, w_VD, self.sums, self.config, values, ids, transform=transform)
            return piece
        ranks: Any = self.ranks
        new = x_CD.new_empty if self.width else x_CD.new_zeros
        sent = new(3 + len(self.asked) + y_CK.shape[1], len(x_CD), dtype=torch.float32)
        mine = Sums.of(sent[..., None], self.asked)
        stats_rows.merge_stats(
            self.sums, mine, self.width, y_CK, x_CD, w_VD, transform=transform, first_class=ranks.first
        )
        piece.exchange = [ranks.begin_gather(sent)]
        if highest:
            sent = stats_topk.shard_highest(x_CD, w_VD, self.sums, self.config, self.topk, ranks.first, transform)
            piece.exchange.append(ranks.begin_gather(sent))
        return piece

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
            piece.x_CD, self.entries, self.ranks.vocab, transform=self.transform, scaled_CD=scaled_CD,
            used=self.used(part),
        )  # fmt: skip
        return self.entries.s

    def fill(self, piece: Piece, w_BD: Tensor, e_CB: Tensor, first_class: int) -> None:
        """See `Exponentials.fill`."""
        transform = self.transform.of_classes(slice(first_class, first_class + len(w_BD)))
        used = self.used(piece.part)
        gemm_tiles(stats_logits.gradient_tile, piece.x_CD, w_BD, e_CB, self.entries, transform, self.config, used=used)
        stats_rows.put_entries(e_CB, self.entries, self.ranks.first + first_class, used)

    def finish_input(self, piece: Piece, product_CD: Tensor, out: Tensor, to_C: Tensor | None) -> None:
        """See `Exponentials.finish_input`."""
        s, ids, rest, used = self.entries.s, self.entries.id[:, 1:], self.entries.rest, self.used(piece.part)
        finish_input_grad(product_CD, out, self.weight_VD, s, ids, rest, self.ranks.first, to_C=to_C, used=used)
