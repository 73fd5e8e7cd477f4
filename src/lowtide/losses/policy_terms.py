"""What policy-gradient losses are built of: ratios, clipping, KL estimates, corrections, advantages, a frame."""

import math
from typing import Literal, Unpack, get_args

import torch
from torch import Tensor

from lowtide.arguments import check_index, check_name, check_number
from lowtide.errors import ArgumentValueError, message
from lowtide.losses.reduction import (
    TokenReductionOptions,
    bounded_exp,
    bounded_expm1,
    check_floats,
    check_like,
    check_mask,
    check_not_negative,
    check_place,
    check_positive,
    check_tokens,
    check_valid,
    per_sequence,
    reduce_tokens,
)

RatioLevel = Literal["token", "sequence", "geometric", "geometric_token"]
CorrectionLevel = Literal["token", "sequence", "geometric"]
Correction = Literal["truncate", "mask"]
KLKind = Literal["k1", "k2", "k3"]
Scale = Literal["group", "batch", "none"]


class PolicyTerms(TokenReductionOptions, total=False):
    """The keyword arguments of `policy_loss`, which every objective takes too."""

    correction: Tensor | None
    ref_logprob: Tensor | None
    beta: float | None
    kl: KLKind
    entropy: Tensor | None
    entropy_coef: float | None


class ClippedTerms(PolicyTerms, total=False):
    """The keyword arguments of `ppo_loss` that every clipped objective takes too."""

    clip_low: float
    clip_high: float
    ratio_max: float | None


def importance_ratio(
    logprob: Tensor, old_logprob: Tensor, mask: Tensor | None = None, *, level: RatioLevel = "token"
) -> Tensor:
    """Return how much likelier tokens are under the policy than under the one that sampled them.

    With d_t = ``logprob - old_logprob`` over the n valid tokens of a sequence, and sg what is not differentiated:

        "token"             exp(d_t)
        "sequence"          exp(sum_t d_t)
        "geometric"         exp(sum_t d_t / n)                                      GSPO's s
        "geometric_token"   sg(exp(sum_t d_t / n)) exp(logprob_t - sg(logprob_t))   GSPO-token's s_t

    Log-ratios are held at 80 from above (e^80 = 5.5e34; float32 ends at e^88.7); beyond, the gradient is 0.

    Args:
        logprob: The policy's log-probabilities of tokens [..., T].
        old_logprob: Those of the policy that sampled, or of the step's start [..., T]; not differentiated, so that
            ``logprob`` itself may be given for a first step.
        mask: As in `reduce_tokens`.
        level: One of the four above.

    Returns:
        Tensor: [..., T], a sequence's ratio at each of its tokens; float32 or float64; exactly 0 where masked.

    Raises:
        ArgumentValueError, ArgumentTypeError: As in `reduce_tokens`.

    Source: Zheng et al. 2025, "Group Sequence Policy Optimization", arXiv 2507.18071, for the last two.
    """
    check_name("level", level, get_args(RatioLevel))
    keep, logprob, old = check_valid(mask, logprob=logprob, old_logprob=old_logprob)
    log_ratio = _at_level(logprob - old.detach(), keep, level.removesuffix("_token"))
    if level == "geometric_token":
        return (bounded_exp(log_ratio).detach() * (logprob - logprob.detach()).exp()).where(keep, 0)
    return bounded_exp(log_ratio).where(keep, 0)


def sampler_correction(
    old_logprob: Tensor,
    sampler_logprob: Tensor,
    mask: Tensor | None = None,
    *,
    level: CorrectionLevel = "token",
    kind: Correction = "truncate",
    low: float = 0.0,
    high: float = 2.0,
) -> Tensor:
    """Return importance-sampling weights for text that another implementation of the policy sampled.

    An inference engine's log-probabilities differ from the trainer's. With d_t = ``old_logprob - sampler_logprob`` and
    w = exp(d_t) ("token"), exp(sum_t d_t) ("sequence") or exp(mean_t d_t) ("geometric"):

        "truncate"   min(max(w, low), high)                  truncated importance sampling, TIS
        "mask"       w where low <= w <= high, else 0        masked importance sampling, MIS

    Args:
        old_logprob: The trainer's log-probabilities of tokens [..., T], before the update.
        sampler_logprob: The sampler's [..., T]. A NaN, a token it could not score, counts as d_t = 0.
        mask: As in `reduce_tokens`.
        level: ``"token"``, ``"sequence"`` (unbiased, and of high variance) or ``"geometric"``.
        kind: ``"truncate"`` or ``"mask"``.
        low: Lower bound, 0 or above.
        high: Upper bound, above ``low``; `math.inf` for none.

    Returns:
        Tensor: [..., T], a sequence's weight at each of its tokens; not differentiated; exactly 0 where masked. It is
        what the losses take as ``correction``.

    Raises:
        ArgumentValueError, ArgumentTypeError: As in `reduce_tokens`.

    Source: Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (TIS, high = 2);
    Liu et al. 2025, "When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference Mismatch" (MIS).
    """
    check_name("level", level, get_args(CorrectionLevel))
    check_name("kind", kind, get_args(Correction))
    low = check_not_negative("low", low)
    if check_number("high", high, 0, math.inf) <= low:
        raise ArgumentValueError(message("high", f"a number above low, {low}", f"{high!r}"))
    old, sampler = check_tokens(old_logprob=old_logprob, sampler_logprob=sampler_logprob)
    keep = check_mask(mask, "old_logprob", old)
    difference = (old - sampler).detach().where(keep & ~sampler.isnan(), 0)
    weight = bounded_exp(_at_level(difference, keep, level))
    weight = weight.clamp(low, high) if kind == "truncate" else weight.where((weight >= low) & (weight <= high), 0)
    return weight.where(keep, 0)


def clipped_surrogate(
    ratio: Tensor, advantage: Tensor, *, clip_low: float = 0.2, clip_high: float = 0.2, ratio_max: float | None = None
) -> Tensor:
    """Return PPO's clipped surrogate of each token, as a loss.

        -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)

    and with ``ratio_max``, min(r, ratio_max) in place of the first r.

    Args:
        ratio: r [..., T], as `importance_ratio` returns it.
        advantage: A, one per sequence [...] or one per token [..., T]; not differentiated.
        clip_low: How far r may fall below 1 before it has no gradient, from 0 to 1.
        clip_high: How far r may rise above 1, 0 or above.
        ratio_max: Number above 1 + ``clip_high`` at which a negative advantage's ratio stops to grow, or None: the
            constant of dual-clip PPO (Ye et al. 2019, arXiv 1912.09729), the delta of INTELLECT-2 (arXiv 2505.07291).

    Returns:
        Tensor: [..., T], float32 or float64.

    Raises:
        ArgumentValueError, ArgumentTypeError: As in `reduce_tokens`.

    Source: Schulman et al. 2017, "Proximal Policy Optimization Algorithms", arXiv 1707.06347, eq. 7.
    """
    (ratio,) = check_tokens(ratio=ratio)
    advantage = per_token_advantage(advantage, "ratio", ratio)
    low, high = check_number("clip_low", clip_low, 0, 1), check_not_negative("clip_high", clip_high)
    clipped = ratio.clamp(1 - low, 1 + high)
    if ratio_max is not None:
        if check_positive("ratio_max", ratio_max) <= 1 + high:
            expected = f"a number above 1 + clip_high, {1 + high}"
            raise ArgumentValueError(message("ratio_max", expected, f"{ratio_max!r}"))
        ratio = ratio.clamp(max=ratio_max)
    return -torch.minimum(ratio * advantage, clipped * advantage)


def kl_estimate(logprob: Tensor, ref_logprob: Tensor, mask: Tensor | None = None, *, kind: KLKind = "k3") -> Tensor:
    """Return an estimate of KL(policy || reference) at each token that the policy sampled.

    With d = ``ref_logprob - logprob``:

        "k1"   -d                  unbiased, of either sign; as a loss its expected gradient is 0, not the KL's
        "k2"   d^2 / 2             biased, low variance; its gradient's expectation is the KL's
        "k3"   exp(d) - 1 - d      unbiased, never negative; its gradient's expectation is KL(reference || policy)'s

    exp(d) - 1 is computed as expm1(d), so that close models do not cancel to noise, and d is held at 80 in it.

    Args:
        logprob: The policy's log-probabilities of tokens [..., T].
        ref_logprob: The reference model's [..., T], not differentiated.
        mask: As in `reduce_tokens`.
        kind: ``"k1"``, ``"k2"`` or ``"k3"``.

    Returns:
        Tensor: [..., T], float32 or float64; exactly 0 where masked.

    Raises:
        ArgumentValueError, ArgumentTypeError: As in `reduce_tokens`.

    Source: Schulman 2020, "Approximating KL Divergence", http://joschu.net/blog/kl-approx.html.
    """
    check_name("kind", kind, get_args(KLKind))
    _, logprob, ref = check_valid(mask, logprob=logprob, ref_logprob=ref_logprob)
    d = ref.detach() - logprob
    if kind == "k1":
        return -d
    return d * d / 2 if kind == "k2" else bounded_expm1(d) - d


def group_advantages(reward: Tensor, group_size: int, *, scale: Scale = "group", eps: float = 1e-4) -> Tensor:
    """Return GRPO's advantages: each reward less the mean of its group, the answers to one prompt.

        (r_i - mean(group)) / (std + eps)

    with the unbiased standard deviation of the group ("group", GRPO), of all rewards ("batch"), or with no division
    ("none", Dr.GRPO).

    Args:
        reward: Rewards [B]; the answers to one prompt stand together. A NaN makes its group NaN.
        group_size: Answers per prompt, 2 or more, a divisor of B.
        scale: ``"group"``, ``"batch"`` or ``"none"``.
        eps: Added to the standard deviation, above 0: a group of equal rewards has advantage 0.

    Returns:
        Tensor: [B], float32 or float64, not differentiated.

    Raises:
        ArgumentValueError, ArgumentTypeError: As in `reduce_tokens`.

    Source: Shao et al. 2024, "DeepSeekMath", arXiv 2402.03300; Liu et al. 2025, "Understanding R1-Zero-Like Training",
    arXiv 2503.20783, for "none".
    """
    check_name("scale", scale, get_args(Scale))
    eps = check_positive("eps", eps)
    groups = _groups(reward, group_size)
    centred = groups - groups.mean(-1, keepdim=True)
    if scale == "none" or not groups.numel():
        return centred.flatten()
    std = groups.std(-1, keepdim=True) if scale == "group" else groups.std()
    return (centred / (std + eps)).flatten()


def leave_one_out_advantages(reward: Tensor, group_size: int) -> Tensor:
    """Return RLOO's advantages: each reward less the mean of the others in its group.

        r_i - sum_{j != i} r_j / (G - 1)

    Args:
        reward: Rewards [B]; the answers to one prompt stand together.
        group_size: Answers per prompt G, 2 or more, a divisor of B.

    Returns:
        Tensor: [B], float32 or float64, not differentiated.

    Raises:
        ArgumentValueError, ArgumentTypeError: As in `reduce_tokens`.

    Source: Ahmadian et al. 2024, "Back to Basics: Revisiting REINFORCE Style Optimization", arXiv 2402.14740.
    """
    groups = _groups(reward, group_size)
    return ((groups - groups.mean(-1, keepdim=True)) * (group_size / (group_size - 1))).flatten()


def per_token_advantage(advantage: Tensor, like_name: str, like: Tensor) -> Tensor:
    """Return an advantage per sequence [...] or per token [..., T] as one per token, not differentiated."""
    value = check_floats("advantage", advantage).detach()
    if value.shape == like.shape[:-1]:
        value = value.unsqueeze(-1).expand(like.shape)
    elif value.shape != like.shape:
        shapes = f"shape {list(like.shape[:-1])}, one per sequence, or {list(like.shape)}, as {like_name} has"
        raise ArgumentValueError(message("advantage", shapes, f"shape {list(value.shape)}"))
    return check_place("advantage", value, like_name, like)


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
    **reduce: Unpack[TokenReductionOptions],
) -> Tensor:
    """Return a policy-gradient loss from one surrogate per token: corrected, with a KL term and an entropy bonus.

        reduce_t(correction_t surrogate_t + beta KL_t - entropy_coef H_t)

    The published objectives are this with their surrogate and their defaults, and take the same keyword arguments.

    Args:
        surrogate: One value per token [..., T], lower is better, such as `clipped_surrogate`'s.
        logprob: The policy's log-probabilities of tokens [..., T], for the KL term.
        mask: As in `reduce_tokens`.
        correction: Factor of each token's surrogate [..., T], not differentiated, such as `sampler_correction`'s.
        ref_logprob: The reference model's log-probabilities [..., T], or None: no KL term.
        beta: Factor of the KL term, 0 or above; required if ``ref_logprob`` is given.
        kl: ``"k1"``, ``"k2"`` or ``"k3"``: see `kl_estimate`.
        entropy: Entropy of the policy at each token [..., T], differentiable, as `lowtide.linear_token_stats` returns
            it, or None: no bonus.
        entropy_coef: Factor of the entropy bonus, 0 or above; required if ``entropy`` is given.
        reduce: ``reduction`` and ``num_items`` of `reduce_tokens`, which also describes the result.

    Raises:
        ArgumentValueError, ArgumentTypeError: As in `reduce_tokens`.
    """
    check_name("kl", kl, get_args(KLKind))
    logprob, loss = check_tokens(logprob=logprob, surrogate=surrogate)
    keep = check_mask(mask, "logprob", logprob)
    if correction is not None:
        loss = loss * check_like("correction", correction, "logprob", logprob).detach().where(keep, 0)
    factor = _factor("beta", beta, "ref_logprob", ref_logprob)
    if factor and ref_logprob is not None:
        loss = loss + factor * kl_estimate(logprob, ref_logprob, keep, kind=kl)
    factor = _factor("entropy_coef", entropy_coef, "entropy", entropy)
    if factor and entropy is not None:
        loss = loss - factor * check_like("entropy", entropy, "logprob", logprob)
    return reduce_tokens(loss, keep, **reduce)


def _at_level(log_ratio: Tensor, keep: Tensor, level: str) -> Tensor:
    if level == "token":
        return log_ratio
    total = per_sequence(log_ratio, keep, average=level == "geometric")
    return total.unsqueeze(-1).expand(log_ratio.shape)


def _groups(reward: Tensor, group_size: int) -> Tensor:
    reward = check_floats("reward", reward).detach()
    if reward.dim() != 1:
        raise ArgumentValueError(message("reward", "shape [B]", f"shape {list(reward.shape)}"))
    size = check_index("group_size", group_size)
    if size < 2 or reward.shape[0] % size:
        expected = f"2 or more, and a divisor of the {reward.shape[0]} rewards"
        raise ArgumentValueError(message("group_size", expected, f"{group_size!r}"))
    return reward.view(-1, size)


def _factor(name: str, factor: float | None, term_name: str, term: Tensor | None) -> float:
    """Return a term's factor; a factor without its term, or a term without its factor, is a mistake."""
    if factor is None:
        if term is not None:
            raise ArgumentValueError(message(name, f"a number, as {term_name} is given", "None"))
        return 0.0
    if (factor := check_not_negative(name, factor)) != 0 and term is None:
        raise ArgumentValueError(message(term_name, f"a tensor, as {name} is {factor}", "None"))
    return factor
