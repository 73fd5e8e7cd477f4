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
from lowtide.head.head_plan import HeadPlan
from lowtide.head.kernels import stats_logits, stats_rows, stats_topk
from lowtide.head.kernels.exp_logits import tiles_across

SUMS = {"entropy": "heat", "sum_sq_prob": "squares", "mean": "total"}  # what each needs of `stats_logits.tile_stats`
OUT = {"top": "argmax", "mean": "mean_logit"}  # the kernels' names, where they are others


class TileStatistics(Exponentials):
    """One call, in either direction; the arguments are those of `exponentials.statistics`."""

    def __init__(self, head: Head, y_nK: Tensor, plan: HeadPlan) -> None:
        super().__init__(head, plan)
        self.y_nK = y_nK
        self.tiles = tiles_across(self.width, self.config)
        self.finishing: dict[str, Any] = {"bias_V": head.bias_V, "scale": head.scale, "softcap": head.softcap}

    def forward(self, want: frozenset[str], topk: int) -> dict[str, Tensor]:
        """Return each row's statistics."""
        (n, K), rows = self.y_nK.shape, self.plan.sum_rows
        self.wide, self.topk = [name for name in SUMS if name in want], topk
        order = self.ranks.reordered(self.plan, rows)
        y_nK = self.y_nK.clamp(min=0)
        y_nK, here_nK = self.ranks.here(y_nK if order is None else y_nK[order])
        if here_nK is not None:
            y_nK = y_nK.where(here_nK, 0)
        found = self._memory(n, K)
        self._tiles_FCP = self.head.input.new_empty(2 + len(self.wide), rows, self.tiles, dtype=torch.float32)
        self._id_CP = torch.empty(rows, self.tiles, dtype=torch.int32, device=y_nK.device)
        begin_sums = partial(self._begin_sums, found, y_nK, here_nK)
        for piece in self.in_stages(self.pieces(rows, rows), self.begin, begin_sums):
            if not self.ranks.alone:
                merged = self._merged(*(told.get() for told in piece.exchange))
                for name, x in merged.items():
                    found[name][piece.part] = x
            del piece  # and with it its memory, when the next is made
        if order is not None:
            found = {name: torch.empty_like(x).index_copy_(0, order, x) for name, x in found.items()}
        return found

    def _memory(self, n: int, K: int) -> dict[str, Tensor]:
        """Return memory for the statistics of n rows."""
        new = self.head.input.new_empty
        found = {name: new(n, dtype=torch.float32) for name in ("lse", "top_logprob", *self.wide)}
        found |= {"top": new(n, dtype=torch.int64), "logprob": new(n, K, dtype=torch.float32)}
        if self.topk:
            found["topk_values"] = new(n, self.topk, dtype=torch.float32)
            found["topk_ids"] = new(n, self.topk, dtype=torch.int64)
        return found

    def _begin_sums(self, found: dict[str, Tensor], y_nK: Tensor, here_nK: Tensor | None, piece: Piece) -> Piece:
        """Compute a piece's statistics of the classes here, and begin to exchange them."""
        part, x_CD = piece.part, aligned_rows(piece.x_CD.get())
        C, y_CK = len(x_CD), y_nK[part]
        shape = len(self._tiles_FCP), C, self.tiles
        sums = self._tiles_FCP.view(-1)[: shape[0] * shape[1] * shape[2]].view(shape)
        out = {name: x[part] for name, x in found.items()} if self.ranks.alone else self._memory(C, y_nK.shape[1])
        if self.width:
            self._statistics(x_CD, y_CK, sums, {OUT.get(name, name): x for name, x in out.items()})
        if here_nK is not None:
            piece.exchange = self._begin_exchange(sums[0], out, here_nK[part])
        return piece

    def _statistics(self, x_CD: Tensor, y_CK: Tensor, sums: Tensor, out: dict[str, Tensor]) -> None:
        tiles: dict[str, Any] = {sums: name in self.wide for name, sums in SUMS.items()}
        stats_logits.tile_stats(
            x_CD, self.weight_VD, sums, self._id_CP, self.config, self.programs, **self.finishing, **tiles
        )
        stats_rows.finish_stats(sums, self._id_CP, x_CD, self.weight_VD, out, y_CK=y_CK, **self.finishing)
        k = min(self.topk, self.width)
        if k == self.topk and k:
            values, ids = out["topk_values"], out["topk_ids"]
            stats_topk.highest_logits(x_CD, self.weight_VD, sums[0], self.config.columns, values, ids, **self.finishing)
        elif k:  # a rank with fewer classes
            values, ids = (out[name].new_empty(len(x_CD), k) for name in ("topk_values", "topk_ids"))
            stats_topk.highest_logits(x_CD, self.weight_VD, sums[0], self.config.columns, values, ids, **self.finishing)
            out["topk_values"][:, :k], out["topk_ids"][:, :k] = values, ids
            out["topk_values"][:, k:] = -torch.inf
            out["topk_ids"][:, k:] = 0

    def _begin_exchange(self, top_CP: Tensor, mine: dict[str, Tensor], here_CK: Tensor) -> list[Any]:
        """Begin to exchange this rank's statistics: [W, 4 + wide + K, C], and the highest logits with their classes."""
        ranks: Any = self.ranks
        if not self.width:
            mine = {name: torch.zeros_like(x) for name, x in mine.items()}
            for name in ("lse", "topk_values"):
                mine.get(name, mine["lse"]).fill_(-torch.inf)
        if "mean" in mine:
            mine["mean"] *= self.width / ranks.vocab
        top = top_CP.amax(1) if self.width else mine["lse"]
        names = "lse", "top_logprob", *self.wide
        rows = [top, (mine["top"] + ranks.first).float(), *(mine[name] for name in names)]
        rows += mine["logprob"].where(here_CK, torch.inf).unbind(1)
        exchanged = [ranks.begin_gather(torch.stack(rows))]
        if self.topk:  # a class is exact in float32 up to 2^24
            ids = (mine["topk_ids"] + ranks.first).float()
            exchanged.append(ranks.begin_gather(torch.stack((mine["topk_values"], ids))))
        return exchanged

    def _merged(self, every: Tensor, highest: Tensor | None = None) -> dict[str, Tensor]:
        """Return the statistics of the whole vocabulary from every rank's.

        With p_r a rank's share of the probability, H_r and q_r its entropy and sum of squares: H is the sum of
        p_r (H_r - log p_r), the sum of squares that of p_r^2 q_r. The share of the rank with the highest class is made
        of the others': where the model is sure, what is left over keeps its digits.
        """
        top, ids, lse, top_logprob = every[:, :4].unbind(1)
        winner = top.max(0).indices[None]
        nothing = lse == -torch.inf  # of a rank: whatever its other numbers are
        own = lse.gather(0, winner)
        others = (lse - own).exp().scatter(0, winner, 0).masked_fill(nothing, 0).sum(0)
        spread = torch.log1p(others)
        share = (lse - own - spread).scatter(0, winner, -spread[None])
        weight = share.exp().masked_fill(nothing, 0)
        found = {
            "lse": own[0].where(own[0].isinf(), own[0] + spread),
            "top": ids.gather(0, winner)[0].long(),
            "top_logprob": top_logprob.gather(0, winner)[0] - spread,
        }
        for name, x in zip(self.wide, every[:, 4:].unbind(1), strict=False):
            if name == "entropy":
                found[name] = (weight * (x - share)).masked_fill(nothing | (weight == 0), 0).sum(0)
            elif name == "sum_sq_prob":
                found[name] = (weight.square() * x).masked_fill(nothing, 0).sum(0)
            else:
                found[name] = x.sum(0)
        logprob = every[:, 4 + len(self.wide) :]
        elsewhere = logprob == torch.inf
        logprob = logprob.masked_fill(nothing[:, None], -torch.inf) + share[:, None]
        found["logprob"] = logprob.masked_fill(elsewhere, 0).sum(0).t()
        if highest is not None:
            values, classes = highest.permute(1, 2, 0, 3).flatten(2)
            found["topk_values"], best = torch.topk(values, self.topk, dim=1)
            found["topk_ids"] = classes.gather(1, best).long()
        return found

    def gradients(self, known: dict[str, Tensor], upstream: dict[str, Tensor], into: Gradients) -> None:
        """Add the gradients."""
        C, device = self.plan.chunk_rows, self.head.input.device
        names = ["lse", "top", "top_logprob"]
        names += [name for name in ("entropy", "logprob") if name in upstream]
        self.known = {OUT.get(name, name): known[name].contiguous() for name in names}
        self.known["argmax"] = self._here(known["top"]).contiguous()
        K = 0
        if "logprob" in upstream:
            K = self.y_nK.shape[1]
            self.known["y"] = self._here(self.y_nK).int().contiguous()
        self.upstream = {
            "mean_logit" if name == "mean" else name: x.float().contiguous() for name, x in upstream.items()
        }
        self._entries = stats_rows.Entries.empty(C, K, device)
        self._numbers = torch.empty(5 * C, dtype=torch.float32, device=device)
        if into.weight_VD is not None and not self.plan.chunks:
            into.weight_VD.zero_()
        self.recompute(into, begun=False)

    def _here(self, y: Tensor) -> Tensor:
        """Return rows of this rank's weight, -1 where another rank has the class: nothing is written of it here."""
        rows, here = self.ranks.here(y)
        return rows if here is None else rows.where(here, -1)

    def prepare(self, piece: Piece, scaled_CD: Tensor | None) -> Tensor:
        """See `Exponentials.prepare`."""
        C, part = len(piece.x_CD), piece.part
        self.entries, self.numbers_5C = self._entries.rows(C), self._numbers[: 5 * C].view(5, C)
        stats_rows.prepare_stats(
            {name: x[part] for name, x in self.known.items()}, {name: x[part] for name, x in self.upstream.items()},
            piece.x_CD, self.numbers_5C, self.entries, self.ranks.vocab, scale=self.head.scale,
            softcap=self.finishing["softcap"], scaled_CD=scaled_CD,
        )  # fmt: skip
        return self.numbers_5C[0]

    def fill(self, piece: Piece, w_BD: Tensor, e_CB: Tensor, first_class: int) -> None:
        """See `Exponentials.fill`."""
        bias = self.head.bias_V
        finishing = self.finishing
        if bias is not None:
            finishing = finishing | {"bias_V": bias[first_class : first_class + len(w_BD)]}
        stats_logits.stats_gradient(
            piece.x_CD, w_BD, e_CB, self.numbers_5C, self.config, self.programs, heat="entropy" in self.upstream,
            even="mean_logit" in self.upstream, **finishing,
        )  # fmt: skip
        stats_rows.put_entries(e_CB, self.entries, first_class)

    def finish_input(self, piece: Piece, product_CD: Tensor, out_CD: Tensor) -> None:  # noqa: ARG002
        """See `Exponentials.finish_input`."""
        stats_rows.finish_input_grad(product_CD, out_CD, self.weight_VD, self.entries, self.numbers_5C[0])
