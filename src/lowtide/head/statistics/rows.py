"""The loop over chunks of tokens for `linear_token_stats`: what each row's logits amount to, and the gradients of that.

N tokens, n of them computed, C rows of a chunk, D hidden size, V vocabulary, K targets a token.
A backend is two functions of a chunk: `TorchChunks` has them, and another one may stand in its place.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from lowtide.head import exponentials
from lowtide.head.backends import choose_stats_backend
from lowtide.head.call import Head
from lowtide.head.exponentials.plan import plan_exp_stats
from lowtide.head.gradients import Gradients, gradient_buffers, put_input_grad
from lowtide.head.head_plan import HeadPlan, padded
from lowtide.head.kernels.configs import topk_row_bytes
from lowtide.head.matmul import HeadMatmul
from lowtide.head.options import HeadOptions
from lowtide.head.ranks.alone import Alone
from lowtide.head.rows import drops_rows, input_is_copied, positions, rows_are_aligned, take_rows
from lowtide.head.schedules import check_classes, remembered_plan
from lowtide.head.softmax import finish_logits_
from lowtide.head.statistics.of_logits import Known, Upstream, row_sums, stats_gradient_

OF_TARGETS = ("logprob", "is_top1")  # 0 where ignored; the others are the same whatever the target
NO_ROW = 1e30  # logsumexp of a row that nothing flows back to: makes its probabilities 0 whatever its logits are


@dataclass(frozen=True, kw_only=True)
class StatsJob:
    """One call, flattened: tokens in one axis N, nothing left to validate."""

    input: Tensor  # [..., D]
    weight_VD: Tensor
    target_NK: Tensor  # int64; K is 0 where there are none
    bias_V: Tensor | None  # wide
    logit_scale: Tensor | None  # scalar, wide
    softcap: float | None
    want: frozenset[str]
    topk: int
    ignore_index: int
    dtype: torch.dtype  # the GEMMs' operands
    wide: torch.dtype  # logits, and what comes of them
    classes: int  # V, of which the weight may hold a part

    @cached_property
    def kept_NK(self) -> Tensor:
        """Return which targets are not ignored."""
        return self.target_NK != self.ignore_index

    @cached_property
    def is_class_NK(self) -> Tensor:
        """Return which targets are classes."""
        return (self.target_NK >= 0) & (self.target_NK < self.classes)

    def check_targets(self) -> None:
        """Raise on the CPU where a target is no class; elsewhere it becomes NaN, for a check would wait."""
        if drops_rows(self.input.device):
            wrong = (self.kept_NK & ~self.is_class_NK).reshape(-1)
            check_classes(self.target_NK.reshape(-1), wrong, self.classes, self.ignore_index)


@dataclass(kw_only=True)
class ChunkStats:
    """What forward finds in a chunk; None where not wanted."""

    lse: Tensor  # [C]
    argmax: Tensor  # [C]
    top_logprob: Tensor  # [C]
    logprob: Tensor  # [C, K], of whatever class stands in an ignored target's place
    entropy: Tensor | None = None  # [C]
    mean_logit: Tensor | None = None  # [C]
    sum_sq_prob: Tensor | None = None  # [C]
    topk_values: Tensor | None = None  # [C, k]
    topk_ids: Tensor | None = None  # [C, k]


class TorchChunks:
    """Both directions of a chunk in plain PyTorch, on any device and in any dtype: logits, and what is done to them."""

    def __init__(self, job: StatsJob, plan: HeadPlan) -> None:
        self.job, self.plan = job, plan
        self.matmul = HeadMatmul(job.weight_VD, plan, job.dtype, job.wide)
        rows = plan.chunk_rows if plan.chunks else 0
        self._buffer = job.input.new_empty(rows, padded(job.weight_VD.shape[0]), dtype=job.wide)

    def forward(self, x_CD: Tensor, y_CK: Tensor) -> ChunkStats:
        """Return what is wanted of hidden states ``x_CD`` and classes ``y_CK``."""
        want, z_CV = self.job.want, self._logits(x_CD)
        sums = row_sums(z_CV, self.plan.columns, heat="entropy" in want, squares="sum_sq_prob" in want)
        highest = torch.topk(z_CV, self.job.topk, dim=1) if "topk" in want else None
        return ChunkStats(
            lse=sums.lse,
            argmax=sums.top_id,
            top_logprob=sums.top_logprob,
            logprob=sums.logprobs(z_CV, y_CK),
            entropy=sums.entropy if "entropy" in want else None,
            mean_logit=z_CV.mean(1) if "mean_logit" in want else None,
            sum_sq_prob=sums.sum_sq_prob if "sum_sq_prob" in want else None,
            topk_values=None if highest is None else highest.values,
            topk_ids=None if highest is None else highest.indices,
        )

    def backward(
        self,
        x_CD: Tensor,
        known: Known,
        upstream: Upstream,
        into: Gradients,
        index: Tensor | None,
        part: slice,
    ) -> None:
        """Add a chunk's part to ``into``, its rows of the input's gradient at ``part`` of ``index``.

        Where the logits' gradient is narrowed for the GEMMs, the size of each row's upstream stays outside of it: the
        target's entry is close to it, and bf16 would miss it by as much in each row.
        """
        job, plan = self.job, self.plan
        z_CV = self._logits(x_CD)
        outside = None
        if plan.backward_gemm == "narrow":
            largest = upstream.largest(job.weight_VD.shape[0])
            outside = largest.where(largest != 0, 1)
            upstream = upstream.times(1 / outside)
        stats_gradient_(z_CV, known, upstream, job.logit_scale, job.softcap, plan.columns)
        if into.bias_V is not None:
            into.bias_V += z_CV.sum(0) if outside is None else outside @ z_CV
        if into.input_ND is None and into.weight_VD is None:
            return
        g_CV = self.matmul.operand(z_CV)
        if into.input_ND is not None:
            put_input_grad(self.matmul, g_CV, outside, into, index, part)
        if into.weight_VD is not None:
            self.matmul.weight_grad(g_CV, outside, x_CD, into.weight_VD, part.start == 0)

    def _logits(self, x_CD: Tensor) -> Tensor:
        job = self.job
        z_CV = self._buffer[: x_CD.shape[0], : job.weight_VD.shape[0]]
        self.matmul.logits(x_CD, z_CV)
        finish_logits_(z_CV, job.bias_V, job.logit_scale, job.softcap, self.plan.columns)
        return z_CV


def plan_stats(job: StatsJob, rows: int, options: HeadOptions, *, weight_frozen: bool) -> HeadPlan:
    """Return the plan for ``rows`` tokens, which names the backend that runs."""
    V, D = job.weight_VD.shape
    weight, K = job.weight_VD, job.target_NK.shape[1]
    fits = weight.dtype != job.dtype or rows_are_aligned(weight)
    backend, reason = choose_stats_backend(
        options, weight.device, job.dtype, D, V, targets=K, topk=job.topk, weight_fits=fits
    )
    if backend == "exp":
        return plan_exp_stats(
            rows,
            D,
            V,
            weight.device,
            options,
            reason,
            weight_dtype=weight.dtype,
            weight_frozen=weight_frozen,
            input_is_copied=input_is_copied(job.input, job.dtype),
            tile_numbers=3 + len(job.want & {"entropy", "sum_sq_prob", "mean_logit"}),
            targets=K,
            sum_row_bytes=topk_row_bytes(job.topk, V, weight.device),
        )
    return remembered_plan(
        rows,
        D,
        V,
        job.dtype,
        job.weight_VD.device,
        replace(options, backend="torch"),
        weight_dtype=job.weight_VD.dtype,
        reduction="none",
        weight_frozen=weight_frozen,
    )


_NEW = {"mean_logit": "mean", "argmax": "top"}  # names of `exponentials`
_OLD = {new: old for old, new in _NEW.items()}


def _renamed(want: frozenset[str]) -> frozenset[str]:
    return frozenset(_NEW.get(name, name) for name in want)


def _head(job: StatsJob, options: HeadOptions) -> Head:
    return Head(
        input=job.input, weight_VD=job.weight_VD, bias_V=job.bias_V, scale=job.logit_scale, softcap=job.softcap,
        dtype=job.dtype, wide=job.wide, ranks=Alone(job.weight_VD.shape[0]), options=options,
    )  # fmt: skip


def forward_chunks(job: StatsJob, options: HeadOptions) -> dict[str, Tensor]:
    """Return each of `ChunkStats`'s fields that are wanted for all N tokens, and "is_top1"; 0 in rows left out.

    Left out, on the CPU, are tokens whose targets are all ignored, if nothing but what is of the targets is wanted.
    """
    job.check_targets()
    N = job.target_NK.shape[0]
    index = None
    if drops_rows(job.input.device) and job.want.issubset(OF_TARGETS):
        index = positions(job.kept_NK.any(1))
    plan = plan_stats(job, N if index is None else index.numel(), options, weight_frozen=True)
    y_NK = job.target_NK.where(job.is_class_NK, 0)
    found: dict[str, Tensor] = {}
    if plan.backend == "exp":
        found = exponentials.statistics(_head(job, options), y_NK, _renamed(job.want), job.topk, plan)
        return of_targets(job, y_NK, {_OLD.get(name, name): x for name, x in found.items()})
    chunks = TorchChunks(job, plan)
    for part in plan.slices() if plan.chunks else (slice(0, 0),):
        rows = part if index is None else index[part]
        stats = chunks.forward(take_rows(job.input, index, part, job.dtype), y_NK[rows])
        for name, value in vars(stats).items():
            if value is not None:
                if name not in found:
                    found[name] = value.new_zeros(N, *value.shape[1:])
                found[name][rows] = value
    return of_targets(job, y_NK, found) if "logprob" in found else found


def of_targets(job: StatsJob, y_NK: Tensor, found: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return what was found, log-probabilities 0 where ignored and NaN where the target is no class."""
    is_top1 = (found["argmax"][:, None] == y_NK) & job.kept_NK & job.is_class_NK
    logprob = found["logprob"].where(job.is_class_NK, torch.nan).where(job.kept_NK, 0)
    return found | {"is_top1": is_top1, "logprob": logprob}


def backward_chunks(
    job: StatsJob, options: HeadOptions, known: Known, upstream: Upstream, wanted: tuple[bool, bool, bool]
) -> Gradients:
    """Return the wanted gradients of input, weight and bias, from all rows to which something flows back."""
    upstream = upstream_of_kept(job, upstream)
    plan = plan_stats(job, known.lse.numel(), options, weight_frozen=not (wanted[1] or wanted[2]))
    if plan.backend == "exp":
        into = gradient_buffers(job.input, job.weight_VD, job.wide, plan, wanted, some_rows=False)
        numbers = {
            "lse": known.lse, "top": known.ids[:, 0], "top_logprob": known.logprobs[:, 0],
            "logprob": known.logprobs[:, 1:], "entropy": known.entropy,
        }  # fmt: skip
        exponentials.statistics_gradients(
            _head(job, options),
            job.target_NK.where(job.is_class_NK, 0).masked_fill(~job.kept_NK, -1),
            plan,
            {name: x for name, x in numbers.items() if x is not None},
            {_NEW.get(name, name): x for name, x in vars(upstream).items() if x is not None},
            into,
        )
        return into
    active_N = upstream.largest(job.weight_VD.shape[0]) != 0
    index = kept = None
    if drops_rows(job.input.device):
        index = positions(active_N)
        known, upstream = (known, upstream) if index is None else (known.part(index), upstream.part(index))
    else:
        kept, known = active_N, silenced(known, active_N)
    plan = plan_stats(job, known.lse.numel(), options, weight_frozen=not (wanted[1] or wanted[2]))
    into = gradient_buffers(job.input, job.weight_VD, job.wide, plan, wanted, some_rows=index is not None)
    chunks = TorchChunks(job, plan)
    for part in plan.slices():
        x_CD = take_rows(job.input, index, part, job.dtype)
        if kept is not None:
            x_CD = x_CD.where(kept[part, None], 0)  # a NaN would reach the weight's gradient
        chunks.backward(x_CD, known.part(part), upstream.part(part), into, index, part)
    return into


def upstream_of_kept(job: StatsJob, upstream: Upstream) -> Upstream:
    """Return the same, a log-probability's 0 where its target is ignored and NaN where it is no class."""
    if upstream.logprob is None:
        return upstream
    g = upstream.logprob.where(job.is_class_NK, torch.nan).where(job.kept_NK, 0)
    return Upstream(**{**vars(upstream), "logprob": g})


def silenced(known: Known, active_N: Tensor) -> Known:
    """Return what is known of the rows, and of inactive ones numbers with which nothing but 0 can come out."""
    return Known(
        lse=known.lse.where(active_N, NO_ROW),
        entropy=None if known.entropy is None else known.entropy.where(active_N, 0),
        ids=known.ids,
        logprobs=known.logprobs.where(active_N[:, None], 0),
    )
