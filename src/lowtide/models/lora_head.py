"""The output embedding with LoRA: its loss without the logits, adapters included.

The logits ``x W^T + b + sum of s_i h_i B_i^T``, with ``h_i = drop(x) A_i^T`` of a few numbers a token, go through
`lowtide.linear_apply`: a chunk of ``x W^T`` at a time, to which the function adds its ``h_i B_i^T`` in place and takes
the loss. A frozen W then costs neither a copy nor a gradient. One linear layer over [x, h] with the weight [W, s B]
would cost both: at D=4096, V=128256 and bfloat16 a GiB each, and a product of N D V for a gradient that nobody wants;
merging the adapter into W the same, and its digits in bfloat16.

Legend: hidden [..., D], logits [..., V], adapters of rank r.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowtide.head.apply import linear_apply
from lowtide.head.options import HeadOptions
from lowtide.models.adapters import AdaptedLinear, adapted_linear, is_lora, saved_module
from lowtide.models.eligibility import why_not_lazy
from lowtide.models.head_call import Forward, HeadCall
from lowtide.models.ordinary import are_plain_linears, is_ordinary
from lowtide.models.report import PatchReport


def called_head(outer: Any) -> Any:
    """Return the module that computes the logits when the output embedding is called: one of modules_to_save, or it."""
    found = saved_module(outer) if isinstance(outer, nn.Module) else outer
    return outer if isinstance(found, str) else found


def why_not_linear(head: nn.Module | None) -> str | None:
    """Return why ``head`` is no linear layer, with LoRA or without."""
    found = None if head is None else adapted_linear(head)
    return found if isinstance(found, str) else None


def with_what(head: nn.Module) -> str:
    """Return what the report says of the adapters that are there now."""
    found = adapted_linear(head) if is_lora(head) else None
    return ", LoRA with it" if isinstance(found, AdaptedLinear) and found.adapters else ""


def head_call(
    head: Any, args: tuple[Any, ...], kwargs: dict[str, Any], report: PatchReport, options: HeadOptions | None
) -> HeadCall | str:
    """Return what remembers this call of the head, or why it must return real logits."""
    if len(args) != 1 or kwargs:
        return "the output embedding was called with more than hidden states"
    hidden = args[0]
    why_not = why_not_lazy(head, hidden)
    if why_not is not None:
        return why_not
    if not is_lora(head):
        return HeadCall(head, hidden, report, options)
    layer = adapted_linear(head)
    if isinstance(layer, str):
        return f"the output embedding {layer}"
    if not are_plain_linears(layer.linears, tuple(module for module in layer.around if module is not head)):
        return "a layer of the output embedding's LoRA has hooks or a forward of its own"
    parameters = tuple(p for linear in layer.linears for p in (linear.weight, linear.bias) if p is not None)
    if not is_ordinary((hidden,), parameters):
        return "a weight of the output embedding's LoRA is not a plain Parameter"
    return (
        LoraHeadCall(head, hidden, layer, report, options)
        if layer.adapters
        else HeadCall(head, hidden, report, options)
    )


class LoraHeadCall(HeadCall):
    """One call of an output embedding with LoRA.

    What the adapters make of the hidden states [..., r] is computed at once, so that dropout draws where the head's own
    code draws, and the loss and logits built later see the same.

    Args:
        head: The patched output embedding, a LoRA layer.
        hidden: Its input [..., D].
        layer: What it runs.
        report: Where to count what becomes of the logits.
        options: For `linear_apply`.
    """

    def __init__(
        self, head: Any, hidden: Tensor, layer: AdaptedLinear, report: PatchReport, options: HeadOptions | None
    ) -> None:
        self._layer = layer
        inner, x = [], hidden
        for adapter in layer.adapters:
            x = x.to(adapter.a.weight.dtype)  # one after another, as the layer does
            inner.append(adapter.a(adapter.dropout(x)))
        self._inner = tuple(inner)
        super().__init__(head, hidden, report, options)

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """Return what the logits are computed from, in the order in which `vjp` returns gradients."""
        base, adapters = self._layer.base, self._layer.adapters
        weights = (parameter for adapter in adapters for parameter in (adapter.b.weight, adapter.b.bias))
        return (self.hidden, base.weight, base.bias, *self._inner, *weights)

    def _logits(self, forward: Forward, tensors: tuple[Tensor | None, ...]) -> Tensor:  # noqa: ARG002
        hidden, inner = tensors[0], tensors[3 : 3 + len(self._inner)]
        logits: Tensor = self._layer.base(hidden)
        dtype = logits.dtype
        for adapter, h in zip(self._layer.adapters, inner, strict=True):
            added: Tensor = adapter.b(h)
            logits = logits + added * adapter.scale
        return logits.to(dtype)

    def _loss(self, target: Tensor, **kwargs: Any) -> Tensor:
        reduction, ignore_index, weight = kwargs["reduction"], kwargs["ignore_index"], kwargs["weight"]
        base, adapters = self._layer.base, self._layer.adapters
        loss: Tensor = linear_apply(
            _cross_entropy,
            self.hidden,
            base.weight,
            target,
            *self._inner,
            linear_bias=base.bias,
            params=([(adapter.b.weight, adapter.b.bias, adapter.scale) for adapter in adapters], kwargs),
            out="token" if reduction == "none" else "sum",
            options=self.options,
        )
        if reduction != "mean":
            return loss
        kept = target != ignore_index
        counted = kept if weight is None else weight.detach()[target.where(kept, 0)] * kept
        mean: Tensor = loss / counted.sum(dtype=loss.dtype)
        return mean


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
        loss: Tensor = F.cross_entropy(
            logits,
            target,
            None if weight is None else weight.to(logits.dtype),
            ignore_index=options["ignore_index"],
            label_smoothing=options["label_smoothing"],
            reduction="none" if options["reduction"] == "none" else "sum",
        )
        return loss
