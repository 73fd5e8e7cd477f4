"""`linear_divergence` as registered operators and in autograd's graph.

`torch.ops.lowtide.divergence` computes each token's value; `torch.ops.lowtide.divergence_backward` builds both sides'
logits once more for the student's gradients; `torch.ops.lowtide.divergence_stored` computes value and gradients at
once, where the gradients can be known by then. All begin with the fields of `DivergenceCall`.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowtide.head.call import DivergenceArgs, Head, HeadCall, Wanted, scalar_on
from lowtide.head.graph import in_places, refuse_batched, save_for_recompute, saved_for_recompute
from lowtide.head.ranks.parallel import Ranks
from lowtide.head.registration import (
    fake_gradients,
    flop_formula,
    found_gradients,
    head_flop,
    schema_of,
    tensor_fields,
    undisturbed,
    wanted_gradients,
    watched,
)
from lowtide.head.stored import (
    StoredGradients,
    fake_stored_gradients,
    keep,
    multiplied,
)
from lowtide.head.terms.divergence import KNOWN, backward, forward


class DivergenceCall(NamedTuple):
    """What `lowtide.linear_divergence` was asked, as plain tensors and scalars."""

    input: Tensor  # [..., D]
    linear_weight: Tensor  # [V, D]
    linear_bias: Tensor | None  # [V]
    teacher_input: Tensor | None  # [..., D'], and with it teacher_weight; or topk_ids and topk_logprobs
    teacher_weight: Tensor | None  # [V', D']
    teacher_bias: Tensor | None  # [V']
    topk_ids: Tensor | None  # [N, K] int64
    topk_logprobs: Tensor | None  # [N, K]
    mask: Tensor | None  # [N] bool
    temperature: Tensor | None  # scalar
    num_items: Tensor | None  # scalar
    softcap: float | None
    teacher_softcap: float | None
    dtype: torch.dtype  # of the student's GEMM operands
    teacher_dtype: torch.dtype
    kind: str
    beta: float
    tail: str
    reduction: str
    workspace_mib: float | None
    accumulate: str
    backend: str

    @property
    def wide(self) -> torch.dtype:
        """Return the dtype of logits and values."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    @property
    def tokens(self) -> int:
        """Return N."""
        return math.prod(self.input.shape[:-1])  # Size.numel() would make a compiler take N for a constant

    @property
    def trained(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the tensors that may get a gradient."""
        return self.input, self.linear_weight, self.linear_bias

    def denominator(self) -> Tensor | None:
        """Return what the mean over the tokens divides by; None for the other reductions."""
        if self.reduction != "mean":
            return None
        if self.num_items is not None:
            return scalar_on(self.input.device, self.num_items, self.wide)
        if self.mask is not None:
            return self.mask.sum(dtype=self.wide)
        return torch.full((), self.tokens, dtype=self.wide, device=self.input.device)

    def head_and_args(self, ranks: Ranks | None, reduction: str) -> tuple[Head, DivergenceArgs]:
        """Return the student's head, and what comes beside it."""
        fields = {**self._asdict(), "logit_scale": None, "reduction": reduction}
        head = HeadCall(*(fields[name] for name in HeadCall._fields)).head(ranks)
        args = DivergenceArgs(*(fields[name] for name in DivergenceArgs._fields))
        return head, args if args.mask is None else args._replace(mask=args.mask.contiguous())


class RowNumbers(NamedTuple):
    """A row's value [C], and the three numbers from which backward rebuilds its gradient [C]."""

    value: Tensor
    lse: Tensor
    other_lse: Tensor
    pivot: Tensor


_TRAINED = tuple(map(DivergenceCall._fields.index, ("input", "linear_weight", "linear_bias")))
_TENSORS = tensor_fields(DivergenceCall)
_CALL = schema_of(DivergenceCall)
_WANTED = "bool input_grad, bool weight_grad, bool bias_grad"


@torch.library.custom_op(
    "lowtide::divergence", mutates_args=(), schema=f"({_CALL}) -> ({', '.join(['Tensor'] * len(RowNumbers._fields))})"
)
def divergence(*args: Any) -> RowNumbers:
    """Compute each token's divergence [N], and what backward needs to know of it."""
    return _values(DivergenceCall(*args))


@divergence.register_fake
def _(*args: Any) -> RowNumbers:
    call = DivergenceCall(*args)
    return RowNumbers(*(call.input.new_empty(call.tokens, dtype=call.wide) for _ in RowNumbers._fields))


@torch.library.custom_op(
    "lowtide::divergence_backward",
    mutates_args=(),
    schema=f"({_CALL}, {_WANTED}, Tensor upstream, "
    "Tensor lse, Tensor other_lse, Tensor pivot) -> (Tensor, Tensor, Tensor)",
)
def divergence_backward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of the student's input, weight and bias from the upstream ones [N]."""
    return _gradients(*_split(args))


@divergence_backward.register_fake
def _(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    call, wanted, *_ = _split(args)
    return fake_gradients(wanted, call.input, call.linear_weight, call.wide)


class Stored(NamedTuple):
    """What `divergence_stored` returns; what was not asked for is empty."""

    value: Tensor  # scalar, or [N] with reduction "none"
    input_grad: Tensor  # this and the next six: see `StoredGradients`
    weight_grad: Tensor
    bias_grad: Tensor
    input_factor: Tensor
    weight_factor: Tensor
    kept_tokens: Tensor
    kept_any: Tensor


@torch.library.custom_op(
    "lowtide::divergence_stored",
    mutates_args=(),
    schema=f"({_CALL}, {_WANTED}) -> ({', '.join(['Tensor'] * len(Stored._fields))})",
)
def divergence_stored(*args: Any) -> Stored:
    """Compute the divergence, reduced, and the gradients that are wanted as if the upstream gradient were 1.

    With reduction "none" these can be the input's alone.
    """
    *fields, input_grad, weight_grad, bias_grad = args
    return _value_and_gradients(DivergenceCall(*fields), (input_grad, weight_grad, bias_grad))


@divergence_stored.register_fake
def _(*args: Any) -> Stored:
    *fields, input_grad, weight_grad, bias_grad = args
    call, wanted = DivergenceCall(*fields), (input_grad, weight_grad, bias_grad)
    per_token = call.reduction == "none"
    return Stored(
        call.input.new_empty((call.tokens,) if per_token else (), dtype=call.wide),
        *fake_stored_gradients(
            wanted,
            call.input,
            call.linear_weight,
            call.wide,
            per_token=per_token,
            ignores=call.mask is not None,
        ),
    )


@flop_formula("divergence")
def _(*args: Any) -> int:
    return _flop(DivergenceCall(*args))


@flop_formula("divergence_backward")
def _(*args: Any) -> int:
    call, wanted, *_ = _split(args)
    return _flop(call, wanted)


@flop_formula("divergence_stored")
def _(*args: Any) -> int:
    return _flop(DivergenceCall(*args[:-3]), args[-3:])


def _flop(call: DivergenceCall, wanted: Sequence[bool] = ()) -> int:
    of_teacher = 0
    if call.teacher_input is not None and call.teacher_weight is not None:
        of_teacher = head_flop(call.teacher_input, call.teacher_weight)
    return head_flop(call.input, call.linear_weight, wanted) + of_teacher


def _split(args: Sequence[Any]) -> tuple[DivergenceCall, tuple[bool, bool, bool], Tensor, Sequence[Tensor]]:
    start = len(DivergenceCall._fields)
    flags = args[start : start + 3]
    return DivergenceCall(*args[:start]), (flags[0], flags[1], flags[2]), args[start + 3], args[start + 4 :]


def _values(call: DivergenceCall, ranks: Ranks | None = None) -> RowNumbers:
    with torch.no_grad(), undisturbed(call.input.device):
        values, _ = forward(*call.head_and_args(ranks, "none"), Wanted(False, False, False), keep=True)
    return RowNumbers(**values)


def _gradients(
    call: DivergenceCall,
    wanted: tuple[bool, bool, bool],
    upstream: Tensor,
    known: Sequence[Tensor],
    ranks: Ranks | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    of_rows = dict(zip(KNOWN, known, strict=True))
    with torch.no_grad(), undisturbed(call.input.device):
        into = backward(*call.head_and_args(ranks, "none"), Wanted(*wanted), {"value": upstream}, of_rows)
    return found_gradients(into, call.input, call.linear_weight, call.wide)


def _value_and_gradients(call: DivergenceCall, wanted: tuple[bool, bool, bool], ranks: Ranks | None = None) -> Stored:
    with torch.no_grad(), undisturbed(call.input.device):
        values, gradients = forward(*call.head_and_args(ranks, call.reduction), Wanted(*wanted), keep=False)
    assert gradients is not None
    return Stored(values["value"], *gradients)


def _reduced(value_N: Tensor, denominator: Tensor | None) -> Tensor:
    return value_N.sum() if denominator is None else value_N.sum() / denominator


def run(call: DivergenceCall, *, recompute: bool, ranks: Ranks | None = None) -> Tensor:
    """Return the divergence, a scalar or [N], connected to whichever of the student's tensors need a gradient.

    Args:
        call: What was asked, validated.
        recompute: Whether backward rebuilds the logits, or forward stores the gradients.
        ranks: Who else holds classes; None: nobody.
    """
    wanted = tuple(t is not None and t.requires_grad for t in call.trained)
    value: Tensor
    if torch.is_grad_enabled() and any(wanted):
        if not recompute:
            value = _Stored.apply(ranks, wanted, *call)  # type: ignore[no-untyped-call]
            return value
        value = _Recomputed.apply(ranks, *call)  # type: ignore[no-untyped-call]
    else:
        value = _run(call, ranks).value
    return value if call.reduction == "none" else _reduced(value, call.denominator())


def _run(call: DivergenceCall, ranks: Ranks | None) -> RowNumbers:
    return RowNumbers(*divergence(*call)) if ranks is None and watched(call) else _values(call, ranks)


class _Stored(torch.autograd.Function):
    """Forward stores the gradients; backward multiplies them with the upstream one."""

    @staticmethod
    def forward(ctx: Any, ranks: Ranks | None, wanted: tuple[bool, bool, bool], *args: Any) -> Tensor:
        call = DivergenceCall(*args)
        if ranks is None and watched(args):
            found = Stored(*divergence_stored(*call, *wanted))
        else:
            found = _value_and_gradients(call, wanted, ranks)
        keep(ctx, StoredGradients(*found[1:]), wanted, call.trained, per_token=call.reduction == "none")
        return found.value

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Any:
        refuse_batched("linear_divergence", upstream)
        needs = [ctx.needs_input_grad[2 + i] for i in _TRAINED]
        grads, sources = multiplied(ctx, upstream, needs, "linear_divergence")
        return None, None, *in_places(grads, _TRAINED, len(DivergenceCall._fields), (*sources, upstream))


class _Recomputed(torch.autograd.Function):
    """Forward stores the inputs and three numbers a token; backward builds both sides' logits once more."""

    @staticmethod
    def forward(ctx: Any, ranks: Ranks | None, *args: Any) -> Tensor:
        call = DivergenceCall(*args)
        ctx.ranks = ranks
        rows = _run(call, ranks)
        save_for_recompute(ctx, *(call[i] for i in _TENSORS), *rows[1:])
        ctx.scalars = [None if i in _TENSORS else field for i, field in enumerate(call)]
        return rows.value

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Any:
        refuse_batched("linear_divergence", upstream)
        fields = list(ctx.scalars)
        tensors = saved_for_recompute(ctx, "linear_divergence")
        for i, tensor in zip(_TENSORS, tensors, strict=False):
            fields[i] = tensor
        call = DivergenceCall(*fields)
        wanted = tuple(ctx.needs_input_grad[1 + i] for i in _TRAINED)
        args = (*call, *wanted, upstream, *tensors[len(_TENSORS) :])
        with torch.no_grad():
            if ctx.ranks is None and watched(args):
                found = divergence_backward(*args)
            else:
                found = _gradients(*_split(args), ctx.ranks)
        grads = wanted_gradients(found, wanted, call.linear_bias)
        return None, *in_places(grads, _TRAINED, len(DivergenceCall._fields), (*call.trained, upstream))
