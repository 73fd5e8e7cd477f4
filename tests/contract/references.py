"""What every public function means, in plain PyTorch with the logits in memory: the truth where tensors are float64.

Nothing of lowtide is used. Each function runs in the dtype of its tensors: float64 gives the truth, the dtype of a
case what plain PyTorch errs. Matrices are multiplied in the tensors' dtype (autocast's where it is on), and what
follows is float32 or float64.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F


def wide(x):
    return x if x.dtype == torch.float64 else x.float()


def logits_of(input, linear_weight, linear_bias=None, softcap=None, logit_scale=1.0):
    raw = F.linear(input, linear_weight, linear_bias)
    z = wide(raw)
    if isinstance(logit_scale, torch.Tensor) and logit_scale.requires_grad:  # a class ruled out says nothing of it
        of_scale = z.detach().masked_fill(z == -math.inf, 0) * (logit_scale - logit_scale.detach())
        z = z * logit_scale.detach() + of_scale
    else:
        z = z * logit_scale
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    return z


def logprob_of(z, y):
    """Return log p_y; in float64 such that no digit is lost where p_y is nearly 1, as the truth has to be there."""
    if z.dtype != torch.float64:
        return z.log_softmax(-1).gather(-1, y[..., None])[..., 0]
    others = z.scatter(-1, y[..., None], -math.inf)
    some = (others > -math.inf).any(-1)
    against = others.masked_fill(~some[..., None], 0).logsumexp(-1)
    chosen = z.gather(-1, y[..., None])[..., 0]
    logprob = F.logsigmoid(chosen - against).where(some | others.isnan().any(-1), chosen - z.logsumexp(-1))
    return logprob.masked_fill(chosen == math.inf, math.nan)


def kept_rows(input, kept):
    """Return the hidden states with 0 where a token counts for nothing, whatever it holds."""
    return input.masked_fill(~kept[..., None], 0)


def cross_entropy(
    input, linear_weight, target, linear_bias=None, weight=None, reduction="mean", ignore_index=-100,
    label_smoothing=0.0, z_loss=0.0, softcap=None, logit_scale=1.0, token_weight=None, num_items=None, shift=False,
):  # fmt: skip
    if shift:
        input, target = input[..., :-1, :], target[..., 1:]
        token_weight = None if token_weight is None else token_weight[..., 1:]
    kept = target != ignore_index
    z = logits_of(kept_rows(input, kept), linear_weight, linear_bias, softcap, logit_scale)
    y, lse = target.long().where(kept, 0), z.logsumexp(-1)
    q = z.new_ones(z.shape[-1]) if weight is None else weight.to(z.dtype)
    loss = (1 - label_smoothing) * q[y] * -logprob_of(z, y)
    if label_smoothing:
        loss = loss - label_smoothing / z.shape[-1] * (q * z.log_softmax(-1)).sum(-1)
    if z_loss:
        loss = loss + z_loss * lse**2
    if token_weight is not None:
        loss = loss * token_weight.detach().to(z.dtype)
    loss = loss.where(kept, 0)
    if reduction == "none":
        return (loss,)
    if reduction == "sum":
        return (loss.sum(),)
    return (loss.sum() / ((q[y] * kept).sum() if num_items is None else num_items),)


def token_stats(
    input, linear_weight, target=None, want=("logprob",), linear_bias=None, softcap=None, logit_scale=1.0,
    ignore_index=-100, topk=None,
):  # fmt: skip
    """The floating fields of ``want`` in its order."""
    alone = tuple(want) == ("logprob",) and target.dim() < input.dim()
    kept = kept_rows(input, target != ignore_index) if alone else input  # without a target it counts for nothing
    z = logits_of(kept, linear_weight, linear_bias, softcap, logit_scale)
    logp = z.log_softmax(-1)
    p = logp.exp()
    found = {
        "entropy": -(p * logp.masked_fill(p == 0, 0)).sum(-1),
        "lse": z.logsumexp(-1),
        "mean_logit": z.mean(-1),
        "sum_sq_prob": (p * p).sum(-1).detach(),
    }
    if topk is not None:
        found["topk"] = z.detach().topk(topk, -1).values
    if target is not None:
        several = target if target.dim() == input.dim() else target[..., None]
        ys = several.long().where(several != ignore_index, 0)
        logprob = logprob_of(z, ys[..., 0])[..., None] if ys.shape[-1] == 1 else logp.gather(-1, ys)
        found["logprob"] = logprob.reshape(target.shape).where(target != ignore_index, 0)
    return tuple(found[name] for name in want)


def divergence_of(log_s, log_t, kind, beta=0.5):
    """Return the divergence of two sets of log-probabilities [..., J], from its definition; 0 log 0 is 0."""

    def kl(log_p, log_q):
        none = log_p == -math.inf
        return (log_p.exp() * (log_p.masked_fill(none, 0) - log_q.masked_fill(none, 0))).sum(-1)

    if kind == "tv":
        return (log_s.exp() - log_t.exp()).abs().sum(-1) / 2
    if kind == "jsd" and 0 < beta < 1:
        none = (log_s == -math.inf) & (log_t == -math.inf)  # on neither side: nothing to differentiate
        log_m = torch.logaddexp(
            log_t.masked_fill(none, 0) + math.log(beta), log_s.masked_fill(none, 0) + math.log1p(-beta)
        )
        return beta * kl(log_t, log_m) + (1 - beta) * kl(log_s, log_m)
    forward = kind == "forward_kl" or (kind == "jsd" and beta == 0)
    return kl(log_t, log_s) if forward else kl(log_s, log_t)


def divergence(
    input, linear_weight, teacher_input=None, teacher_weight=None, kind="forward_kl", beta=0.5, temperature=1.0,
    linear_bias=None, teacher_bias=None, teacher_topk=None, mask=None, reduction="none", num_items=None, softcap=None,
    teacher_softcap=None,
):  # fmt: skip
    mask = input.new_ones(input.shape[:-1], dtype=torch.bool) if mask is None else mask
    a = logits_of(kept_rows(input, mask), linear_weight, linear_bias, softcap)
    if teacher_topk is None:
        teacher_input = kept_rows(teacher_input.detach(), mask)
        no_bias = None if teacher_bias is None else teacher_bias.detach()
        b = logits_of(teacher_input, teacher_weight.detach(), no_bias, teacher_softcap)
        more = b.shape[-1] - a.shape[-1]
        a, b = F.pad(a, (0, max(more, 0)), value=-math.inf), F.pad(b, (0, max(-more, 0)), value=-math.inf)
        log_s, log_t = (a / temperature).log_softmax(-1), (b / temperature).log_softmax(-1)
    else:
        ids, log_t, tail = teacher_topk
        ids = ids.where(log_t > -math.inf, 0)  # what stands in a place that is not used
        whole = (a / temperature).log_softmax(-1)
        log_s, log_t = whole.gather(-1, ids), wide(log_t).to(whole.dtype)
        log_s = log_s.masked_fill(log_t == -math.inf, -math.inf)
        if tail == "renormalise":
            log_s, log_t = log_s.log_softmax(-1), log_t.log_softmax(-1)
        elif tail == "bucket":
            used = torch.zeros_like(whole).scatter_add(-1, ids, (log_t > -math.inf).to(whole.dtype)) > 0
            rest = whole.masked_fill(used, -math.inf).logsumexp(-1, keepdim=True)
            left = (1 - log_t.exp().sum(-1, keepdim=True)).clamp(min=torch.finfo(log_t.dtype).eps)
            left = left.log().masked_fill(used.all(-1, keepdim=True), -math.inf)
            log_s, log_t = torch.cat((log_s, rest), -1), torch.cat((log_t, left), -1)
    value = divergence_of(log_s, log_t, kind, beta).where(mask, 0)
    if reduction == "none":
        return (value,)
    if reduction == "sum":
        return (value.sum(),)
    return (value.sum() / (mask.sum() if num_items is None else num_items),)


def swiglu(input, gate_weight, up_weight, down_weight, gate_bias=None, up_bias=None, down_bias=None, activation="silu"):
    gate, up = wide(F.linear(input, gate_weight, gate_bias)), wide(F.linear(input, up_weight, up_bias))
    act = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    out = F.linear((act * up).to(down_weight.dtype), down_weight, down_bias)
    return (out,)


def rms_norm(input, weight=None, eps=1e-6, offset=0.0, rounding="after_weight", residual=None):
    total = input if residual is None else input + residual
    x = wide(total)
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    scale = torch.ones(x.shape[-1:], dtype=input.dtype) if weight is None else weight
    if rounding == "before_weight":
        out = x.to(input.dtype) * (scale + offset)
    else:
        out = (x * (wide(scale) + offset)).to(input.dtype)
    return (out,) if residual is None else (out, total)
