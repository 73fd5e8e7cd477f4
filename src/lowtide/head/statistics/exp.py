"""`linear_token_stats` without a chunk's logits either: a GEMM whose tiles leave sums, and one that leaves a gradient.

N tokens, C rows of a chunk, D hidden size, V vocabulary, K targets a token. The kernels: `kernels.stats_logits`,
`kernels.stats_rows`, `kernels.stats_topk`, `kernels.stats_entries`.
"""

from typing import Any

import torch
from torch import Tensor

from lowtide.head.exponentials.blocks import aligned_rows, operand_rows, rebuild_in_blocks, slices
from lowtide.head.gradients import Gradients
from lowtide.head.head_plan import HeadPlan
from lowtide.head.rows import take_rows
from lowtide.head.statistics.of_logits import Known, Upstream
from lowtide.head.statistics.rows import StatsJob

FIELDS = {"entropy": "heat", "sum_sq_prob": "squares", "mean_logit": "total"}  # and the sums that each needs


def topk_row_bytes(k: int, V: int, device: torch.device) -> int:
    """Return the scratch of a row for its k highest logits: those of its tiles, and what sorting these takes."""
    from lowtide.head.kernels import configs

    columns = configs.of_device(device).columns
    return min(k, -(-V // columns)) * (4 * columns + 48)


class ExpStats:
    """One call, in either direction: what all its chunks share.

    Args:
        job: The call.
        plan: Chunks and blocks.
    """

    def __init__(self, job: StatsJob, plan: HeadPlan) -> None:
        from lowtide.head.kernels import configs, gemm, stats_entries, stats_logits, stats_rows, stats_topk

        self.job, self.plan = job, plan
        self.gemms, self.thin, self.entries, self.highest = stats_logits, stats_rows, stats_entries, stats_topk
        self.weight_VD = operand_rows(job.weight_VD, job.dtype)
        self.config = configs.of_device(job.input.device)
        self.programs = gemm.multiprocessors(job.input.device)
        self.tiles = gemm.tiles_across(self.weight_VD.shape[0], self.config)
        self.transform = gemm.LogitTransform(job.bias_V, job.logit_scale, job.softcap)
        self.target_NK = job.target_NK.where(job.is_class_NK, 0).contiguous()

    def forward(self) -> dict[str, Tensor]:
        """Return the wanted of `ChunkStats`'s fields for all N tokens."""
        job, want = self.job, self.job.want
        N, K = job.target_NK.shape
        new = job.input.new_empty
        wide = [name for name in FIELDS if name in want]
        found = {name: new(N, dtype=torch.float32) for name in ("lse", "top_logprob", *wide)}
        found["argmax"] = new(N, dtype=torch.int64)
        found["logprob"] = new(N, K, dtype=torch.float32)
        if job.topk:
            found["topk_values"] = new(N, job.topk, dtype=torch.float32)
            found["topk_ids"] = new(N, job.topk, dtype=torch.int64)
        rows = self.plan.sum_rows
        sums_FCP = new(2 + len(wide), rows, self.tiles, dtype=torch.float32)
        id_CP = new(rows, self.tiles, dtype=torch.int32)
        asked: dict[str, Any] = {sums: name in want for name, sums in FIELDS.items()}
        out = self.thin.RowStats(
            lse=found["lse"], top=found["argmax"], top_logprob=found["top_logprob"], logprob=found["logprob"],
            entropy=found.get("entropy"), sum_sq_prob=found.get("sum_sq_prob"), mean=found.get("mean_logit"),
        )  # fmt: skip
        for part in slices(N, rows):
            C = part.stop - part.start
            x_CD = self._input(part)
            sums = sums_FCP.view(-1)[: len(sums_FCP) * C * self.tiles].view(len(sums_FCP), C, self.tiles)
            self.gemms.tile_stats(
                x_CD, self.weight_VD, sums, id_CP, self.config, self.programs, transform=self.transform, **asked
            )
            self.thin.finish_stats(
                sums, id_CP, x_CD, self.weight_VD, out.rows(part), y_CK=self.target_NK[part], transform=self.transform
            )
            if job.topk:
                self.highest.highest_logits(
                    x_CD, self.weight_VD, sums[0], self.config.columns, found["topk_values"][part],
                    found["topk_ids"][part], transform=self.transform,
                )  # fmt: skip
        return found

    def backward(self, known: Known, upstream: Upstream, into: Gradients) -> None:
        """Compute the gradients; ``known`` and ``upstream`` are those of all N tokens."""
        rebuild_in_blocks(_Gradient(self, known, upstream), self.plan, self.weight_VD, into)

    def _input(self, part: slice) -> Tensor:
        return aligned_rows(take_rows(self.job.input, None, part, self.job.dtype))


class _Gradient:
    """The gradient of what was wanted with respect to the logits: `Rebuilt` for token statistics."""

    def __init__(self, stats: ExpStats, known: Known, upstream: Upstream) -> None:
        self.stats, job = stats, stats.job
        C, device = stats.plan.chunk_rows, job.input.device
        logprob = upstream.logprob
        K = 0 if logprob is None else logprob.shape[1]
        self.y_NK = None if logprob is None else stats.target_NK.int().masked_fill_(~job.kept_NK, -1)
        self.known = stats.thin.RowStats(
            lse=known.lse.contiguous(), top=known.ids[:, 0].contiguous(), top_logprob=known.logprobs[:, 0].contiguous(),
            logprob=None if logprob is None else known.logprobs[:, 1:].contiguous(),
            entropy=None if known.entropy is None else known.entropy.contiguous(),
        )  # fmt: skip
        given = (logprob, upstream.entropy, upstream.lse, upstream.mean_logit)
        logprob, entropy, lse, mean = (None if g is None else g.float().contiguous() for g in given)
        self.upstream = stats.thin.RowStats(lse=lse, logprob=logprob, entropy=entropy, mean=mean)
        self._entries = stats.entries.Entries.empty(C, K, device)
        self._numbers = torch.empty(5, C, dtype=torch.float32, device=device)

    def begin(self, part: slice, scaled: Tensor | None) -> Tensor:
        stats, C = self.stats, part.stop - part.start
        self.x_CD, self.entries = stats._input(part), self._entries.rows(C)
        self.numbers_5C = self._numbers.view(-1)[: 5 * C].view(5, C)
        stats.entries.prepare_stats(
            self.known.rows(part), self.upstream.rows(part), None if self.y_NK is None else self.y_NK[part], self.x_CD,
            self.numbers_5C, self.entries, stats.weight_VD.shape[0], transform=stats.transform, scaled_CD=scaled,
        )  # fmt: skip
        return self.numbers_5C[0]

    def fill(self, w_BD: Tensor, e_CB: Tensor, first_class: int) -> None:
        stats = self.stats
        stats.gemms.stats_gradient(
            self.x_CD, w_BD, e_CB, self.numbers_5C, stats.config, stats.programs,
            transform=stats.transform.of_classes(slice(first_class, first_class + len(w_BD))),
            heat=self.upstream.entropy is not None, even=self.upstream.mean is not None,
        )  # fmt: skip
        stats.entries.put_entries(e_CB, self.entries, first_class)

    def finish(self, product_CD: Tensor, out_CD: Tensor) -> None:
        self.stats.entries.finish_input_grad(product_CD, out_CD, self.stats.weight_VD, self.entries, self.numbers_5C[0])
