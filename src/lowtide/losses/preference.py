"""Preference losses beside DPO's: without a reference model (SimPO, ORPO, CPO), and of single answers (KTO)."""

from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from lowtide.arguments import check_number, scalar_tensor
from lowtide.errors import ArgumentValueError, message
from lowtide.losses.checks import (
    check_bool,
    check_choice,
    check_floats,
    check_like,
    check_not_negative,
    check_place,
    check_positive,
)
from lowtide.losses.reduction import SequenceReduction, reduce_sequences

KTO_KINDS = ("kto", "apo_zero")


def simpo_loss(
    chosen_mean_logprob: Tensor,
    rejected_mean_logprob: Tensor,
    *,
    beta: float = 2.0,
    gamma: float = 1.0,
    label_smoothing: float = 0.0,
    reduction: SequenceReduction = "mean",
    num_items: float | Tensor | None = None,
) -> Tensor:
    """Return SimPO's loss: the answers' mean log-probabilities are the rewards, without a reference model.

    With m = beta (mean log p(chosen) - mean log p(rejected)) - gamma and e = ``label_smoothing``:

        -(1 - e) log sigmoid(m) - e log sigmoid(-m)

    Args:
        chosen_mean_logprob: Mean log-probability of the tokens of each preferred answer [...]:
            ``sequence_logprobs(logprob, mask, average=True)``.
        rejected_mean_logprob: That of the other answer [...].
        beta: Scale of the rewards, above 0.
        gamma: Margin by which the preferred answer's reward should exceed the other's, 0 or above. The defaults are the
            paper's for Llama-3-Base; it takes beta from 2 to 2.5 and gamma from 0.3 to 1.6.
        label_smoothing: Probability that a pair is labelled the wrong way round, from 0 to 1/2.
        reduction: ``"mean"`` over pairs, ``"sum"``, or ``"none"``: one value a pair [...].
        num_items: Number of pairs above 0, or 0-d tensor (not inspected), that replaces the mean's denominator.

    Returns:
        Tensor: Scalar, or [...] with "none"; float32, or float64 for float64.

    Raises:
        ArgumentValueError: A shape, device, number or word that does not fit; also a `ValueError`.
        ArgumentTypeError: A dtype that does not fit; also a `TypeError`.

    Source: Meng et al. 2024, "SimPO: Simple Preference Optimization with a Reference-Free Reward", arXiv 2405.14734.
    """
    chosen = check_floats("chosen_mean_logprob", chosen_mean_logprob)
    rejected = check_like("rejected_mean_logprob", rejected_mean_logprob, "chosen_mean_logprob", chosen)
    margin = check_positive("beta", beta) * (chosen - rejected) - check_not_negative("gamma", gamma)
    return reduce_sequences(_smoothed(margin, label_smoothing), reduction, num_items)


def cpo_loss(
    chosen_logprob: Tensor,
    rejected_logprob: Tensor,
    chosen_nll: Tensor | None,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    reduction: SequenceReduction = "mean",
    num_items: float | Tensor | None = None,
) -> Tensor:
    """Return CPO's loss: DPO with a uniform reference, and the preferred answer's negative log-likelihood.

    With m = beta (log p(chosen) - log p(rejected)) and e = ``label_smoothing``:

        -(1 - e) log sigmoid(m) - e log sigmoid(-m) + chosen_nll

    Args:
        chosen_logprob: Log-probability of each preferred answer [...], summed over its tokens.
        rejected_logprob: That of the other answer [...].
        chosen_nll: What is added, times its weight: one value a pair [...], such as
            ``-sequence_logprobs(logprob, mask, average=True)``, or a 0-d tensor, such as `sft_loss`'s mean over the
            tokens of all preferred answers, which counts once in a mean. None: the preference alone.
        beta: Scale of the difference, above 0.
        label_smoothing: Probability that a pair is labelled the wrong way round, from 0 to 1/2.
        reduction: ``"mean"`` over pairs, ``"sum"``, or ``"none"``: one value a pair [...].
        num_items: Number of pairs above 0, or 0-d tensor (not inspected), that replaces the mean's denominator.

    Returns:
        Tensor: Scalar, or [...] with "none"; float32, or float64 for float64.

    Raises:
        ArgumentValueError: A shape, device, number or word that does not fit; also a `ValueError`.
        ArgumentTypeError: A dtype that does not fit; also a `TypeError`.

    Source: Xu et al. 2024, "Contrastive Preference Optimization: Pushing the Boundaries of LLM Performance in Machine
    Translation", arXiv 2401.08417.
    """
    chosen = check_floats("chosen_logprob", chosen_logprob)
    rejected = check_like("rejected_logprob", rejected_logprob, "chosen_logprob", chosen)
    loss = _smoothed(check_positive("beta", beta) * (chosen - rejected), label_smoothing)
    return _with_nll(loss, chosen_nll, chosen, reduction, num_items)


def orpo_loss(
    chosen_mean_logprob: Tensor,
    rejected_mean_logprob: Tensor,
    chosen_nll: Tensor | None = None,
    *,
    beta: float = 0.1,
    reduction: SequenceReduction = "mean",
    num_items: float | Tensor | None = None,
) -> Tensor:
    """Return ORPO's loss: the preferred answer's negative log-likelihood, and the log of the odds ratio.

    With p the geometric mean of an answer's token probabilities and odds(p) = p / (1 - p):

        chosen_nll - beta log sigmoid(log odds(p_chosen) - log odds(p_rejected))

    log(1 - p) is computed as log(-expm1(log p)). Where float32 says p = 1 (log p above -1e-19), the odds are those
    of log p = -1e-19 and have no gradient.

    Args:
        chosen_mean_logprob: log p: mean log-probability of the tokens of each preferred answer [...], at most 0:
            ``sequence_logprobs(logprob, mask, average=True)``.
        rejected_mean_logprob: That of the other answer [...].
        chosen_nll: Negative log-likelihood of the preferred answer: one value a pair [...], or a 0-d tensor, such as
            `sft_loss`'s mean over all their tokens, which counts once in a mean. None: ``-chosen_mean_logprob``, as in
            the paper.
        beta: The paper's lambda, above 0.
        reduction: ``"mean"`` over pairs, ``"sum"``, or ``"none"``: one value a pair [...].
        num_items: Number of pairs above 0, or 0-d tensor (not inspected), that replaces the mean's denominator.

    Returns:
        Tensor: Scalar, or [...] with "none"; float32, or float64 for float64.

    Raises:
        ArgumentValueError: A shape, device, number or word that does not fit; also a `ValueError`.
        ArgumentTypeError: A dtype that does not fit; also a `TypeError`.

    Source: Hong et al. 2024, "ORPO: Monolithic Preference Optimization without Reference Model", arXiv 2403.07691.
    """
    chosen = check_floats("chosen_mean_logprob", chosen_mean_logprob)
    rejected = check_like("rejected_mean_logprob", rejected_mean_logprob, "chosen_mean_logprob", chosen)
    loss = -check_positive("beta", beta) * logsigmoid(_log_odds(chosen) - _log_odds(rejected))
    return _with_nll(loss, -chosen if chosen_nll is None else chosen_nll, chosen, reduction, num_items)


def kto_loss(
    logprob: Tensor,
    ref_logprob: Tensor,
    desirable: Tensor,
    kl: float | Tensor,
    *,
    kind: Literal["kto", "apo_zero"] = "kto",
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
    reduction: SequenceReduction = "mean",
    num_items: float | Tensor | None = None,
) -> Tensor:
    """Return KTO's loss of single answers, each good or bad; no pairs are needed.

    With a = ``logprob - ref_logprob`` and w the weight of the answer's side:

        "kto"        w (1 - sigmoid(beta (a - kl))) where desirable, else w (1 - sigmoid(beta (kl - a)))
        "apo_zero"   the same with kl = 0: APO-zero (arXiv 2408.06266, eq. 7) of single answers

    Args:
        logprob: Log-probability of each answer [...], summed over its tokens.
        ref_logprob: The reference model's [...], not differentiated.
        desirable: bool or integers [...], not 0 where the answer is a good one.
        kl: Number or 0-d tensor, not differentiated and not inspected: what `kto_reference` returns, averaged over
            ranks where there are several. 0 for "apo_zero", which does without.
        kind: ``"kto"`` or ``"apo_zero"``.
        beta: How hard the policy is held to the reference, above 0.
        desirable_weight: w of good answers, 0 or above. The paper keeps the ratio of both sides, number times weight,
            between 1 and 4/3 (its eq. 8).
        undesirable_weight: w of bad answers, 0 or above.
        reduction: ``"mean"`` over answers, ``"sum"``, or ``"none"``: one value an answer [...].
        num_items: Number of answers above 0, or 0-d tensor (not inspected), that replaces the mean's denominator.

    Returns:
        Tensor: Scalar, or [...] with "none"; float32, or float64 for float64.

    Raises:
        ArgumentValueError: A shape, device, number or word that does not fit; also a `ValueError`.
        ArgumentTypeError: A dtype that does not fit; also a `TypeError`.

    Source: Ethayarajh et al. 2024, "KTO: Model Alignment as Prospect Theoretic Optimization", arXiv 2402.01306.
    """
    check_choice("kind", kind, KTO_KINDS)
    logprob = check_floats("logprob", logprob)
    log_ratio = logprob - check_like("ref_logprob", ref_logprob, "logprob", logprob).detach()
    desirable = check_bool("desirable", desirable, "logprob", logprob)
    reference = scalar_tensor("kl", kl, logprob.dtype).detach().to(logprob.dtype)
    if kind == "apo_zero" and (isinstance(kl, Tensor) or kl != 0):
        raise ArgumentValueError(message("kl", "0 with kind='apo_zero'", "a tensor" if isinstance(kl, Tensor) else kl))
    gain = check_positive("beta", beta) * (log_ratio - reference)
    good = check_not_negative("desirable_weight", desirable_weight) * (-gain).sigmoid()
    bad = check_not_negative("undesirable_weight", undesirable_weight) * gain.sigmoid()
    return reduce_sequences(good.where(desirable, bad), reduction, num_items)


def kto_reference(logprob: Tensor, ref_logprob: Tensor) -> Tensor:
    """Return KTO's reference point: how far the policy is from the reference on answers that do not belong.

        kl = max(0, mean(logprob - ref_logprob))

    over answers paired with another example's prompt. With several ranks, average the mean before the maximum:
    ``kto_reference`` of all ranks' log-probabilities, gathered.

    Args:
        logprob: The policy's log-probability of each mismatched answer [...], summed over its tokens.
        ref_logprob: The reference model's [...].

    Returns:
        Tensor: 0-d, not differentiated; 0 where there are no answers.

    Raises:
        ArgumentValueError: A shape or device that does not fit; also a `ValueError`.
        ArgumentTypeError: A dtype that does not fit; also a `TypeError`.

    Source: as `kto_loss`.
    """
    logprob = check_floats("logprob", logprob).detach()
    log_ratio = logprob - check_like("ref_logprob", ref_logprob, "logprob", logprob).detach()
    return (log_ratio.sum() / max(log_ratio.numel(), 1)).clamp(min=0)


def _smoothed(margin: Tensor, label_smoothing: float) -> Tensor:
    e = check_number("label_smoothing", label_smoothing, 0, 0.5)
    return -(1 - e) * logsigmoid(margin) - e * logsigmoid(-margin)


def _log_odds(logprob: Tensor) -> Tensor:
    nearly_one = -(torch.finfo(logprob.dtype).tiny ** 0.5)  # its odds' gradient, its inverse, still is finite
    logprob = logprob.clamp(max=nearly_one)
    return logprob - (-logprob.expm1()).log()


def _with_nll(
    loss: Tensor, nll: Tensor | None, like: Tensor, reduction: SequenceReduction, num_items: float | Tensor | None
) -> Tensor:
    if nll is not None:
        nll = check_floats("chosen_nll", nll)
        if nll.dim() != 0:
            check_place("chosen_nll", nll, "the log-probabilities", like)
        loss = loss + nll
    return reduce_sequences(loss, reduction, num_items)
