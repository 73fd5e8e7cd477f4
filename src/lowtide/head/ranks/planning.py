"""Plans of a sharded head, the same on every rank."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lowtide.errors import UnsupportedError, message
from lowtide.head.backends import choose_backend
from lowtide.head.call import Head
from lowtide.head.exponentials.plan import plan_exp
from lowtide.head.head_plan import HeadPlan
from lowtide.head.options import HeadOptions
from lowtide.head.plan import choose_gradient
from lowtide.head.schedules import remembered_plan


def plan_of_shard(
    head: Head, options: HeadOptions, reduction: str, *, weight_frozen: bool, capped_and_smoothed: bool
) -> HeadPlan:
    """Return a plan that is the same on every rank: made for the largest shard and for what all ranks can do."""
    ranks: Any = head.ranks
    D, device, most = head.weight_VD.shape[1], head.input.device, ranks.most_rows
    backend, reason = "torch", ""
    if options.backend not in ("row", "torch"):
        backend, reason = _exp_or_torch(head, options, most, capped_and_smoothed=capped_and_smoothed)
    if backend != "exp":
        return plan_part(ranks, head.weight_VD, head.dtype, options, reduction, weight_frozen=weight_frozen)
    gradient = choose_gradient(options, reduction, weight_frozen=False)
    tokens = ranks.tokens.groups * ranks.tokens.length
    # Hidden states are gathered ahead, or rounded, in which a rank must not differ: of sums alone four pieces live at
    # once, of gradients three; with these also the product, in float32, whose sum over the ranks is under way.
    return plan_exp(
        tokens, D, most, device, options, reason, gradient, head.weight_VD.dtype, weight_frozen, input_is_copied=True,
        device_bytes=ranks.limits.gpu_bytes, sum_row_bytes=3 * 2 * D, row_bytes=(2 * 2 + 4) * D, pieces=2,
    )  # fmt: skip


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


def plan_part(
    ranks: Any, weight_VD: Tensor, dtype: torch.dtype, options: HeadOptions, reduction: str, *, weight_frozen: bool
) -> HeadPlan:
    """Return the plan of a loop over chunks of logits [C, V_r + 1], the same on every rank."""
    tokens = ranks.tokens
    return remembered_plan(
        tokens.groups * tokens.length,
        weight_VD.shape[1],
        ranks.shard.most_rows + 1,
        dtype,
        weight_VD.device,
        plain_options(options),
        weight_dtype=weight_VD.dtype,
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
