"""Which implementation runs for a call, on every rank the same, and when its gradients are computed."""

from functools import partial
from types import ModuleType
from typing import Any

import torch

from lowtide.errors import UnsupportedError, message
from lowtide.head.backends import (
    NOT_OF_MASKED,
    NOT_OF_SHARDS,
    NOT_ON_EVERY_RANK,
    choose,
    skips_ignored,
    why_not_exp,
    why_not_row,
)
from lowtide.head.call import CrossEntropyArgs, DivergenceArgs, Head, SupportArgs, TokenStatsArgs
from lowtide.head.options import HeadOptions
from lowtide.head.planner import When
from lowtide.head.ranks.parallel import Ranks
from lowtide.head.rows import rows_are_aligned

Args = CrossEntropyArgs | TokenStatsArgs | DivergenceArgs | SupportArgs


def skips_tokens(head: Head, backend: str) -> bool:
    """Return whether the device puts ignored tokens last, and the kernels end before them."""
    if backend != "exp" or head.ignored_tokens != "skip" or head.ranks.spread:
        return False
    return head.ranks.limits.skips if isinstance(head.ranks, Ranks) else skips_ignored(head.input.device)


def skipping() -> ModuleType:
    """Return what leaves tiles out of gradients, for a call that requests it: the head's one import of that room."""
    from lowtide.skip import seam

    return seam


def check_backend(head: Head, args: Args) -> None:
    """Raise if an explicitly requested implementation cannot run; for meta tensors too, which have no plan."""
    if head.backend != "auto" and head.ranks.alone:
        choose_backend(head, args)


def choose_backend(head: Head, args: Args) -> tuple[str, str]:
    """Return the implementation that runs, and why: one that runs on every rank."""
    device, ranks, w = head.input.device, head.ranks, head.weight_VD
    where = "" if ranks.alone else " where the vocabulary is sharded"
    row = partial(why_not_row, device, head.dtype, ranks.most_rows)

    def exp(**of_work: Any) -> str | None:
        if isinstance(ranks, Ranks) and not ranks.limits.exponentials:
            return NOT_ON_EVERY_RANK
        copied = not ranks.alone or w.dtype != head.dtype
        fits = copied or torch.compiler.is_compiling() or rows_are_aligned(w)  # a compiler traces no address
        return why_not_exp(device, head.dtype, w.shape[1], ranks.most_rows, weight_fits=fits, **of_work)

    if isinstance(args, SupportArgs):
        return support_backend(head)
    if isinstance(args, DivergenceArgs):
        return choose("divergence", head.options, row=row(topk=args.topk_ids is not None))
    if isinstance(args, TokenStatsArgs):
        size = args.target.shape[1], args.topk
        why_not = exp(stats=size) if args.mask is None else NOT_OF_MASKED
        return choose("statistics", head.options, where, exp=why_not)
    why_not = exp(capped_and_smoothed=head.softcap is not None and args.label_smoothing != 0)
    why_not = why_not if args.mask is None else NOT_OF_MASKED
    return choose("cross entropy", head.options, where, exp=why_not, row=row() if ranks.alone else NOT_OF_SHARDS)


def support_backend(head: Head) -> tuple[str, str]:
    """Return the implementation that runs for sets of classes, and why."""
    return choose("sets", head.options, row=why_not_row(head.input.device, head.dtype, max(1, head.ranks.most_rows)))


def choose_gradient(options: HeadOptions, reduction: str, weight_frozen: bool, *, divergence: bool = False) -> When:
    """Return when the gradients are computed; raise if forward was requested and cannot be right.

    With a scalar loss the upstream gradient is one factor, applied afterwards. With one loss a token it is not, but
    then a frozen head still allows it: the input's gradient is a row times the upstream factor of that row. Of a
    divergence three numbers per token are stored instead, and the input's gradient only if requested.
    """
    known = reduction != "none" or weight_frozen
    if options.gradient == "forward" and not known:
        expected = "'auto' or 'recompute' with reduction='none' and a head that is trained"
        hint = "The weight's gradient needs each token's upstream gradient, known in backward only."
        raise UnsupportedError(message("gradient", expected, "'forward'", hint))
    small = divergence and reduction == "none" and options.gradient == "auto"
    return "recompute" if options.gradient == "recompute" or not known or small else "forward"
