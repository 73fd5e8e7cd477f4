"""The loop over chunks of tokens for `linear_divergence`: both sides' logits, their divergence, its gradient.

N tokens, n of them computed, C rows of a chunk, D hidden size, V vocabulary, K classes of a teacher's top k.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from lowtide.errors import TargetIndexError, message
from lowtide.head.backends import choose_divergence_backend
from lowtide.head.divergences.plan import plan_pair
from lowtide.head.divergences.terms import (
    ALONE,
    Everyone,
    Kind,
    RowNumbers,
    dense_gradient_,
    dense_rows,
    topk_gradient_,
    topk_rows,
)
from lowtide.head.gradients import Gradients, gradient_buffers, put_input_grad
from lowtide.head.head_plan import HeadPlan, padded
from lowtide.head.matmul import HeadMatmul, finish_logits_
from lowtide.head.options import HeadOptions
from lowtide.head.planning import plain_options
from lowtide.head.ranks.parallel import Ranks
from lowtide.head.rows import drops_rows, positions, take_rows


@dataclass(frozen=True, kw_only=True)
class Teacher:
    """The teacher's own head."""

    input: Tensor  # [..., D]
    weight_VD: Tensor
    bias_V: Tensor | None  # wide
    softcap: float | None
    dtype: torch.dtype  # the GEMM's operands


@dataclass(frozen=True, kw_only=True)
class KnownClasses:
    """What is known of a teacher: its top k."""

    ids_NK: Tensor  # int64
    logprobs_NK: Tensor  # wide; -inf where there is none
    tail: str


@dataclass(frozen=True, kw_only=True)
class DivergenceJob:
    """One call, flattened: tokens in one axis N, nothing left to validate."""

    input: Tensor  # [..., D]
    weight_VD: Tensor
    bias_V: Tensor | None  # wide
    teacher: Teacher | KnownClasses
    mask_N: Tensor | None  # bool
    softcap: float | None
    scale: Tensor | None  # scalar, wide: 1 / temperature
    kind: Kind
    dtype: torch.dtype  # the GEMMs' operands
    wide: torch.dtype  # logits, and what comes of them
    ranks: Ranks | None = None  # who else holds classes of both sides

    @property
    def drops_rows(self) -> bool:
        """Return whether masked rows are dropped; not where the ranks have to make as many exchanges each."""
        return self.ranks is None and drops_rows(self.input.device)

    def check_ids(self) -> None:
        """Raise on the CPU where an id is negative; elsewhere its row becomes NaN, for a check would wait.

        Raises:
            TargetIndexError: With the first one's value and place.
        """
        if isinstance(self.teacher, KnownClasses) and drops_rows(self.input.device):
            ids = self.teacher.ids_NK.reshape(-1)
            wrong = ((ids < 0) & (self.teacher.logprobs_NK.reshape(-1) > -torch.inf)).nonzero()
            if wrong.numel():
                position = int(wrong[0, 0])
                got = f"{int(ids[position])} at position {position} of the flattened ids"
                hint = "Give unused places the log-probability -inf."
                raise TargetIndexError(message("teacher_topk", "class indices of 0 or more", got, hint))


class Pair(Protocol):
    """Both directions of a chunk: logits, and what is done to them."""

    def forward(self, x_CD: Tensor, index: Tensor | None, part: slice, kept_C: Tensor | None) -> RowNumbers:
        """Return the chunk's divergences, and what backward needs to know of its rows."""

    def expect(self, factor: Tensor) -> None:
        """Prepare for all factors, a scalar or [n], that `backward` will get."""

    def backward(
        self,
        x_CD: Tensor,
        rows: RowNumbers | None,
        factor_C: Tensor,
        into: Gradients,
        index: Tensor | None,
        part: slice,
        kept_C: Tensor | None,
    ) -> Tensor:
        """Add a chunk's part to ``into``, its rows of the input's gradient at ``part`` of ``index``; return its values.

        Where the logits' gradient is narrowed for the GEMMs, each row's factor stays outside of it, as in `run_chunks`.
        ``rows`` are from `forward`; None: they are found on the way, from the same logits.
        """

    def finish(self, into: Gradients) -> None:
        """Do what is left to do after the last chunk of backward."""


class TorchPair:
    """Both directions of a chunk in plain PyTorch, on any device and in any dtype: logits, and what is done to them."""

    def __init__(self, job: DivergenceJob, plan: HeadPlan, teacher_plan: HeadPlan) -> None:
        self.job, self.plan = job, plan
        self.everyone: Everyone = ALONE if job.ranks is None else job.ranks
        self.matmul = HeadMatmul(job.weight_VD, plan, job.dtype, job.wide)
        rows, self.V = plan.chunk_rows if plan.chunks else 0, job.weight_VD.shape[0]
        if isinstance(job.teacher, Teacher):
            teacher = job.teacher
            self.teacher_matmul = HeadMatmul(teacher.weight_VD, teacher_plan, teacher.dtype, job.wide)
            self.width = max(self.V, teacher.weight_VD.shape[0])
            self._teacher_buffer = job.input.new_empty(rows, padded(self.width), dtype=job.wide)
        else:
            self.width = self.V + 1  # the column where classes that the student lacks are read and written
        self._buffer = job.input.new_empty(rows, padded(self.width), dtype=job.wide)

    def forward(self, x_CD: Tensor, index: Tensor | None, part: slice, kept_C: Tensor | None) -> RowNumbers:
        """Return the chunk's divergences, and what backward needs to know of its rows."""
        job, columns = self.job, self.plan.columns
        z_CW = self._student(x_CD)
        if isinstance(job.teacher, Teacher):
            return dense_rows(z_CW, self._teacher(job.teacher, index, part, kept_C), job.kind, columns, self.everyone)
        ids, logprobs = self._known(job.teacher, index, part)
        return topk_rows(z_CW, ids, logprobs, job.teacher.tail, job.kind, columns, self.everyone)

    def expect(self, factor: Tensor) -> None:
        """Nothing depends on it: the logits' gradient is wide, or as wide in range."""

    def backward(
        self,
        x_CD: Tensor,
        rows: RowNumbers | None,
        factor_C: Tensor,
        into: Gradients,
        index: Tensor | None,
        part: slice,
        kept_C: Tensor | None,
    ) -> Tensor:
        """Add a chunk's part to ``into`` and return its values: see `Pair.backward`."""
        job, plan, kind = self.job, self.plan, self.job.kind
        z_CW = self._student(x_CD)
        cap: Tensor | float | None = job.softcap
        if job.scale is not None:
            factor_C = factor_C * job.scale
            cap = None if cap is None else cap * job.scale
        inside, outside = (None, factor_C) if plan.backward_gemm == "narrow" else (factor_C, None)
        if isinstance(job.teacher, Teacher):
            teacher_CW, normalised = self._teacher(job.teacher, index, part, kept_C), rows is None
            rows = rows or dense_rows(z_CW, teacher_CW, kind, plan.columns, self.everyone)
            dense_gradient_(z_CW, teacher_CW, rows, kind, inside, plan.columns, cap=cap, normalised=normalised)
        else:
            ids, logprobs = self._known(job.teacher, index, part)
            tail = job.teacher.tail
            rows = rows or topk_rows(z_CW, ids, logprobs, tail, kind, plan.columns, self.everyone)
            topk_gradient_(z_CW, ids, logprobs, rows, tail, kind, inside, plan.columns, cap=cap)
        z_CV = z_CW[:, : self.V]
        if kept_C is not None:
            z_CV.masked_fill_(~kept_C[:, None], 0)  # infinities and NaN of a row that does not count, times 0
        if job.ranks is not None:
            _add_products(self.matmul, z_CV, outside, x_CD, into, job.ranks, part, begun=part.start > 0)
            return rows.value
        if into.bias_V is not None:
            into.bias_V += z_CV.sum(0) if outside is None else outside @ z_CV
        if into.input_ND is None and into.weight_VD is None:
            return rows.value
        g_CV = self.matmul.operand(z_CV)
        if into.input_ND is not None:
            put_input_grad(self.matmul, g_CV, outside, into, index, part)
        if into.weight_VD is not None:
            self.matmul.weight_grad(g_CV, outside, x_CD, into.weight_VD, part.start == 0)
        return rows.value

    def finish(self, into: Gradients) -> None:
        """There is nothing left."""

    def _student(self, x_CD: Tensor) -> Tensor:
        z_CW = self._buffer[: x_CD.shape[0], : self.width]
        self._logits(self.matmul, x_CD, z_CW, self.job.bias_V, self.job.softcap)
        return z_CW

    def _teacher(self, teacher: Teacher, index: Tensor | None, part: slice, kept_C: Tensor | None) -> Tensor:
        x_CD = teacher_rows(teacher, index, part, kept_C)
        z_CW = self._teacher_buffer[: x_CD.shape[0], : self.width]
        self._logits(self.teacher_matmul, x_CD, z_CW, teacher.bias_V, teacher.softcap)
        return z_CW

    def _logits(
        self, matmul: HeadMatmul, x_CD: Tensor, z_CW: Tensor, bias_V: Tensor | None, softcap: float | None
    ) -> None:
        """Write one side's logits over the temperature, and -inf for the classes that only the other side has."""
        V = matmul.weight_VD.shape[0]
        matmul.logits(x_CD, z_CW[:, :V])
        finish_logits_(z_CW[:, :V], bias_V, self.job.scale if softcap is None else None, softcap, self.plan.columns)
        if softcap is not None and self.job.scale is not None:
            z_CW[:, :V].mul_(self.job.scale)
        if self.width > V:
            z_CW[:, V:] = -torch.inf

    def _known(self, teacher: KnownClasses, index: Tensor | None, part: slice) -> tuple[Tensor, Tensor]:
        """Return a chunk's classes, V where the student lacks one or there is none, and their log-probabilities."""
        rows = part if index is None else index[part]
        ids, logprobs = teacher.ids_NK[rows], teacher.logprobs_NK[rows]
        there = logprobs > -torch.inf
        logprobs = logprobs.masked_fill((ids < 0) & there, torch.nan)
        if self.job.ranks is not None:
            own, here = self.job.ranks.here(ids)
            return own.where(there & here, self.V), logprobs
        return ids.where(there & (ids >= 0) & (ids < self.V), self.V), logprobs


def teacher_rows(teacher: Teacher, index: Tensor | None, part: slice, kept_C: Tensor | None) -> Tensor:
    """Return a chunk of the teacher's hidden states [C, D] in the operands' dtype, 0 where not kept."""
    x_CD = take_rows(teacher.input, index, part, teacher.dtype)
    return x_CD if kept_C is None else x_CD.where(kept_C[:, None], 0)


def pair_of(job: DivergenceJob, plan: HeadPlan, teacher_plan: HeadPlan) -> Pair:
    """Return what computes the chunks, as the plan says."""
    if plan.backend == "row":
        from lowtide.head.divergences.kernel_loop import KernelPair

        assert isinstance(job.teacher, Teacher)
        return KernelPair(job, job.teacher, plan, teacher_plan)
    return TorchPair(job, plan, teacher_plan)


def _plans(
    job: DivergenceJob,
    n: int,
    options: HeadOptions,
    wanted: tuple[bool, bool, bool],
    gradient: Literal["forward", "recompute"],
) -> tuple[HeadPlan, HeadPlan]:
    V, D = job.weight_VD.shape
    if job.ranks is not None:
        V, options = job.ranks.shard.most_rows, plain_options(options)
    if isinstance(job.teacher, Teacher):
        teacher_V, teacher_D = job.teacher.weight_VD.shape
        teacher_V = teacher_V if job.ranks is None else V
        teacher_dtype = job.teacher.dtype
    else:
        teacher_D, teacher_V, teacher_dtype = 0, job.teacher.ids_NK.shape[1], job.dtype
    topk = isinstance(job.teacher, KnownClasses)
    backend, reason = choose_divergence_backend(options, job.input.device, job.dtype, V, topk=topk)
    return plan_pair(
        n,
        (D, V),
        (teacher_D, teacher_V),
        job.dtype,
        teacher_dtype,
        job.input.device,
        options,
        backend=backend,
        reason=reason,
        weight_dtype=job.weight_VD.dtype,
        gradient=gradient,
        gradients=(any(wanted), wanted[1] or wanted[2]),
        device_bytes=None if job.ranks is None else job.ranks.limits.gpu_bytes,
    )


def forward_chunks(job: DivergenceJob, N: int, options: HeadOptions) -> RowNumbers:
    """Return the divergence of all N tokens, and what backward needs to know of each; 0 where masked.

    On the CPU masked tokens are dropped; elsewhere they are computed as zeros, for a count would stop the host.
    """
    kept, index = _counted_rows(job)
    plans = _plans(job, N if index is None else index.numel(), options, (False, False, False), "recompute")
    pair = pair_of(job, *plans)
    found = RowNumbers(*(job.input.new_zeros(N, dtype=job.wide) for _ in RowNumbers._fields))
    for part in plans[0].slices():
        x_CD, kept_C = _chunk(job, index, part, kept)
        for whole, piece in zip(found, pair.forward(x_CD, index, part, kept_C), strict=True):
            whole[part if index is None else index[part]] = piece
    return found if kept is None else found._replace(value=found.value.where(kept, 0))


def stored_chunks(
    job: DivergenceJob, N: int, options: HeadOptions, factor: Tensor, wanted: tuple[bool, bool, bool]
) -> tuple[Tensor, Gradients]:
    """Return the divergence of all N tokens, and the wanted gradients of their sum times ``factor``, a scalar.

    Each side's logits are built once.
    """
    kept, index = _counted_rows(job)
    n = N if index is None else index.numel()
    plans = _plans(job, n, options, wanted, "forward")
    into = gradient_buffers(
        job.input, job.weight_VD, job.wide, plans[0], wanted, some_rows=index is not None, stored=True
    )
    pair = pair_of(job, *plans)
    pair.expect(factor)
    value = job.input.new_zeros(N, dtype=job.wide)
    for part in plans[0].slices():
        x_CD, kept_C = _chunk(job, index, part, kept)
        factor_C = factor.expand(x_CD.shape[0])
        if kept_C is not None:  # a mean over nothing has a factor of infinity
            factor_C = factor_C.where(kept_C, 0)
        value[part if index is None else index[part]] = pair.backward(x_CD, None, factor_C, into, index, part, kept_C)
    pair.finish(into)
    return value if kept is None else value.where(kept, 0), into


def backward_chunks(
    job: DivergenceJob, options: HeadOptions, rows: RowNumbers, upstream_N: Tensor, wanted: tuple[bool, bool, bool]
) -> Gradients:
    """Return the wanted gradients of input, weight and bias, from all rows to which something flows back."""
    if job.mask_N is not None:
        upstream_N = upstream_N.where(job.mask_N, 0)
    active_N = upstream_N != 0
    kept = index = None
    if job.drops_rows:
        index = positions(active_N)
    else:
        kept = active_N
    if index is not None:
        rows, upstream_N = RowNumbers(*(x[index] for x in rows)), upstream_N[index]
    plans = _plans(job, upstream_N.numel(), options, wanted, "recompute")
    into = gradient_buffers(job.input, job.weight_VD, job.wide, plans[0], wanted, some_rows=index is not None)
    pair = pair_of(job, *plans)
    pair.expect(upstream_N)
    for part in plans[0].slices():
        x_CD, kept_C = _chunk(job, index, part, kept)
        of_chunk = RowNumbers(*(x[part] for x in rows))
        pair.backward(x_CD, of_chunk, upstream_N[part], into, index, part, kept_C)
    pair.finish(into)
    return into


def _counted_rows(job: DivergenceJob) -> tuple[Tensor | None, Tensor | None]:
    """Return which of all tokens are not masked, or the positions of these: whichever way rows are left out here."""
    job.check_ids()
    if job.mask_N is not None and job.drops_rows:
        return None, positions(job.mask_N)
    return job.mask_N, None


def _chunk(job: DivergenceJob, index: Tensor | None, part: slice, kept: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return a chunk's hidden states [C, D] in the operands' dtype, 0 where not kept, and which rows are kept."""
    x_CD = take_rows(job.input, index, part, job.dtype)
    if kept is None:
        return x_CD, None
    return x_CD.where(kept[part, None], 0), kept[part]


def _add_products(
    matmul: HeadMatmul,
    z_CV: Tensor,
    outside_C: Tensor | None,
    x_CD: Tensor,
    into: Gradients,
    ranks: Ranks,
    part: slice,
    *,
    begun: bool,
) -> None:
    """Add a chunk's gradients: the sum of the hidden states' over the ranks runs beside the weight's own product.

    Args:
        matmul: The GEMMs.
        z_CV: The gradient of this rank's logits, each row's still to be multiplied with ``outside_C``.
        outside_C: See there; None: 1.
        x_CD: The chunk's hidden states.
        into: Takes the gradients.
        ranks: The others.
        part: The chunk's rows within a group.
        begun: Whether the weight's gradient holds something already.
    """
    if into.bias_V is not None:
        into.bias_V += z_CV.sum(0) if outside_C is None else outside_C @ z_CV
    if into.input_ND is None and into.weight_VD is None:
        return
    g_CV = matmul.operand(z_CV)
    reduced = None
    if into.input_ND is not None:
        part_CD = torch.empty_like(x_CD, dtype=matmul.wide)  # summed before it is rounded
        matmul.input_grad(g_CV, outside_C, part_CD)
        reduced = ranks.tokens.reduce(part_CD)
    if into.weight_VD is not None:
        matmul.weight_grad(g_CV, outside_C, x_CD, into.weight_VD, not begun)
    if reduced is not None and into.input_ND is not None:
        reduced.write(into, part.start)
