"""The head as registered operators: opaque to torch.compile, with shapes it can infer, and no autograd of their own.

`torch.ops.lowtide.cross_entropy` computes the loss, and with it the gradients where they can be known by then;
`torch.ops.lowtide.cross_entropy_backward` builds them from the inputs once the upstream gradient is there.
Both begin with the fields of `Call`, declared once: the operators' schemas are made from its annotations.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from lowtide.head import exponentials
from lowtide.head.call import Head, scalar_on
from lowtide.head.gradients import Gradients, gradient_buffers
from lowtide.head.options import HeadOptions
from lowtide.head.ranks.alone import Alone
from lowtide.head.registration import (
    fake_gradients,
    flop_formula,
    found_gradients,
    head_flop,
    schema_of,
    undisturbed,
    watched,
)
from lowtide.head.schedules import CrossEntropyJob, Rows, plan_rows, run_chunks
from lowtide.head.softmax import LossTerms
from lowtide.head.stored import Kept, StoredGradients, fake_stored_gradients, lacks_denominator, stored_gradients


class Call(NamedTuple):
    """What `lowtide.linear_cross_entropy` was asked, as plain tensors and scalars; labels already shifted."""

    input: Tensor  # [..., D]
    linear_weight: Tensor  # [V, D]
    target: Tensor  # [...]
    linear_bias: Tensor | None  # [V]
    weight: Tensor | None  # [V]
    token_weight: Tensor | None  # [...]
    num_items: Tensor | None  # scalar
    logit_scale: Tensor | None  # scalar
    dtype: torch.dtype  # of the GEMMs' operands
    reduction: str
    ignore_index: int
    label_smoothing: float
    z_loss: float
    softcap: float | None
    workspace_mib: float | None
    accumulate: str
    backend: str

    @property
    def wide(self) -> torch.dtype:
        """Return the dtype of logits, losses and sums."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    @property
    def trained(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the tensors that may get a gradient."""
        return self.input, self.linear_weight, self.linear_bias

    def options(self, gradient: Literal["auto", "recompute"] = "auto") -> HeadOptions:
        """Return the options for a pass, whose gradients are those of its own loss or (recompute) wait for upstream."""
        accumulate: Any = self.accumulate
        backend: Any = self.backend
        return _options(self.workspace_mib, accumulate, backend, gradient)

    def job(self) -> CrossEntropyJob:
        """Return the same, flattened, for the loop over chunks: what kernels read without strides has none."""
        wide, device = self.wide, self.input.device
        return CrossEntropyJob(
            input=self.input,
            weight_VD=self.linear_weight,
            target_N=self.target.reshape(-1).long().contiguous(),
            bias_V=None if self.linear_bias is None else self.linear_bias.to(wide).contiguous(),
            token_weight_N=None if self.token_weight is None else self.token_weight.reshape(-1).to(wide).contiguous(),
            num_items=None if self.num_items is None else scalar_on(device, self.num_items, wide),
            logit_scale=None if self.logit_scale is None else scalar_on(device, self.logit_scale, wide),
            softcap=self.softcap,
            terms=LossTerms(
                class_weight=None if self.weight is None else self.weight.to(wide).contiguous(),
                label_smoothing=self.label_smoothing,
                z_loss=self.z_loss,
            ),
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            dtype=self.dtype,
            wide=wide,
        )


@cache
def _options(workspace_mib: float | None, accumulate: Any, backend: Any, gradient: Any) -> HeadOptions:
    return HeadOptions(workspace_mib=workspace_mib, accumulate=accumulate, backend=backend, gradient=gradient)


class Wanted(NamedTuple):
    """Which gradients are wanted."""

    input: bool
    weight: bool
    bias: bool


class Stored(NamedTuple):
    """What `cross_entropy` returns; what was not asked for is empty."""

    loss: Tensor  # scalar, or [N] with reduction "none"
    input_grad: Tensor  # this and the next six: see `StoredGradients`
    weight_grad: Tensor
    bias_grad: Tensor
    input_factor: Tensor
    weight_factor: Tensor
    kept_tokens: Tensor
    kept_any: Tensor
    lse: Tensor  # [N] each row's logsumexp, where it was to be kept
    miss: Tensor  # [N] and that minus its target's logit

    @property
    def gradients(self) -> StoredGradients:
        """Return the part of it that is gradients."""
        return StoredGradients(*self[1:8])


_CALL = schema_of(Call)
_WANTED = ", ".join(f"bool {name}_grad" for name in Wanted._fields)


@torch.library.custom_op(
    "lowtide::cross_entropy",
    mutates_args=(),
    schema=f"({_CALL}, {_WANTED}, bool keep_rows) -> ({', '.join(['Tensor'] * len(Stored._fields))})",
)
def cross_entropy(*args: Any) -> Stored:
    """Compute the loss, and the gradients that are wanted as if the upstream gradient were 1.

    With ``keep_rows`` also what `cross_entropy_backward` can use to spare itself the row sums.
    """
    *fields, keep_rows = args
    call, wanted = _split(fields)
    with undisturbed(call.input.device):
        return _loss_and_gradients(call, wanted, keep_rows)


@cross_entropy.register_fake
def _(*args: Any) -> Stored:
    *fields, keep_rows = args
    call, wanted = _split(fields)
    N = call.target.numel()
    loss = call.input.new_empty((N,) if call.reduction == "none" else (), dtype=call.wide)
    per_token = call.reduction == "none"
    return Stored(
        loss,
        *fake_stored_gradients(
            wanted, call.input, call.linear_weight, call.wide, per_token=per_token, ignores=any(wanted)
        ),
        lse=loss.new_empty(N if keep_rows else 0),
        miss=loss.new_empty(N if keep_rows else 0),
    )


@torch.library.custom_op(
    "lowtide::cross_entropy_backward",
    mutates_args=(),
    schema=f"({_CALL}, {_WANTED}, Tensor upstream, Tensor lse, Tensor miss) -> (Tensor, Tensor, Tensor)",
)
def cross_entropy_backward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of input, weight and bias from ``upstream``, a scalar or [N], and what forward kept."""
    *fields, upstream, lse, miss = args
    call, wanted = _split(fields)
    with undisturbed(call.input.device):
        return _gradients(call, wanted, upstream, lse, miss)


@cross_entropy_backward.register_fake
def _(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    *fields, _upstream, _lse, _miss = args
    call, wanted = _split(fields)
    return fake_gradients(wanted, call.input, call.linear_weight, call.wide)


@flop_formula("cross_entropy")
def _(*args: Any) -> int:
    call, wanted = _split(args[:-1])
    return head_flop(call.input, call.linear_weight, wanted)


@flop_formula("cross_entropy_backward")
def _(*args: Any) -> int:
    call, wanted = _split(args[:-3])
    return head_flop(call.input, call.linear_weight, wanted)


def run(*args: Any) -> Stored:
    """Run `cross_entropy`: as an operator where something watches operators, else without that detour (0.15 ms)."""
    if watched(args):
        return Stored(*cross_entropy(*args))
    *fields, keep_rows = args
    call, wanted = _split(fields)
    with torch.no_grad(), undisturbed(call.input.device):
        return _loss_and_gradients(call, wanted, keep_rows)


def run_backward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Run `cross_entropy_backward` in the same way."""
    if watched(args):
        found: tuple[Tensor, Tensor, Tensor] = cross_entropy_backward(*args)
        return found
    *fields, upstream, lse, miss = args
    call, wanted = _split(fields)
    with torch.no_grad(), undisturbed(call.input.device):
        return _gradients(call, wanted, upstream, lse, miss)


def _split(fields: Sequence[Any]) -> tuple[Call, Wanted]:
    return Call(*fields[: len(Call._fields)]), Wanted(*fields[len(Call._fields) :])


def _loss_and_gradients(call: Call, wanted: Wanted, keep_rows: bool) -> Stored:
    job = call.job()
    rows, plan = plan_rows(job, call.options(), weight_frozen=not (wanted.weight or wanted.bias))
    loss_n = torch.empty_like(rows.unit)
    kept = loss_n.new_zeros(2, call.target.numel() if keep_rows else 0)
    into = Gradients()

    def settle() -> tuple[Tensor, Gradients]:
        nonlocal into
        into = gradient_buffers(
            job.input, job.weight_VD, job.wide, plan, wanted, some_rows=rows.index is not None, stored=True
        )
        return _stored_factor(call, job, rows), into

    if plan.backend == "exp":
        numbers = exponentials.cross_entropy(
            _head(job, call), job.terms, rows.target, plan, settle if any(wanted) else None
        )
        loss_n = numbers["loss"]
        if keep_rows:
            kept = torch.stack((numbers["lse"], numbers["miss"]))
    else:
        factor = settle()[0] if any(wanted) else None
        run_chunks(job, rows, plan, loss_n=loss_n, factor_n=factor, into=into)
    loss_n *= rows.unit
    if rows.kept is not None:
        loss_n = loss_n.where(rows.kept, 0)
    loss = _among_all(loss_n, job, rows) if call.reduction == "none" else loss_n.sum()
    denominator = rows.denominator
    if denominator is not None:
        loss = loss / denominator
    return _stored(call, job, rows, wanted, loss, into, kept)


def _head(job: CrossEntropyJob, call: Call) -> Head:
    return Head(
        input=job.input, weight_VD=job.weight_VD, bias_V=job.bias_V, scale=job.logit_scale, softcap=job.softcap,
        dtype=job.dtype, wide=job.wide, ranks=Alone(job.weight_VD.shape[0]), options=call.options(),
    )  # fmt: skip


def _stored(
    call: Call, job: CrossEntropyJob, rows: Rows, wanted: Wanted, loss: Tensor, into: Gradients, kept_2N: Tensor
) -> Stored:
    """Bring the gradients into the dtypes of what they belong to, with the factors that they still lack."""
    gradients = stored_gradients(
        into,
        call.input,
        call.linear_weight,
        job.wide,
        denominator=rows.denominator,
        input_factor_N=_among_all(rows.unit, job, rows).clone() if call.reduction == "none" else None,
        kept=Kept.of(job.target_N != job.ignore_index) if any(wanted) else None,
    )
    return Stored(loss, *gradients, lse=kept_2N[0].clone(), miss=kept_2N[1].clone())


def _stored_factor(call: Call, job: CrossEntropyJob, rows: Rows) -> Tensor:
    """Return what each row's loss is multiplied with on its way to the stored gradients."""
    if call.reduction == "none":  # the head is frozen: its input's gradient is stored without any row's factor
        return torch.ones_like(rows.unit) if rows.kept is None else rows.kept.to(job.wide)
    return rows.unit if lacks_denominator(call.input, call.linear_weight) else _divided(rows)


def _gradients(
    call: Call, wanted: Wanted, upstream: Tensor, lse: Tensor, miss: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    job = call.job()
    if upstream.dim():  # a token to which nothing flows back is as good as ignored, whatever its hidden state holds
        job = replace(job, target_N=job.target_N.where(upstream != 0, job.ignore_index))
    rows, plan = plan_rows(job, call.options("recompute"), weight_frozen=not (wanted.weight or wanted.bias))
    into = gradient_buffers(job.input, job.weight_VD, job.wide, plan, wanted, some_rows=rows.index is not None)
    if rows.index is not None:
        upstream = upstream[rows.index] if upstream.dim() else upstream
    factor = _divided(rows) * upstream.to(job.wide)
    if rows.kept is not None:
        factor = factor.where(rows.kept, 0)
    if plan.backend == "exp":
        known = {"lse": lse, "miss": miss}
        exponentials.cross_entropy_gradients(_head(job, call), job.terms, rows.target, plan, factor, known, into)
    else:
        run_chunks(job, rows, plan, loss_n=None, factor_n=factor, into=into)
    return found_gradients(into, call.input, call.linear_weight, call.wide)


def _among_all(x_n: Tensor, job: CrossEntropyJob, rows: Rows) -> Tensor:
    """Return the computed rows' values among those of all N tokens, 0 elsewhere."""
    return x_n if rows.index is None else x_n.new_zeros(job.target_N.numel()).index_copy_(0, rows.index, x_n)


def _divided(rows: Rows) -> Tensor:
    """Return each row's factor: its weight over the denominator, and 0 for ignored rows even where that is 0."""
    denominator = rows.denominator
    if denominator is None:
        return rows.unit
    factor = rows.unit / denominator
    return factor if rows.kept is None else factor.where(rows.kept, 0)
