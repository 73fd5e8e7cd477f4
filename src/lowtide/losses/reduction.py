"""Reductions of values per token to values per sequence and per batch: every denominator has a name."""

from typing import Literal, TypedDict, get_args

from torch import Tensor

from lowtide.arguments import check_name, positive_scalar
from lowtide.errors import ArgumentValueError, message
from lowtide.head.options import Reduction
from lowtide.losses.checks import check_tokens, check_valid

TokenReduction = Literal["token", "sequence", "sequence_sum", "sum", "none"]
NumItems = float | Tensor | None


class TokenReductionOptions(TypedDict, total=False):
    """The keyword arguments of `reduce_tokens`, which every loss per token takes too."""

    reduction: TokenReduction
    num_items: NumItems


class SequenceReductionOptions(TypedDict, total=False):
    """The keyword arguments of `reduce_sequences`, which every loss per sequence takes too."""

    reduction: Reduction
    num_items: NumItems


def reduce_tokens(
    values: Tensor, mask: Tensor | None = None, *, reduction: TokenReduction = "token", num_items: NumItems = None
) -> Tensor:
    """Reduce one value per token to a loss, with an explicit denominator.

    With valid tokens t of sequences i, n_i valid tokens in sequence i and B sequences:

        "token"          sum_it v_it / sum_i n_i            every token weighs the same
        "sequence"       sum_i (sum_t v_it / n_i) / B       every sequence weighs the same
        "sequence_sum"   sum_i sum_t v_it / B               a sequence weighs by its length
        "sum"            sum_it v_it
        "none"           v_it, exactly 0 where masked

    Gradient accumulation and data parallelism need ``num_items``; a mean of means is not the mean.

    Args:
        values: Values of tokens [..., T]; the last axis is a sequence's tokens, each leading index a sequence.
        mask: bool or integers [..., T], not 0 where a token counts, or None for all. Nothing leaves a masked position,
            not even a NaN, in value or gradient.
        reduction: One of the five above.
        num_items: Number above 0, or 0-d tensor (not inspected), that replaces the last denominator: the tokens of the
            whole step for "token", its sequences for "sequence" and "sequence_sum". None: counted in this batch.

    Returns:
        Tensor: Scalar, or [..., T] with "none"; float32, or float64 if ``values`` is. A sequence without valid tokens
        is 0 and still one of the B; where nothing is kept, the result is 0 and connected to ``values``.

    Raises:
        ArgumentValueError: A shape, device, number or word that does not fit; also a `ValueError`.
        ArgumentTypeError: A dtype that does not fit; also a `TypeError`.
    """
    check_name("reduction", reduction, get_args(TokenReduction))
    keep, values = check_valid(mask, values=values)
    if reduction in ("sequence", "sequence_sum"):
        values = per_sequence(values, keep, average=reduction == "sequence")
        return _reduced(values, reduction, max(values.numel(), 1), num_items)
    return _reduced(values, reduction, keep.sum().clamp(min=1) if reduction == "token" else None, num_items)


def reduce_sequences(values: Tensor, *, reduction: Reduction = "mean", num_items: NumItems = None) -> Tensor:
    """Reduce one value per sequence [...]: "mean" over them (over ``num_items``, where given), "sum" or "none"."""
    check_name("reduction", reduction, get_args(Reduction))
    return _reduced(values, reduction, max(values.numel(), 1) if reduction == "mean" else None, num_items)


def per_sequence(values: Tensor, keep: Tensor, *, average: bool) -> Tensor:
    """Return the sum, or the mean over valid tokens, of each sequence's values, which are 0 where masked."""
    total = values.sum(-1)
    return total / keep.sum(-1).clamp(min=1) if average else total


def sequence_logprobs(logprob: Tensor, mask: Tensor | None = None, *, average: bool = False) -> Tensor:
    """Return the log-probability of each sequence: the sum, or the mean, over its valid tokens.

        sum_t logprob_t          with ``average``: sum_t logprob_t / n

    The preference losses take these: sums for `dpo_loss`, `cpo_loss` and `kto_loss`, means for `simpo_loss` and
    `orpo_loss`.

    Args:
        logprob: Log-probabilities of tokens [..., T], as `lowtide.linear_logprobs` returns them.
        mask: As in `reduce_tokens`.
        average: Whether to divide by the number n of valid tokens.

    Returns:
        Tensor: [...], float32 or float64; 0 for a sequence without valid tokens.

    Raises:
        ArgumentValueError, ArgumentTypeError: As in `reduce_tokens`.
    """
    keep, logprob = check_valid(mask, logprob=logprob)
    return per_sequence(logprob, keep, average=average)


def wpo_weights(logprob: Tensor, sum_sq_prob: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return WPO's weight of each sequence: how likely it is under the policy, 1 for a uniform guess or a sure one.

        w = exp(mean_t (log p_t - log sum_v p_tv^2))

    over valid tokens. A pair's loss is multiplied with the weights of both its answers:
    ``(dpo_loss(..., reduction="none") * w_chosen * w_rejected).mean()``.

    Args:
        logprob: Log-probabilities of tokens [..., T].
        sum_sq_prob: Sum of the squared probabilities of the vocabulary at each token [..., T], a field of what
            `lowtide.linear_token_stats` returns.
        mask: As in `reduce_tokens`.

    Returns:
        Tensor: [...], float32 or float64, not differentiated; 1 for a sequence without valid tokens.

    Raises:
        ArgumentValueError, ArgumentTypeError: As in `reduce_tokens`.

    Source: Zhou et al. 2024, "WPO: Enhancing RLHF with Weighted Preference Optimization", arXiv 2406.11827, eq. 2.
    """
    logprob, sum_sq_prob = check_tokens(logprob=logprob, sum_sq_prob=sum_sq_prob)
    return sequence_logprobs((logprob - sum_sq_prob.log()).detach(), mask, average=True).exp()


def _reduced(values: Tensor, reduction: str, count: NumItems, num_items: NumItems) -> Tensor:
    """Return the sum over ``num_items``, or over ``count`` without it; where that is None, nothing is divided."""
    if count is None:
        if num_items is not None:
            got = "a tensor" if isinstance(num_items, Tensor) else f"{num_items!r}"
            hint = "Only a mean is divided."
            raise ArgumentValueError(message("num_items", f"None with reduction={reduction!r}", got, hint))
        return values if reduction == "none" else values.sum()
    if num_items is not None:
        count = positive_scalar("num_items", num_items, values.dtype).detach().to(values.dtype)
    return values.sum() / count
