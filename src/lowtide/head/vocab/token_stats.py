"""`linear_token_stats` where each rank holds a part of the vocabulary: the loop over chunks, on this rank's part.

Each rank's sums are about its own highest logit; from everybody's come the row's, as from one pass over the whole. The
names are those of `statistics/rows` and `statistics/of_logits`.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowtide.head.gradients import Gradients, gradient_buffers
from lowtide.head.graph import is_last_backward
from lowtide.head.head_plan import HeadPlan
from lowtide.head.matmul import HeadMatmul
from lowtide.head.options import HeadOptions
from lowtide.head.ranks.parallel import Ranks
from lowtide.head.softmax import finish_logits_
from lowtide.head.statistics.of_logits import FLOOR, Known, RowSums, Upstream, row_sums, stats_gradient_
from lowtide.head.statistics.rows import StatsJob, of_targets, silenced, upstream_of_kept
from lowtide.head.vocab.products import add_products, chunk_buffer, chunks_of, plan_part


class ShardedStats:
    """Both directions of a call, in the place of `statistics/rows`.

    Args:
        ranks: The others.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks, self.classes = ranks, ranks.shard.vocab

    def keep_input(self) -> None:
        """Keep the hidden states that forward gathers."""
        self.ranks.tokens.keep()

    def forward_chunks(self, job: StatsJob, options: HeadOptions) -> dict[str, Tensor]:
        """Return what is wanted of all N tokens, the same on every rank."""
        ranks, tokens = self.ranks, self.ranks.tokens
        job.check_targets()
        y_NK, here_NK = ranks.here(job.target_NK.where(job.is_class_NK, 0))
        y_GLK, here_GLK = tokens.arranged(y_NK, ranks.shard.rows), tokens.arranged(here_NK, 0)
        plan = self._plan(job, options, weight_frozen=True)
        chunks = _Logits(job, plan, ranks)
        found: dict[str, list[Tensor]] = {}
        for part in chunks_of(ranks, plan) or [slice(0, 0)]:
            z_CE = chunks.of(chunks.rows(part) if tokens.length else job.input.new_empty(0, job.input.shape[-1]))
            at_y = z_CE.gather(1, y_GLK[:, part].flatten(0, 1)).where(here_GLK[:, part].flatten(0, 1), 0)
            for name, value in self._merged(job, z_CE[:, :-1], at_y, plan).items():
                found.setdefault(name, []).append(value.view(tokens.groups, part.stop - part.start, *value.shape[1:]))
        whole = {name: tokens.put_back(torch.cat(pieces, 1)) for name, pieces in found.items()}
        y = job.target_NK.where(job.is_class_NK, 0)
        return of_targets(job, y, whole)

    def backward_chunks(
        self, job: StatsJob, options: HeadOptions, known: Known, upstream: Upstream, wanted: tuple[bool, bool, bool]
    ) -> Gradients:
        """Return the wanted gradients of input, weight and bias."""
        ranks, tokens = self.ranks, self.ranks.tokens
        upstream = upstream_of_kept(job, upstream)
        active_N = upstream.largest(ranks.shard.vocab) != 0
        known = silenced(known, active_N)
        plan = self._plan(job, options, weight_frozen=not (wanted[1] or wanted[2]))
        into = gradient_buffers(job.input, job.weight_VD, job.wide, plan, wanted, some_rows=False)
        chunks = _Logits(job, plan, ranks)
        ids = ranks.here(known.ids)[0]
        arranged = {name: tokens.arranged(x, 0) for name, x in vars(upstream).items() if x is not None}
        lse, logprobs = tokens.arranged(known.lse, 0), tokens.arranged(known.logprobs, 0)
        ids, active = tokens.arranged(ids, ranks.shard.rows), tokens.arranged(active_N, 0)
        entropy = None if known.entropy is None else tokens.arranged(known.entropy, 0)
        for part in chunks_of(ranks, plan):

            def of_chunk(x_GL: Tensor, part: slice = part) -> Tensor:
                return x_GL[:, part].flatten(0, 1)

            x_CD = chunks.rows(part).where(of_chunk(active)[:, None], 0)  # a NaN would reach the weight's gradient
            z_CE = chunks.of(x_CD)
            z_CE[:, -1] = 0
            of_rows = Upstream(**{name: of_chunk(x) for name, x in arranged.items()})
            outside = None
            if plan.backward_gemm == "narrow":  # as in `TorchChunks.backward`
                largest = of_rows.largest(ranks.shard.vocab)
                outside = largest.where(largest != 0, 1)
                of_rows = of_rows.times(1 / outside)
            stats_gradient_(
                z_CE,
                Known(
                    lse=of_chunk(lse), entropy=None if entropy is None else of_chunk(entropy), ids=of_chunk(ids),
                    logprobs=of_chunk(logprobs),
                ),
                of_rows, job.logit_scale, job.softcap, plan.columns, classes=ranks.shard.vocab,
            )  # fmt: skip
            add_products(chunks.matmul, z_CE[:, :-1], outside, x_CD, into, ranks, part, begun=part.start > 0)
        if is_last_backward():
            tokens.let_go()
        return into

    def _plan(self, job: StatsJob, options: HeadOptions, *, weight_frozen: bool) -> HeadPlan:
        return plan_part(self.ranks, job.weight_VD, job.dtype, options, "none", weight_frozen=weight_frozen)

    def _merged(self, job: StatsJob, z_CV: Tensor, at_y_CK: Tensor, plan: HeadPlan) -> dict[str, Tensor]:
        """Return the wanted fields of `ChunkStats` from what all ranks find in their logits."""
        want, ranks, V = job.want, self.ranks, self.ranks.shard.vocab
        mine = _Sums.of(z_CV, ranks.shard.first, plan.columns, job.want)
        told = ranks.gather(torch.cat((torch.stack(mine, 1), at_y_CK), 1))  # [W, C, sums and targets]
        sums = _merge(_Sums(*told[..., : len(mine)].unbind(2)))
        found = {
            "lse": sums.lse,
            "argmax": sums.top_id,
            "top_logprob": sums.top_logprob,
            "logprob": sums.logprobs_of(told[..., len(mine) :].sum(0)),
        }
        if "entropy" in want:
            found["entropy"] = sums.entropy
        if "sum_sq_prob" in want:
            found["sum_sq_prob"] = sums.sum_sq_prob
        if "mean_logit" in want:
            found["mean_logit"] = told[..., _Sums._fields.index("total")].sum(0) / V
        if "topk" in want:
            found |= self._highest(job, z_CV)
        return found

    def _highest(self, job: StatsJob, z_CV: Tensor) -> dict[str, Tensor]:
        C, k = z_CV.shape[0], job.topk
        values, ids = z_CV.new_full((2, C, k), -torch.inf)
        highest = torch.topk(z_CV, min(k, z_CV.shape[1]), dim=1)
        values[:, : highest.values.shape[1]] = highest.values
        ids[:, : highest.values.shape[1]] = (highest.indices + self.ranks.shard.first).to(ids.dtype)
        told = self.ranks.gather(torch.stack((values, ids)))  # [W, 2, C, k]
        several = told.permute(1, 2, 0, 3).flatten(2)  # a class's number is exact in float32 up to 2^24
        best = torch.topk(several[0], k, dim=1)
        return {"topk_values": best.values, "topk_ids": several[1].gather(1, best.indices).long()}


class _Logits:
    """Hidden states and logits [C, V_r + 1] of a chunk; the last column is for other ranks' classes."""

    def __init__(self, job: StatsJob, plan: HeadPlan, ranks: Ranks) -> None:
        self.job, self.plan, self.ranks = job, plan, ranks
        self.matmul = HeadMatmul(job.weight_VD, plan, job.dtype, job.wide)
        self._buffer = chunk_buffer(ranks, plan, job.input, ranks.shard.rows, job.wide)

    def rows(self, part: slice) -> Tensor:
        return self.ranks.tokens.begin_rows(self.job.input, part, self.job.dtype).get()

    def of(self, x_CD: Tensor) -> Tensor:
        job, V = self.job, self.ranks.shard.rows
        z_CE = self._buffer[: x_CD.shape[0]]
        self.matmul.logits(x_CD, z_CE[:, :V])
        finish_logits_(z_CE[:, :V], job.bias_V, job.logit_scale, job.softcap, self.plan.columns)
        z_CE[:, V] = -torch.inf
        return z_CE


class _Sums(NamedTuple):
    """`RowSums` as numbers to be exchanged: [C] of one rank, or [W, C] of all."""

    top: Tensor
    top_id: Tensor
    rest: Tensor
    heat: Tensor
    squares: Tensor
    total: Tensor  # of the logits

    @classmethod
    def of(cls, z_CV: Tensor, first: int, columns: int, want: Any) -> "_Sums":
        """Return this rank's."""
        none = z_CV.new_zeros(z_CV.shape[0])
        if not z_CV.shape[1]:
            return cls(none - torch.inf, none, none, none, none, none)
        total = z_CV.sum(1) if "mean_logit" in want else none
        sums = row_sums(z_CV, columns, heat="entropy" in want, squares="sum_sq_prob" in want)
        nothing = sums.top == -torch.inf  # on this rank; another may have more
        return cls(
            top=sums.top,
            top_id=(sums.top_id + first).to(z_CV.dtype),
            rest=sums.rest.masked_fill(nothing, 0),
            heat=none if sums.heat is None else sums.heat.masked_fill(nothing, 0),
            squares=none if sums.squares is None else sums.squares.masked_fill(nothing, 0),
            total=total,
        )


def _merge(told: _Sums) -> RowSums:
    """Return the sums over the vocabulary from those of its parts [W, C], about the highest logit of all."""
    top, winner = told.top.max(0)
    others = torch.ones_like(told.top).scatter_(0, winner[None], 0)  # whose highest logit is one of the rest
    below = told.top - top
    weight, count = below.exp(), told.rest + others
    return RowSums(
        top=top,
        top_id=told.top_id.gather(0, winner[None])[0].long(),
        rest=(weight * count).sum(0),
        heat=(weight * (told.heat + below.clamp(min=FLOOR) * count)).sum(0),
        squares=(weight.square() * (told.squares + others)).sum(0),
    )
