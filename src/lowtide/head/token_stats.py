"""Log-probabilities, entropies and other statistics of each token, without logits in memory.

N tokens, n rows computed, K targets a token, V vocabulary.
"""

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from lowtide.arguments import check_index
from lowtide.errors import ArgumentTypeError, ArgumentValueError, UnsupportedError, message
from lowtide.head.call import (
    CrossEntropyArgs,
    Gradients,
    Head,
    SupportArgs,
    TokenStatsArgs,
    Wanted,
    check_target,
    checked_call,
    gradient_buffers,
)
from lowtide.head.engine import run
from lowtide.head.nodes import Function, Shape
from lowtide.head.options import HeadOptions
from lowtide.head.plan import HeadPlan, choose_gradient, plan_token_stats, skips_tokens
from lowtide.head.ranks import VocabShard
from lowtide.head.rows import Rows
from lowtide.head.support import SUPPORT, check_support
from lowtide.head.terms.cross_entropy import CROSS_ENTROPY, check_classes
from lowtide.head.terms.loss import Mask
from lowtide.head.terms.statistics import Statistics, Upstream, silenced

if TYPE_CHECKING:  # it has kernels, and needs Triton
    from lowtide.head.exponentials.tile_sums import TileStatistics


class TopK(NamedTuple):
    """The highest logits of each token, in descending order, and their classes."""

    values: Tensor  # [..., k] logits, scale and cap applied; minus `TokenStats.lse`: log-probabilities
    ids: Tensor  # [..., k] int64


_ABSENT: Any = None


class TokenStats(NamedTuple):
    """The statistics of each token by `linear_token_stats`. A field that was not requested is None, whatever its type.

    With z a token's logits, p their softmax, V their number. float32, for float64 inputs float64.

    Attributes:
        logprob: ``log p_y`` of the target [...], or of each of its K targets [..., K]; 0 where ignored.
        entropy: ``-sum_v p_v log p_v`` [...], in nats.
        lse: ``log(sum_v exp(z_v))`` [...].
        mean_logit: ``sum_v z_v / V`` [...].
        argmax: The class of the highest logit [...], int64. Not differentiable, nor are the fields below.
        sum_sq_prob: ``sum_v p_v**2`` [...]: how likely two samples are the same class.
        topk: (values, ids) of the k highest logits [..., k]: see `TopK`.
        is_top1: Whether the target is ``argmax``, bool, of the target's shape; False where ignored.
        outside: With ``support`` and targets, how many of these are not in their token's set, 0-d int64, requested or
            not; else None.
    """

    logprob: Tensor = _ABSENT
    entropy: Tensor = _ABSENT
    lse: Tensor = _ABSENT
    mean_logit: Tensor = _ABSENT
    argmax: Tensor = _ABSENT
    sum_sq_prob: Tensor = _ABSENT
    topk: TopK = _ABSENT
    is_top1: Tensor = _ABSENT
    outside: Tensor | None = None


Want = Literal[
    "logprob", "entropy", "lse", "mean_logit", "argmax", "sum_sq_prob", "topk", "is_top1", "outside"
]  # fmt: skip
WANTS = TokenStats._fields[:-1]  # what is returned on request only: all but "outside"
OF_TARGETS = ("logprob", "is_top1")  # 0 where ignored; the others are the same whatever the target
DIFFERENTIABLE = ("logprob", "entropy", "lse", "mean_logit")


def linear_logprobs(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float | Tensor = 1.0,
    ignore_index: int = -100,
    support: Tensor | None = None,
    options: HeadOptions | None = None,
    vocab_shard: VocabShard | None = None,
) -> Tensor:
    """Return the log-probability of each token's target, differentiable, without the logits in memory.

    With logits ``z = cap((x @ W.T + b) * logit_scale)``, where ``cap(z) = softcap * tanh(z / softcap)``: the value is
    ``z_y - log(sum_v exp(z_v))``, what ``log_softmax(z).gather(-1, y)`` would give. The logits are computed in chunks.
    Backward recomputes them (four GEMMs, 8NDV FLOP); nothing of size [N, V] is saved.

    Args:
        input: Hidden states [..., D], any floating dtype and strides, any number of leading axes.
        linear_weight: [V, D], the output embedding. Outside autocast of the same dtype as ``input``.
        target: Class indices [...] from 0 to V - 1, or ``ignore_index``; or [..., K], K candidates for each token. An
            integer dtype.
        linear_bias: [V], or None.
        softcap: Cap of the logits, above 0, or None.
        logit_scale: Number or 0-d tensor by which the logits are multiplied, before the cap: 1 / temperature. A tensor
            that requires a gradient gets it, in float16 at the cost of a float32 copy of ``input``.
        ignore_index: Targets of this value have log-probability 0 and contribute nothing, whatever the hidden state.
        support: The set of classes that each token's distribution is over, as sampling with top k or top p leaves it,
            in place of the vocabulary: ids [..., K] padded with -1, or [K], one set for all tokens. An integer dtype;
            an id that stands twice counts once. Only these rows of the weight are read, and get a gradient: 2NKD FLOP a
            pass. A target outside its set has log-probability -inf and no gradient.
        options: Memory and implementation: see `HeadOptions`. With one target per token all backends of
            `linear_cross_entropy` run here; with [..., K] ``"torch"``, and ``"exp"`` for K up to 64.
        vocab_shard: For a vocabulary sharded over ranks, as in `linear_cross_entropy`, and so are DTensors. The
            result is that of all tokens, the same on every rank.

    Returns:
        Tensor: Of the target's shape, float32, for float64 inputs float64; exactly 0 at ignored targets.

    Raises:
        ArgumentValueError: A shape, device or number that does not fit; also a `ValueError`.
        ArgumentTypeError: A dtype that does not fit; also a `TypeError`.
        TargetIndexError: On the CPU, a target that is neither a class nor ``ignore_index``, or an id of ``support``
            that is neither a class nor -1; also an `IndexError`. On other devices the log-probability and gradients of
            such a target, or of a token with such an id, are NaN.
        UnsupportedError: Double backward, forward-mode derivatives, torch.func transforms, or an explicitly requested
            implementation that cannot run; also a `RuntimeError`.

    Example:
        >>> hidden, head = torch.randn(2, 5, 16, requires_grad=True), torch.nn.Linear(16, 1000, bias=False)
        >>> labels = torch.randint(0, 1000, (2, 5))
        >>> linear_logprobs(hidden, head.weight, labels, logit_scale=1 / 0.7).shape
        torch.Size([2, 5])
    """
    head = checked_call(
        "linear_logprobs", input, linear_weight, linear_bias, logit_scale, softcap, options, vocab_shard,
        gathered=support is not None,
    )  # fmt: skip
    check_target(input, target, linear_weight, several=True)
    return _token_stats(head, input, support, target, frozenset({"logprob"}), 0, ignore_index).logprob


def linear_token_stats(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor | None = None,
    *,
    want: Iterable[Want] = ("logprob", "entropy", "lse", "argmax"),
    linear_bias: Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float | Tensor = 1.0,
    ignore_index: int = -100,
    topk: int | None = None,
    support: Tensor | None = None,
    options: HeadOptions | None = None,
    vocab_shard: VocabShard | None = None,
) -> TokenStats:
    """Return statistics of each token's logits, all from one pass over them, without the logits in memory.

    The logits are those of `linear_logprobs`; see `TokenStats` for the statistics. ``logprob``, ``entropy``,
    ``lse`` and ``mean_logit`` are differentiable, with any upstream gradients at once. With g, h, l, m the
    upstream gradients of the four, H the entropy and p the softmax, the gradient with respect to logit z_v is

        g ([v = y] - p_v) - h p_v (log p_v + H) + l p_v + m / V

    computed from the logits, which backward recomputes in chunks. Forward is one GEMM, backward one for each of hidden
    states and weight that needs its gradient, and one for the logits.

    Args:
        input: Hidden states [..., D], any floating dtype and strides, any number of leading axes.
        linear_weight: [V, D], the output embedding. Outside autocast of the same dtype as ``input``.
        target: Class indices [...] or [..., K] as in `linear_logprobs`, or None if neither ``logprob`` nor
            ``is_top1`` is requested.
        want: Names of the fields of `TokenStats` to compute.
        linear_bias: [V], or None.
        softcap: Cap of the logits, above 0, or None.
        logit_scale: As in `linear_logprobs`.
        ignore_index: Targets of this value have ``logprob`` 0 and ``is_top1`` False, and no gradient of their
            ``logprob``. The other fields do not depend on targets and are computed for every token.
        topk: How many of the highest logits ``topk`` holds, from 1 to V. It requests that field, and is required
            if ``want`` has it.
        options: Memory and implementation: see `HeadOptions`. If only ``logprob`` is requested, with one target
            per token, all backends of `linear_cross_entropy` run here; else ``"torch"``, and ``"exp"`` for K and
            ``topk`` up to 64.
        vocab_shard: As in `linear_logprobs`.
        support: As in `linear_logprobs`: all statistics are then over each token's set. Of an empty set ``lse`` is
            -inf, ``argmax`` -1, and ``entropy`` and ``sum_sq_prob`` are 0. ``mean_logit`` and ``topk`` are refused.

    Returns:
        TokenStats: The requested fields, None for the others.

    Raises:
        ArgumentValueError: A name, shape, device or number that does not fit; also a `ValueError`.
        ArgumentTypeError: A dtype that does not fit; also a `TypeError`.
        TargetIndexError: As in `linear_logprobs`.
        UnsupportedError: As in `linear_logprobs`.

    Note:
        A token to which no gradient flows back contributes nothing to any gradient, even if its hidden state is NaN
        or inf. On the CPU such tokens are dropped before any product of backward; for other devices see
        `HeadOptions.ignored_tokens`.

    Example:
        >>> hidden, head = torch.randn(2, 5, 16, requires_grad=True), torch.nn.Linear(16, 1000, bias=False)
        >>> labels = torch.randint(0, 1000, (2, 5))
        >>> stats = linear_token_stats(hidden, head.weight, labels, want=("logprob", "entropy", "is_top1"))
        >>> (-stats.logprob - 0.01 * stats.entropy).mean().backward()
        >>> accuracy = stats.is_top1.float().mean()
    """
    names = _check_want(want)
    if "topk" in names and topk is None:
        raise ArgumentValueError(message("topk", "an int, as want has 'topk'", "None", "Pass their number: topk=5."))
    with torch.set_grad_enabled(torch.is_grad_enabled() and not names.isdisjoint(DIFFERENTIABLE)):
        head = checked_call(
            "linear_token_stats", input, linear_weight, linear_bias, logit_scale, softcap, options, vocab_shard,
            gathered=support is not None,
        )  # fmt: skip
        highest, V = 0, head.ranks.vocab
        if topk is not None:
            highest, names = check_index("topk", topk), names | {"topk"}
            if not 1 <= highest <= V:
                raise ArgumentValueError(message("topk", f"an int from 1 to {V}, the vocabulary", str(topk)))
        if target is not None:
            check_target(input, target, linear_weight, several=True)
        elif needed := " and ".join(repr(name) for name in OF_TARGETS if name in names):
            hint = "Pass the targets, or a want without these."
            raise ArgumentValueError(message("target", f"class indices, as want has {needed}", "None", hint))
        return _token_stats(head, input, support, target, names, highest, ignore_index)


def _token_stats(
    head: Head, input: Tensor, support: Tensor | None, target: Tensor | None, names: frozenset[str], topk: int,
    ignore_index: int,
) -> TokenStats:  # fmt: skip
    """Return fields ``names`` for the tokens of ``input``, the caller's."""
    ranks, leading, has_targets = head.ranks, input.shape[:-1], target is not None
    target = head.input.new_empty(*leading, 0, dtype=torch.long) if target is None else ranks.whole(target).long()
    by_loss = names == {"logprob"} and target.dim() == len(leading) and support is None
    if head.skip and not by_loss:
        hint = "Of statistics only log-probabilities of one target a token, over the whole vocabulary, skip tiles."
        raise UnsupportedError(message("options", "skip=None", f"skip={head.skip}", hint))
    when = choose_gradient(head.gradient, "none", by_loss and head.frozen)
    ignore_index = check_index("ignore_index", ignore_index)
    if by_loss:
        # a token's log-probability is minus its cross entropy, which has more backends; 0 - x leaves no -0.0
        args = CrossEntropyArgs(target, reduction="none", ignore_index=ignore_index)
        loss = CROSS_ENTROPY(head, args, recompute=when == "recompute")["loss"]
        return TokenStats(logprob=ranks.result(0 - loss.view(target.shape)))
    N, want = math.prod(leading), ",".join(sorted(names))
    y_NK = target.reshape(N, math.prod(target.shape[len(leading) :]))
    if support is None:
        found = TOKEN_STATS(head, TokenStatsArgs(y_NK, want, topk, ignore_index), recompute=True)
    else:
        ids = ranks.whole(check_support(support, input, names))
        if not ids.shape[-1]:
            ids = ids.new_full((*ids.shape[:-1], 1), -1)
        ids = ids.expand(*leading, -1).reshape(N, ids.shape[-1])
        found = SUPPORT(head, SupportArgs(y_NK, ids, want, ignore_index), recompute=True)

    def of_tokens(name: str) -> Tensor:
        shape = target.shape if name in OF_TARGETS else leading + found[name].shape[1:]
        return ranks.result(found[name].view(shape))

    fields: dict[str, Any] = {name: of_tokens(name) for name in names & found.keys()}
    if topk:
        fields["topk"] = TopK(of_tokens("topk_values"), of_tokens("topk_ids"))
    if support is not None and has_targets:
        fields["outside"] = ranks.result(found["outside"].sum())
    return TokenStats(**fields)


def _check_want(want: Iterable[str]) -> frozenset[str]:
    known = ", ".join(map(repr, WANTS))
    if isinstance(want, str | Tensor) or not isinstance(want, Iterable):
        raise ArgumentTypeError(message("want", f"a sequence of names among {known}", f"{want!r}"))
    names = frozenset(want)
    wrong = ", ".join(sorted(map(repr, names.difference(TokenStats._fields))))
    if wrong or names <= {"outside"}:
        raise ArgumentValueError(message("want", f"names among {known}", wrong or "none"))
    return names - {"outside"}


def forward(head: Head, args: TokenStatsArgs, wanted: Wanted, keep: bool) -> dict[str, Tensor]:
    """Return each requested statistic of all N tokens, and what `backward` needs of them.

    Tokens whose targets are all ignored are left out, if nothing but what is of the targets is wanted.
    """
    check_classes(head, args.target, args.ignore_index)
    kept_NK, is_class_NK = _kept(head, args)
    rows, plan = _plan(head, args, wanted, kept_NK.any(1) if args.wanted.issubset(OF_TARGETS) else None)
    y_NK = args.target.where(is_class_NK, 0)
    if plan.backend == "exp":
        has_loss = "logprob" in args.wanted and head.ranks.alone
        first_n = rows.of(y_NK[:, 0].where((kept_NK & is_class_NK)[:, 0], -1).int(), -1) if has_loss else None
        found = _exponentials(head, rows.of(y_NK), plan, rows).forward(args.wanted, args.topk, first_n)
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
    numbers = known | {"logprob": known["logprob"].where(usable, top_logprob[:, None])}
    if "entropy" not in args.wanted:
        del numbers["entropy"]
    active_N = g.largest(head.ranks.vocab) != 0
    rows, plan = _plan(head, args, wanted, active_N)
    into = gradient_buffers(head, rows, plan, wanted)
    if plan.backend == "exp":
        _exponentials(head, rows.of(y_NK), plan, rows).gradients(rows.of_each(numbers), g.of(rows.of), into)
        return into
    if not head.drops_tokens:
        rows, numbers = replace(rows, kept=rows.of(active_N)), silenced(numbers, active_N)
    g_n, terms = g.of(rows.of), _terms(args, rows, head, plan, y_NK)
    run(
        head, rows, plan, terms, into, known=rows.of_each(numbers),
        upstream=lambda _, part: g_n.of(lambda x: x[part]),
    )  # fmt: skip
    return into


def _plan(head: Head, args: TokenStatsArgs, wanted: Wanted, active_N: Tensor | None) -> tuple[Rows, HeadPlan]:
    """Return the rows of the tokens that are ``active_N`` (None: all), and the plan for them."""
    rows = Rows(tokens=len(args.target), index=None if active_N is None else head.positions_of(active_N))
    plan = plan_token_stats(head, args, rows.n, wanted)
    rows = rows.in_order(head.ranks.order(plan))
    if active_N is not None and skips_tokens(head, plan.backend) and (head.ranks.alone or any(wanted)):
        from lowtide.head.kernels.elementwise import valid_first

        index, count = valid_first(active_N)  # the others last; the host learns nothing
        rows = replace(rows, index=index, count=count)
    return rows, plan


def _exponentials(head: Head, y_nK: Tensor, plan: HeadPlan, rows: Rows) -> "TileStatistics":
    if head.ranks.alone:
        from lowtide.head.exponentials.tile_sums import TileStatistics

        return TileStatistics(head, y_nK, plan, rows)
    from lowtide.head.exponentials.sharded import ShardedStatistics

    return ShardedStatistics(head, y_nK, plan, rows)


def _terms(args: TokenStatsArgs, rows: Rows, head: Head, plan: HeadPlan, y_NK: Tensor) -> Statistics:
    y_nK = rows.of(y_NK)
    terms = Statistics(head, plan, y_nK, args.wanted | {"argmax"}, topk=args.topk)
    if args.mask is not None:
        terms.mask = Mask(args.mask, rows, y_nK).fill_
    return terms


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
