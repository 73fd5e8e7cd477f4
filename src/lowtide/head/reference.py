"""The head's specification in plain PyTorch: the logits exist, and autograd does the rest. Tests compare with it."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from lowtide.head.divergence import TeacherTopK
from lowtide.head.token_stats import TokenStats, TopK


def logits(
    input: Tensor,
    linear_weight: Tensor,
    linear_bias: Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float | Tensor = 1.0,
) -> Tensor:
    """Return ``cap((input @ linear_weight.T + linear_bias) * logit_scale)`` [..., V], float32 or float64."""
    dtype = torch.float64 if input.dtype == torch.float64 else torch.float32
    z = input.to(dtype) @ linear_weight.to(dtype).T
    if linear_bias is not None:
        z = z + linear_bias.to(dtype)
    z = z * logit_scale
    return z if softcap is None else softcap * torch.tanh(z / softcap)


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float | Tensor = 1.0,
    token_weight: Tensor | None = None,
    num_items: float | Tensor | None = None,
    shift: bool = False,
) -> Tensor:
    """The twin of `lowtide.linear_cross_entropy`: same arguments, same meaning, with the logits in memory."""
    if shift:
        input, target = input[..., :-1, :], target[..., 1:]
        token_weight = None if token_weight is None else token_weight[..., 1:]
    z = logits(input, linear_weight, linear_bias, softcap, logit_scale)
    kept = target != ignore_index
    y = target.where(kept, 0)
    lse = z.logsumexp(-1)
    q = torch.ones(z.shape[-1], dtype=z.dtype, device=z.device) if weight is None else weight.to(z.dtype)
    nll = q[y] * (lse - z.gather(-1, y[..., None])[..., 0])
    uniform = (q * (lse[..., None] - z)).sum(-1) / z.shape[-1]
    loss = (1 - label_smoothing) * nll + label_smoothing * uniform + z_loss * lse**2
    if token_weight is not None:
        loss = loss * token_weight.detach().to(z.dtype)
    return _reduced(loss.where(kept, 0), reduction, (q[y] * kept).sum() if num_items is None else num_items)


def linear_logprobs(input: Tensor, linear_weight: Tensor, target: Tensor, **kwargs: Any) -> Tensor:
    """The twin of `lowtide.linear_logprobs`, whose arguments `linear_token_stats` takes too."""
    logprob = linear_token_stats(input, linear_weight, target, want=("logprob",), **kwargs).logprob
    assert logprob is not None
    return logprob


def linear_token_stats(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor | None = None,
    *,
    want: Iterable[str] = ("logprob", "entropy", "lse", "argmax"),
    linear_bias: Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float | Tensor = 1.0,
    ignore_index: int = -100,
    topk: int | None = None,
) -> TokenStats:
    """The twin of `lowtide.linear_token_stats`: same arguments, same meaning, with the logits in memory."""
    z = logits(input, linear_weight, linear_bias, softcap, logit_scale)
    logp = z.log_softmax(-1)
    p = logp.exp()
    found: dict[str, object] = {
        "entropy": -(p * logp).where(p > 0, 0).sum(-1),
        "lse": z.logsumexp(-1),
        "mean_logit": z.mean(-1),
        "argmax": z.argmax(-1),
        "sum_sq_prob": p.detach().square().sum(-1),
    }
    if topk is not None:
        found["topk"] = TopK(*z.detach().topk(topk, dim=-1))
    if target is not None:
        kept = target != ignore_index
        several = target if target.dim() == input.dim() else target[..., None]
        y = several.where(several != ignore_index, 0)
        found["logprob"] = logp.gather(-1, y).view(target.shape).where(kept, 0)
        found["is_top1"] = (y == z.argmax(-1, keepdim=True)).view(target.shape) & kept
    names = {*want, "topk"} if topk is not None else {*want}
    return TokenStats(**{name: found[name] for name in names})  # type: ignore[arg-type]


def linear_divergence(
    input: Tensor,
    linear_weight: Tensor,
    teacher_input: Tensor | None,
    teacher_weight: Tensor | None,
    *,
    kind: str = "forward_kl",
    beta: float = 0.5,
    temperature: float | Tensor = 1.0,
    linear_bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    teacher_topk: TeacherTopK | tuple[Any, ...] | None = None,
    mask: Tensor | None = None,
    reduction: str = "none",
    num_items: float | Tensor | None = None,
    softcap: float | None = None,
    teacher_softcap: float | None = None,
) -> Tensor:
    """The twin of `lowtide.linear_divergence`: same arguments, same meaning, with both sides' logits in memory."""
    a = (logits(input, linear_weight, linear_bias, softcap) / temperature).log_softmax(-1)
    if teacher_topk is not None:
        a, b = _cut_to_topk(a, TeacherTopK(*teacher_topk))
    else:
        assert teacher_input is not None
        assert teacher_weight is not None
        b = logits(teacher_input, teacher_weight, teacher_bias, teacher_softcap)
        b = (b / temperature).log_softmax(-1).detach()
        V = max(a.shape[-1], b.shape[-1])
        a, b = (pad(side, (0, V - side.shape[-1]), value=-math.inf) for side in (a, b))
    s, t = a.exp(), b.exp()
    if kind == "forward_kl" or (kind == "jsd" and beta == 0):
        value = _kl(t, b, a)
    elif kind == "reverse_kl" or (kind == "jsd" and beta == 1):
        value = _kl(s, a, b)
    elif kind == "jsd":
        log_m = torch.logaddexp(b + math.log(beta), a + math.log1p(-beta))
        value = beta * _kl(t, b, log_m) + (1 - beta) * _kl(s, a, log_m)
    else:
        value = (s - t).abs().sum(-1) / 2
    kept = torch.ones_like(value, dtype=torch.bool) if mask is None else mask
    return _reduced(value.where(kept, 0), reduction, kept.sum() if num_items is None else num_items)


def _reduced(value: Tensor, reduction: str, items: float | Tensor) -> Tensor:
    if reduction == "none":
        return value
    return value.sum() / (items if reduction == "mean" else 1)


def _kl(p: Tensor, log_p: Tensor, log_q: Tensor) -> Tensor:
    none = p == 0
    return (p * (log_p.masked_fill(none, 0) - log_q.masked_fill(none, 0))).sum(-1)


def _cut_to_topk(a: Tensor, topk: TeacherTopK) -> tuple[Tensor, Tensor]:
    """Return both sides' log-probabilities of the outcomes that are left of the vocabulary."""
    b = topk.logprobs.detach().to(a.dtype)
    none = (b == -math.inf) | (topk.ids >= a.shape[-1])
    ids = topk.ids.where(~none, 0)
    chosen = a.gather(-1, ids).masked_fill(none, -math.inf)
    if topk.tail == "drop":
        return chosen, b
    if topk.tail == "renormalise":
        return chosen.log_softmax(-1), b.log_softmax(-1)
    taken = torch.zeros_like(a).scatter_add(-1, ids, (~none).to(a.dtype)) > 0
    rest = a.masked_fill(taken, -math.inf).logsumexp(-1, keepdim=True)
    left = torch.log(-torch.expm1(b.logsumexp(-1, keepdim=True).clamp(max=-torch.finfo(b.dtype).eps)))
    left = left.masked_fill(taken.all(-1, keepdim=True), -math.inf)
    return torch.cat((chosen, rest), -1), torch.cat((b, left), -1)
