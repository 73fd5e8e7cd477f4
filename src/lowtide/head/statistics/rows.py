"""The plan of token statistics."""

from dataclasses import replace

from lowtide.head.backends import choose_stats_backend
from lowtide.head.call import Head, TokenStatsArgs
from lowtide.head.exponentials.plan import plan_exp_stats
from lowtide.head.head_plan import HeadPlan
from lowtide.head.kernels.configs import topk_row_bytes
from lowtide.head.rows import input_is_copied, rows_are_aligned
from lowtide.head.schedules import remembered_plan


def plan_stats(head: Head, args: TokenStatsArgs, rows: int, *, weight_frozen: bool) -> HeadPlan:
    """Return the plan for ``rows`` tokens, which names the backend that runs."""
    weight, K, options, topk = head.weight_VD, args.target.shape[1], head.options, args.topk
    V, D = weight.shape
    fits = weight.dtype != head.dtype or rows_are_aligned(weight)
    backend, reason = choose_stats_backend(
        options, weight.device, head.dtype, D, V, targets=K, topk=topk, weight_fits=fits
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
            input_is_copied=input_is_copied(head.input, head.dtype),
            tile_numbers=3 + len(args.wanted & {"entropy", "sum_sq_prob", "mean_logit"}),
            targets=K,
            sum_row_bytes=topk_row_bytes(topk, V, weight.device),
        )
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
