"""What the losses of `lowtide.losses` mean in plain PyTorch, from their papers.

A reference casts each tensor once, to float32 at least, and computes there: that is what every loss promises.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

HELD = 80.0  # where log-ratios are held


def wide(x):
    return x if x.dtype == torch.float64 else x.float()


def reduced(values, mask, reduction="token", num_items=None):
    values = values.where(mask, 0)
    n = mask.sum(-1)
    if reduction == "none":
        return (values,)
    if reduction == "sum":
        return (values.sum(),)
    if reduction == "token":
        return (values.sum() / (n.sum().clamp(min=1) if num_items is None else num_items),)
    each = values.sum(-1)
    if reduction == "sequence":
        each = each / n.clamp(min=1)
    return (each.sum() / (max(each.numel(), 1) if num_items is None else num_items),)


def k_estimate(logprob, ref, kind):
    d = ref.detach() - logprob
    if kind == "k1":
        return -d
    return d**2 / 2 if kind == "k2" else torch.expm1(d.clamp(max=HELD)) - d


def token_loss(
    loss, logprob, mask, other=None, ref=None, entropy=None, correction=None, advantage=None, mean_logit=None, lse=None,
    reduction="token", num_items=None, beta=None, kl="k3", entropy_coef=None, gamma=2.0, label_smoothing=0.1, coef=1e-4,
    temperature=1.0, clip_low=0.2, clip_high=0.2, ratio_max=None, ratio_min=0.0, max_length=9, tau_positive=1.0,
    tau_negative=1.05, token_level=False, kind="k2",
):  # fmt: skip
    """One value a token, 0 where masked, reduced; tensors where masked may hold anything."""

    def clean(x):
        return None if x is None else wide(x).where(mask, 0)

    logprob, other, ref = clean(logprob), clean(other), clean(ref)
    terms = (reduction, num_items)
    if loss == "reduce_tokens":
        return reduced(logprob, mask, *terms)
    if loss == "sft_loss":
        return reduced(-logprob, mask, *terms)
    if loss == "dft_loss":
        return reduced(-logprob.exp().detach() * logprob, mask, *terms)
    if loss == "focal_loss":
        tiny = torch.finfo(logprob.dtype).tiny
        return reduced(-((-torch.expm1(logprob)).clamp(min=tiny) ** gamma) * logprob, mask, *terms)
    if loss == "label_smoothed_loss":
        smooth = clean(lse) - clean(mean_logit)
        return reduced((label_smoothing - 1) * logprob + label_smoothing * smooth, mask, *terms)
    if loss == "z_loss":
        return reduced(coef * logprob**2, mask, *terms)
    if loss == "gkd_loss":
        return reduced(temperature**2 * logprob, mask, *terms)
    if loss == "sampled_distillation_loss":
        return reduced(k_estimate(logprob, other, kind), mask, *terms)
    if advantage is not None:
        a = wide(advantage).detach()
        a = (a[..., None].expand(mask.shape) if a.dim() < mask.dim() else a).where(mask, 0)
    if loss == "policy_loss":
        value = other
    elif loss == "reinforce_loss":
        value = -a * logprob
    else:
        d = logprob - other.detach()
        n = mask.sum(-1, keepdim=True).clamp(min=1)
        if loss == "gspo_loss":
            mean = d.sum(-1, keepdim=True) / n
            ratio = mean.clamp(max=HELD).exp().expand(d.shape)
            if token_level:
                ratio = ratio.detach() * (logprob - logprob.detach()).exp()
        else:
            ratio = d.clamp(max=HELD).exp()
        if loss == "cispo_loss":
            value = -ratio.detach().clamp(ratio_min, ratio_max or 5.0) * a * logprob
        elif loss == "sapo_loss":
            tau = torch.where(a > 0, a.new_tensor(tau_positive), a.new_tensor(tau_negative))
            value = -4 / tau * torch.sigmoid(tau * (ratio - 1)) * a
        else:
            first = ratio if ratio_max is None else ratio.clamp(max=ratio_max)
            value = -torch.minimum(first * a, ratio.clamp(1 - clip_low, 1 + clip_high) * a)
    if correction is not None:
        value = value * clean(correction).detach()
    if ref is not None:
        value = value + beta * k_estimate(logprob, ref, kl)
    if entropy is not None:
        value = value - entropy_coef * clean(entropy)
    result = reduced(value, mask, *terms)
    return tuple(r / max_length for r in result) if loss == "dr_grpo_loss" else result


def pair_loss(
    loss, chosen, rejected, ref_chosen=None, ref_rejected=None, kind="sigmoid", beta=0.1, label_smoothing=0.0,
    divergence="reverse_kl", alpha=0.5, tau=0.05, chosen_length=None, rejected_length=None, gamma=1.0, nll=None,
    desirable=None, kl=0.0, desirable_weight=1.0, undesirable_weight=1.0, reduction="mean", num_items=None,
):  # fmt: skip
    """One value a pair (for KTO an answer), reduced."""
    chosen, rejected = wide(chosen), wide(rejected)
    e, ls = label_smoothing, F.logsigmoid

    def smoothed(m):
        return -(1 - e) * ls(m) - e * ls(-m)

    if loss == "simpo_loss":
        value = smoothed(beta * (chosen - rejected) - gamma)
    elif loss == "cpo_loss":
        value = smoothed(beta * (chosen - rejected)) + (0 if nll is None else wide(nll))
    elif loss == "orpo_loss":

        def odds(x):
            x = x.clamp(max=-(torch.finfo(x.dtype).tiny ** 0.5))
            return x - torch.log(-torch.expm1(x))

        value = (-chosen if nll is None else wide(nll)) - beta * ls(odds(chosen) - odds(rejected))
    elif loss == "kto_loss":
        gain = beta * (chosen - rejected.detach() - kl)
        value = torch.where(
            desirable, desirable_weight * torch.sigmoid(-gain), undesirable_weight * torch.sigmoid(gain)
        )
    else:
        ra, rb = wide(ref_chosen).detach(), wide(ref_rejected).detach()
        a, b = chosen - ra, rejected - rb

        def score(x):
            if divergence == "forward_kl":
                return -torch.expm1((-x).clamp(max=HELD))
            if divergence == "js":
                return math.log(2) + ls(x)
            if divergence == "alpha" and alpha != 1:
                return torch.expm1(((alpha - 1) * x).clamp(max=HELD)) / (alpha - 1)
            return x

        m = beta * (score(a) - score(b))
        if kind in ("ipo", "sigmoid_norm"):
            per_token = score(a) / wide(chosen_length.float()).clamp(min=1) - score(b) / rejected_length.float().clamp(
                min=1
            )
        if kind == "sigmoid":
            value = smoothed(m)
        elif kind == "robust":
            value = (-(1 - e) * ls(m) + e * ls(-m)) / (1 - 2 * e)
        elif kind == "hinge":
            value = (1 - m).clamp(min=0)
        elif kind == "ipo":
            value = (per_token - 1 / (2 * beta)) ** 2
        elif kind == "sigmoid_norm":
            value = -ls(beta * per_token)
        elif kind == "exo_pair":
            value = m.sigmoid() * (ls(m) - math.log1p(-e)) + (-m).sigmoid() * (ls(-m) - math.log(e))
        elif kind == "nca_pair":
            value = -ls(beta * a) - (ls(-beta * a) + ls(-beta * b)) / 2
        elif kind == "bco_pair":
            value = -ls(beta * a) - ls(-beta * b)
        elif kind == "sppo_hard":
            value = (a - 1 / (2 * beta)) ** 2 + (b + 1 / (2 * beta)) ** 2
        elif kind == "apo_zero":
            value = torch.sigmoid(-beta * a) + torch.sigmoid(beta * b)
        elif kind == "apo_down":
            value = torch.sigmoid(beta * a) + torch.sigmoid(-beta * (a - b))
        elif kind == "discopop":
            value = -torch.sigmoid(-m / tau) * ls(m) + (ls(m / tau) - m).exp()
        else:
            x, y = (chosen - rejected, ra - rb) if kind == "aot" else (a, b)
            value = smoothed(beta * (x.flatten().sort().values - y.flatten().sort().values)).view(x.shape)
    if reduction == "none":
        return (value,)
    return (
        value.sum()
        if reduction == "sum"
        else value.sum() / (max(value.numel(), 1) if num_items is None else num_items),
    )
