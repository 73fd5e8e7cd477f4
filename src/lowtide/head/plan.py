"""Who asks the planner: what will run, in chunks of how many rows, and the bytes it takes.

N tokens, D hidden size, V vocabulary.
"""

from typing import Any

import torch

from lowtide.errors import ArgumentValueError, UnsupportedError, message
from lowtide.head.arguments import check_options, check_reduction
from lowtide.head.backends import (
    NOT_OF_SHARDS,
    NOT_ON_EVERY_RANK,
    choose,
    why_not_exp,
    why_not_exp_stats,
    why_not_row,
    why_not_row_pair,
)
from lowtide.head.call import CrossEntropyArgs, DivergenceArgs, Head, TokenStatsArgs, Wanted
from lowtide.head.head_plan import HeadPlan, When, Work
from lowtide.head.kernels.configs import topk_row_bytes
from lowtide.head.options import HeadOptions
from lowtide.head.planner import STATS_BYTES_PER_TARGET, STATS_BYTES_PER_TOKEN, plan_of, plan_of_teacher
from lowtide.head.ranks.alone import Alone
from lowtide.head.rows import input_is_copied, rows_are_aligned


def plan_head(
    N: int,
    D: int,
    V: int,
    dtype: torch.dtype,
    device: torch.device | str,
    options: HeadOptions | None = None,
    *,
    weight_dtype: torch.dtype | None = None,
    reduction: str = "mean",
    weight_frozen: bool = False,
    capped_and_smoothed: bool = False,
    weight_fits: bool = True,
    input_is_copied: bool = False,
    function: bool = False,
    capability: tuple[int, int] | None = None,
    device_bytes: int | None = None,
) -> HeadPlan:
    """Say what `linear_cross_entropy` will do for N kept tokens, hidden size D and vocabulary V, and its bytes.

    Nothing is computed or allocated. On the CPU ignored tokens are dropped first, so N counts the others; elsewhere
    N counts all.

    Args:
        N: Tokens that are computed.
        D: Hidden size.
        V: Vocabulary.
        dtype: dtype of the GEMMs' operands: that of ``input``, or autocast's.
        device: Where the tensors are.
        options: As given to `linear_cross_entropy`.
        weight_dtype: dtype of ``linear_weight``, where autocast makes it differ from ``dtype``.
        reduction: As given to `linear_cross_entropy`.
        weight_frozen: True if neither ``linear_weight`` nor ``linear_bias`` needs a gradient.
        capped_and_smoothed: True if the loss has both a soft cap and label smoothing.
        weight_fits: False if the weight's rows do not lie one after another, at 16-byte addresses.
        input_is_copied: True if the hidden states of a chunk have to be copied: another dtype, or axes that cannot be
            flattened without.
        function: True for `linear_apply`, whose function gets a chunk's logits in pieces: `HeadPlan.piece_rows`.
        capability: Compute capability of a GPU that is planned for and is not this machine's. None: this machine's.
        device_bytes: Likewise that GPU's memory.

    Returns:
        HeadPlan: print it, or read its fields.

    Raises:
        ArgumentValueError: A negative size, or a reduction that there is not.
        ArgumentTypeError: ``options`` that are none.
        UnsupportedError: ``options`` asks for what cannot run here.

    Example:
        >>> plan = plan_head(16384, 2048, 131072, torch.float32, "cpu", HeadOptions(workspace_mib=64))
        >>> plan.chunk_rows, plan.chunks
        (103, 160)
    """
    _check_sizes(N=N, D=D, V=V)
    check_reduction(reduction)
    options, device = check_options(options), torch.device(device)
    if function:
        choice = choose("linear_apply", options, " for linear_apply")
    else:
        against = why_not_exp(
            device, dtype, D, V, capped_and_smoothed=capped_and_smoothed, weight_fits=weight_fits, capability=capability
        )
        choice = choose("cross entropy", options, exp=against, row=why_not_row(device, dtype, V))
    work = Work(
        size=(N, D, V),
        dtype=dtype,
        weight_dtype=weight_dtype or dtype,
        device=device,
        choice=choice,
        gradient=choose_gradient(options, reduction, weight_frozen),
        weight_frozen=weight_frozen,
        device_bytes=device_bytes,
        function=function,
        input_is_copied=input_is_copied,
    )
    return plan_of(work, options)


def plan_divergence(
    N: int,
    D: int,
    V: int,
    teacher_D: int | None,
    dtype: torch.dtype,
    device: torch.device | str,
    options: HeadOptions | None = None,
    *,
    teacher_V: int | None = None,
    topk: int | None = None,
    teacher_dtype: torch.dtype | None = None,
    weight_dtype: torch.dtype | None = None,
    reduction: str = "none",
    weight_frozen: bool = False,
) -> HeadPlan:
    """Say what `linear_divergence` will do with gradients for N tokens, and its bytes, as `plan_head` does.

    Nothing is computed or allocated. On the CPU masked tokens are dropped first, so N counts the others; elsewhere N
    counts all. ``chunk_rows`` are the rows whose gradients are multiplied at a time, ``product_rows`` those of which
    both sides' logits exist.

    Args:
        N: Tokens that are computed.
        D: The student's hidden size.
        V: Its vocabulary.
        teacher_D: The teacher's hidden size; None with ``topk``.
        dtype: dtype of the student's GEMM operands: that of ``input``, or autocast's.
        device: Where the tensors are.
        options: As given to `linear_divergence`.
        teacher_V: The teacher's vocabulary; None: the student's.
        topk: How many of the teacher's log-probabilities there are for each token, where its head is not here.
        teacher_dtype: dtype of the teacher's GEMM operands; None: the student's.
        weight_dtype: dtype of ``linear_weight``, where autocast makes it differ from ``dtype``.
        reduction: As given to `linear_divergence`.
        weight_frozen: True if neither ``linear_weight`` nor ``linear_bias`` needs a gradient.

    Returns:
        HeadPlan: print it, or read its fields.

    Raises:
        ArgumentValueError: A negative size, a reduction that there is not, or not one of ``teacher_D`` and ``topk``.
        ArgumentTypeError: ``options`` that are none.
        UnsupportedError: ``options`` asks for what cannot run here.

    Example:
        >>> plan = plan_divergence(8192, 2048, 128256, 4096, torch.float32, "cpu", reduction="mean")
        >>> plan.chunk_rows, plan.gradient
        (135, 'forward')
    """
    given = {"teacher_D": teacher_D, "teacher_V": teacher_V, "topk": topk}
    _check_sizes(N=N, D=D, V=V, **{name: size for name, size in given.items() if size is not None})
    if (teacher_D is None) == (topk is None):
        raise ArgumentValueError(message("teacher_D", "a size without topk, None with it", str(teacher_D)))
    check_reduction(reduction)
    options, device = check_options(options), torch.device(device)
    of_teacher = (0, topk or 0) if teacher_D is None else (teacher_D, V if teacher_V is None else teacher_V)
    work = Work(
        size=(N, D, V),
        dtype=dtype,
        weight_dtype=weight_dtype or dtype,
        device=device,
        choice=choose("divergence", options, row=why_not_row_pair(device, dtype, V, topk=topk is not None)),
        gradient=choose_gradient(options, reduction, weight_frozen, divergence=True),
        weight_frozen=weight_frozen,
        teacher=(*of_teacher, teacher_dtype or dtype),
    )
    return plan_of(work, options)


def _check_sizes(**sizes: int) -> None:
    for name, size in sizes.items():
        if not isinstance(size, int) or size < 0:
            raise ArgumentValueError(message(name, "a size of 0 or more", str(size)))


def plan_cross_entropy(head: Head, args: CrossEntropyArgs, n: int, wanted: Wanted) -> HeadPlan:
    """Return the plan for n rows, the same on every rank: for the largest shard, and what all ranks can do."""
    V, capped = head.ranks.most_rows, head.softcap is not None and args.label_smoothing != 0
    exp = why_not_exp(*_place(head), capped_and_smoothed=capped, weight_fits=_weight_fits(head))
    row = why_not_row(head.input.device, head.dtype, V) if head.ranks.alone else NOT_OF_SHARDS
    choice = choose("cross entropy", head.options, _where(head), exp=_of_all_ranks(head, exp), row=row)
    gradient = choose_gradient(head.options, args.reduction, head.ranks.alone and not wanted.head)
    return plan_of(_work(head, n, wanted, choice, gradient), head.options)


def plan_token_stats(head: Head, args: TokenStatsArgs, n: int, wanted: Wanted) -> HeadPlan:
    """Return the same for token statistics."""
    (device, _, _, V), K, topk = _place(head), args.target.shape[1], args.topk
    exp = why_not_exp_stats(*_place(head), targets=K, topk=topk, weight_fits=_weight_fits(head))
    choice = choose("statistics", head.options, _where(head), exp=_of_all_ranks(head, exp))
    more = {
        "token_bytes": STATS_BYTES_PER_TOKEN + STATS_BYTES_PER_TARGET * max(0, K - 1),
        "tile_numbers": 3 + len(args.wanted & {"entropy", "sum_sq_prob", "mean_logit"}),
        "sum_row_bytes": topk_row_bytes(topk, V, device),
    }
    return plan_of(_work(head, n, wanted, choice, "recompute", **more), head.options)


def plan_both_sides(
    head: Head, args: DivergenceArgs, n: int, wanted: Wanted, *, stored: bool
) -> tuple[HeadPlan, HeadPlan]:
    """Return the same for a divergence: the student's plan, and the teacher's, for the same chunks."""
    weight, V = args.teacher_weight, head.ranks.most_rows
    if weight is None:
        assert args.topk_ids is not None
        teacher = (0, args.topk_ids.shape[1], head.dtype)
    else:
        teacher = (weight.shape[1], weight.shape[0] if head.ranks.alone else V + 1, args.teacher_dtype)
    choice = choose(
        "divergence", head.options, row=why_not_row_pair(head.input.device, head.dtype, V, topk=weight is None)
    )
    gradient: When = "forward" if stored else "recompute"
    work = _work(head, n, wanted, choice, gradient, teacher=teacher, values_only=not any(wanted))
    return plan_of(work, head.options), plan_of_teacher(work, head.options)


def _place(head: Head) -> tuple[torch.device, torch.dtype, int, int]:
    return head.input.device, head.dtype, head.weight_VD.shape[1], head.ranks.most_rows


def _where(head: Head) -> str:
    return "" if head.ranks.alone else " where the vocabulary is sharded"


def _weight_fits(head: Head) -> bool:
    """Return whether the weight's rows lie as TMA takes them; a shard's are copied where they do not."""
    return not head.ranks.alone or head.weight_VD.dtype != head.dtype or rows_are_aligned(head.weight_VD)


def _of_all_ranks(head: Head, exp: str | None) -> str | None:
    """Return why exponentials cannot run on some rank, where ``exp`` is why not on this one."""
    return exp if isinstance(head.ranks, Alone) or head.ranks.limits.exponentials else NOT_ON_EVERY_RANK


def _work(head: Head, n: int, wanted: Wanted, choice: tuple[str, str], gradient: When, **more: Any) -> Work:
    """Return what a pass over n tokens is, on every rank alike: by the largest shard and the smallest GPU."""
    ranks, D, V = head.ranks, head.weight_VD.shape[1], head.ranks.most_rows
    if isinstance(ranks, Alone):
        more["input_is_copied"] = n != head.tokens or input_is_copied(head.input, head.dtype)
    else:
        n = ranks.slots
        V += choice[0] != "exp"  # the column of other ranks' classes
        # Hidden states are gathered ahead, or rounded, in which a rank must not differ: of sums alone four pieces live
        # at once, of gradients three; with these the product too, in float32, whose sum over the ranks is under way.
        more |= {"sum_row_bytes": 3 * 2 * D + more.get("sum_row_bytes", 0), "row_bytes": (2 * 2 + 4) * D}
        more |= {"device_bytes": ranks.limits.gpu_bytes, "input_is_copied": True, "pieces": 2}
    return Work(
        size=(n, D, V),
        dtype=head.dtype,
        weight_dtype=head.weight_VD.dtype,
        device=head.input.device,
        choice=choice,
        gradient=gradient,
        weight_frozen=not wanted.head,
        **more,
    )


def choose_gradient(options: HeadOptions, reduction: str, weight_frozen: bool, *, divergence: bool = False) -> When:
    """Return when the gradients are computed.

    With a scalar loss the upstream gradient is one factor, applied afterwards. With one loss a token it is not, but
    then a frozen head still allows it: the input's gradient is a row times the upstream factor of that row. Of a
    divergence three numbers a token are kept instead, and not the input's gradient unless that is asked for.

    Raises:
        UnsupportedError: ``gradient="forward"`` was asked for where it cannot be right.
    """
    known = reduction != "none" or weight_frozen
    if options.gradient == "forward" and not known:
        expected = "'auto' or 'recompute' with reduction='none' and a head that is trained"
        hint = "The weight's gradient needs each token's upstream gradient, known in backward only."
        raise UnsupportedError(message("gradient", expected, "'forward'", hint))
    small = divergence and reduction == "none" and options.gradient == "auto"
    return "recompute" if options.gradient == "recompute" or not known or small else "forward"
