"""Cross entropy where each rank holds a part of the vocabulary: the loop over chunks, on this rank's part.

Three GEMMs a chunk on V_r classes, as with the whole vocabulary, and between the first and the others one exchange of a
few numbers a row: the logsumexp of this rank's classes but the target, the target's logit where it is here, with label
smoothing the sum of all. From everybody's each rank has the row's whole logsumexp. The sum of the hidden states'
gradient over the ranks runs while the weight's gradient is computed.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lowtide.errors import UnsupportedError, message
from lowtide.head import exponentials
from lowtide.head.backends import choose_backend
from lowtide.head.call import Head
from lowtide.head.exponentials.plan import plan_exp
from lowtide.head.gradients import Gradients, gradient_buffers
from lowtide.head.graph import is_last_backward
from lowtide.head.head_plan import HeadPlan
from lowtide.head.matmul import HeadMatmul
from lowtide.head.operators import Call, Stored, Wanted
from lowtide.head.options import HeadOptions
from lowtide.head.plan import choose_gradient
from lowtide.head.ranks.parallel import Ranks
from lowtide.head.registration import found_gradients, undisturbed
from lowtide.head.rows import Rows
from lowtide.head.schedules import CrossEntropyJob, check_classes
from lowtide.head.softmax import LossTerms, finish_logits_, loss_from, loss_gradient_, lse_of_others
from lowtide.head.stored import Kept, lacks_denominator, stored_gradients
from lowtide.head.vocab.products import add_products, chunk_buffer, plan_part

ELSEWHERE = 2**30  # a class of no tile, and of no rank's weight


@dataclass(frozen=True, kw_only=True)
class ShardTerms(LossTerms):
    """`LossTerms` of a chunk's rows, whose targets may be other ranks' classes."""

    vocab: int
    own_C: Tensor | None = None  # each row's class weight

    def classes(self, V: int) -> int:  # noqa: ARG002
        """Return the number of classes of all ranks."""
        return self.vocab

    def weight_of(self, y_C: Tensor) -> Tensor:  # noqa: ARG002
        """Return the class weights of the targets."""
        assert self.own_C is not None
        return self.own_C

    def total_class_weight(self, V: int) -> Tensor | float:  # noqa: ARG002
        """Return Q."""
        return self.vocab if self.total is None else self.total


@dataclass(frozen=True, kw_only=True)
class _Rows:
    """What is known of the tokens before any product, [n] each in the order of the chunks; what "mean" divides by."""

    order: Rows
    y: Tensor  # row of this rank's weight; V_r where the class is another rank's; as `exponentials` takes it for these
    here: Tensor | None  # whether it is; None for exponentials
    kept: Tensor
    unit: Tensor  # the token's weight; 0 if ignored, NaN if its target is no class
    own: Tensor | None  # class weight
    total: Tensor | None  # of all class weights
    counted: Tensor | None  # parts of what "mean" divides by; None for the other reductions

    @cached_property
    def denominator(self) -> Tensor | None:
        """Return what "mean" divides by; None for the other reductions."""
        return None if self.counted is None else self.counted.sum()

    def divided(self) -> Tensor:
        """Return each row's factor: its weight over the denominator, and 0 for ignored rows even where that is 0."""
        return self.unit if self.denominator is None else (self.unit / self.denominator).where(self.kept, 0)


class ShardedHead:
    """Stands in the place of `operators` in autograd's graph: the same calls, on this rank's part of the vocabulary.

    Args:
        ranks: The others.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks

    def run(self, *args: Any) -> Stored:
        """Compute the loss, the same on every rank, and the gradients that are wanted."""
        *fields, keep_rows = args
        call, wanted = Call(*fields[: len(Call._fields)]), Wanted(*fields[len(Call._fields) :])
        with torch.no_grad(), undisturbed(call.input.device):
            job = call.job()
            plan = _plan(job, self.ranks, call.options(), wanted)
            if not call.input.requires_grad and (keep_rows or (any(wanted) and plan.schedule == "blocks")):
                self.ranks.tokens.keep()
            rows = _select(job, self.ranks, plan)
            into = gradient_buffers(job.input, job.weight_VD, job.wide, plan, wanted, some_rows=False, stored=True)

            def factor() -> Tensor:
                return rows.unit if lacks_denominator(call.input, call.linear_weight) else rows.divided()

            if plan.backend == "exp":
                settle = (lambda: (factor(), into)) if any(wanted) else None
                loss = self._loss(job, rows)
                found = exponentials.cross_entropy(self._head(job, call), loss, rows.y, plan, settle)
                numbers = torch.stack([found[name] for name in ("loss", "lse", "miss")])
            else:
                numbers = _run_chunks(job, rows, plan, self.ranks, factor() if any(wanted) else None, into, None)
            loss_N = rows.order.among_all((numbers[0] * rows.unit).where(rows.kept, 0))
            value = loss_N if call.reduction == "none" else loss_N.sum()
            value = value if rows.denominator is None else value / rows.denominator
            kept = None
            if any(wanted):
                kept_N = job.target_N != job.ignore_index
                mine = self.ranks.tokens.mine(kept_N.view(call.target.shape))
                kept = Kept(mine.reshape(-1), kept_N.any())
            gradients = stored_gradients(
                into, call.input, call.linear_weight, job.wide, denominator=rows.denominator, input_factor_N=None,
                kept=kept,
            )  # fmt: skip
            lse, miss = (rows.order.among_all(numbers[i]) if keep_rows else value.new_empty(0) for i in (1, 2))
            if keep_rows and rows.own is not None and rows.total is not None:
                miss = torch.cat((miss, rows.order.among_all(rows.own), rows.total[None]))
            return Stored(value, *gradients, lse=lse, miss=miss)

    def run_backward(self, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the gradients from the upstream one, a scalar or [N], and what forward kept of each row.

        Behind the rows' misses it kept the class weights: what backward exchanges is what gradients are made of.
        """
        *fields, upstream, lse, miss = args
        call, wanted = Call(*fields[: len(Call._fields)]), Wanted(*fields[len(Call._fields) :])
        tokens = self.ranks.tokens
        with torch.no_grad(), undisturbed(call.input.device):
            job = call.job()
            if upstream.dim():  # as in `operators`
                job = replace(job, target_N=job.target_N.where(upstream != 0, job.ignore_index))
            plan = _plan(job, self.ranks, call.options("recompute"), wanted)
            tokens_here = lse.numel()
            rows = _select(job, self.ranks, plan, miss[tokens_here:])
            into = gradient_buffers(job.input, job.weight_VD, job.wide, plan, wanted, some_rows=False)
            given = upstream.to(job.wide)
            factor = rows.divided() * (rows.order.of(given) if given.dim() else given)
            factor = factor.where(rows.kept, 0)
            known = {"lse": rows.order.of(lse), "miss": rows.order.of(miss[:tokens_here])}
            if plan.backend == "exp":
                loss = self._loss(job, rows)
                exponentials.cross_entropy_gradients(self._head(job, call), loss, rows.y, plan, factor, known, into)
            else:
                _run_chunks(job, rows, plan, self.ranks, factor, into, torch.stack(list(known.values())))
            if is_last_backward():
                tokens.let_go()
            return found_gradients(into, call.input, call.linear_weight, call.wide)

    def _loss(self, job: CrossEntropyJob, rows: _Rows) -> LossTerms:
        return replace(job.terms, own_n=rows.own, total=rows.total)

    def _head(self, job: CrossEntropyJob, call: Call) -> Head:
        return Head(
            input=job.input, weight_VD=job.weight_VD, bias_V=job.bias_V, scale=job.logit_scale, softcap=job.softcap,
            dtype=job.dtype, wide=job.wide, ranks=self.ranks, options=call.options(),
        )  # fmt: skip


def _select(job: CrossEntropyJob, ranks: Ranks, plan: HeadPlan, class_weights: Tensor | None = None) -> _Rows:
    """Look at the targets. All tokens are computed, on every device: how many chunks there are must not depend on them.

    On the CPU a target that is no class is an error; elsewhere its token's loss and gradient are NaN. The targets'
    ``class_weights`` [N + 1], with all classes' sum behind them, are exchanged where nobody kept them.
    """
    q, index = job.terms.class_weight, ranks.order(plan)
    order = Rows(tokens=job.target_N.numel(), index=index, filled=index is not None)
    if plan.backend == "exp" and q is None:
        return _select_at_once(job, ranks, order)
    V, y_N = ranks.shard.vocab, job.target_N
    kept_N, is_class = y_N != job.ignore_index, (y_N >= 0) & (y_N < V)
    if y_N.device.type == "cpu":
        check_classes(y_N, kept_N & ~is_class, V, job.ignore_index)
    local_N, here_N = ranks.here(y_N.where(is_class, 0))
    unit_N = torch.ones_like(y_N, dtype=job.wide) if job.token_weight_N is None else job.token_weight_N
    unit_N = unit_N.where(is_class, torch.nan).where(kept_N, 0)
    kept = order.of(kept_N)
    own = total = None
    if q is not None:
        if class_weights is None:
            here = torch.cat((q, q.new_zeros(1)))[local_N]
            class_weights = ranks.sum_of(torch.cat((here, q.sum()[None])))
        own, total = order.of(class_weights[:-1]), class_weights[-1]
    if plan.backend == "exp":
        local_N = local_N.where(here_N, ELSEWHERE).where(kept_N, -1).int()
    return _Rows(
        order=order,
        y=order.of(local_N, -1 if plan.backend == "exp" else ranks.shard.rows),
        here=order.of(here_N),
        kept=kept,
        unit=order.of(unit_N),
        own=own,
        total=total,
        counted=_counted(job, kept_N.to(job.wide) if own is None else own.where(kept, 0)),
    )


def _select_at_once(job: CrossEntropyJob, ranks: Ranks, order: Rows) -> _Rows:
    """The same by one kernel: what stands before the first GEMM stands in its way."""
    from lowtide.head.kernels.select import select

    shard = ranks.shard
    of_shard = shard.first, shard.rows, ELSEWHERE
    y_N, unit_N, counted = select(job.target_N, shard.vocab, job.ignore_index, job.token_weight_N, None, of_shard)
    y = order.of(y_N, -1)
    return _Rows(
        order=order,
        y=y,
        here=None,
        kept=y >= 0,
        unit=order.of(unit_N),
        own=None,
        total=None,
        counted=_counted(job, counted),
    )


def _counted(job: CrossEntropyJob, counted: Tensor) -> Tensor | None:
    if job.reduction != "mean":
        return None
    return counted if job.num_items is None else job.num_items


def _plan(job: CrossEntropyJob, ranks: Ranks, options: HeadOptions, wanted: Wanted) -> HeadPlan:
    """Return a plan that is the same on every rank: made for the largest part and for what all of them can do."""
    D, frozen = job.weight_VD.shape[1], not (wanted.weight or wanted.bias)
    both = job.softcap is not None and job.terms.label_smoothing != 0
    device, most = job.input.device, ranks.shard.most_rows
    backend, reason = "torch", ""
    if options.backend not in ("row", "torch"):
        backend, reason = _exp_or_torch(job, ranks, options, most, capped_and_smoothed=both)
    if backend != "exp":
        return plan_part(ranks, job.weight_VD, job.dtype, options, job.reduction, weight_frozen=frozen)
    gradient = choose_gradient(options, job.reduction, weight_frozen=False)
    tokens = ranks.tokens.groups * ranks.tokens.length
    # Hidden states are gathered ahead, or rounded, in which a rank must not differ: of sums alone four pieces live at
    # once, of gradients three; with these also the product, in float32, whose sum over the ranks is under way.
    return plan_exp(
        tokens, D, most, device, options, reason, gradient, job.weight_VD.dtype, frozen, input_is_copied=True,
        device_bytes=ranks.limits.gpu_bytes, sum_row_bytes=3 * 2 * D, row_bytes=(2 * 2 + 4) * D, pieces=2,
    )  # fmt: skip


def _exp_or_torch(
    job: CrossEntropyJob, ranks: Ranks, options: HeadOptions, most: int, *, capped_and_smoothed: bool
) -> tuple[str, str]:
    """Return which of the two runs, on every rank alike.

    Raises:
        UnsupportedError: "exp" was asked for by name, and some rank's GPU cannot run it.
    """
    if ranks.limits.exponentials:
        return choose_backend(
            options, job.input.device, job.dtype, job.weight_VD.shape[1], most, capped_and_smoothed=capped_and_smoothed
        )
    if options.backend == "exp":
        hint = "Its kernels need bfloat16 and GPUs of compute capability 9.0 to below 12 on all of them."
        raise UnsupportedError(message("backend", "'auto' or 'torch'", "'exp', which some rank cannot run", hint))
    return "torch", "not every rank's GPU runs the kernels of exp"


def _run_chunks(
    job: CrossEntropyJob,
    rows: _Rows,
    plan: HeadPlan,
    ranks: Ranks,
    factor_n: Tensor | None,
    into: Gradients,
    known_2n: Tensor | None,
) -> Tensor:
    """Compute each row's loss, logsumexp and 1 - p of its target [3, n], and with a factor the gradients.

    Args:
        job: The call, on this rank's weight.
        rows: From `_select`.
        plan: From `_plan`.
        ranks: The others.
        factor_n: What each row's loss is multiplied with on its way to the gradients; None: no gradients.
        into: Takes the gradients.
        known_2n: Logsumexps and 1 - p, where they are known; None: they are found, and the losses with them.
    """
    V = job.weight_VD.shape[0]
    matmul = HeadMatmul(job.weight_VD, plan, job.dtype, job.wide)
    buffer = chunk_buffer(ranks, plan, job.input, V, job.wide)
    found = rows.unit.new_zeros(3, *rows.unit.shape)
    q, total = job.terms.class_weight, rows.total
    q_E = None if q is None else torch.cat((q, q.new_zeros(1)))
    begun = False
    for part in ranks.chunks(plan):
        y_C, kept_C = rows.y[part], rows.kept[part]
        terms = ShardTerms(
            class_weight=q_E, label_smoothing=job.terms.label_smoothing, z_loss=job.terms.z_loss,
            vocab=ranks.shard.vocab, own_C=None if rows.own is None else rows.own[part], total=total,
        )  # fmt: skip
        x_CD = ranks.begin_rows(job.input, None, part, job.dtype).get()
        x_CD = x_CD.where(kept_C[:, None], 0)  # a NaN in an ignored row would reach the weight's gradient
        z_CE = buffer[: len(y_C)]
        matmul.logits(x_CD, z_CE[:, :V])
        finish_logits_(z_CE[:, :V], job.bias_V, job.logit_scale, job.softcap, plan.columns)
        z_CE[:, V] = -torch.inf
        if known_2n is None:
            assert rows.here is not None
            loss_C, stats_2C = _exchange(z_CE, y_C, rows.here[part], terms, ranks, plan.columns)
            found[:, part] = torch.stack((loss_C, *stats_2C))
        else:
            stats_2C = known_2n[:, part]
        if factor_n is not None:
            _add_gradients(
                job, plan, ranks, matmul, z_CE, stats_2C, y_C, factor_n[part], terms, x_CD, into,
                slice(part.start // ranks.groups, part.stop // ranks.groups), begun,
            )  # fmt: skip
        begun = True
    return found


def _exchange(
    z_CE: Tensor, y_C: Tensor, here_C: Tensor, terms: ShardTerms, ranks: Ranks, columns: int
) -> tuple[Tensor, Tensor]:
    """Return each row's loss, and its logsumexp and 1 - p of its target [2, C], from what all ranks hold of it."""
    t_C = z_CE.gather(1, y_C[:, None])[:, 0].where(here_C, 0)
    pieces = [lse_of_others(z_CE, y_C, columns), t_C]
    if terms.label_smoothing:
        z_CV = z_CE[:, :-1]
        q = terms.class_weight
        pieces.append(z_CV.sum(1) if q is None else z_CV @ q[:-1])
    told = ranks.gather(torch.stack(pieces))
    others, t = told[:, 0].logsumexp(0), told[:, 1].sum(0)
    gap, lse = others - t, torch.logaddexp(others, t)
    nll = torch.logaddexp(gap, torch.zeros_like(gap))  # log(1 + exp(gap)), to its last digit where p is close to 1
    loss = loss_from(nll, lse, told[:, 2].sum(0) if terms.label_smoothing else None, y_C, terms, ranks.shard.rows)
    return loss, torch.stack((lse, gap.sigmoid()))


def _add_gradients(
    job: CrossEntropyJob,
    plan: HeadPlan,
    ranks: Ranks,
    matmul: HeadMatmul,
    z_CE: Tensor,
    stats_2C: Tensor,
    y_C: Tensor,
    factor_C: Tensor,
    terms: ShardTerms,
    x_CD: Tensor,
    into: Gradients,
    part: slice,
    begun: bool,
) -> None:
    narrow = plan.backward_gemm == "narrow"
    z_CE[:, -1] = 0  # the column of other ranks' classes takes their targets' gradient, and is left out below
    inside = torch.ones_like(factor_C) if narrow else factor_C
    loss_gradient_(z_CE, stats_2C, y_C, inside, terms, job.logit_scale, job.softcap, plan.columns)
    add_products(matmul, z_CE[:, :-1], factor_C if narrow else None, x_CD, into, ranks, part, begun=begun)
