"""What every loss shares: its checks, and reductions of values per token, in which every denominator has a name."""

import math
from typing import Literal, TypedDict, get_args

import torch
from torch import Tensor

from lowtide.arguments import check_name, check_number, check_tensor, positive_scalar
from lowtide.errors import ArgumentTypeError, ArgumentValueError, message
from lowtide.head.options import Reduction

LARGEST_EXPONENT = 80.0  # exp(80) = 5.5e34: finite in float32 even after a sum over a batch or a product with rewards
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


def check_floats(name: str, value: object) -> Tensor:
    """Return a floating-point tensor in float32, or in float64 if it is."""
    tensor = check_tensor(name, value)
    if not tensor.is_floating_point():
        raise ArgumentTypeError(message(name, "a floating-point tensor", str(tensor.dtype)))
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def check_alike(**values: object) -> list[Tensor]:
    """Return tensors, given by name, in float32 or float64, all of the first one's shape and on its device."""
    (like_name, like), *others = values.items()
    like = check_floats(like_name, like)
    return [like, *(check_like(name, value, like_name, like) for name, value in others)]


def check_tokens(**values: object) -> list[Tensor]:
    """Return values of tokens [..., T], given by name, as `check_alike` does."""
    first, *others = check_alike(**values)
    if first.dim() == 0:
        expected = "shape [..., T], the last axis being a sequence's tokens"
        raise ArgumentValueError(message(next(iter(values)), expected, "no axes"))
    return [first, *others]


def check_like(name: str, value: object, like_name: str, like: Tensor) -> Tensor:
    """Return ``value`` in float32 or float64, of the shape and on the device of ``like``; no broadcasting."""
    return check_place(name, check_floats(name, value), like_name, like)


def check_place(name: str, value: Tensor, like_name: str, like: Tensor) -> Tensor:
    """Return ``value`` if it has the shape and the device of ``like``."""
    if value.shape != like.shape:
        expected = f"shape {list(like.shape)}, as {like_name} has"
        raise ArgumentValueError(message(name, expected, f"shape {list(value.shape)}"))
    if value.device != like.device:
        raise ArgumentValueError(message(name, f"a tensor on {like.device}, as {like_name} is", f"{value.device}"))
    return value


def check_mask(mask: object, like_name: str, like: Tensor) -> Tensor:
    """Return ``mask`` as bool, True where a token counts; all of them where it is None."""
    return torch.ones_like(like, dtype=torch.bool) if mask is None else check_bool("mask", mask, like_name, like)


def check_bool(name: str, value: object, like_name: str, like: Tensor) -> Tensor:
    """Return a bool tensor of the shape and on the device of ``like``; integers are True where they are not 0."""
    tensor = check_tensor(name, value)
    if tensor.is_floating_point() or tensor.is_complex():
        hint = f"Write {name} != 0; to weigh tokens, multiply the values."
        raise ArgumentTypeError(message(name, "a bool or integer tensor", str(tensor.dtype), hint))
    check_place(name, tensor, like_name, like)
    return tensor if tensor.dtype == torch.bool else tensor != 0


def check_valid(mask: object, **values: object) -> list[Tensor]:
    """Return the mask as bool, and values of tokens [..., T] as `check_tokens` does, 0 where masked."""
    tensors = check_tokens(**values)
    keep = check_mask(mask, next(iter(values)), tensors[0])
    return [keep, *(tensor.where(keep, 0) for tensor in tensors)]


def check_positive(name: str, value: object) -> float:
    """Return a finite number above 0."""
    return check_number(name, value, 0, math.inf, above=True)


def check_not_negative(name: str, value: object) -> float:
    """Return a finite number, 0 or above."""
    if (number := check_number(name, value, 0, math.inf)) == math.inf:
        raise ArgumentValueError(message(name, "a finite number, 0 or above", f"{value!r}"))
    return number


def bounded_exp(x: Tensor) -> Tensor:
    """Return exp(x), held at exp(80) above x = 80, where the gradient is 0.

    exp overflows float32 at 88.7, and the gradient of what min and clamp then leave out would be 0 * inf = NaN.
    """
    return x.clamp(max=LARGEST_EXPONENT).exp()


def bounded_expm1(x: Tensor) -> Tensor:
    """Return exp(x) - 1, exact for small x, held as `bounded_exp` holds it."""
    return x.clamp(max=LARGEST_EXPONENT).expm1()
