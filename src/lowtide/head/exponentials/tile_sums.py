"""Token statistics without a chunk's logits: a GEMM whose tiles leave sums, and one that leaves a gradient.

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
from lowtide.head.kernels import stats_entries, stats_logits, stats_rows, stats_topk
from lowtide.head.kernels.gemm import LogitTransform, tiles_across
from lowtide.head.kernels.stats_rows import RowStats
from lowtide.head.plan import HeadPlan

SUMS = {"entropy": "heat", "sum_sq_prob": "squares", "mean": "total"}  # what each needs of `stats_logits.tile_stats`


class TileStatistics(Exponentials):
    """One call, in either direction; the arguments are those of `exponentials.statistics`."""

    def __init__(self, head: Head, y_nK: Tensor, plan: HeadPlan) -> None:
        super().__init__(head, plan)
        assert not isinstance(head.softcap, Tensor)
        self.y_nK, self.tiles = y_nK, tiles_across(self.width, self.config)
        self.transform = LogitTransform(head.bias_V, head.scale, head.softcap)

    def forward(self, want: frozenset[str], topk: int) -> dict[str, Tensor]:
        """Return each row's statistics."""
        (n, K), rows, new = self.y_nK.shape, self.plan.sum_rows, self.head.input.new_empty
        self.wide, self.topk = [name for name in SUMS if name in want], topk
        order = self.ranks.reordered(self.plan, rows)
        y_nK = self.y_nK.clamp(min=0)
        y_nK = (y_nK if order is None else y_nK[order]).contiguous()
        found = {name: new(n, dtype=torch.float32) for name in ("lse", "top_logprob", *self.wide)}
        found |= {"top": new(n, dtype=torch.int64), "logprob": new(n, K, dtype=torch.float32)}
        out = RowStats(**found)
        if topk:
            found["topk_values"] = new(n, topk, dtype=torch.float32)
            found["topk_ids"] = new(n, topk, dtype=torch.int64)
        highest = [found[name] for name in ("topk_values", "topk_ids") if topk]
        self._tiles_FCP = new(2 + len(self.wide), rows, self.tiles, dtype=torch.float32)
        self._id_CP = torch.empty(rows, self.tiles, dtype=torch.int32, device=y_nK.device)
        begin_sums = partial(self._begin_sums, out, y_nK, highest)
        for piece in self.in_stages(self.pieces(rows, rows), self.begin, begin_sums):
            if not self.ranks.alone:
                part, every = piece.part, [told.get() for told in piece.exchange]
                stats_rows.merge_stats(every[0], out.rows(part), self.ranks.vocab, y_CK=y_nK[part])
                if topk:
                    stats_topk.merge_highest(every[1], *(x[part] for x in highest))
            del piece  # and with it its memory, when the next is made
        if order is not None:
            found = {name: torch.empty_like(x).index_copy_(0, order, x) for name, x in found.items()}
        return found

    def _begin_sums(self, out: RowStats, y_nK: Tensor, highest: list[Tensor], piece: Piece) -> Piece:
        """Compute a piece's statistics of the classes here, and begin to exchange them where there are others."""
        part, x_CD, w_VD, transform = piece.part, aligned_rows(piece.x_CD.get()), self.weight_VD, self.transform
        shape, y_CK = (len(self._tiles_FCP), len(x_CD), self.tiles), y_nK[part]
        sums = self._tiles_FCP.view(-1)[: shape[0] * shape[1] * shape[2]].view(shape)
        asked = {sums: name in self.wide for name, sums in SUMS.items()}
        if self.width:
            stats_logits.tile_stats(
                x_CD, w_VD, sums, self._id_CP, self.config, self.programs, transform=transform, **asked
            )
        if self.ranks.alone:
            stats_rows.finish_stats(sums, self._id_CP, x_CD, w_VD, out.rows(part), y_CK=y_CK, transform=transform)
            if highest:
                values, ids = (x[part] for x in highest)
                stats_topk.highest_logits(x_CD, w_VD, sums[0], self.config.columns, values, ids, transform=transform)
            return piece
        ranks: Any = self.ranks
        told = stats_rows.told_stats(shape[0], shape[1], y_CK.shape[1], x_CD.device)
        stats_rows.shard_stats(
            sums, self._id_CP, x_CD, w_VD, told, asked=(asked["heat"], asked["squares"], asked["total"]),
            first_class=ranks.first, y_CK=y_CK, transform=transform,
        )  # fmt: skip
        piece.exchange = [ranks.begin_gather(told)]
        if highest:
            mine = stats_topk.shard_highest(x_CD, w_VD, sums[0], self.config.columns, self.topk, ranks.first, transform)
            piece.exchange.append(ranks.begin_gather(mine))
        return piece

    def gradients(self, known: dict[str, Tensor], upstream: dict[str, Tensor], into: Gradients) -> None:
        """Add the gradients."""
        C, device = self.plan.chunk_rows, self.head.input.device
        names = ["lse", "top", "top_logprob"]
        names += [name for name in ("entropy", "logprob") if name in upstream]
        self.known = RowStats(**{name: known[name].contiguous() for name in names})
        self.upstream = RowStats(**{name: x.float().contiguous() for name, x in upstream.items()})
        K = self.y_nK.shape[1] if "logprob" in upstream else 0
        self._targets = self.y_nK.int().contiguous() if K else None
        self._entries = stats_entries.Entries.empty(C, K, device)
        self._numbers = torch.empty(5 * C, dtype=torch.float32, device=device)
        if into.weight_VD is not None and not self.plan.chunks:
            into.weight_VD.zero_()
        self.recompute(into, begun=False)

    def prepare(self, piece: Piece, scaled_CD: Tensor | None) -> Tensor:
        """See `Exponentials.prepare`."""
        C, part = len(piece.x_CD), piece.part
        self.entries, self.numbers_5C = self._entries.rows(C), self._numbers[: 5 * C].view(5, C)
        stats_entries.prepare_stats(
            self.known.rows(part), self.upstream.rows(part), None if self._targets is None else self._targets[part],
            piece.x_CD, self.numbers_5C, self.entries, self.ranks.vocab, transform=self.transform, scaled_CD=scaled_CD,
        )  # fmt: skip
        return self.numbers_5C[0]

    def fill(self, piece: Piece, w_BD: Tensor, e_CB: Tensor, first_class: int) -> None:
        """See `Exponentials.fill`."""
        stats_logits.stats_gradient(
            piece.x_CD, w_BD, e_CB, self.numbers_5C, self.config, self.programs,
            transform=self.transform.of_classes(slice(first_class, first_class + len(w_BD))),
            heat=self.upstream.entropy is not None, even=self.upstream.mean is not None,
        )  # fmt: skip
        stats_entries.put_entries(e_CB, self.entries, self.ranks.first + first_class)

    def finish_input(self, piece: Piece, product_CD: Tensor, out_CD: Tensor) -> None:  # noqa: ARG002
        """See `Exponentials.finish_input`."""
        numbers, first = self.numbers_5C[0], self.ranks.first
        stats_entries.finish_input_grad(product_CD, out_CD, self.weight_VD, self.entries, numbers, first)
