"""Divergences of a student's distribution over the vocabulary from a teacher's, without logits in memory.

N tokens, n rows computed, D hidden size, V vocabulary, K classes of a teacher's top k.
"""

from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from lowtide.arguments import check_device, check_name, check_number, check_tensor, positive_scalar
from lowtide.errors import ArgumentTypeError, ArgumentValueError, TargetIndexError, message
from lowtide.head.call import (
    DivergenceArgs,
    Gradients,
    Head,
    Wanted,
    axes_and,
    check_head,
    check_mask,
    check_reduction,
    check_softcap,
    checked_call,
    gradient_buffers,
    scalar_on,
)
from lowtide.head.engine import Numbers, Terms, run, weight_lift
from lowtide.head.nodes import Function, Shape, head_flop, named_gradients
from lowtide.head.options import HeadOptions, Reduction
from lowtide.head.plan import choose_gradient, plan_both_sides
from lowtide.head.ranks import Alone, Ranks, VocabShard
from lowtide.head.rows import Rows, looks_at_numbers
from lowtide.head.terms.divergence import Dense, DenseKernels, KnownClasses

Kind = Literal["forward_kl", "reverse_kl", "jsd", "tv"]
TAILS = ("bucket", "renormalise", "drop")
TEACHER = ("teacher_input", "teacher_weight", "teacher_bias")
KNOWN = ("lse", "other_lse", "pivot")  # of each token, what backward needs


class TeacherTopK(NamedTuple):
    """A teacher's K most likely classes for each token, and their log-probabilities. A plain tuple is accepted too.

    Attributes:
        ids: Classes [..., K], an integer dtype, each at most once for a token.
        logprobs: The teacher's log-probabilities of these [..., K], any floating dtype, at the temperature of the call.
            -inf in places that are not used.
        tail: How both sides treat the other classes. ``"bucket"``: as one more class with the rest of each side's
            probability. ``"renormalise"``: left out, and the remaining probabilities scaled to sum to 1. ``"drop"``:
            their terms are left out of the sum, and nothing else changes.
    """

    ids: Tensor
    logprobs: Tensor
    tail: str = "bucket"


def linear_divergence(
    input: Tensor,
    linear_weight: Tensor,
    teacher_input: Tensor | None,
    teacher_weight: Tensor | None,
    *,
    kind: Kind = "forward_kl",
    beta: float = 0.5,
    temperature: float | Tensor = 1.0,
    linear_bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    teacher_topk: TeacherTopK | tuple[Any, ...] | None = None,
    mask: Tensor | None = None,
    options: HeadOptions | None = None,
    reduction: Reduction = "none",
    num_items: float | Tensor | None = None,
    softcap: float | None = None,
    teacher_softcap: float | None = None,
    vocab_shard: VocabShard | None = None,
) -> Tensor:
    """Return the divergence of a student from a teacher at each token, without either's logits in memory.

    With s the softmax of ``cap(x @ W.T + b) / temperature`` of the student, where ``cap(z) = softcap * tanh(z /
    softcap)``, and t that of the teacher:

        "forward_kl"    KL(t || s) = sum_v t_v (log t_v - log s_v)
        "reverse_kl"    KL(s || t)
        "jsd"           beta KL(t || m) + (1 - beta) KL(s || m),   m = beta t + (1 - beta) s
        "tv"            sum_v |s_v - t_v| / 2

    A class of probability 0 adds 0. "jsd" with ``beta`` 0 is the forward KL and with 1 the reverse KL, the limits of
    ``jsd / (beta (1 - beta))`` there, as in TRL's `GKDTrainer`; the jsd's own would be 0. There is no factor of
    ``temperature**2``. Both sides' logits are computed in chunks. Reduced to one number, the student's gradients are
    computed along with it: four GEMMs in forward, none in backward. With a value per token backward recomputes the
    logits: two GEMMs in forward, four in backward. The generalised JSD is from https://arxiv.org/abs/2306.13649.
    `plan_divergence` reports what will run, and the bytes.

    Args:
        input: The student's hidden states [..., D], any floating dtype and strides, any number of leading axes.
        linear_weight: The student's output embedding [V, D]. Outside autocast of the same dtype as ``input``.
        teacher_input: The teacher's hidden states [..., D'], of its own size D' and dtype; None with ``teacher_topk``.
            The teacher gets no gradient, even if its tensors require one.
        teacher_weight: The teacher's output embedding [V', D']; None with ``teacher_topk``. If V and V' differ, the
            classes that one side lacks have probability 0 there: the forward KL is inf if the teacher has more
            classes than the student, the reverse KL if it has fewer.
        kind: ``"forward_kl"``, ``"reverse_kl"``, ``"jsd"`` or ``"tv"``.
        beta: From 0 to 1: the teacher's share of the "jsd" mixture. The other kinds do not use it.
        temperature: Number or 0-d tensor above 0 (a tensor is not inspected) by which both sides' logits are divided.
            It gets no gradient.
        linear_bias: [V], or None.
        teacher_bias: [V'], or None.
        teacher_topk: The top classes of an absent teacher, instead of ``teacher_input`` and ``teacher_weight``:
            `TeacherTopK`, or a tuple (ids, logprobs) or (ids, logprobs, tail).
        mask: bool [...], True where the divergence is computed. Elsewhere it is 0 and contributes nothing, even if
            hidden states are NaN or inf. None: everywhere.
        options: Memory and implementation: see `HeadOptions`. ``"row"`` (kernels over rows of both sides' logits, on
            NVIDIA GPUs with Triton) supports a teacher's own head and no float64; there is no ``"exp"``. With a value
            per token there is no ``gradient="forward"``.
        reduction: ``"none"``: one value per token. ``"sum"``, or ``"mean"`` over the tokens where ``mask`` is True.
        num_items: Number above 0, or 0-d tensor (not inspected), that replaces the mean's denominator, for
            gradient accumulation. An error with the other reductions.
        softcap: Cap of the student's logits, above 0, or None.
        teacher_softcap: Cap of the teacher's logits, or None. It does not change ``teacher_topk``.
        vocab_shard: For a vocabulary sharded over ranks, as in `linear_cross_entropy`, and so are DTensors. The
            teacher's weight and bias are then sharded as the student's are, for the same classes; a top k is that of
            the whole vocabulary. Hidden states that are sharded on an axis of tokens are gathered first. The result is
            that of all tokens, the same on every rank.

    Returns:
        Tensor: [...] or a scalar in nats, float32, for float64 inputs float64. The mean over no valid token is NaN;
        with ``num_items``, and as a sum, it is 0.

    Raises:
        ArgumentValueError: A name, shape, device or number that does not fit; also a `ValueError`.
        ArgumentTypeError: A dtype that does not fit, or float64 on one side alone; also a `TypeError`.
        TargetIndexError: On the CPU, a negative id in ``teacher_topk``; also an `IndexError`. On other devices that
            token's value and gradients are NaN.
        UnsupportedError: Double backward, forward-mode derivatives, torch.func transforms, or an explicitly requested
            implementation that cannot run; also a `RuntimeError`.

    Note:
        An infinite KL is returned as inf. The forward KL's gradient stays finite there, the reverse KL's is NaN. With
        a value for each token, one to which no gradient flows back contributes nothing to any gradient; on the CPU it
        is not recomputed.

    Example:
        >>> student, head = torch.randn(2, 5, 16, requires_grad=True), torch.nn.Linear(16, 1000, bias=False)
        >>> teacher, teacher_head = torch.randn(2, 5, 64), torch.nn.Linear(64, 1000, bias=False)
        >>> kl = linear_divergence(
        ...     student, head.weight, teacher, teacher_head.weight, temperature=2.0, reduction="mean"
        ... )
        >>> (2.0**2 * kl).backward()
    """
    of_head = input, linear_weight, linear_bias, 1, softcap, options, vocab_shard
    head = checked_call("linear_divergence", *of_head, gathered=True)
    ranks = head.ranks
    check_name("kind", kind, get_args(Kind))
    denominator = check_reduction(reduction, num_items)
    beta = check_number("beta", beta, 0, 1)
    if kind == "jsd" and beta in (0, 1):
        kind = "forward_kl" if beta == 0 else "reverse_kl"
    check_mask(mask, input, "dtype torch.bool, True where computed")
    ids = logprobs = None
    tail, teacher_dtype, of_teacher = "", head.dtype, (teacher_input, teacher_weight, teacher_bias)
    if teacher_topk is None:
        teacher_dtype = _check_teacher(input, head.dtype, *of_teacher, ranks)
    else:
        for name, value in zip((*TEACHER, "teacher_softcap"), (*of_teacher, teacher_softcap), strict=True):
            if value is not None:
                got = f"a {type(value).__name__}"
                raise ArgumentValueError(message(name, "None with teacher_topk", got, "Give one teacher."))
        ids, logprobs, tail = _check_topk(input, teacher_topk)
    recompute = choose_gradient(head.gradient, reduction) == "recompute"
    hidden, weight, bias = (None if x is None else x.detach() for x in of_teacher)
    args = DivergenceArgs(
        ranks.whole(hidden), ranks.local(weight), ranks.local(bias), ranks.whole(ids), ranks.whole(logprobs),
        None if mask is None else ranks.whole(mask).reshape(-1), _check_temperature(temperature), denominator,
        check_softcap("teacher_softcap", teacher_softcap), teacher_dtype, kind, beta, tail, reduction,
    )  # fmt: skip
    value = DIVERGENCE(head, args, recompute=recompute)["value"]
    return ranks.result(value.view(input.shape[:-1]) if reduction == "none" else value)


def _check_teacher(
    input: Tensor, dtype: torch.dtype, hidden: Tensor | None, weight: Tensor | None, bias: Tensor | None,
    ranks: Ranks | Alone,
) -> torch.dtype:  # fmt: skip
    """Check the teacher's own head, and return the dtype that its GEMM's operands take."""
    if hidden is None or weight is None:
        hint = "Give hidden states and weight of the teacher, or its top k."
        raise ArgumentValueError(
            message(TEACHER[hidden is not None], "a tensor, as teacher_topk is None", "None", hint)
        )
    teacher_dtype = check_head(hidden, weight, bias, TEACHER)
    if isinstance(ranks, Ranks):
        ranks.check_alike("teacher_weight", weight)
        if bias is not None:
            ranks.check_alike("teacher_bias", bias)
    elif weight.shape[0] == 0:
        raise ArgumentValueError(message("teacher_weight", "at least one class", str(list(weight.shape))))
    if hidden.shape[:-1] != input.shape[:-1]:
        expected = f"shape {axes_and(input, hidden.shape[-1])}, as input is {list(input.shape)}"
        raise ArgumentValueError(message("teacher_input", expected, str(list(hidden.shape))))
    check_device("teacher_input", hidden, input)
    if (teacher_dtype == torch.float64) != (dtype == torch.float64):
        expected = f"float64 on both sides or on neither, and input is {input.dtype}"
        raise ArgumentTypeError(message("teacher_input", expected, str(hidden.dtype), "Cast one side."))
    return teacher_dtype


def _check_topk(input: Tensor, teacher_topk: object) -> tuple[Tensor, Tensor, str]:
    """Check a teacher's top k, and return ids [N, K], log-probabilities [N, K], and what becomes of the tail."""
    if not isinstance(teacher_topk, tuple) or len(teacher_topk) not in (2, 3):
        got = f"a tuple of {len(teacher_topk)}" if isinstance(teacher_topk, tuple) else type(teacher_topk).__name__
        expected = "lowtide.TeacherTopK, or a tuple (ids, logprobs) or (ids, logprobs, tail)"
        raise ArgumentTypeError(message("teacher_topk", expected, got))
    ids, logprobs, tail = TeacherTopK(*teacher_topk)
    for name, tensor in (("teacher_topk.ids", ids), ("teacher_topk.logprobs", logprobs)):
        check_device(name, check_tensor(name, tensor), input)
    check_name("teacher_topk.tail", tail, TAILS)
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise ArgumentTypeError(message("teacher_topk.ids", "an integer dtype", str(ids.dtype)))
    if not logprobs.is_floating_point():
        raise ArgumentTypeError(message("teacher_topk.logprobs", "a floating-point dtype", str(logprobs.dtype)))
    if ids.dim() != input.dim() or ids.shape[:-1] != input.shape[:-1] or ids.shape[-1] == 0:
        expected = f"shape {axes_and(input, 'K')} with K above 0, as input is {list(input.shape)}"
        raise ArgumentValueError(message("teacher_topk.ids", expected, str(list(ids.shape))))
    if logprobs.shape != ids.shape:
        expected = f"shape {list(ids.shape)}, as the ids have"
        raise ArgumentValueError(message("teacher_topk.logprobs", expected, str(list(logprobs.shape))))
    return ids.long().reshape(-1, ids.shape[-1]), logprobs.detach().reshape(-1, ids.shape[-1]), tail


def _check_temperature(temperature: float | Tensor) -> Tensor | None:
    """Return the temperature as a 0-d tensor, None for 1."""
    if isinstance(temperature, Tensor) and temperature.requires_grad:
        expected = "a number, or a 0-d tensor that requires no gradient"
        raise ArgumentValueError(message("temperature", expected, "one that does", "Pass temperature.detach()."))
    found = positive_scalar("temperature", temperature, torch.float64)
    return None if isinstance(temperature, int | float) and temperature == 1 else found


def forward(head: Head, args: DivergenceArgs, wanted: Wanted, keep: bool) -> dict[str, Tensor]:
    """Return the value, reduced, with ``keep`` what `backward` needs of each token, and the gradients for upstream 1.

    Masked tokens are dropped on the CPU, or where the host may wait; elsewhere they are computed as zeros.
    """
    _check_ids(head, args)
    rows, denominator = _rows(head, args.mask), _denominator(head, args)
    factor = _factor(head, args, head.input.new_ones((), dtype=head.wide), denominator) if any(wanted) else None
    numbers, into = _run(head, args, rows, wanted, factor)
    value = rows.among_all(numbers["value"])
    value = value if args.mask is None else value.where(args.mask, 0)
    value = value if args.reduction == "none" else value.sum()
    values = {"value": value if denominator is None else value / denominator}
    if keep:
        values |= {name: rows.among_all(numbers[name]) for name in KNOWN}
    return values | (named_gradients(head, into, stored=True) if any(wanted) else {})


def backward(
    head: Head, args: DivergenceArgs, wanted: Wanted, upstream: dict[str, Tensor | None], known: dict[str, Tensor]
) -> Gradients:
    """Return the needed gradients from the value's upstream gradient, a scalar or [N], and what forward saved.

    Tokens to which nothing flows back are left out as masked ones are.
    """
    given = upstream["value"]
    assert given is not None
    factor = _factor(head, args, given, _denominator(head, args))
    rows = _rows(head, factor != 0)
    return _run(head, args, rows, wanted, factor, rows.of_each(known))[1]


def _factor(head: Head, args: DivergenceArgs, upstream: Tensor, denominator: Tensor | int | None) -> Tensor:
    """Return what each token's gradient is multiplied with [N]: 0 where masked, of a mean over nothing too."""
    factor = upstream.to(head.wide)
    factor = (factor if denominator is None else factor / denominator).expand(head.tokens)
    return factor if args.mask is None else factor.where(args.mask, 0)


def _run(
    head: Head, args: DivergenceArgs, rows: Rows, wanted: Wanted, factor_N: Tensor | None, known: Numbers | None = None
) -> tuple[Numbers, Gradients]:
    """Return the rows' numbers, and the needed gradients of the sum of ``factor * value``."""
    scale = args.temperature
    softcap: float | Tensor | None = args.teacher_softcap
    if scale is not None:  # both sides' logits are divided by the temperature
        scale = 1 / scalar_on(head.input.device, scale, head.wide)
        softcap = None if softcap is None else softcap * scale
        head = head._replace(scale=scale, softcap=None if head.softcap is None else head.softcap * scale)
    stored = known is None and factor_N is not None
    plan, teacher_plan = plan_both_sides(head, args, rows.n, wanted, stored=stored)
    terms: Terms
    if args.teacher_input is None or args.teacher_weight is None:
        terms = KnownClasses(head, plan, args, rows)
    else:
        teacher = head._replace(
            input=args.teacher_input, weight_VD=args.teacher_weight, bias_V=args.teacher_bias, softcap=softcap,
            dtype=args.teacher_dtype, ranks=Alone(len(args.teacher_weight)) if head.ranks.alone else head.ranks,
        ).prepared()  # fmt: skip
        form = DenseKernels if plan.backend == "row" else Dense
        terms = form(head, plan, teacher, teacher_plan, rows, args.kind, args.beta)
    into = gradient_buffers(head, rows, plan, wanted, stored=known is None)
    if factor_N is None:
        return run(head, rows, plan, terms), into
    factor = rows.of(factor_N).contiguous()
    if plan.backend == "row" and head.dtype == torch.float16:
        terms.lift = weight_lift(factor, head.scale)
    return run(head, rows, plan, terms, into, upstream=lambda _, part: factor[part], known=known), into


def _rows(head: Head, kept_N: Tensor | None) -> Rows:
    """Return which tokens are computed."""
    if kept_N is None or head.drops_tokens:
        return Rows(tokens=head.tokens, index=None if kept_N is None else head.positions_of(kept_N))
    return Rows(tokens=head.tokens, kept=kept_N.contiguous())


def _denominator(head: Head, args: DivergenceArgs) -> Tensor | int | None:
    """Return what the mean over the tokens divides by; None for the other reductions."""
    if args.reduction != "mean":
        return None
    if args.num_items is not None:
        return scalar_on(head.input.device, args.num_items, head.wide)
    return head.tokens if args.mask is None else args.mask.sum(dtype=head.wide)


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


def _shapes(head: Head, args: DivergenceArgs, keep: bool) -> dict[str, Shape]:
    of_value: tuple[int, ...] = (head.tokens,) if args.reduction == "none" else ()
    return {"value": (of_value, head.wide)} | dict.fromkeys(KNOWN, ((head.tokens if keep else 0,), head.wide))


def _flop(head: Head, args: DivergenceArgs, wanted: Wanted) -> int:
    own, x, weight = head_flop(head.input, head.weight_VD, wanted), args.teacher_input, args.teacher_weight
    return own if x is None or weight is None else own + head_flop(x, weight)


DIVERGENCE = Function(
    "divergence", "linear_divergence", DivergenceArgs, forward, backward, shapes=_shapes, returned=("value",),
    upstream=("value",), known=KNOWN, flop=_flop,
)  # fmt: skip
