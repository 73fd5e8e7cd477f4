"""Sets of classes over which a head's log-probabilities are taken: their checks, and what the operator gets.

N tokens, T targets a token, K ids of a set.
"""

import math

import torch
from torch import Tensor

from lowtide.arguments import check_device, check_tensor
from lowtide.errors import ArgumentTypeError, ArgumentValueError, UnsupportedError, message
from lowtide.head.call import Head, SupportArgs, axes_and
from lowtide.head.terms.support import SUPPORT

WITHOUT_SUPPORT = ("mean_logit", "topk")  # statistics of the whole vocabulary


def check_support(support: object, input: Tensor, names: frozenset[str]) -> Tensor:
    """Check sets of classes, ids [..., K] or [K], and that ``names`` are statistics of a set; return them as int64."""
    for name in WITHOUT_SUPPORT:
        if name in names:
            hint = "Of a set take its log-probabilities: target=ids."
            raise ArgumentValueError(message("want", "statistics of a set with support", repr(name), hint))
    if not isinstance(support, Tensor):
        hint = "Pad sets of different lengths with -1."
        raise ArgumentTypeError(message("support", "a tensor of ids", type(support).__name__, hint))
    ids = check_tensor("support", support)
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        hint = "For a mask of the vocabulary pass the ids where it is True." if ids.dtype == torch.bool else ""
        raise ArgumentTypeError(message("support", "an integer dtype", str(ids.dtype), hint))
    check_device("support", ids, input)
    if ids.dim() != 1 and (ids.dim() != input.dim() or ids.shape[:-1] != input.shape[:-1]):
        expected = f"shape {axes_and(input, 'K')}, padded with -1, or [K], one set for all tokens"
        got = f"{list(ids.shape)}"
        raise ArgumentValueError(message("support", f"{expected}, as input is {list(input.shape)}", got))
    return ids.long()


def support_stats(
    head: Head, input: Tensor, target: Tensor | None, names: frozenset[str], ignore_index: int, support: Tensor
) -> dict[str, Tensor]:
    """Return fields ``names`` over the sets, and "outside" if there are targets; ``input`` is the caller's."""
    if head.gradient == "forward":
        hint = "Each token's upstream gradient is known in backward only."
        raise UnsupportedError(message("gradient", "'auto' or 'recompute' with support", "'forward'", hint))
    ranks = head.ranks
    leading, N = input.shape[:-1], math.prod(input.shape[:-1])
    target, support = ranks.whole(target), ranks.whole(support)
    y = head.input.new_zeros((N, 0), dtype=torch.long)
    if target is not None:
        y = target.long().reshape(N, target.shape[-1] if target.dim() > len(leading) else 1).contiguous()
    if not support.shape[-1]:
        support = support.new_full((*support.shape[:-1], 1), -1)
    ids = support.expand(*leading, -1).reshape(N, support.shape[-1])
    args = SupportArgs(target=y, ids=ids, want=",".join(sorted(names)), ignore_index=ignore_index)
    stats = SUPPORT(head, args, recompute=True)
    shapes = {} if target is None else dict.fromkeys(("logprob", "is_top1"), target.shape)
    wanted = names | {"outside"} if target is not None else names
    return {
        name: ranks.result(x if name == "outside" else x.view(shapes.get(name, leading)))
        for name, x in stats.items()
        if name in wanted
    }
