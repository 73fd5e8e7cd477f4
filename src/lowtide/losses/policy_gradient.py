"""Policy-gradient objectives as they were published."""

from typing import Unpack

from torch import Tensor

from lowtide.arguments import check_index
from lowtide.errors import ArgumentValueError, message
from lowtide.losses.policy_terms import (
    ClippedTerms,
    PolicyTerms,
    RatioLevel,
    clipped_surrogate,
    importance_ratio,
    per_token_advantage,
    policy_loss,
)
from lowtide.losses.reduction import check_floats, check_mask, check_not_negative, check_positive, check_tokens


def ppo_loss(
    logprob: Tensor,
    old_logprob: Tensor,
    advantage: Tensor,
    mask: Tensor | None = None,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    ratio_max: float | None = None,
    level: RatioLevel = "token",
    **terms: Unpack[PolicyTerms],
) -> Tensor:
    """Return PPO's clipped objective as a loss, averaged over tokens.

        mean_t -min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t)      r_t = exp(logprob_t - old_logprob_t)

    Most of what follows is this with other bounds, ratios and denominators.

    Args:
        logprob: The policy's log-probabilities of tokens [..., T].
        old_logprob: As in `importance_ratio` [..., T]; not differentiated.
        advantage: One per sequence [...] or one per token [..., T]; not differentiated.
        mask: As in `reduce_tokens`.
        clip_low: How far r may fall below 1 before it has no gradient, from 0 to 1.
        clip_high: How far r may rise above 1, 0 or above.
        ratio_max: As in `clipped_surrogate`.
        level: Whether r is a token's or a sequence's: see `importance_ratio`.
        terms: ``correction``, ``ref_logprob``, ``beta``, ``kl``, ``entropy``, ``entropy_coef``, ``reduction`` and
            ``num_items`` of `policy_loss`, as is the result; ``reduction`` is "token".

    Raises:
        ArgumentValueError, ArgumentTypeError: As in `reduce_tokens`.

    Source: Schulman et al. 2017, "Proximal Policy Optimization Algorithms", arXiv 1707.06347, eq. 7.
    """
    logprob, advantage = _checked(logprob, advantage, mask)
    ratios = importance_ratio(logprob, old_logprob, mask, level=level)
    surrogate = clipped_surrogate(ratios, advantage, clip_low=clip_low, clip_high=clip_high, ratio_max=ratio_max)
    return policy_loss(surrogate, logprob, mask, **terms)


def grpo_loss(
    logprob: Tensor, old_logprob: Tensor, advantage: Tensor, mask: Tensor | None = None, **terms: Unpack[ClippedTerms]
) -> Tensor:
    """Return GRPO's objective as a loss: PPO's surrogate and a k3 KL term, averaged over each sequence, then over them.

        1/B sum_i 1/n_i sum_t (-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) + beta KL)

    ``beta`` is the paper's 0.04 if ``ref_logprob`` is given without ``beta``. Advantages: `group_advantages`.

    Args:
        logprob: The policy's log-probabilities of tokens [..., T].
        old_logprob: Those of the policy that sampled [..., T]; not differentiated.
        advantage: One per sequence [...] or one per token [..., T]; not differentiated.
        mask: As in `reduce_tokens`.
        terms: ``clip_low``, ``clip_high``, ``ratio_max`` and terms as in `ppo_loss`, as are result and errors;
            ``reduction`` is "sequence".

    Source: Shao et al. 2024, "DeepSeekMath", arXiv 2402.03300, eq. 3 (beta); the paper names no clip range: PPO's.
    """
    terms.setdefault("reduction", "sequence")
    if terms.get("ref_logprob") is not None:
        terms.setdefault("beta", 0.04)
    return ppo_loss(logprob, old_logprob, advantage, mask, **terms)


def dr_grpo_loss(
    logprob: Tensor,
    old_logprob: Tensor,
    advantage: Tensor,
    mask: Tensor | None = None,
    *,
    max_length: int,
    **terms: Unpack[ClippedTerms],
) -> Tensor:
    """Return Dr.GRPO's objective as a loss: a sum over tokens with a constant denominator, so that length does not pay.

        1/(B max_length) sum_i sum_t -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)

    Advantages: ``group_advantages(reward, group_size, scale="none")``.

    Args:
        logprob: The policy's log-probabilities of tokens [..., T].
        old_logprob: Those of the policy that sampled [..., T]; not differentiated.
        advantage: One per sequence [...] or one per token [..., T]; not differentiated.
        mask: As in `reduce_tokens`.
        max_length: Most tokens that an answer may have, the same for every batch.
        terms: ``clip_low``, ``clip_high``, ``ratio_max`` and terms as in `ppo_loss`, as is the result; ``reduction`` is
            "sequence_sum", ``num_items`` counts sequences, B.

    Raises:
        ArgumentValueError, ArgumentTypeError: As in `reduce_tokens`.

    Source: Liu et al. 2025, "Understanding R1-Zero-Like Training: A Critical Perspective", arXiv 2503.20783.
    """
    if check_index("max_length", max_length) < 1:
        raise ArgumentValueError(message("max_length", "tokens, 1 or more", f"{max_length!r}"))
    terms.setdefault("reduction", "sequence_sum")
    loss = ppo_loss(logprob, old_logprob, advantage, mask, **terms)
    return loss / max_length


def bnpo_loss(
    logprob: Tensor, old_logprob: Tensor, advantage: Tensor, mask: Tensor | None = None, **terms: Unpack[ClippedTerms]
) -> Tensor:
    """Return what TRL names BNPO: GRPO's surrogate, averaged over the tokens of this batch.

        1/(sum_i n_i) sum_i sum_t (-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) + beta KL)

    ``beta`` as in `grpo_loss`. The paper of that name (Xiao et al. 2025, arXiv 2506.02864) normalises rewards with a
    Beta distribution: that is a matter of the advantages, which are given.

    Args:
        logprob: The policy's log-probabilities of tokens [..., T].
        old_logprob: Those of the policy that sampled [..., T]; not differentiated.
        advantage: One per sequence [...] or one per token [..., T]; not differentiated.
        mask: As in `reduce_tokens`.
        terms: ``clip_low``, ``clip_high``, ``ratio_max`` and terms as in `ppo_loss`, as are result and errors;
            ``reduction`` is "token".
    """
    terms.setdefault("reduction", "token")
    return grpo_loss(logprob, old_logprob, advantage, mask, **terms)


def dapo_loss(
    logprob: Tensor, old_logprob: Tensor, advantage: Tensor, mask: Tensor | None = None, **terms: Unpack[ClippedTerms]
) -> Tensor:
    """Return DAPO's objective as a loss: a higher upper bound, every token of the batch weighing the same, no KL term.

        1/(sum_i n_i) sum_i sum_t -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)

    Under gradient accumulation pass all tokens of the step as ``num_items``.

    Args:
        logprob: The policy's log-probabilities of tokens [..., T].
        old_logprob: Those of the policy that sampled [..., T]; not differentiated.
        advantage: One per sequence [...] or one per token [..., T]; not differentiated.
        mask: As in `reduce_tokens`.
        terms: ``clip_low``, ``clip_high``, ``ratio_max`` and terms as in `ppo_loss`, as are result and errors;
            ``clip_high`` is 0.28 ("clip-higher"), ``reduction`` is "token".

    Source: Yu et al. 2025, "DAPO: An Open-Source LLM Reinforcement Learning System at Scale", arXiv 2503.14476, eq. 8.
    """
    terms.setdefault("clip_high", 0.28)
    return ppo_loss(logprob, old_logprob, advantage, mask, **terms)


def gspo_loss(
    logprob: Tensor,
    old_logprob: Tensor,
    advantage: Tensor,
    mask: Tensor | None = None,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    token_level: bool = False,
    **terms: Unpack[PolicyTerms],
) -> Tensor:
    """Return GSPO's objective as a loss: one ratio per sequence, the geometric mean of its tokens'.

        1/B sum_i -min(s_i A_i, clip(s_i, 1 - clip_low, 1 + clip_high) A_i)      s_i = exp(1/n_i sum_t d_t)

    with d_t = ``logprob - old_logprob``. ``token_level`` is GSPO-token: s_it = sg(s_i) p_t / sg(p_t) and one advantage
    per token, averaged over each sequence; of the same value and gradient where a sequence's advantages are equal.

    Args:
        logprob: The policy's log-probabilities of tokens [..., T].
        old_logprob: Those of the policy that sampled [..., T]; not differentiated.
        advantage: One per sequence [...] or, with ``token_level``, one per token [..., T]; not differentiated.
        mask: As in `reduce_tokens`.
        clip_low: As in `ppo_loss`; the paper's, three orders below PPO's as the ratio is a mean.
        clip_high: As in `ppo_loss`.
        token_level: Whether to take GSPO-token.
        terms: As in `ppo_loss`, as is the result; ``reduction`` is "sequence".

    Raises:
        ArgumentValueError, ArgumentTypeError: As in `reduce_tokens`.

    Source: Zheng et al. 2025, "Group Sequence Policy Optimization", arXiv 2507.18071, eqs. 5 and 13.
    """
    if not token_level and check_floats("advantage", advantage).shape == check_tokens(logprob=logprob)[0].shape:
        expected = f"one per sequence, {list(logprob.shape[:-1])}"
        raise ArgumentValueError(message("advantage", expected, f"{list(advantage.shape)}", "Or token_level=True."))
    terms.setdefault("reduction", "sequence")
    level: RatioLevel = "geometric_token" if token_level else "geometric"
    return ppo_loss(logprob, old_logprob, advantage, mask, level=level, clip_low=clip_low, clip_high=clip_high, **terms)


def cispo_loss(
    logprob: Tensor,
    old_logprob: Tensor,
    advantage: Tensor,
    mask: Tensor | None = None,
    *,
    ratio_min: float = 0.0,
    ratio_max: float = 5.0,
    **terms: Unpack[PolicyTerms],
) -> Tensor:
    """Return CISPO's objective as a loss: REINFORCE with a clipped weight, so that no token loses its gradient.

        1/(sum_i n_i) sum_i sum_t -sg(clip(r_t, ratio_min, ratio_max)) A_t logprob_t

    with r_t = exp(logprob - old_logprob) and sg what is not differentiated.

    Args:
        logprob: The policy's log-probabilities of tokens [..., T].
        old_logprob: Those of the policy that sampled [..., T]; not differentiated.
        advantage: One per sequence [...] or one per token [..., T]; not differentiated.
        mask: As in `reduce_tokens`.
        ratio_min: The paper's 1 - epsilon_low, which it sets so that nothing is clipped; 0 or above.
        ratio_max: The paper's 1 + epsilon_high, above ``ratio_min``. It gives no number; 5 is ScaleRL's (Khatri et al.
            2025, arXiv 2510.13786).
        terms: As in `ppo_loss`, as is the result; ``reduction`` is "token".

    Raises:
        ArgumentValueError, ArgumentTypeError: As in `reduce_tokens`.

    Source: MiniMax 2025, "MiniMax-M1", arXiv 2506.13585, eqs. 4 and 5.
    """
    low = check_not_negative("ratio_min", ratio_min)
    if check_positive("ratio_max", ratio_max) <= low:
        raise ArgumentValueError(message("ratio_max", f"a number above ratio_min, {low}", f"{ratio_max!r}"))
    logprob, advantage = _checked(logprob, advantage, mask)
    weight = importance_ratio(logprob, old_logprob, mask).detach().clamp(low, ratio_max)
    return policy_loss(-weight * (advantage * logprob), logprob, mask, **terms)


def sapo_loss(
    logprob: Tensor,
    old_logprob: Tensor,
    advantage: Tensor,
    mask: Tensor | None = None,
    *,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
    **terms: Unpack[PolicyTerms],
) -> Tensor:
    """Return SAPO's objective as a loss: a soft gate in place of the clip, fading as the ratio leaves 1.

        1/B sum_i 1/n_i sum_t -(4 / tau) sigmoid(tau (r_t - 1)) A_t

    with r_t = exp(logprob - old_logprob), and tau = ``tau_positive`` where A > 0, else ``tau_negative``.

    Args:
        logprob: The policy's log-probabilities of tokens [..., T].
        old_logprob: Those of the policy that sampled [..., T]; not differentiated.
        advantage: One per sequence [...] or one per token [..., T]; not differentiated.
        mask: As in `reduce_tokens`.
        tau_positive: Temperature of positive advantages, above 0.
        tau_negative: Temperature of the others, above 0; the larger, the faster their gradient fades.
        terms: As in `ppo_loss`, as is the result; ``reduction`` is "sequence".

    Raises:
        ArgumentValueError, ArgumentTypeError: As in `reduce_tokens`.

    Source: Gao et al. 2025, "Soft Adaptive Policy Optimization", arXiv 2511.20347.
    """
    positive, negative = check_positive("tau_positive", tau_positive), check_positive("tau_negative", tau_negative)
    terms.setdefault("reduction", "sequence")
    logprob, advantage = _checked(logprob, advantage, mask)
    ratio = importance_ratio(logprob, old_logprob, mask)
    surrogates = [-4 / tau * (tau * (ratio - 1)).sigmoid() * advantage for tau in (positive, negative)]
    return policy_loss(surrogates[0].where(advantage > 0, surrogates[1]), logprob, mask, **terms)


def reinforce_loss(
    logprob: Tensor, advantage: Tensor, mask: Tensor | None = None, **terms: Unpack[PolicyTerms]
) -> Tensor:
    """Return REINFORCE's objective as a loss: with `leave_one_out_advantages`, RLOO.

        1/B sum_i sum_t -A_t logprob_t

    Its gradient is the policy gradient; its value means nothing.

    Args:
        logprob: The policy's log-probabilities of the tokens that it sampled [..., T].
        advantage: One per sequence [...] or one per token [..., T]; not differentiated.
        mask: As in `reduce_tokens`.
        terms: As in `ppo_loss`, as is the result; ``reduction`` is "sequence_sum".

    Raises:
        ArgumentValueError, ArgumentTypeError: As in `reduce_tokens`.

    Source: Williams 1992, "Simple Statistical Gradient-Following Algorithms for Connectionist Reinforcement Learning";
    Ahmadian et al. 2024, arXiv 2402.14740, for RLOO.
    """
    terms.setdefault("reduction", "sequence_sum")
    logprob, advantage = _checked(logprob, advantage, mask)
    return policy_loss(-advantage * logprob, logprob, mask, **terms)


def _checked(logprob: Tensor, advantage: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the log-probabilities, cast once, and the advantages of tokens, 0 where masked.

    With a cast in each term, the gradients of the terms would be summed in the narrow dtype.
    """
    (logprob,) = check_tokens(logprob=logprob)
    return logprob, per_token_advantage(advantage, "logprob", logprob).where(check_mask(mask, "logprob", logprob), 0)
