"""`linear_token_stats` without a chunk's logits either: a GEMM whose tiles leave sums, and one that leaves a gradient.

N tokens, C rows of a chunk, D hidden size, V vocabulary. The kernels: `kernels.stats_logits`, `kernels.stats_rows`.
"""

import torch
from torch import Tensor

from lowtide.head.exp_blocks import aligned_rows, operand_rows, rebuild_in_blocks, slices
from lowtide.head.logit_stats import Known, Upstream
from lowtide.head.plan import HeadPlan
from lowtide.head.schedules import Gradients, take_rows
from lowtide.head.token_stats_rows import StatsJob

FIELDS = {"entropy": "heat", "sum_sq_prob": "squares", "mean_logit": "total"}  # and the sums that each needs


class ExpStats:
    """One call, in either direction: what all its chunks share.

    Args:
        job: The call, with at most one target a token.
        plan: Chunks and blocks.
    """

    def __init__(self, job: StatsJob, plan: HeadPlan) -> None:
        from lowtide.head.kernels import configs, exp_logits, stats_logits, stats_rows

        self.job, self.plan = job, plan
        self.gemms, self.thin = stats_logits, stats_rows
        self.weight_VD = operand_rows(job.weight_VD, job.dtype)
        self.config = configs.of_device(job.input.device)
        self.programs = exp_logits.multiprocessors(job.input.device)
        self.tiles = exp_logits.tiles_across(self.weight_VD.shape[0], self.config)
        V = self.weight_VD.shape[0]
        y_N = job.target_NK[:, 0] if job.target_NK.shape[1] else None
        self.target_N = None if y_N is None else y_N.where((y_N >= 0) & (y_N < V), 0).contiguous()

    def forward(self) -> dict[str, Tensor]:
        """Return the wanted of `ChunkStats`'s fields for all N tokens."""
        job, want = self.job, self.job.want
        N, K = job.target_NK.shape
        new = job.input.new_empty
        wide = [name for name in FIELDS if name in want]
        found = {name: new(N, dtype=torch.float32) for name in ("lse", "top_logprob", *wide)}
        found["argmax"] = new(N, dtype=torch.int64)
        if K:
            found["logprob"] = new(N, dtype=torch.float32)
        rows = self.plan.sum_rows
        sums_FCP = new(2 + len(wide), rows, self.tiles, dtype=torch.float32)
        id_CP = new(rows, self.tiles, dtype=torch.int32)
        asked = {sums: name in want for name, sums in FIELDS.items()}
        for part in slices(N, rows):
            C = part.stop - part.start
            x_CD = self._input(part)
            sums = sums_FCP.view(-1)[: len(sums_FCP) * C * self.tiles].view(len(sums_FCP), C, self.tiles)
            self.gemms.tile_stats(
                x_CD, self.weight_VD, sums, id_CP, self.config, self.programs, bias_V=job.bias_V,
                scale=job.logit_scale, softcap=job.softcap, **asked,
            )  # fmt: skip
            self.thin.finish_stats(
                sums, id_CP, x_CD, self.weight_VD, {name: x[part] for name, x in found.items()},
                y_C=None if self.target_N is None else self.target_N[part], bias_V=job.bias_V, scale=job.logit_scale,
                softcap=job.softcap,
            )  # fmt: skip
        logprob = found.get("logprob", new(N, dtype=torch.float32))
        return found | {"logprob": logprob[:, None][:, :K]}

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
        self.known = {"lse": known.lse, "argmax": known.ids[:, 0].int(), "top_logprob": known.logprobs[:, 0]}
        if known.entropy is not None:
            self.known["entropy"] = known.entropy
        if upstream.logprob is None or stats.target_N is None:
            self.known |= {"y": torch.full_like(self.known["argmax"], -1), "logprob": known.lse}
        else:
            ignored = ~job.kept_NK[:, 0]
            self.known |= {"y": stats.target_N.masked_fill(ignored, -1).int(), "logprob": known.logprobs[:, 1]}
        given = {name: x for name, x in vars(upstream).items() if x is not None}
        self.upstream = {name: x.reshape(len(x)).float().contiguous() for name, x in given.items()}
        self.known = {name: x.contiguous() for name, x in self.known.items()}
        self.place_N = self.known["y"].clamp(min=0)  # of a weight's row that can be read
        self._numbers = torch.empty(7, C, dtype=torch.float32, device=device)
        self._rest = torch.empty(C, dtype=torch.float32, device=device)

    def begin(self, part: slice, scaled: Tensor | None) -> Tensor:
        stats, C = self.stats, part.stop - part.start
        self.part, self.x_CD = part, stats._input(part)
        self.numbers_7C = self._numbers.view(-1)[: 7 * C].view(7, C)
        stats.thin.prepare_stats(
            {name: x[part] for name, x in self.known.items()}, {name: x[part] for name, x in self.upstream.items()},
            self.x_CD, self.numbers_7C, self._rest, stats.weight_VD.shape[0], scale=stats.job.logit_scale,
            softcap=stats.job.softcap, scaled_CD=scaled,
        )  # fmt: skip
        return self.numbers_7C[0]

    def fill(self, w_BD: Tensor, e_CB: Tensor, first_class: int) -> None:
        stats, bias = self.stats, self.stats.job.bias_V
        stats.gemms.stats_gradient(
            self.x_CD, w_BD, e_CB, self.numbers_7C, self.known["y"][self.part], self.known["argmax"][self.part],
            stats.config, stats.programs, bias_V=None if bias is None else bias[first_class : first_class + len(w_BD)],
            scale=stats.job.logit_scale, softcap=stats.job.softcap, heat="entropy" in self.upstream,
            even="mean_logit" in self.upstream, first_class=first_class,
        )  # fmt: skip

    def finish(self, product_CD: Tensor, out_CD: Tensor) -> None:
        from lowtide.head.kernels.exp_rows import finish_input_grad

        place_C, rest_C = self.place_N[self.part], self._rest[: len(product_CD)]
        finish_input_grad(product_CD, out_CD, self.stats.weight_VD, place_C, self.numbers_7C[0], rest_C)
