"""Token statistics without a chunk's logits: a GEMM whose tiles leave sums, and one that leaves a gradient.

n rows, C rows of a chunk, D hidden size, V vocabulary, K targets a token. The kernels: `kernels.stats_logits`,
`kernels.stats_rows`, `kernels.stats_topk`.
"""

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


class Statistics(Exponentials):
    """One call, in either direction; the arguments are those of `exponentials.statistics`."""

    def __init__(self, head: Head, y_nK: Tensor, plan: HeadPlan) -> None:
        super().__init__(head, plan)
        self.y_nK = y_nK
        self.tiles = tiles_across(self.width, self.config)
        self.finishing: dict[str, Any] = {"bias_V": head.bias_V, "scale": head.scale, "softcap": head.softcap}

    def forward(self, want: frozenset[str], topk: int) -> dict[str, Tensor]:
        """Return each row's statistics."""
        (n, K), new, rows = self.y_nK.shape, self.head.input.new_empty, self.plan.sum_rows
        y_nK = self.y_nK.clamp(min=0)
        wide = [name for name in SUMS if name in want]
        found = {name: new(n, dtype=torch.float32) for name in ("lse", "top_logprob", *wide)}
        found |= {"top": new(n, dtype=torch.int64), "logprob": new(n, K, dtype=torch.float32)}
        if topk:
            found["topk_values"] = new(n, topk, dtype=torch.float32)
            found["topk_ids"] = new(n, topk, dtype=torch.int64)
        sums_FCP = new(2 + len(wide), rows, self.tiles, dtype=torch.float32)
        id_CP = new(rows, self.tiles, dtype=torch.int32)
        asked: dict[str, Any] = {sums: name in want for name, sums in SUMS.items()}
        for piece in self.in_stages(self.pieces(rows, rows), self.begin):
            part, x_CD = piece.part, aligned_rows(piece.x_CD.get())
            shape = len(sums_FCP), len(x_CD), self.tiles
            sums = sums_FCP.view(-1)[: shape[0] * shape[1] * shape[2]].view(shape)
            stats_logits.tile_stats(
                x_CD, self.weight_VD, sums, id_CP, self.config, self.programs, **self.finishing, **asked
            )
            out = {OUT.get(name, name): x[part] for name, x in found.items()}
            stats_rows.finish_stats(sums, id_CP, x_CD, self.weight_VD, out, y_CK=y_nK[part], **self.finishing)
            if topk:
                stats_topk.highest_logits(
                    x_CD, self.weight_VD, sums[0], self.config.columns, out["topk_values"], out["topk_ids"],
                    **self.finishing,
                )  # fmt: skip
        return found

    def gradients(self, known: dict[str, Tensor], upstream: dict[str, Tensor], into: Gradients) -> None:
        """Add the gradients."""
        C, device = self.plan.chunk_rows, self.head.input.device
        names = ["lse", "top", "top_logprob"]
        names += [name for name in ("entropy", "logprob") if name in upstream]
        self.known = {OUT.get(name, name): known[name].contiguous() for name in names}
        K = 0
        if "logprob" in upstream:
            K = self.y_nK.shape[1]
            self.known["y"] = self.y_nK.int().contiguous()
        self.upstream = {
            "mean_logit" if name == "mean" else name: x.float().contiguous() for name, x in upstream.items()
        }
        self._entries = stats_rows.Entries.empty(C, K, device)
        self._numbers = torch.empty(5 * C, dtype=torch.float32, device=device)
        if into.weight_VD is not None and not self.plan.chunks:
            into.weight_VD.zero_()
        self.recompute(into, begun=False)

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
