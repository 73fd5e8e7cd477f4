"""Token statistics without a chunk's logits: a GEMM whose tiles leave sums, and one that leaves a gradient.

n rows, C rows of a chunk, D hidden size, V vocabulary, K targets a token. The kernels: `kernels.stats_logits`,
`kernels.stats_rows`, `kernels.stats_topk`, `kernels.stats_entries`.
"""

from functools import partial

import torch
from torch import Tensor

from lowtide.head.call import Head
from lowtide.head.exponentials.loops import Exponentials, Piece, aligned_rows
from lowtide.head.gradients import Gradients
from lowtide.head.head_plan import HeadPlan
from lowtide.head.kernels import stats_entries, stats_logits, stats_rows, stats_topk
from lowtide.head.kernels.gemm import LogitTransform, tiles_across
from lowtide.head.kernels.stats_rows import RowStats
from lowtide.head.ranks.alone import Alone

SUMS = {"entropy": "heat", "sum_sq_prob": "squares", "mean": "total"}  # what each needs of `stats_logits.tile_stats`


class TileStatistics(Exponentials):
    """One call, in either direction; the arguments are those of `exponentials.statistics`."""

    def __init__(self, head: Head, y_nK: Tensor, plan: HeadPlan) -> None:
        super().__init__(head, plan)
        assert not isinstance(head.softcap, Tensor)
        self.y_nK = y_nK
        self.tiles = tiles_across(self.width, self.config)
        self.transform = LogitTransform(head.bias_V, head.scale, head.softcap)

    def forward(self, want: frozenset[str], topk: int) -> dict[str, Tensor]:
        """Return each row's statistics."""
        (n, K), rows, new = self.y_nK.shape, self.plan.sum_rows, self.head.input.new_empty
        self.wide, self.topk = [name for name in SUMS if name in want], topk
        order, y_nK = self.ranks.reordered(self.plan, rows), self.y_nK.clamp(min=0)
        y_nK = (y_nK if order is None else y_nK[order]).contiguous()
        found = {name: new(n, dtype=torch.float32) for name in ("lse", "top_logprob", *self.wide)}
        found |= {"top": new(n, dtype=torch.int64), "logprob": new(n, K, dtype=torch.float32)}
        out = RowStats(**found)
        if topk:
            found |= {"topk_values": new(n, topk, dtype=torch.float32), "topk_ids": new(n, topk, dtype=torch.int64)}
        self._tiles_FCP = new(2 + len(self.wide), rows, self.tiles, dtype=torch.float32)
        self._id_CP = new(rows, self.tiles, dtype=torch.int32)
        begin_sums = partial(self._begin_sums, out, found, y_nK)
        for piece in self.in_stages(self.pieces(rows, rows), self.begin, begin_sums):
            if not self.ranks.alone:
                self._merge(piece, out.rows(piece.part), found, y_nK)
            del piece  # and with it its memory, when the next is made
        if order is not None:
            found = {name: torch.empty_like(x).index_copy_(0, order, x) for name, x in found.items()}
        return found

    def _begin_sums(self, out: RowStats, found: dict[str, Tensor], y_nK: Tensor, piece: Piece) -> Piece:
        """Sum a piece's tiles; finish them, or begin to exchange what this rank's classes amount to."""
        x_CD, y_CK, w_VD, transform = aligned_rows(piece.x_CD.get()), y_nK[piece.part], self.weight_VD, self.transform
        C, F = len(x_CD), len(self._tiles_FCP)
        sums = self._tiles_FCP.view(-1)[: F * C * self.tiles].view(F, C, self.tiles)
        asked = {name: wanted in self.wide for wanted, name in SUMS.items()}
        if self.width:
            stats_logits.tile_stats(
                x_CD, w_VD, sums, self._id_CP, self.config, self.programs, transform=transform, **asked
            )
        highest = [found[name][piece.part] for name in ("topk_values", "topk_ids")] if self.topk else None
        if isinstance(self.ranks, Alone):
            stats_rows.finish_stats(sums, self._id_CP, x_CD, w_VD, out.rows(piece.part), y_CK=y_CK, transform=transform)
            if highest is not None:
                self._highest(x_CD, sums[0], *highest)
            return piece
        mine = stats_rows.told_stats(F, C, y_CK.shape[1], x_CD.device)
        stats_rows.shard_stats(
            sums, self._id_CP, x_CD, w_VD, mine, asked=(asked["heat"], asked["squares"], asked["total"]),
            first_class=self.ranks.first, y_CK=y_CK, transform=transform,
        )  # fmt: skip
        piece.exchange = [self.ranks.begin_gather(mine)]
        if highest is not None:  # a class is exact in float32 up to 2^24
            self._highest(x_CD, sums[0], *highest)
            values, ids = highest
            piece.exchange.append(self.ranks.begin_gather(torch.stack((values, (ids + self.ranks.first).float()))))
        return piece

    def _highest(self, x_CD: Tensor, top_CP: Tensor, values_Ck: Tensor, ids_Ck: Tensor) -> None:
        """Write the highest logits and their classes here; -inf where this rank has fewer."""
        k = min(self.topk, self.width)
        values, ids = (values_Ck, ids_Ck) if k == self.topk else (x.new_empty(len(x), k) for x in (values_Ck, ids_Ck))
        if k:
            columns = self.config.columns
            stats_topk.highest_logits(x_CD, self.weight_VD, top_CP, columns, values, ids, transform=self.transform)
        if k < self.topk:
            values_Ck[:, :k], ids_Ck[:, :k] = values, ids
            values_Ck[:, k:] = -torch.inf
            ids_Ck[:, k:] = 0

    def _merge(self, piece: Piece, out: RowStats, found: dict[str, Tensor], y_nK: Tensor) -> None:
        """Turn what all ranks exchanged into a piece's statistics."""
        told, *highest = (exchange.get() for exchange in piece.exchange)
        stats_rows.merge_stats(told, out, self.ranks.vocab, y_CK=y_nK[piece.part])
        for every in highest:
            values, classes = every.permute(1, 2, 0, 3).flatten(2)
            best = torch.topk(values, self.topk, dim=1)
            found["topk_values"][piece.part] = best.values
            found["topk_ids"][piece.part] = classes.gather(1, best.indices).long()

    def gradients(self, known: dict[str, Tensor], upstream: dict[str, Tensor], into: Gradients) -> None:
        """Add the gradients."""
        C, device = self.plan.chunk_rows, self.head.input.device
        names = ["lse", "top", "top_logprob", *(name for name in ("entropy", "logprob") if name in upstream)]
        self.known = RowStats(**{name: known[name].contiguous() for name in names})
        self.upstream = RowStats(**{name: x.float().contiguous() for name, x in upstream.items()})
        given = self.upstream.logprob is not None
        self.y_int = self.y_nK.int().contiguous() if given else None
        self._entries = stats_entries.Entries.empty(C, self.y_nK.shape[1] if given else 0, device)
        self._numbers = torch.empty(5 * C, dtype=torch.float32, device=device)
        if into.weight_VD is not None and not self.plan.chunks:
            into.weight_VD.zero_()
        self.recompute(into, begun=False)

    def prepare(self, piece: Piece, scaled_CD: Tensor | None) -> Tensor:
        """See `Exponentials.prepare`."""
        C, part = len(piece.x_CD), piece.part
        self.entries, self.numbers_5C = self._entries.rows(C), self._numbers[: 5 * C].view(5, C)
        stats_entries.prepare_stats(
            self.known.rows(part), self.upstream.rows(part), None if self.y_int is None else self.y_int[part],
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
        stats_entries.finish_input_grad(
            product_CD, out_CD, self.weight_VD, self.entries, self.numbers_5C[0], self.ranks.first
        )
