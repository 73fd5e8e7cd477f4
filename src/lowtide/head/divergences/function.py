"""`linear_divergence` as a function of the head, on the loops of `divergences/rows`."""

from typing import Any

import torch
from torch import Tensor

from lowtide.head.call import DivergenceArgs, Head, HeadCall, Wanted, scalar_on
from lowtide.head.divergences.rows import (
    DivergenceJob,
    KnownClasses,
    Teacher,
    backward_chunks,
    forward_chunks,
    stored_chunks,
)
from lowtide.head.divergences.terms import Kind, RowNumbers
from lowtide.head.gradients import Gradients
from lowtide.head.nodes import Function, Shape, head_flop
from lowtide.head.stored import Kept, StoredGradients, lacks_denominator, stored_gradients


def _job(head: Head, args: DivergenceArgs) -> DivergenceJob:
    wide = head.wide
    teacher: Teacher | KnownClasses
    if args.teacher_input is not None and args.teacher_weight is not None:
        teacher = Teacher(
            input=args.teacher_input,
            weight_VD=args.teacher_weight,
            bias_V=None if args.teacher_bias is None else args.teacher_bias.to(wide).contiguous(),
            softcap=args.teacher_softcap,
            dtype=args.teacher_dtype,
        )
    else:
        assert args.topk_ids is not None
        assert args.topk_logprobs is not None
        teacher = KnownClasses(ids_NK=args.topk_ids, logprobs_NK=args.topk_logprobs.to(wide), tail=args.tail)
    ranks: Any = None if head.ranks.alone else head.ranks
    softcap: Any = head.softcap
    return DivergenceJob(
        input=head.input,
        weight_VD=head.weight_VD,
        bias_V=head.bias_V,
        teacher=teacher,
        mask_N=None if args.mask is None else args.mask.contiguous(),
        softcap=softcap,
        scale=None if args.temperature is None else 1 / scalar_on(head.input.device, args.temperature, wide),
        kind=Kind(args.kind, args.beta),
        dtype=head.dtype,
        wide=wide,
        ranks=ranks,
    )


def _denominator(head: Head, args: DivergenceArgs) -> Tensor | None:
    """Return what the mean over the tokens divides by; None for the other reductions."""
    if args.reduction != "mean":
        return None
    if args.num_items is not None:
        return scalar_on(head.input.device, args.num_items, head.wide)
    if args.mask is not None:
        return args.mask.sum(dtype=head.wide)
    return torch.full((), head.tokens, dtype=head.wide, device=head.input.device)


def forward(
    head: Head,
    args: DivergenceArgs,
    wanted: Wanted,
    keep: bool,  # noqa: ARG001
) -> tuple[dict[str, Tensor], StoredGradients | None]:
    """Return the divergence, what `backward` needs of each token, and the wanted gradients for upstream 1."""
    denominator, per_token, stored = _denominator(head, args), args.reduction == "none", None
    if any(wanted):
        one = torch.ones((), dtype=head.wide, device=head.input.device)
        divided = denominator is not None and not lacks_denominator(head.input, head.weight_VD)
        factor = one / denominator if divided and denominator is not None else one
        value_N, into = stored_chunks(_job(head, args), head.tokens, head.options, factor, wanted)
        values = {}
        stored = stored_gradients(
            into,
            head.input,
            head.weight_VD,
            head.wide,
            denominator=denominator,
            input_factor_N=torch.ones_like(value_N) if per_token else None,
            kept=None if args.mask is None else Kept.of(args.mask.clone()),  # an operator returns no memory of others
        )
    else:
        value_N, lse, other_lse, pivot = forward_chunks(_job(head, args), head.tokens, head.options)
        values = {"lse": lse, "other_lse": other_lse, "pivot": pivot}
    value = value_N if per_token else value_N.sum()
    return values | {"value": value if denominator is None else value / denominator}, stored


def backward(
    head: Head, args: DivergenceArgs, wanted: Wanted, upstream: dict[str, Tensor | None], known: dict[str, Tensor]
) -> Gradients:
    """Return the wanted gradients from the value's upstream gradient, a scalar or [N], and what forward kept."""
    given, denominator = upstream["value"], _denominator(head, args)
    assert given is not None
    given = given if denominator is None else given / denominator
    given = given.expand(head.tokens) if given.dim() == 0 else given
    rows = RowNumbers(given, known["lse"], known["other_lse"], known["pivot"])
    return backward_chunks(_job(head, args), head.options, rows, given, wanted)


def _shapes(call: HeadCall, args: DivergenceArgs, keep: bool) -> dict[str, Shape]:
    each = (call.tokens if keep else 0,), call.wide
    of_value = ((call.tokens,) if args.reduction == "none" else (), call.wide)
    return {"value": of_value, "lse": each, "other_lse": each, "pivot": each}


def _of_teacher(args: DivergenceArgs) -> int:
    if args.teacher_input is None or args.teacher_weight is None:
        return 0
    return head_flop(args.teacher_input, args.teacher_weight)


DIVERGENCE = Function(
    "divergence", "linear_divergence", DivergenceArgs, forward, backward, shapes=_shapes, returned=("value",),
    differentiable=1, known=("lse", "other_lse", "pivot"), ignores=lambda args: args.mask is not None,
    beside=_of_teacher,
)  # fmt: skip
