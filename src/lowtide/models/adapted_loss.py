"""The cross entropy of an output embedding with LoRA, without its logits.

The logits ``x W^T + b + sum of s_i h_i B_i^T``, with ``h_i = drop(x) A_i^T`` of a few numbers a token, go through
`lowtide.linear_apply`: a chunk of ``x W^T`` at a time, to which the function adds its ``h_i B_i^T`` in place and takes
the loss. A frozen W then costs neither a copy nor a gradient. One linear layer over [x, h] with the weight [W, s B]
would cost both: at D=4096, V=128256 and bfloat16 a GiB each, and a product of N D V for a gradient that nobody wants;
merging the adapter into W the same, and its digits in bfloat16.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lowtide.head.apply import linear_apply
from lowtide.head.options import HeadOptions
from lowtide.models.stock_functions import original

_plain_cross_entropy: Any = original(F.cross_entropy)
# h [..., r], B [V, r], a bias [V] or None, and s.
AdapterTerm = tuple[Tensor, Tensor, Tensor | None, float]


def adapted_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    adapters: Sequence[AdapterTerm],
    linear_bias: Tensor | None,
    weight: Tensor | None,
    reduction: str,
    ignore_index: int,
    label_smoothing: float,
    softcap: float | None,
    logit_scale: float | Tensor,
    options: HeadOptions | None,
) -> Tensor:
    """Return `lowtide.linear_cross_entropy` of logits to which ``adapters`` add before scale and cap."""
    settings = {
        "weight": weight,
        "reduction": reduction,
        "ignore_index": ignore_index,
        "label_smoothing": label_smoothing,
        "softcap": softcap,
        "logit_scale": logit_scale,
    }
    kept = target != ignore_index
    input, *inner = (_Kept.apply(kept, x) for x in (input, *(h for h, *_ in adapters)))  # type: ignore[no-untyped-call]
    loss: Tensor = linear_apply(
        _cross_entropy,
        input,
        linear_weight,
        target,
        *inner,
        linear_bias=linear_bias,
        params=([tuple(rest) for _, *rest in adapters], settings),
        out="token" if reduction == "none" else "sum",
        options=options,
    )
    if reduction == "none":
        return loss
    loss = loss.where(kept.any(), 0)  # without a token the gradients are 0 whatever comes from upstream
    if reduction == "sum":
        return loss
    counted = kept if weight is None else weight.detach()[target.where(kept, 0)] * kept
    total = counted.sum(dtype=loss.dtype)
    if weight is not None:
        return loss / total
    # without a token the mean is NaN, and gradients are 0 as stock's, not NaN
    return torch.where(total > 0, loss / total.clamp(min=1), torch.nan)


class _Kept(torch.autograd.Function):
    """Blocks gradients of ignored tokens: an infinite upstream factor would turn the stored zeros into NaN."""

    @staticmethod
    def forward(ctx: Any, kept: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(kept)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (kept,) = ctx.saved_tensors
        return None, grad.masked_fill(~kept.unsqueeze(-1), 0)


def _cross_entropy(logits: Tensor, target: Tensor, *rest: Any) -> Tensor:
    """Add what the adapters make of their inputs to rows of ``x W^T + b``, and take the loss.

    A function of this module, and not one made for each call, so that it is looked at once.
    """
    *inner, adapters, options = rest
    with torch.autocast(logits.device.type, enabled=False):
        for h, (b_Vr, bias_V, scale) in zip(inner, adapters, strict=True):
            # in the logits' own memory, where autograd allows it: logits without a gradient are a view made without
            out = logits if logits.requires_grad else None
            product = (h.to(logits.dtype), b_Vr.to(logits.dtype).T)
            logits = torch.addmm(logits, *product, alpha=scale) if out is None else out.addmm_(*product, alpha=scale)
            if bias_V is not None:
                logits = logits.add(bias_V, alpha=scale) if out is None else logits.add_(bias_V, alpha=scale)
        logit_scale, softcap = options["logit_scale"], options["softcap"]
        if isinstance(logit_scale, Tensor) or logit_scale != 1:
            logits = logits * logit_scale
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        weight = options["weight"]
        loss: Tensor = _plain_cross_entropy(
            logits,
            target,
            None if weight is None else weight.to(logits.dtype),
            ignore_index=options["ignore_index"],
            label_smoothing=options["label_smoothing"],
            reduction="none" if options["reduction"] == "none" else "sum",
        )
        return loss
