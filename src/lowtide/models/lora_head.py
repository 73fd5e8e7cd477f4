"""The output embedding with LoRA: what remembers a call of it, so that its loss needs no logits.

Legend: hidden [..., D], logits [..., V], adapters of rank r.
"""

from typing import Any

from torch import Tensor, nn

from lowtide.arguments import is_dtensor
from lowtide.distributed.zero import gather_for
from lowtide.head.options import HeadOptions
from lowtide.models.adapters import AdaptedLinear, adapted_linear, is_lora, saved_module
from lowtide.models.eligibility import why_not_class, why_not_lazy
from lowtide.models.head_call import Forward, HeadCall
from lowtide.models.ordinary import are_plain_linears
from lowtide.models.parallel_style import style_of
from lowtide.models.report import PatchReport
from lowtide.models.sharded_head import sharded_call
from lowtide.models.steps import Step, rows_of

_LORA_IN_PARTS = "has LoRA on a weight that is in parts over ranks"


def called_head(outer: Any) -> Any:
    """Return the module that computes the logits when the output embedding is called: one of modules_to_save, or it."""
    found = saved_module(outer) if isinstance(outer, nn.Module) else outer
    return outer if isinstance(found, str) else found


def saved_layers(outer: Any) -> list[Any]:
    """Return the modules that a layer of modules_to_save may call; [] of any other output embedding."""
    children: Any = outer._modules if isinstance(outer, nn.Module) else {}
    if not {"original_module", "modules_to_save"} <= children.keys():
        return []
    return [children["original_module"], *children["modules_to_save"].children()]


def why_not_linear(head: nn.Module | None) -> str | None:
    """Return why ``head`` is no linear layer, with LoRA or without."""
    found = None if head is None else adapted_linear(head)
    if isinstance(found, AdaptedLinear) and head is not None and is_lora(head) and style_of(found.base) is not None:
        return _LORA_IN_PARTS
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
    hidden, why_not = args[0], why_not_class(head)
    if why_not is not None:  # before anything reads the weight: a parametrization computes it anew each time
        return why_not
    if is_dtensor(head.weight):
        in_parts = f"the output embedding {_LORA_IN_PARTS}"
        return in_parts if is_lora(head) else sharded_call(head, hidden, report, options)
    why_not = why_not_lazy(head, hidden)
    if why_not is not None:
        return why_not
    if not is_lora(head):
        return HeadCall(head, hidden, report, options)
    layer = adapted_linear(head)
    if isinstance(layer, str):
        return f"the output embedding {layer}"
    why_not = _why_not_inside(head, layer)
    if why_not is not None:
        return why_not
    parameters = tuple(p for linear in layer.linears for p in (linear.weight, linear.bias) if p is not None)
    if any(type(parameter) is not nn.Parameter for parameter in parameters):
        return "a weight of the output embedding's LoRA is not a plain Parameter"
    if not gather_for(head, parameters):
        return "DeepSpeed is gathering the output embedding's LoRA for a call of its own"
    return LoraHeadCall(head, hidden, layer, report, options)


def _why_not_inside(head: Any, layer: AdaptedLinear) -> str | None:
    """Return why a call of the layers inside may do more than linear layers do."""
    if are_plain_linears(layer.linears, tuple(module for module in layer.around if module is not head)):
        return None
    return "a layer of the output embedding's LoRA has hooks or a forward of its own"


class LoraHeadCall(HeadCall):
    """One call of an output embedding with LoRA, none of which may be active: logits that are built later are of now.

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

    def why_not_again(self) -> str | None:
        """Return why the head may do more now than it did then."""
        return super().why_not_again() or _why_not_inside(self.head, self._layer)

    @property
    def adapted(self) -> bool:
        """Whether adapters take part."""
        return bool(self._layer.adapters)

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

    def operands(
        self,
        head: nn.Linear,  # noqa: ARG002
        hidden: Tensor,
        steps: tuple[Step, ...],
    ) -> tuple[Tensor, Tensor, Tensor | None, dict[str, Any]]:
        """Return those of the layer beneath the adapters, and by name the adapters with the rows of their inputs."""
        base, adapters = self._layer.base, zip(self._inner, self._layer.adapters, strict=True)
        low_rank = [(rows_of(h, steps), adapter.b.weight, adapter.b.bias, adapter.scale) for h, adapter in adapters]
        return rows_of(hidden, steps), base.weight, base.bias, {"adapters": low_rank} if low_rank else {}
