"""Supervised fine-tuning: negative log-likelihood and its variants."""

import torch
from torch import Tensor

from lowtide.arguments import check_number
from lowtide.losses.checks import check_like, check_mask, check_not_negative, check_tokens
from lowtide.losses.reduction import TokenReduction, reduce_tokens


def sft_loss(
    logprob: Tensor,
    mask: Tensor | None = None,
    *,
    reduction: TokenReduction = "token",
    num_items: float | Tensor | None = None,
) -> Tensor:
    """Return the negative log-likelihood.

        -logprob_t

    Where the log-probabilities serve nothing else, `lowtide.linear_cross_entropy` computes the same in one call.

    Args:
        logprob: Log-probabilities of the targets [..., T].
        mask: bool or integers [..., T], not 0 where a token counts, or None for all.
        reduction: ``"token"``, ``"sequence"``, ``"sequence_sum"``, ``"sum"`` or ``"none"``: see `reduce_tokens`.
        num_items: Number above 0, or 0-d tensor (not inspected), that replaces the last denominator: tokens with
            "token", sequences with "sequence" and "sequence_sum".

    Returns:
        Tensor: Scalar, or [..., T] with "none"; float32, or float64 for float64.

    Raises:
        ArgumentValueError: A shape, device, word or count that does not fit; also a `ValueError`.
        ArgumentTypeError: A dtype that does not fit; also a `TypeError`.
    """
    return reduce_tokens(-check_tokens("logprob", logprob), mask, reduction=reduction, num_items=num_items)


def dft_loss(
    logprob: Tensor,
    mask: Tensor | None = None,
    *,
    reduction: TokenReduction = "token",
    num_items: float | Tensor | None = None,
) -> Tensor:
    """Return dynamic fine-tuning's loss: each token weighed by its own probability, which is not differentiated.

        -sg(p_t) log p_t          p_t = exp(logprob_t)

    Args:
        logprob: Log-probabilities of the targets [..., T].
        mask: As in `sft_loss`.
        reduction: As in `sft_loss`.
        num_items: As in `sft_loss`.

    Returns:
        Tensor: Scalar, or [..., T] with "none"; float32, or float64 for float64.

    Raises:
        ArgumentValueError: A shape, device, number or word that does not fit; also a `ValueError`.
        ArgumentTypeError: A dtype that does not fit; also a `TypeError`.

    Source: Wu et al. 2025, "On the Generalization of SFT: A Reinforcement Learning Perspective with Reward
    Rectification", arXiv 2508.05629.
    """
    logprob = _kept(logprob, mask)
    return reduce_tokens(-logprob.exp().detach() * logprob, mask, reduction=reduction, num_items=num_items)


def focal_loss(
    logprob: Tensor,
    mask: Tensor | None = None,
    *,
    gamma: float = 2.0,
    reduction: TokenReduction = "token",
    num_items: float | Tensor | None = None,
) -> Tensor:
    """Return the focal loss: tokens that the model is sure of count for less.

        -(1 - p_t)^gamma log p_t          p_t = exp(logprob_t)

    1 - p is computed as -expm1(log p), and held at float's smallest normal number from below, which keeps the gradient
    finite where p is 1 and gamma below 1.

    Args:
        logprob: Log-probabilities of the targets [..., T].
        mask: As in `sft_loss`.
        gamma: 0 or above; 0 is the negative log-likelihood, 2 the paper's.
        reduction: As in `sft_loss`.
        num_items: As in `sft_loss`.

    Returns:
        Tensor: Scalar, or [..., T] with "none"; float32, or float64 for float64.

    Raises:
        ArgumentValueError: A shape, device, number or word that does not fit; also a `ValueError`.
        ArgumentTypeError: A dtype that does not fit; also a `TypeError`.

    Source: Lin et al. 2017, "Focal Loss for Dense Object Detection", arXiv 1708.02002, eq. 4.
    """
    gamma = check_not_negative("gamma", gamma)
    logprob = _kept(logprob, mask)
    unsure = (-logprob.expm1()).clamp(min=torch.finfo(logprob.dtype).tiny)
    return reduce_tokens(-(unsure**gamma) * logprob, mask, reduction=reduction, num_items=num_items)


def label_smoothed_loss(
    logprob: Tensor,
    mean_logit: Tensor,
    lse: Tensor,
    mask: Tensor | None = None,
    *,
    label_smoothing: float = 0.1,
    reduction: TokenReduction = "token",
    num_items: float | Tensor | None = None,
) -> Tensor:
    """Return the cross entropy against targets mixed with the uniform distribution.

        -(1 - a) logprob_t + a (lse_t - mean_logit_t)          a = ``label_smoothing``

    which is `torch.nn.functional.cross_entropy`'s: lse - mean_logit is -1/V times the sum of all log-probabilities.

    Args:
        logprob: Log-probabilities of the targets [..., T].
        mean_logit: Mean of each token's logits over the vocabulary [..., T].
        lse: logsumexp of each token's logits [..., T]. All three are fields of what `lowtide.linear_token_stats`
            returns.
        mask: As in `sft_loss`.
        label_smoothing: a, from 0 to 1.
        reduction: As in `sft_loss`.
        num_items: As in `sft_loss`.

    Returns:
        Tensor: Scalar, or [..., T] with "none"; float32, or float64 for float64.

    Raises:
        ArgumentValueError: A shape, device, number or word that does not fit; also a `ValueError`.
        ArgumentTypeError: A dtype that does not fit; also a `TypeError`.

    Source: Szegedy et al. 2015, "Rethinking the Inception Architecture for Computer Vision", arXiv 1512.00567.
    """
    a = check_number("label_smoothing", label_smoothing, 0, 1)
    logprob = check_tokens("logprob", logprob)
    mean_logit = check_like("mean_logit", mean_logit, "logprob", logprob)
    lse = check_like("lse", lse, "logprob", logprob)
    loss = -(1 - a) * logprob + a * (lse - mean_logit)
    return reduce_tokens(loss, mask, reduction=reduction, num_items=num_items)


def z_loss(
    lse: Tensor,
    mask: Tensor | None = None,
    *,
    coef: float = 1e-4,
    reduction: TokenReduction = "token",
    num_items: float | Tensor | None = None,
) -> Tensor:
    """Return the z-loss, to be added to another: it keeps the softmax's normaliser near 1.

        coef lse_t^2

    Args:
        lse: logsumexp of each token's logits [..., T], a field of what `lowtide.linear_token_stats` returns.
        mask: As in `sft_loss`.
        coef: Factor, 0 or above; the paper's is 1e-4.
        reduction: As in `sft_loss`.
        num_items: As in `sft_loss`.

    Returns:
        Tensor: Scalar, or [..., T] with "none"; float32, or float64 for float64.

    Raises:
        ArgumentValueError: A shape, device, number or word that does not fit; also a `ValueError`.
        ArgumentTypeError: A dtype that does not fit; also a `TypeError`.

    Source: Chowdhery et al. 2022, "PaLM: Scaling Language Modeling with Pathways", arXiv 2204.02311, section 5.
    """
    coef = check_not_negative("coef", coef)
    lse = check_tokens("lse", lse)
    lse = lse.where(check_mask(mask, "lse", lse), 0)
    return reduce_tokens(coef * lse * lse, mask, reduction=reduction, num_items=num_items)


def _kept(logprob: Tensor, mask: Tensor | None) -> Tensor:
    logprob = check_tokens("logprob", logprob)
    return logprob.where(check_mask(mask, "logprob", logprob), 0)
