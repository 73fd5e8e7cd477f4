"""Which plan a call gets, on one rank and many: from its tensors to the planner's numbers."""

from dataclasses import replace
from typing import Any

from lowtide.errors import UnsupportedError, message
from lowtide.head.backends import choose_backend, choose_divergence_backend, choose_stats_backend
from lowtide.head.call import CrossEntropyArgs, DivergenceArgs, Head, TokenStatsArgs, Wanted
from lowtide.head.divergences.plan import plan_pair
from lowtide.head.exponentials.plan import plan_exp, plan_exp_stats
from lowtide.head.head_plan import HeadPlan
from lowtide.head.kernels.configs import topk_row_bytes
from lowtide.head.options import HeadOptions
from lowtide.head.plan import choose_gradient, remembered_plan
from lowtide.head.rows import input_is_copied, rows_are_aligned


def plan_cross_entropy(head: Head, args: CrossEntropyArgs, n: int, wanted: Wanted) -> HeadPlan:
    """Return the plan for n rows, the same on every rank: for the largest shard, and what all ranks can do."""
    ranks, options, weight, device = head.ranks, head.options, head.weight_VD, head.input.device
    both, D = head.softcap is not None and args.label_smoothing != 0, weight.shape[1]
    if ranks.alone:
        return remembered_plan(
            n, D, ranks.rows, head.dtype, device, options, weight_dtype=weight.dtype, reduction=args.reduction,
            weight_frozen=not wanted.head, capped_and_smoothed=both,
            weight_fits=weight.dtype != head.dtype or rows_are_aligned(weight),
            input_is_copied=n != head.tokens or input_is_copied(head.input, head.dtype),
        )  # fmt: skip
    return _plan_of_shard(head, options, args.reduction, weight_frozen=not wanted.head, capped_and_smoothed=both)


def plan_token_stats(head: Head, args: TokenStatsArgs, rows: int, *, weight_frozen: bool) -> HeadPlan:
    """Return the plan for ``rows`` tokens, which names the backend that runs, the same on every rank."""
    weight, K, options, topk = head.weight_VD, args.target.shape[1], head.options, args.topk
    ranks: Any = head.ranks
    V, D, of_ranks = ranks.most_rows, weight.shape[1], {}
    if ranks.alone:
        fits = weight.dtype != head.dtype or rows_are_aligned(weight)
        choice = choose_stats_backend(options, weight.device, head.dtype, D, V, targets=K, topk=topk, weight_fits=fits)
    elif options.backend in ("auto", "exp") and ranks.limits.exponentials:
        choice = choose_stats_backend(options, weight.device, head.dtype, D, V, targets=K, topk=topk)
        rows = ranks.groups * ranks.tokens.length
        of_ranks = _ahead(ranks, D)
    else:
        choice = "torch", ""
    backend, reason = choice
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
            input_is_copied=not ranks.alone or input_is_copied(head.input, head.dtype),
            tile_numbers=3 + len(args.wanted & {"entropy", "sum_sq_prob", "mean_logit"}),
            targets=K,
            sum_row_bytes=topk_row_bytes(topk, V, weight.device) + of_ranks.pop("sum_row_bytes", 0),
            **of_ranks,
        )
    if not ranks.alone:
        return plan_logits_of_shard(head, options, "none", weight_frozen=weight_frozen)
    return remembered_plan(
        rows,
        D,
        V,
        head.dtype,
        weight.device,
        replace(options, backend="torch"),
        weight_dtype=weight.dtype,
        reduction="none",
        weight_frozen=weight_frozen,
    )


def plan_both_sides(
    head: Head, args: DivergenceArgs, n: int, wanted: Wanted, *, stored: bool
) -> tuple[HeadPlan, HeadPlan]:
    """Return the student's plan and the teacher's for n rows, the same on every rank."""
    ranks: Any = head.ranks
    device, topk = head.input.device, args.topk_ids
    V, D = head.weight_VD.shape
    if topk is not None:
        of_teacher = (0, topk.shape[1])
    else:
        assert args.teacher_weight is not None
        of_teacher = (args.teacher_weight.shape[1], args.teacher_weight.shape[0])
    if not ranks.alone:
        V = ranks.most_rows + 1
        of_teacher = of_teacher if topk is not None else (of_teacher[0], V)
    backend, reason = choose_divergence_backend(head.options, device, head.dtype, V, topk=topk is not None)
    return plan_pair(
        n,
        (D, V),
        of_teacher,
        head.dtype,
        args.teacher_dtype,
        device,
        head.options,
        backend=backend,
        reason=reason,
        weight_dtype=head.weight_VD.dtype,
        gradient="forward" if stored else "recompute",
        gradients=(any(wanted), wanted.head),
        device_bytes=None if ranks.alone else ranks.limits.gpu_bytes,
    )


def _plan_of_shard(
    head: Head, options: HeadOptions, reduction: str, *, weight_frozen: bool, capped_and_smoothed: bool
) -> HeadPlan:
    """Return a plan that is the same on every rank: made for the largest shard and for what all ranks can do."""
    ranks: Any = head.ranks
    D, device, most = head.weight_VD.shape[1], head.input.device, ranks.most_rows
    backend, reason = "torch", ""
    if options.backend not in ("row", "torch"):
        backend, reason = _exp_or_torch(head, options, most, capped_and_smoothed=capped_and_smoothed)
    if backend != "exp":
        return plan_logits_of_shard(head, options, reduction, weight_frozen=weight_frozen)
    gradient = choose_gradient(options, reduction, weight_frozen=False)
    tokens = ranks.tokens.groups * ranks.tokens.length
    return plan_exp(
        tokens, D, most, device, options, reason, gradient, head.weight_VD.dtype, weight_frozen, input_is_copied=True,
        **_ahead(ranks, D),
    )  # fmt: skip


def _ahead(ranks: Any, D: int) -> dict[str, Any]:
    """Return what plans of exponentials count besides where ranks exchange.

    Hidden states are gathered ahead, or rounded, in which a rank must not differ: of sums alone four pieces live at
    once, of gradients three; with these also the product, in float32, whose sum over the ranks is under way.
    """
    return {
        "device_bytes": ranks.limits.gpu_bytes,
        "sum_row_bytes": 3 * 2 * D,
        "row_bytes": (2 * 2 + 4) * D,
        "pieces": 2,
    }


def _exp_or_torch(head: Head, options: HeadOptions, most: int, *, capped_and_smoothed: bool) -> tuple[str, str]:
    """Return which of the two runs, on every rank alike.

    Raises:
        UnsupportedError: "exp" was asked for by name, and some rank's GPU cannot run it.
    """
    ranks: Any = head.ranks
    if ranks.limits.exponentials:
        return choose_backend(
            options,
            head.input.device,
            head.dtype,
            head.weight_VD.shape[1],
            most,
            capped_and_smoothed=capped_and_smoothed,
        )
    if options.backend == "exp":
        hint = "Its kernels need bfloat16 and GPUs of compute capability 9.0 to below 12 on all of them."
        raise UnsupportedError(message("backend", "'auto' or 'torch'", "'exp', which some rank cannot run", hint))
    return "torch", "not every rank's GPU runs the kernels of exp"


def plan_logits_of_shard(head: Head, options: HeadOptions, reduction: str, *, weight_frozen: bool) -> HeadPlan:
    """Return the plan of a loop over chunks of logits [C, V_r + 1], the same on every rank."""
    ranks: Any = head.ranks
    return remembered_plan(
        ranks.groups * ranks.tokens.length,
        head.weight_VD.shape[1],
        ranks.most_rows + 1,
        head.dtype,
        head.weight_VD.device,
        plain_options(options),
        weight_dtype=head.weight_VD.dtype,
        reduction=reduction,
        weight_frozen=weight_frozen,
        device_bytes=ranks.limits.gpu_bytes,
    )


def plain_options(options: HeadOptions) -> HeadOptions:
    """Return the options for a part of the vocabulary.

    Raises:
        UnsupportedError: An implementation asked for by name that cannot share a vocabulary.
    """
    if options.backend not in ("auto", "torch"):
        hint = "Its kernels do not know other ranks' classes; cross entropy's of 'exp' do."
        expected = "'auto' or 'torch' where the vocabulary is sharded"
        raise UnsupportedError(message("backend", expected, f"{options.backend!r}", hint))
    return replace(options, backend="torch")
