"""Output embeddings beside a plain linear layer, with a record of one call: with LoRA, sharded over ranks.

With LoRA the logits are ``x W^T + b + s h B^T`` with ``h = drop(x) A^T``, a few numbers per token.

Legend: hidden x [..., D], logits [..., V] of which a rank has V_r, an adapter of rank r.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lowtide.arguments import is_dtensor
from lowtide.distributed.zero import gather_for
from lowtide.head.apply import linear_apply
from lowtide.head.options import HeadOptions
from lowtide.head.ranks.shard import shard_of_dtensor
from lowtide.models.adapters import AdaptedLinear, adapted_linear, is_lora
from lowtide.models.eligibility import are_plain_linears, why_not_class, why_not_lazy, why_not_now
from lowtide.models.head_call import Forward, HeadCall, Running
from lowtide.models.instance import children_of
from lowtide.models.parallel_style import style_aside, style_of, why_not_fused
from lowtide.models.steps import Rows, rows_of

# h [..., r], B [V, r] and s.
AdapterTerm = tuple[Tensor, Tensor, float]
_LORA_SHARDED = "has LoRA on a sharded weight"


def why_not_linear(head: nn.Module) -> str | None:
    """Return why ``head`` is no linear layer, with LoRA or without."""
    found = adapted_linear(head)
    if isinstance(found, AdaptedLinear):
        return _LORA_SHARDED if is_lora(head) and style_of(found.base) is not None else None
    layer = children_of(head).get("base_layer", head)
    hint = " (list it in llm_int8_skip_modules to train without logits)"
    return found + hint * type(layer).__module__.startswith("bitsandbytes.")


def with_what(head: nn.Module) -> str:
    """Return the report's text about the adapter that is active now."""
    found = adapted_linear(head)
    return ", LoRA with it" if isinstance(found, AdaptedLinear) and found.adapter else ""


def head_call(head: Any, args: tuple[Any, ...], kwargs: dict[str, Any], running: Running) -> HeadCall | str:
    """Return a record of this call of the head, or why it must return real logits."""
    if len(args) != 1 or kwargs:
        return "the output embedding was called with more than hidden states"
    hidden, why_not = args[0], why_not_class(head)
    if why_not is not None:  # before anything reads the weight: a parametrization computes it anew each time
        return why_not
    if is_dtensor(head.weight) or style_aside(head) is not None:
        if is_lora(head):
            return f"the output embedding {_LORA_SHARDED}"
        return sharded_call(head, hidden, running)
    if not is_lora(head):
        return why_not_lazy(head, hidden) or HeadCall(head, hidden, running)
    layer = adapted_linear(head)
    if isinstance(layer, str):
        return f"the output embedding {layer}"
    why_not = why_not_lazy(head, hidden) or _why_not_inside(head, layer)
    if why_not is not None:
        return why_not
    parameters = [p for linear in layer.linears for p in (linear.weight, linear.bias) if p is not None]
    if any(type(parameter) is not nn.Parameter for parameter in parameters):
        return "a weight of the output embedding's LoRA is not a plain Parameter"
    if not gather_for(head, parameters):
        return "DeepSpeed is gathering the output embedding's LoRA for a call of its own"
    return LoraHeadCall(head, hidden, layer, running)


def _why_not_inside(head: Any, layer: AdaptedLinear) -> str | None:
    """Return why a call of the layers inside may do more than linear layers do."""
    if are_plain_linears(layer.linears, tuple(module for module in layer.around if module is not head)):
        return None
    return "a layer of the output embedding's LoRA has hooks or a forward of its own"


class LoraHeadCall(HeadCall):
    """One call of an output embedding with LoRA; logits built later use the adapter of this call.

    The adapter's ``h`` [..., r] is computed at once, so that dropout draws where the head's own code draws, and the
    loss and logits built later see the same.
    """

    def __init__(self, head: Any, hidden: Tensor, layer: AdaptedLinear, running: Running) -> None:
        self._layer = layer
        adapter = layer.adapter
        self._h: Tensor | None = None
        if adapter is not None:
            self._h = adapter.a(adapter.dropout(hidden.to(adapter.a.weight.dtype)))
        self.only_loss = adapter is not None
        super().__init__(head, hidden, running)

    def why_not_again(self) -> str | None:
        """Return why the head may do more now than it did then."""
        return super().why_not_again() or _why_not_inside(self.head, self._layer)

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """Return what the logits are computed from, in the order in which `vjp` returns gradients."""
        base, adapter = self._layer.base, self._layer.adapter
        return self.hidden, base.weight, base.bias, self._h, None if adapter is None else adapter.b.weight

    def _logits(self, forward: Forward, tensors: tuple[Tensor | None, ...]) -> Tensor:  # noqa: ARG002
        logits: Tensor = self._layer.base(tensors[0])
        adapter = self._layer.adapter
        return logits if adapter is None else (logits + adapter.b(tensors[3]) * adapter.scale).to(logits.dtype)

    def operands(self, hidden: Tensor, rows: Rows) -> tuple[Tensor, Tensor, Tensor | None, dict[str, Any]]:
        """Return those of the base layer, and the adapter with the rows of its input as a keyword argument."""
        base, adapter, h = self._layer.base, self._layer.adapter, self._h
        more: dict[str, Any] = {}
        if adapter is not None and h is not None:
            more["adapter"] = rows_of(h, rows), adapter.b.weight, adapter.scale
        return rows_of(hidden, rows), base.weight, base.bias, more


def adapted_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    adapter: AdapterTerm,
    linear_bias: Tensor | None,
    options: HeadOptions | None,
    **settings: Any,
) -> Tensor:
    """Return `lowtide.linear_cross_entropy` of logits to which an adapter adds before scale and cap.

    ``settings`` are its ``weight``, ``reduction``, ``ignore_index``, ``label_smoothing``, ``softcap`` and
    ``logit_scale``. A chunk at a time goes through `lowtide.linear_apply`, and the function adds ``s h B^T`` to
    ``x W^T``, so a frozen W costs neither a copy nor a gradient. One linear layer over [x, h] with the weight
    [W, s B] would cost both: at D=4096, V=128256 and bfloat16 a GiB each, and a GEMM of N D V for an unused gradient.
    The same holds for merging the adapter into W, which also rounds it to bfloat16.
    """
    weight: Tensor | None = settings["weight"]
    reduction = settings["reduction"]
    kept = target != settings["ignore_index"]
    # 0 for ignored tokens: a NaN among theirs would be in the gradients of the weights, which sum over all tokens
    h, b_Vr, scale = adapter
    input, h = (x.where(kept.unsqueeze(-1), 0) for x in (input, h))
    loss: Tensor = linear_apply(
        _cross_entropy,
        input,
        linear_weight,
        target,
        h,
        linear_bias=linear_bias,
        params=(b_Vr, scale, settings),
        out="token" if reduction == "none" else "sum",
        options=options,
    )
    if reduction == "none":
        return loss
    loss = loss.where(kept.any(), 0)  # without a token the gradients are 0 whatever comes from upstream
    if reduction == "sum":
        return loss
    counted = kept if weight is None else weight.detach()[target.where(kept, 0)] * kept
    total: Tensor = counted.sum(dtype=loss.dtype)
    if weight is not None:
        return loss / total
    # without a token the mean is NaN, and gradients are 0 as stock's, not NaN
    return torch.where(total > 0, loss / total.clamp(min=1), torch.nan)


def _cross_entropy(
    logits: Tensor, target: Tensor, h: Tensor, b_Vr: Tensor, scale: float, options: dict[str, Any]
) -> Tensor:
    """Add what the adapter makes of its input to rows of ``x W^T + b``, and take the loss.

    A function of this module, and not one made for each call, so that it is looked at once.
    """
    with torch.autocast(logits.device.type, enabled=False):
        logits = logits.addmm(h.to(logits.dtype), b_Vr.to(logits.dtype).T, alpha=scale)
        logit_scale, softcap = options["logit_scale"], options["softcap"]
        if isinstance(logit_scale, Tensor) or logit_scale != 1:
            logits = logits * logit_scale
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        weight = options["weight"]
        loss: Tensor = cross_entropy(
            logits,
            target,
            None if weight is None else weight.to(logits.dtype),
            ignore_index=options["ignore_index"],
            label_smoothing=options["label_smoothing"],
            reduction="none" if options["reduction"] == "none" else "sum",
        )
        return loss


def sharded_call(head: Any, hidden: Any, running: Running) -> HeadCall | str:
    """Return a record of a call of a head whose weight is a DTensor, or why it must return real logits."""
    style = style_aside(head)
    if style is None:
        return "the output embedding's weight is sharded, and not by ColwiseParallel"
    if type(hidden) is not Tensor and not is_dtensor(hidden):
        return f"the hidden states are a {type(hidden).__name__} of {getattr(hidden, 'dtype', 'no dtype')}"
    why_not = why_not_fused(head, hidden, why_not_now(head, hidden))
    if why_not is not None:
        return why_not
    hidden = style.enter(head, hidden)
    if is_dtensor(hidden):
        hidden = hidden.full_tensor()
        hidden = hidden if type(hidden) is Tensor else hidden.clone()  # it is being gathered: this waits
    return ShardedHeadCall(head, hidden, running)


class ShardedHeadCall(HeadCall):
    """One call of an output embedding whose classes are sharded; ``hidden`` is whole on each rank, and so its gradient.

    The weight is a DTensor with ``Shard(0)`` on a mesh of one axis, the tensor-parallel one. All ranks of the mesh make
    the same calls on the same tokens. Only what is equal on all ranks decides what becomes of the logits: types,
    shapes, options.
    """

    sharded = True

    def _logits(self, forward: Forward, tensors: tuple[Tensor | None, ...]) -> Tensor:
        from torch.distributed.tensor import DTensor, Replicate

        weight: Any = self.head.weight
        hidden: Any = DTensor.from_local(tensors[0], weight.device_mesh, [Replicate()], run_check=False)  # type: ignore[arg-type]
        return forward(hidden)

    def operands(self, hidden: Tensor, rows: Rows) -> tuple[Tensor, Tensor, Tensor | None, dict[str, Any]]:
        """Return plain tensors, and the range of this rank's classes as a keyword argument."""
        weight: Any = self.head.weight
        bias: Any = self.head.bias
        bias = None if bias is None else bias.to_local()
        shard = shard_of_dtensor("linear_weight", weight, weight.device_mesh)
        return rows_of(hidden, rows), weight.to_local(), bias, {"vocab_shard": shard}
