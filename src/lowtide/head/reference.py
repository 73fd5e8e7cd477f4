"""The head's specification in plain PyTorch: the logits exist, and autograd does the rest. Tests compare with it."""

from collections.abc import Iterable

import torch
from torch import Tensor

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
    loss = loss.where(kept, 0)
    if reduction == "none":
        return loss
    if reduction == "sum":
        return loss.sum()
    if num_items is not None:
        return loss.sum() / num_items
    return loss.sum() / (q[y] * kept).sum()


def linear_logprobs(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float | Tensor = 1.0,
    ignore_index: int = -100,
) -> Tensor:
    """The twin of `lowtide.linear_logprobs`: same arguments, same meaning, with the logits in memory."""
    stats = linear_token_stats(
        input,
        linear_weight,
        target,
        want=("logprob",),
        linear_bias=linear_bias,
        softcap=softcap,
        logit_scale=logit_scale,
        ignore_index=ignore_index,
    )
    assert stats.logprob is not None
    return stats.logprob


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
