"""Log-probabilities, entropies and other statistics of each token, without logits in memory."""

import math
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from lowtide.arguments import check_index
from lowtide.errors import ArgumentTypeError, ArgumentValueError, UnsupportedError, message
from lowtide.head.call import CrossEntropyArgs, Head, SupportArgs, TokenStatsArgs, check_target, checked_call
from lowtide.head.options import HeadOptions
from lowtide.head.plan import choose_gradient
from lowtide.head.ranks import VocabShard
from lowtide.head.support import SUPPORT, check_support
from lowtide.head.terms.cross_entropy import CROSS_ENTROPY
from lowtide.head.terms.token_stats import DIFFERENTIABLE, OF_TARGETS, TOKEN_STATS


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
WANTS = tuple(name for name in TokenStats._fields if name != "outside")  # what is returned on request only


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
    of_head = input, linear_weight, linear_bias, logit_scale, softcap, options, vocab_shard
    head = checked_call("linear_logprobs", *of_head, gathered=support is not None)
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
    if topk is not None:
        names = names.union({"topk"})
    elif "topk" in names:
        raise ArgumentValueError(message("topk", "an int, as want has 'topk'", "None", "Pass their number: topk=5."))
    with torch.set_grad_enabled(torch.is_grad_enabled() and not names.isdisjoint(DIFFERENTIABLE)):
        of_head = input, linear_weight, linear_bias, logit_scale, softcap, options, vocab_shard
        head = checked_call("linear_token_stats", *of_head, gathered=support is not None)
        highest, V = 0 if topk is None else check_index("topk", topk), head.ranks.vocab
        if topk is not None and not 1 <= highest <= V:
            raise ArgumentValueError(message("topk", f"an int from 1 to {V}, the vocabulary", str(topk)))
        if target is not None:
            check_target(input, target, linear_weight, several=True)
        elif not names.isdisjoint(OF_TARGETS):
            needed = " and ".join(repr(name) for name in OF_TARGETS if name in names)
            hint = "Pass the targets, or a want without these."
            raise ArgumentValueError(message("target", f"class indices, as want has {needed}", "None", hint))
        return _token_stats(head, input, support, target, names, highest, ignore_index)


def _token_stats(
    head: Head, input: Tensor, support: Tensor | None, target: Tensor | None, names: frozenset[str], topk: int,
    ignore_index: int,
) -> TokenStats:  # fmt: skip
    """Return fields ``names`` for the tokens of ``input``, the caller's."""
    ranks, leading = head.ranks, input.shape[:-1]
    by_loss = names == {"logprob"} and target is not None and target.dim() == len(leading) and support is None
    if head.skip and not by_loss:
        hint = "Of statistics only log-probabilities of one target a token, over the whole vocabulary, skip tiles."
        raise UnsupportedError(message("options", "skip=None", f"skip={head.skip}", hint))
    K = 0 if target is None else target.shape[-1] if target.dim() > len(leading) else 1
    if head.gradient == "forward" and not (by_loss and head.frozen):
        hint = "Each token's upstream gradient is known in backward only."
        raise UnsupportedError(message("gradient", "'auto' or 'recompute' for values of each token", "'forward'", hint))
    ignore_index, target = check_index("ignore_index", ignore_index), ranks.whole(target)
    if by_loss and target is not None:
        # a token's log-probability is minus its cross entropy, which has more backends; 0 - x leaves no -0.0
        of_loss = CrossEntropyArgs(target.long(), reduction="none", ignore_index=ignore_index)
        recompute = choose_gradient(head.gradient, "none", head.frozen) == "recompute"
        loss = CROSS_ENTROPY(head, of_loss, recompute=recompute)["loss"]
        return TokenStats(logprob=ranks.result(0 - loss.view(target.shape)))
    N = math.prod(leading)
    y_NK = head.input.new_zeros((N, 0), dtype=torch.long) if target is None else target.long().reshape(N, K)
    want, wanted = ",".join(sorted(names)), set(names)
    if support is None:
        args = TokenStatsArgs(target=y_NK, want=want, topk=topk, ignore_index=ignore_index)
        found = TOKEN_STATS(head, args, recompute=True)
        wanted |= {"topk_values", "topk_ids"} if topk else set()
    else:
        ids = ranks.whole(check_support(support, input, names))
        if not ids.shape[-1]:
            ids = ids.new_full((*ids.shape[:-1], 1), -1)
        ids = ids.expand(*leading, -1).reshape(N, ids.shape[-1])
        sets = SupportArgs(target=y_NK, ids=ids, want=want, ignore_index=ignore_index)
        found = SUPPORT(head, sets, recompute=True)
        wanted |= set() if target is None else {"outside"}
        found["outside"] = found["outside"].sum()
    shapes = {} if target is None else {**dict.fromkeys(OF_TARGETS, target.shape), "outside": ()}
    fields: dict[str, Any] = {}
    for name in wanted & found.keys():
        fields[name] = ranks.result(found[name].view(shapes.get(name, leading + found[name].shape[1:])))
    if "topk" in names:
        fields["topk"] = TopK(fields.pop("topk_values"), fields.pop("topk_ids"))
    return TokenStats(**fields)


def _check_want(want: Iterable[str]) -> frozenset[str]:
    known = ", ".join(map(repr, WANTS))
    if isinstance(want, str | Tensor) or not isinstance(want, Iterable):
        raise ArgumentTypeError(message("want", f"a sequence of names among {known}", f"{want!r}"))
    names = frozenset(want)
    if names.isdisjoint(WANTS) or not names.issubset(TokenStats._fields):
        wrong = sorted(map(repr, names - set(WANTS)))
        raise ArgumentValueError(message("want", f"names among {known}", ", ".join(wrong) or "none"))
    return names.intersection(WANTS)
