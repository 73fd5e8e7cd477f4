"""Token statistics: what `linear_token_stats` returns, from the numbers of each row and back.

N tokens, n rows computed, K targets a token, V vocabulary.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lowtide.head.call import Gradients, Head, TokenStatsArgs, Wanted
from lowtide.head.engine import Terms, gradient_buffers, run
from lowtide.head.nodes import Function, Shape
from lowtide.head.plan import HeadPlan, plan_token_stats, skips_tokens
from lowtide.head.rows import Rows, looks_at_numbers
from lowtide.head.terms.cross_entropy import check_classes, put_last
from lowtide.head.terms.loss import Masked
from lowtide.head.terms.statistics import Statistics, Upstream, silenced

if TYPE_CHECKING:  # it has kernels, and needs Triton
    from lowtide.head.exponentials.tile_sums import TileStatistics

OF_TARGETS = ("logprob", "is_top1")  # 0 where ignored; the others are the same whatever the target
DIFFERENTIABLE = ("logprob", "entropy", "lse", "mean_logit")


def forward(head: Head, args: TokenStatsArgs, wanted: Wanted, keep: bool) -> dict[str, Tensor]:
    """Return each requested statistic of all N tokens, and what `backward` needs of them.

    Tokens whose targets are all ignored are left out, if nothing but what is of the targets is wanted.
    """
    kept_NK, is_class_NK = _kept(head, args)
    of_targets, index = args.wanted.issubset(OF_TARGETS), None
    if looks_at_numbers(head.input.device):
        wrong = (kept_NK & ~is_class_NK).reshape(-1)
        check_classes(args.target.reshape(-1), wrong, head.ranks.vocab, args.ignore_index)
    if of_targets:
        index = head.positions_of(kept_NK.any(1))
    rows = Rows(tokens=len(args.target), index=index)
    plan = plan_token_stats(head, args, rows.n, wanted)
    rows, y_NK = rows.in_order(head.ranks.order(plan)), args.target.where(is_class_NK, 0)
    if plan.backend == "exp":
        if of_targets and head.ranks.alone and skips_tokens(head, plan.backend):
            rows = put_last(rows, kept_NK.any(1))
        found = _exponentials(head, rows.of(y_NK), plan, rows).forward(args.wanted, args.topk)
    else:
        found = run(head, rows, plan, _terms(args, rows, head, plan, y_NK))
    found = {name: rows.among_all(x) for name, x in found.items()}
    found["is_top1"] = (found["argmax"][:, None] == y_NK) & kept_NK & is_class_NK
    found["logprob"] = found["logprob"].where(is_class_NK, torch.nan).where(kept_NK, 0)
    if not keep:
        del found["top_logprob"]
    return found


def backward(
    head: Head, args: TokenStatsArgs, wanted: Wanted, upstream: dict[str, Tensor | None], known: dict[str, Tensor]
) -> Gradients:
    """Return the needed gradients from the upstream ones [N] (of logprob [N, K]), and what forward returned."""
    kept_NK, is_class_NK = _kept(head, args)
    g = Upstream(**{name: upstream[name] for name in DIFFERENTIABLE if name in args.wanted})
    if isinstance(g.logprob, Tensor):
        g = g._replace(logprob=g.logprob.where(is_class_NK, torch.nan).where(kept_NK, 0))
    # the highest class in the place of an ignored target
    usable, top, top_logprob = kept_NK & is_class_NK, known["argmax"], known["top_logprob"]
    y_NK = args.target.where(usable, top[:, None])
    numbers = {name: known[name] for name in ("lse", "top_logprob", *(["entropy"] if g.entropy is not None else []))}
    numbers |= {"argmax": top, "logprob": known["logprob"].where(usable, top_logprob[:, None])}
    active_N = g.largest(head.ranks.vocab) != 0
    rows = Rows(tokens=len(args.target), index=head.positions_of(active_N))
    plan = plan_token_stats(head, args, rows.n, wanted)
    rows = rows.in_order(head.ranks.order(plan))
    if skips_tokens(head, plan.backend):
        rows = put_last(rows, active_N)
    into = gradient_buffers(head, rows, plan, wanted)
    if plan.backend == "exp":
        y_nK = rows.of(args.target.where(usable, -1), -1)
        _exponentials(head, y_nK, plan, rows).gradients(rows.of_each(numbers), g.of(rows.of), into)
    else:
        if not head.drops_tokens:
            rows, numbers = replace(rows, kept=rows.of(active_N)), silenced(numbers, active_N)
        g_n, terms = g.of(rows.of), _terms(args, rows, head, plan, y_NK)
        known = rows.of_each(numbers)
        run(head, rows, plan, terms, into, upstream=lambda _, part: g_n.of(lambda x: x[part]), known=known)
    return into


def _exponentials(head: Head, y_nK: Tensor, plan: HeadPlan, rows: Rows) -> "TileStatistics":
    if head.ranks.alone:
        from lowtide.head.exponentials.tile_sums import TileStatistics

        return TileStatistics(head, y_nK, plan, rows)
    from lowtide.head.exponentials.sharded import ShardedStatistics

    return ShardedStatistics(head, y_nK, plan, rows)


def _terms(args: TokenStatsArgs, rows: Rows, head: Head, plan: HeadPlan, y_NK: Tensor) -> Terms:
    y_nK = rows.of(y_NK)
    terms = Statistics(head, plan, y_nK, args.wanted | {"argmax"}, topk=args.topk)
    return terms if args.mask is None else Masked(terms, args.mask, rows, y_nK)


def _kept(head: Head, args: TokenStatsArgs) -> tuple[Tensor, Tensor]:
    """Return which targets [N, K] are not ignored, and which are classes."""
    return args.target != args.ignore_index, (args.target >= 0) & (args.target < head.ranks.vocab)


def _shapes(head: Head, args: TokenStatsArgs, keep: bool) -> dict[str, Shape]:
    N, K = args.target.shape
    of_top = (N, args.topk) if args.topk else (0,)
    wide: dict[str, tuple[int, ...]] = {
        name: (N if name in args.wanted else 0,) for name in ("entropy", "mean_logit", "sum_sq_prob")
    }
    wide |= {"logprob": (N, K), "lse": (N,), "top_logprob": (N if keep else 0,), "topk_values": of_top}
    others = {"is_top1": ((N, K), torch.bool), "argmax": ((N,), torch.int64), "topk_ids": (of_top, torch.int64)}
    return {name: (shape, head.wide) for name, shape in wide.items()} | others


TOKEN_STATS = Function(
    "token_stats", "linear_token_stats", TokenStatsArgs, forward, backward, shapes=_shapes,
    returned=(*DIFFERENTIABLE, "argmax", "sum_sq_prob", "topk_values", "topk_ids", "is_top1"),
    upstream=DIFFERENTIABLE,
    known=("logprob", "entropy", "lse", "argmax", "top_logprob"),
)  # fmt: skip
