"""Losses of one value per token: supervised fine-tuning and its variants, and distillation from a teacher.

Distillation takes divergences of whole distributions, or both models' log-probabilities of sampled tokens.
"""

from typing import Literal, Unpack

import torch
from torch import Tensor

from lowtide.arguments import check_name, check_number
from lowtide.errors import ArgumentValueError, message
from lowtide.losses.policy_terms import kl_estimate
from lowtide.losses.reduction import (
    TokenReductionOptions,
    check_mask,
    check_not_negative,
    check_positive,
    check_tokens,
    check_valid,
    reduce_tokens,
)


def sft_loss(logprob: Tensor, mask: Tensor | None = None, **reduce: Unpack[TokenReductionOptions]) -> Tensor:
    """Return the negative log-likelihood.

        -logprob_t

    Where the log-probabilities serve nothing else, `lowtide.linear_cross_entropy` computes the same in one call.

    Args:
        logprob: Log-probabilities of the targets [..., T].
        mask: As in `reduce_tokens`.
        reduce: ``reduction`` and ``num_items`` of `reduce_tokens`, which also describes the result.

    Raises:
        ArgumentValueError, ArgumentTypeError: As in `reduce_tokens`.
    """
    (logprob,) = check_tokens(logprob=logprob)
    return reduce_tokens(-logprob, mask, **reduce)


def dft_loss(logprob: Tensor, mask: Tensor | None = None, **reduce: Unpack[TokenReductionOptions]) -> Tensor:
    """Return dynamic fine-tuning's loss: each token weighed by its own probability, which is not differentiated.

        -sg(p_t) log p_t          p_t = exp(logprob_t)

    Args:
        logprob: Log-probabilities of the targets [..., T].
        mask: As in `reduce_tokens`.
        reduce: ``reduction`` and ``num_items`` of `reduce_tokens`, which also describes the result.

    Raises:
        ArgumentValueError, ArgumentTypeError: As in `reduce_tokens`.

    Source: Wu et al. 2025, "On the Generalization of SFT", arXiv 2508.05629.
    """
    _, logprob = check_valid(mask, logprob=logprob)
    return reduce_tokens(-logprob.exp().detach() * logprob, mask, **reduce)


def focal_loss(
    logprob: Tensor, mask: Tensor | None = None, *, gamma: float = 2.0, **reduce: Unpack[TokenReductionOptions]
) -> Tensor:
    """Return the focal loss: tokens that the model is sure of count for less.

        -(1 - p_t)^gamma log p_t          p_t = exp(logprob_t)

    1 - p is computed as -expm1(log p), and held at float's smallest normal number from below, which keeps the gradient
    finite where p is 1 and gamma below 1.

    Args:
        logprob: Log-probabilities of the targets [..., T].
        mask: As in `reduce_tokens`.
        gamma: 0 or above; 0 is the negative log-likelihood, 2 the paper's.
        reduce: ``reduction`` and ``num_items`` of `reduce_tokens`, which also describes the result.

    Raises:
        ArgumentValueError, ArgumentTypeError: As in `reduce_tokens`.

    Source: Lin et al. 2017, "Focal Loss for Dense Object Detection", arXiv 1708.02002, eq. 4.
    """
    gamma = check_not_negative("gamma", gamma)
    _, logprob = check_valid(mask, logprob=logprob)
    unsure = (-logprob.expm1()).clamp(min=torch.finfo(logprob.dtype).tiny)
    return reduce_tokens(-(unsure**gamma) * logprob, mask, **reduce)


def label_smoothed_loss(
    logprob: Tensor,
    mean_logit: Tensor,
    lse: Tensor,
    mask: Tensor | None = None,
    *,
    label_smoothing: float = 0.1,
    **reduce: Unpack[TokenReductionOptions],
) -> Tensor:
    """Return the cross entropy against targets mixed with the uniform distribution.

        -(1 - a) logprob_t + a (lse_t - mean_logit_t)          a = ``label_smoothing``

    which is `torch.nn.functional.cross_entropy`'s: lse - mean_logit is -1/V times the sum of all log-probabilities.
    The three tensors are fields of what `lowtide.linear_token_stats` returns.

    Args:
        logprob: Log-probabilities of the targets [..., T].
        mean_logit: Mean of each token's logits over the vocabulary [..., T].
        lse: logsumexp of each token's logits [..., T].
        mask: As in `reduce_tokens`.
        label_smoothing: a, from 0 to 1.
        reduce: ``reduction`` and ``num_items`` of `reduce_tokens`, which also describes the result.

    Raises:
        ArgumentValueError, ArgumentTypeError: As in `reduce_tokens`.

    Source: Szegedy et al. 2015, "Rethinking the Inception Architecture for Computer Vision", arXiv 1512.00567.
    """
    a = check_number("label_smoothing", label_smoothing, 0, 1)
    logprob, mean_logit, lse = check_tokens(logprob=logprob, mean_logit=mean_logit, lse=lse)
    return reduce_tokens(-(1 - a) * logprob + a * (lse - mean_logit), mask, **reduce)


def soft_target_loss(
    logprob: Tensor, target_prob: Tensor, mask: Tensor | None = None, **reduce: Unpack[TokenReductionOptions]
) -> Tensor:
    """Return the cross entropy against soft targets: K classes of each token and their probabilities.

        -sum_k p_tk logprob_tk          p = ``target_prob``

    as of a teacher's top k that were stored, which need not sum to 1: classes that are not listed add nothing. Divide
    by their sum to renormalise them. `lowtide.linear_logprobs` with targets [..., T, K] computes the log-probabilities.
    `lowtide.linear_divergence` with ``teacher_topk=(ids, target_prob.log(), "drop")`` has the same gradient for fewer
    GEMMs, and ways to compare the other classes' mass too.

    Args:
        logprob: Log-probabilities of the listed classes [..., T, K].
        target_prob: Probabilities of the same classes [..., T, K], not differentiated; 0 for entries that are not used,
            whatever their log-probability.
        mask: As in `reduce_tokens`, [..., T].
        reduce: ``reduction`` and ``num_items`` of `reduce_tokens`, which also describes the result.

    Raises:
        ArgumentValueError, ArgumentTypeError: As in `reduce_tokens`.

    Source: Hinton et al. 2015, "Distilling the Knowledge in a Neural Network", arXiv 1503.02531.
    """
    logprob, target_prob = check_tokens(logprob=logprob, target_prob=target_prob)
    if logprob.dim() < 2:
        raise ArgumentValueError(message("logprob", "shape [..., T, K]", f"shape {list(logprob.shape)}"))
    target_prob = target_prob.detach()
    keep = check_mask(mask, "logprob without its last axis", logprob.new_empty(logprob.shape[:-1]))
    used = keep[..., None] & (target_prob != 0)
    return reduce_tokens(-(target_prob.where(used, 0) * logprob.where(used, 0)).sum(-1), mask, **reduce)


def z_loss(
    lse: Tensor, mask: Tensor | None = None, *, coef: float = 1e-4, **reduce: Unpack[TokenReductionOptions]
) -> Tensor:
    """Return the z-loss, to be added to another: it keeps the softmax's normaliser near 1.

        coef lse_t^2

    Args:
        lse: logsumexp of each token's logits [..., T], a field of what `lowtide.linear_token_stats` returns.
        mask: As in `reduce_tokens`.
        coef: Factor, 0 or above; the paper's is 1e-4.
        reduce: ``reduction`` and ``num_items`` of `reduce_tokens`, which also describes the result.

    Raises:
        ArgumentValueError, ArgumentTypeError: As in `reduce_tokens`.

    Source: Chowdhery et al. 2022, "PaLM: Scaling Language Modeling with Pathways", arXiv 2204.02311, section 5.
    """
    coef = check_not_negative("coef", coef)
    _, lse = check_valid(mask, lse=lse)
    return reduce_tokens(coef * lse * lse, mask, **reduce)


def gkd_loss(
    divergence: Tensor, mask: Tensor | None = None, *, temperature: float = 1.0, **reduce: Unpack[TokenReductionOptions]
) -> Tensor:
    """Return generalised knowledge distillation's loss from one divergence per token.

        temperature^2 D_t(teacher, student)

    D is any divergence of the two distributions: the forward or reverse KL or GKD's generalised Jensen-Shannon
    divergence, as `lowtide.linear_divergence` returns them without the logits of either model. GKD takes it on answers
    of the student in a share lambda of the batches and on the data's in the others: which answers these are is the
    caller's.

    Args:
        divergence: One per token [..., T].
        mask: As in `reduce_tokens`.
        temperature: The temperature of both distributions, above 0. Gradients shrink with its square, which the factor
            makes good (Hinton et al. 2015, arXiv 1503.02531); `lowtide.linear_divergence` has no such factor.
        reduce: ``reduction`` and ``num_items`` of `reduce_tokens`, which also describes the result.

    Raises:
        ArgumentValueError, ArgumentTypeError: As in `reduce_tokens`.

    Source: Agarwal et al. 2023, "On-Policy Distillation of Language Models", arXiv 2306.13649.
    """
    scale = check_positive("temperature", temperature) ** 2
    (divergence,) = check_tokens(divergence=divergence)
    return reduce_tokens(scale * divergence, mask, **reduce)


def sampled_distillation_loss(
    logprob: Tensor,
    teacher_logprob: Tensor,
    mask: Tensor | None = None,
    *,
    kind: Literal["k2", "k3"] = "k2",
    **reduce: Unpack[TokenReductionOptions],
) -> Tensor:
    """Return an on-policy distillation loss from both models' log-probabilities of tokens that the student sampled.

        "k2"   (log p_t - log q_t)^2 / 2      gradient (log p_t - log q_t) grad log p_t: that of KL(student || teacher)
        "k3"   q_t/p_t - 1 - log(q_t/p_t)     gradient (1 - q_t/p_t) grad log p_t: that of KL(teacher || student)

    with p the student's and q the teacher's probability; the gradients are those of the KL at each token in expectation
    over the student's samples. No distribution of the teacher is needed, only one number per token; `gkd_loss` of a
    divergence has less variance.

    Args:
        logprob: The student's log-probabilities of the tokens that it sampled [..., T].
        teacher_logprob: The teacher's of the same tokens [..., T], not differentiated.
        mask: As in `reduce_tokens`.
        kind: ``"k2"`` or ``"k3"``: see `kl_estimate`.
        reduce: ``reduction`` and ``num_items`` of `reduce_tokens`, which also describes the result.

    Raises:
        ArgumentValueError, ArgumentTypeError: As in `reduce_tokens`.

    Source: Gu et al. 2023, "MiniLLM", arXiv 2306.08543; Schulman 2020 as in `kl_estimate`, for the estimates.
    """
    check_name("kind", kind, ("k2", "k3"))
    logprob, teacher = check_tokens(logprob=logprob, teacher_logprob=teacher_logprob)
    return reduce_tokens(kl_estimate(logprob, teacher, mask, kind=kind), mask, **reduce)
