"""The frame of every policy-gradient loss: a surrogate a token, corrected, with a KL term and an entropy bonus."""

from typing import TypedDict

from torch import Tensor

from lowtide.errors import ArgumentValueError, message
from lowtide.losses.checks import check_choice, check_like, check_mask, check_not_negative, check_tokens
from lowtide.losses.ratios import KL_KINDS, KLKind, kl_estimate
from lowtide.losses.reduction import TokenReduction, reduce_tokens


class PolicyTerms(TypedDict, total=False):
    """The keyword arguments of `policy_loss`, which every objective takes too."""

    correction: Tensor | None
    ref_logprob: Tensor | None
    beta: float | None
    kl: KLKind
    entropy: Tensor | None
    entropy_coef: float | None
    reduction: TokenReduction
    num_items: float | Tensor | None


def policy_loss(
    surrogate: Tensor,
    logprob: Tensor,
    mask: Tensor | None = None,
    *,
    correction: Tensor | None = None,
    ref_logprob: Tensor | None = None,
    beta: float | None = None,
    kl: KLKind = "k3",
    entropy: Tensor | None = None,
    entropy_coef: float | None = None,
    reduction: TokenReduction = "token",
    num_items: float | Tensor | None = None,
) -> Tensor:
    """Return a policy-gradient loss from one surrogate a token: corrected, with a KL term and an entropy bonus.

        reduce_t(correction_t surrogate_t + beta KL_t - entropy_coef H_t)

    The published objectives are this with their surrogate and their defaults, and take the same keyword arguments.

    Args:
        surrogate: One value a token [..., T], lower is better, such as `clipped_surrogate`'s.
        logprob: The policy's log-probabilities of tokens [..., T], for the KL term.
        mask: bool or integers [..., T], not 0 where a token counts, or None for all.
        correction: Factor of each token's surrogate [..., T], not differentiated, such as `sampler_correction`'s.
        ref_logprob: The reference model's log-probabilities [..., T], or None: no KL term.
        beta: Factor of the KL term, 0 or above; said where ``ref_logprob`` is given.
        kl: ``"k1"``, ``"k2"`` or ``"k3"``: see `kl_estimate`.
        entropy: Entropy of the policy at each token [..., T], differentiable, as `lowtide.linear_token_stats` returns
            it, or None: no bonus.
        entropy_coef: Factor of the entropy bonus, 0 or above; said where ``entropy`` is given.
        reduction: ``"token"``, ``"sequence"``, ``"sequence_sum"``, ``"sum"`` or ``"none"``: see `reduce_tokens`.
        num_items: Number above 0, or 0-d tensor (not inspected), that replaces the last denominator: tokens with
            "token", sequences with "sequence" and "sequence_sum".

    Returns:
        Tensor: Scalar, or [..., T] with "none"; float32, or float64 for float64. A sequence without kept tokens is 0
        and still counted; where nothing is kept, the loss is 0.

    Raises:
        ArgumentValueError: A shape, device, number or word that does not fit; also a `ValueError`.
        ArgumentTypeError: A dtype that does not fit; also a `TypeError`.
    """
    check_choice("kl", kl, KL_KINDS)
    logprob = check_tokens("logprob", logprob)
    keep = check_mask(mask, "logprob", logprob)
    loss = check_like("surrogate", surrogate, "logprob", logprob)
    if correction is not None:
        loss = loss * check_like("correction", correction, "logprob", logprob).detach().where(keep, 0)
    factor = _factor("beta", beta, "ref_logprob", ref_logprob)
    if factor and ref_logprob is not None:
        loss = loss + factor * kl_estimate(logprob, ref_logprob, keep, kind=kl)
    factor = _factor("entropy_coef", entropy_coef, "entropy", entropy)
    if factor and entropy is not None:
        loss = loss - factor * check_like("entropy", entropy, "logprob", logprob)
    return reduce_tokens(loss, keep, reduction=reduction, num_items=num_items)


def _factor(name: str, factor: float | None, term_name: str, term: Tensor | None) -> float:
    """Return a term's factor; a factor without its term, or a term without its factor, is a mistake."""
    if factor is None:
        if term is not None:
            raise ArgumentValueError(message(name, f"a number, as {term_name} is given", "None"))
        return 0.0
    if (factor := check_not_negative(name, factor)) != 0 and term is None:
        raise ArgumentValueError(message(term_name, f"a tensor, as {name} is {factor}", "None"))
    return factor
