"""KTO: a preference loss of single answers, good or bad, without pairs."""

from typing import Literal, Unpack, get_args

from torch import Tensor

from lowtide.arguments import check_name, scalar_tensor
from lowtide.errors import ArgumentValueError, message
from lowtide.losses.checks import check_alike, check_bool, check_not_negative, check_positive
from lowtide.losses.reduction import SequenceReductionOptions, reduce_sequences

KTOKind = Literal["kto", "apo_zero"]
KTO_KINDS = get_args(KTOKind)


def kto_loss(
    logprob: Tensor,
    ref_logprob: Tensor,
    desirable: Tensor,
    kl: float | Tensor,
    *,
    kind: KTOKind = "kto",
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
    **reduce: Unpack[SequenceReductionOptions],
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
        reduce: ``reduction`` and ``num_items`` of `dpo_loss`, here of answers, not pairs; it also describes the result.

    Raises:
        ArgumentValueError, ArgumentTypeError: As in `reduce_tokens`.

    Source: Ethayarajh et al. 2024, "KTO: Model Alignment as Prospect Theoretic Optimization", arXiv 2402.01306.
    """
    check_name("kind", kind, KTO_KINDS)
    logprob, ref = check_alike(logprob=logprob, ref_logprob=ref_logprob)
    log_ratio = logprob - ref.detach()
    desirable = check_bool("desirable", desirable, "logprob", logprob)
    reference = scalar_tensor("kl", kl, logprob.dtype).detach().to(logprob.dtype)
    if kind == "apo_zero" and (isinstance(kl, Tensor) or kl != 0):
        raise ArgumentValueError(message("kl", "0 with kind='apo_zero'", "a tensor" if isinstance(kl, Tensor) else kl))
    gain = check_positive("beta", beta) * (log_ratio - reference)
    good = check_not_negative("desirable_weight", desirable_weight) * (-gain).sigmoid()
    bad = check_not_negative("undesirable_weight", undesirable_weight) * gain.sigmoid()
    return reduce_sequences(good.where(desirable, bad), **reduce)


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
        ArgumentValueError, ArgumentTypeError: As in `reduce_tokens`.

    Source: as `kto_loss`.
    """
    logprob, ref = check_alike(logprob=logprob, ref_logprob=ref_logprob)
    log_ratio = (logprob - ref).detach()
    return (log_ratio.sum() / max(log_ratio.numel(), 1)).clamp(min=0)
