"""Distillation: from divergences of whole distributions, or from both models' log-probabilities of sampled tokens."""

from typing import Literal

from torch import Tensor

from lowtide.losses.checks import check_choice, check_like, check_positive, check_tokens
from lowtide.losses.ratios import kl_estimate
from lowtide.losses.reduction import TokenReduction, reduce_tokens


def gkd_loss(
    divergence: Tensor,
    mask: Tensor | None = None,
    *,
    temperature: float = 1.0,
    reduction: TokenReduction = "token",
    num_items: float | Tensor | None = None,
) -> Tensor:
    """Return generalised knowledge distillation's loss from one divergence a token.

        temperature^2 D_t(teacher, student)

    D is any divergence of the two distributions: the forward or reverse KL or GKD's generalised Jensen-Shannon
    divergence, as `lowtide.linear_divergence` returns them without the logits of either model. GKD takes it on answers
    of the student in a share lambda of the batches and on the data's in the others: which answers these are is the
    caller's.

    Args:
        divergence: One a token [..., T].
        mask: bool or integers [..., T], not 0 where a token counts, or None for all.
        temperature: The temperature of both distributions, above 0. Gradients shrink with its square, which the factor
            makes good (Hinton et al. 2015, arXiv 1503.02531); `lowtide.linear_divergence` has no such factor.
        reduction: ``"token"``, ``"sequence"``, ``"sequence_sum"``, ``"sum"`` or ``"none"``: see `reduce_tokens`.
        num_items: Number above 0, or 0-d tensor (not inspected), that replaces the last denominator: tokens with
            "token", sequences with "sequence" and "sequence_sum".

    Returns:
        Tensor: Scalar, or [..., T] with "none"; float32, or float64 for float64.

    Raises:
        ArgumentValueError: A shape, device, number or word that does not fit; also a `ValueError`.
        ArgumentTypeError: A dtype that does not fit; also a `TypeError`.

    Source: Agarwal et al. 2023, "On-Policy Distillation of Language Models: Learning from Self-Generated Mistakes",
    arXiv 2306.13649.
    """
    scale = check_positive("temperature", temperature) ** 2
    values = scale * check_tokens("divergence", divergence)
    return reduce_tokens(values, mask, reduction=reduction, num_items=num_items)


def sampled_distillation_loss(
    logprob: Tensor,
    teacher_logprob: Tensor,
    mask: Tensor | None = None,
    *,
    kind: Literal["k2", "k3"] = "k2",
    reduction: TokenReduction = "token",
    num_items: float | Tensor | None = None,
) -> Tensor:
    """Return an on-policy distillation loss from both models' log-probabilities of tokens that the student sampled.

        "k2"   (log p_t - log q_t)^2 / 2      gradient (log p_t - log q_t) grad log p_t: that of KL(student || teacher)
        "k3"   q_t/p_t - 1 - log(q_t/p_t)     gradient (1 - q_t/p_t) grad log p_t: that of KL(teacher || student)

    with p the student's and q the teacher's probability; the gradients are those of the KL at each token in expectation
    over the student's samples. No distribution of the teacher is needed, only one number a token; `gkd_loss` of a
    divergence has less variance.

    Args:
        logprob: The student's log-probabilities of the tokens that it sampled [..., T].
        teacher_logprob: The teacher's of the same tokens [..., T], not differentiated.
        mask: bool or integers [..., T], not 0 where a token counts, or None for all.
        kind: ``"k2"`` or ``"k3"``: see `kl_estimate`.
        reduction: As in `gkd_loss`.
        num_items: As in `gkd_loss`.

    Returns:
        Tensor: Scalar, or [..., T] with "none"; float32, or float64 for float64.

    Raises:
        ArgumentValueError: A shape, device, number or word that does not fit; also a `ValueError`.
        ArgumentTypeError: A dtype that does not fit; also a `TypeError`.

    Source: Gu et al. 2023, "MiniLLM: Knowledge Distillation of Large Language Models", arXiv 2306.08543; Schulman 2020,
    for the estimates.
    """
    check_choice("kind", kind, ("k2", "k3"))
    teacher = check_like("teacher_logprob", teacher_logprob, "logprob", check_tokens("logprob", logprob))
    values = kl_estimate(logprob, teacher, mask, kind=kind)
    return reduce_tokens(values, mask, reduction=reduction, num_items=num_items)
