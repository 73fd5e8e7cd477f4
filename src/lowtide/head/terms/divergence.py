"""Divergence from a teacher: what `linear_divergence` returns, from the numbers of each row and back.

N tokens, n rows computed, D hidden size, V vocabulary, K classes of a teacher's top k.
"""

from dataclasses import replace

import torch
from torch import Tensor

from lowtide.errors import TargetIndexError, message
from lowtide.head.call import DivergenceArgs, Head, Wanted, scalar_on
from lowtide.head.engine import Numbers, Terms, gradient_buffers, run
from lowtide.head.gradients import Gradients, weight_lift
from lowtide.head.nodes import Function, Shape, head_flop, stored_gradients
from lowtide.head.plan import HeadPlan, plan_both_sides
from lowtide.head.ranks.parallel import Alone
from lowtide.head.rows import Rows, looks_at_numbers
from lowtide.head.terms.dense import Dense, DenseKernels
from lowtide.head.terms.topk import KnownClasses

KNOWN = ("lse", "other_lse", "pivot")  # of each token, what backward needs


def forward(head: Head, args: DivergenceArgs, wanted: Wanted, keep: bool) -> dict[str, Tensor]:
    """Return the value, reduced, with ``keep`` what `backward` needs of each token, and the gradients for upstream 1.

    Masked tokens are dropped on the CPU, or where the host may wait; elsewhere they are computed as zeros.
    """
    _check_ids(head, args)
    rows, denominator, per_token = _rows(head, args.mask), _denominator(head, args), args.reduction == "none"
    factor: Tensor | None = None
    if any(wanted):
        factor = torch.ones((), dtype=head.wide, device=head.input.device)
        if denominator is not None:
            factor = factor / denominator
        factor = factor.expand(head.tokens)
        if args.mask is not None:  # a mean over nothing has a factor of infinity
            factor = factor.where(args.mask, 0)
    numbers, into = _run(head, args, rows, wanted, factor)
    value = rows.among_all(numbers["value"])
    value = value if args.mask is None else value.where(args.mask, 0)
    input_factor_N = torch.ones_like(value) if per_token else None
    value = value if per_token else value.sum()
    values = {"value": value if denominator is None else value / denominator}
    if keep:
        values |= {name: rows.among_all(numbers[name]) for name in KNOWN}
    if not any(wanted):
        return values
    # copies: an operator returns no memory of others
    kept = None if args.mask is None else (args.mask.clone(), args.mask.any())
    return values | stored_gradients(head, into, input_factor_N=input_factor_N, kept=kept)


def backward(
    head: Head, args: DivergenceArgs, wanted: Wanted, upstream: dict[str, Tensor | None], known: dict[str, Tensor]
) -> Gradients:
    """Return the needed gradients from the value's upstream gradient, a scalar or [N], and what forward saved.

    Tokens to which nothing flows back are left out as masked ones are.
    """
    factor = upstream["value"]
    assert factor is not None
    factor, denominator = factor.to(head.wide), _denominator(head, args)
    factor = (factor if denominator is None else factor / denominator).expand(head.tokens)
    if args.mask is not None:
        factor = factor.where(args.mask, 0)
    rows = _rows(head, factor != 0)
    return _run(head, args, rows, wanted, factor, rows.of_each(known))[1]


def _run(
    head: Head, args: DivergenceArgs, rows: Rows, wanted: Wanted, factor_N: Tensor | None, known: Numbers | None = None
) -> tuple[Numbers, Gradients]:
    """Return the rows' numbers, and the needed gradients of the sum of ``factor * value``."""
    if args.temperature is not None:
        head = _scaled(head, 1 / scalar_on(head.input.device, args.temperature, head.wide))
    plan, terms = _terms(head, args, rows, wanted, stored=known is None and factor_N is not None)
    into = gradient_buffers(head, rows, plan, wanted, stored=known is None)
    if factor_N is None:
        return run(head, rows, plan, terms), into
    factor = rows.of(factor_N).contiguous()
    if plan.backend == "row" and head.dtype == torch.float16:
        terms.lift = weight_lift(factor, head.scale)
    return run(head, rows, plan, terms, into, upstream=lambda _, part: factor[part], known=known), into


def _rows(head: Head, kept_N: Tensor | None) -> Rows:
    """Return which tokens are computed."""
    rows = Rows(tokens=head.tokens, index=None if kept_N is None else head.positions_of(kept_N))
    if kept_N is None or head.drops_tokens:
        return rows
    return replace(rows, kept=rows.of(kept_N).contiguous())


def _denominator(head: Head, args: DivergenceArgs) -> Tensor | None:
    """Return what the mean over the tokens divides by; None for the other reductions."""
    if args.reduction != "mean":
        return None
    if args.num_items is not None:
        return scalar_on(head.input.device, args.num_items, head.wide)
    if args.mask is not None:
        return args.mask.sum(dtype=head.wide)
    return torch.full((), head.tokens, dtype=head.wide, device=head.input.device)


def _check_ids(head: Head, args: DivergenceArgs) -> None:
    """Raise on the CPU where an id is negative; elsewhere its row becomes NaN, for a check would stop the host."""
    if args.topk_ids is not None and args.topk_logprobs is not None and looks_at_numbers(head.input.device):
        ids = args.topk_ids.reshape(-1)
        wrong = ((ids < 0) & (args.topk_logprobs.reshape(-1) > -torch.inf)).nonzero()
        if wrong.numel():
            position = int(wrong[0, 0])
            got = f"{int(ids[position])} at position {position} of the flattened ids"
            hint = "Give unused places the log-probability -inf."
            raise TargetIndexError(message("teacher_topk", "class indices of 0 or more", got, hint))


def _scaled(head: Head, scale: Tensor | None) -> Head:
    """Return a side whose logits are divided by the temperature."""
    if scale is None:
        return head
    return head._replace(scale=scale, softcap=None if head.softcap is None else head.softcap * scale)


def _terms(head: Head, args: DivergenceArgs, rows: Rows, wanted: Wanted, *, stored: bool) -> tuple[HeadPlan, Terms]:
    plan, teacher_plan = plan_both_sides(head, args, rows.n, wanted, stored=stored)
    if args.teacher_input is None or args.teacher_weight is None:
        return plan, KnownClasses(head, plan, args, rows)
    teacher = head._replace(
        input=args.teacher_input, weight_VD=args.teacher_weight, bias_V=args.teacher_bias, scale=None,
        softcap=args.teacher_softcap, dtype=args.teacher_dtype,
        ranks=Alone(len(args.teacher_weight)) if head.ranks.alone else head.ranks,
    ).prepared()  # fmt: skip
    form = DenseKernels if plan.backend == "row" else Dense
    return plan, form(head, plan, _scaled(teacher, head.scale), teacher_plan, rows, args.kind, args.beta)


def _shapes(head: Head, args: DivergenceArgs, keep: bool) -> dict[str, Shape]:
    of_value: tuple[int, ...] = (head.tokens,) if args.reduction == "none" else ()
    return {"value": (of_value, head.wide)} | dict.fromkeys(KNOWN, ((head.tokens if keep else 0,), head.wide))


def _flop_of_teacher(args: DivergenceArgs) -> int:
    if args.teacher_input is None or args.teacher_weight is None:
        return 0
    return head_flop(args.teacher_input, args.teacher_weight)


DIVERGENCE = Function(
    "divergence", "linear_divergence", DivergenceArgs, forward, backward, shapes=_shapes, returned=("value",),
    upstream=("value",), known=KNOWN, ignores=lambda args: args.mask is not None, beside=_flop_of_teacher,
)  # fmt: skip
