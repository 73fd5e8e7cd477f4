"""Output embeddings beside a plain linear layer, with a record of one call: with LoRA, in 4 bits, sharded over ranks.

With LoRA the logits are ``x W^T + b + sum of s_i h_i B_i^T`` with ``h_i = drop(x) A_i^T``, a few numbers per token. A
weight in 4 bits is dequantised once for what is computed of the logits, and freed after it.

Legend: hidden x [..., D], logits [..., V] of which a rank has V_r, adapters of rank r.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lowtide.arguments import is_dtensor, operand_dtype
from lowtide.distributed.zero import gather_for, is_partitioned
from lowtide.head.apply import linear_apply
from lowtide.head.options import HeadOptions
from lowtide.head.ranks.shard import shard_of_dtensor
from lowtide.models.adapters import AdaptedLinear, adapted_linear, is_lora
from lowtide.models.eligibility import are_plain_linears, why_not_class, why_not_lazy, why_not_now
from lowtide.models.four_bit import gemm_dtype, is_four_bit, is_here, kind_of, packed_weight, rounds_input
from lowtide.models.head_call import Forward, HeadCall
from lowtide.models.instance import children_of
from lowtide.models.parallel_style import Style, is_sharded_along, style_aside, style_of, why_not_agreed
from lowtide.models.report import PatchReport
from lowtide.models.steps import Rows, RowView, rows_of

# h [..., r], B [V, r], a bias [V] or None, and s.
AdapterTerm = tuple[Tensor, Tensor, Tensor | None, float]
_LORA_SHARDED = "has LoRA on a sharded weight"


def why_not_linear(head: nn.Module | None) -> str | None:
    """Return why ``head`` is no linear layer, with LoRA or without, in 4 bits or not."""
    found = None if head is None else adapted_linear(head, four_bit=True)
    if isinstance(found, AdaptedLinear) and head is not None and is_lora(head) and style_of(found.base) is not None:
        return _LORA_SHARDED
    if isinstance(found, str) and head is not None and rounds_input(children_of(head).get("base_layer") or head):
        found += " (list it in llm_int8_skip_modules to train without logits)"
    return found if isinstance(found, str) else None


def with_what(head: nn.Module) -> str:
    """Return the report's text about the adapters that are active now, and about a weight in 4 bits."""
    found = adapted_linear(head, four_bit=True) if is_lora(head) or is_four_bit(head) else ""
    if isinstance(found, str):
        return ""
    packed = f", {kind_of(found.base)} weight dequantised for it" if found.four_bit else ""
    return ", LoRA with it" * bool(found.adapters) + packed


def head_call(
    head: Any, args: tuple[Any, ...], kwargs: dict[str, Any], report: PatchReport, options: HeadOptions | None
) -> HeadCall | str:
    """Return a record of this call of the head, or why it must return real logits."""
    if len(args) != 1 or kwargs:
        return "the output embedding was called with more than hidden states"
    hidden, why_not = args[0], why_not_class(head)
    if why_not is not None:  # before anything reads the weight: a parametrization computes it anew each time
        return why_not
    if is_dtensor(head.weight):
        if is_lora(head) or is_four_bit(head):
            return f"the output embedding {_LORA_SHARDED if is_lora(head) else 'is in 4 bits, and sharded'}"
        return sharded_call(head, hidden, report, options)
    if not is_lora(head) and not is_four_bit(head):
        return why_not_lazy(head, hidden) or HeadCall(head, hidden, report, options)
    layer = adapted_linear(head, four_bit=True)
    if isinstance(layer, str):
        return f"the output embedding {layer}"
    dtype, packed = None, layer.base.weight if layer.four_bit else None
    if packed is not None:
        if type(hidden) is not Tensor or not is_here(packed) or is_partitioned(packed):
            return "the output embedding is in 4 bits, and sharded, or called with another kind of tensor"
        dtype, other = gemm_dtype(layer.base, hidden), operand_dtype(hidden)
        if dtype != other:
            given = f"{layer.base.compute_dtype}, its bnb_4bit_compute_dtype"
            return f"the output embedding is in 4 bits and computes in {given}, not in {other}"
    why_not = why_not_lazy(head, hidden, dtype) or _why_not_inside(head, layer)
    if why_not is not None:
        return why_not
    parameters = [p for linear in layer.linears for p in (linear.weight, linear.bias) if p is not None]
    if any(type(parameter) is not nn.Parameter for parameter in parameters if parameter is not packed):
        return "a weight of the output embedding's LoRA is not a plain Parameter"
    if not gather_for(head, parameters):
        return "DeepSpeed is gathering the output embedding's LoRA for a call of its own"
    return LayerHeadCall(head, hidden, layer, report, options)


def _why_not_inside(head: Any, layer: AdaptedLinear) -> str | None:
    """Return why a call of the layers inside may do more than linear layers do."""
    others = layer.around + layer.linears[: layer.four_bit]
    if are_plain_linears(layer.linears[layer.four_bit :], tuple(module for module in others if module is not head)):
        return None
    return "a layer of the output embedding's LoRA has hooks or a forward of its own"


class LayerHeadCall(HeadCall):
    """One call of an output embedding with LoRA or in 4 bits; logits built later use the adapters of this call.

    The adapters' ``h`` [..., r] are computed at once, so that dropout draws where the head's own code draws, and the
    loss and logits built later see the same.
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
        self.only_loss = bool(inner)
        super().__init__(head, hidden, report, options)
        if layer.four_bit:
            self.weight_dtype = operand_dtype(hidden)

    @property
    def classes(self) -> int:
        """Return V, which the shape of a weight in 4 bits does not have."""
        return self._layer.base.out_features if self._layer.four_bit else super().classes

    def dtype(self) -> torch.dtype:
        """Return the dtype of the logits: a layer in 4 bits returns its input's under autocast too."""
        return self.hidden.dtype if self._layer.four_bit else super().dtype()

    def why_not_again(self) -> str | None:
        """Return why the head may do more now than it did then."""
        return super().why_not_again() or _why_not_inside(self.head, self._layer)

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """Return what the logits are computed from, in the order in which `vjp` returns gradients."""
        base, adapters = self._layer.base, self._layer.adapters
        weights = (parameter for adapter in adapters for parameter in (adapter.b.weight, adapter.b.bias))
        return (self.hidden, base.weight, base.bias, *self._inner, *weights)

    def _logits(self, forward: Forward, tensors: tuple[Tensor | None, ...]) -> Tensor:
        hidden, inner = tensors[0], tensors[3 : 3 + len(self._inner)]
        assert hidden is not None
        base = self._layer.base
        logits = forward(hidden) if base is self.head else base(hidden)
        dtype = logits.dtype
        for adapter, h in zip(self._layer.adapters, inner, strict=True):
            added: Tensor = adapter.b(h)
            logits = logits + added * adapter.scale
        return logits.to(dtype)

    def operands(
        self,
        head: nn.Linear,  # noqa: ARG002
        hidden: Tensor,
        rows: Rows,
    ) -> tuple[Tensor, Tensor, Tensor | None, dict[str, Any]]:
        """Return those of the base layer, and the adapters with the rows of their inputs as a keyword argument."""
        base, adapters = self._layer.base, zip(self._inner, self._layer.adapters, strict=True)
        weight: Tensor = base.weight
        bias: Tensor | None = base.bias
        if self._layer.four_bit:
            weight = packed_weight(base, self.weight_dtype).dense()
            bias = None if bias is None else bias.to(weight.dtype)
        low_rank = [(rows_of(h, rows), adapter.b.weight, adapter.b.bias, adapter.scale) for h, adapter in adapters]
        return rows_of(hidden, rows), weight, bias, {"adapters": low_rank} if low_rank else {}


def adapted_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    adapters: Sequence[AdapterTerm],
    linear_bias: Tensor | None,
    options: HeadOptions | None,
    **settings: Any,
) -> Tensor:
    """Return `lowtide.linear_cross_entropy` of logits to which ``adapters`` add before scale and cap.

    ``settings`` are its ``weight``, ``reduction``, ``ignore_index``, ``label_smoothing``, ``softcap`` and
    ``logit_scale``. A chunk at a time goes through `lowtide.linear_apply`, and the function adds each ``s h B^T`` to
    ``x W^T`` in place, so a frozen W costs neither a copy nor a gradient. One linear layer over [x, h] with the weight
    [W, s B] would cost both: at D=4096, V=128256 and bfloat16 a GiB each, and a GEMM of N D V for an unused gradient.
    The same holds for merging the adapter into W, which also rounds it to bfloat16.
    """
    weight: Tensor | None = settings["weight"]
    reduction = settings["reduction"]
    kept = target != settings["ignore_index"]
    # 0 for ignored tokens: a NaN among theirs would be in the gradients of the weights, which sum over all tokens
    input, *inner = (x.where(kept.unsqueeze(-1), 0) for x in (input, *(h for h, *_ in adapters)))
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
    total: Tensor = counted.sum(dtype=loss.dtype)
    if weight is not None:
        return loss / total
    # without a token the mean is NaN, and gradients are 0 as stock's, not NaN
    return torch.where(total > 0, loss / total.clamp(min=1), torch.nan)


def _cross_entropy(logits: Tensor, target: Tensor, *rest: Any) -> Tensor:
    """Add what the adapters make of their inputs to rows of ``x W^T + b``, and take the loss.

    A function of this module, and not one made for each call, so that it is looked at once.
    """
    *inner, adapters, options = rest
    with torch.autocast(logits.device.type, enabled=False):
        for h, (b_Vr, bias_V, scale) in zip(inner, adapters, strict=True):
            # in the logits' own memory, where autograd allows it: logits without a gradient are a view made without
            add = logits.addmm_ if logits.requires_grad else logits.addmm
            logits = add(h.to(logits.dtype), b_Vr.to(logits.dtype).T, alpha=scale)
            if bias_V is not None:
                logits = (logits.add_ if logits.requires_grad else logits.add)(bias_V, alpha=scale)
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


def sharded_call(head: Any, hidden: Any, report: PatchReport, options: HeadOptions | None) -> HeadCall | str:
    """Return a record of a call of a head whose weight is a DTensor, or why it must return real logits."""
    weight, style = head.weight, style_aside(head)
    mesh = weight.device_mesh
    if style is not None and style.mesh != mesh:
        return "the output embedding's weight is not on the mesh of what wraps it"
    for name, parameter in (("weight", weight), ("bias", head.bias)):
        if parameter is None:
            continue
        if not is_dtensor(parameter) or parameter.device_mesh != mesh:
            return f"the output embedding's {name} is not on the mesh of its weight"
        if mesh.ndim != 1 or not is_sharded_along(parameter.placements[0], 0):
            return f"the output embedding's {name} has placements {parameter.placements}, not Shard(0) on one axis"
    if is_dtensor(hidden):
        if hidden.device_mesh != mesh:
            return "the hidden states are not on the mesh of the output embedding"
        placement = hidden.placements[0]
    elif type(hidden) is not Tensor:
        return f"the hidden states are a {type(hidden).__name__} of {getattr(hidden, 'dtype', 'no dtype')}"
    elif style is None:
        return "the output embedding's weight is a DTensor, and the hidden states are not"
    else:
        placement = style.input_placement
    if not placement.is_replicate():
        if not any(is_sharded_along(placement, axis) for axis in range(hidden.dim() - 1)):
            return f"the hidden states have placement {placement}, not Replicate() or Shard of an axis of tokens"
        hidden = hidden if is_dtensor(hidden) else _placed(hidden, mesh, placement)
    why_not = why_not_now(head, hidden)
    if style is None:  # with one, the ranks have agreed before
        why_not = why_not_agreed(head, mesh, hidden.device, why_not)
    if why_not is not None:
        return why_not
    return ShardedHeadCall(head, hidden, style, report, options)


class ShardedHeadCall(HeadCall):
    """One call of an output embedding whose classes are sharded; ``hidden`` is whole on each rank, or a DTensor.

    The weight is a DTensor with ``Shard(0)`` on a mesh of one axis, the tensor-parallel one. All ranks of the mesh make
    the same calls on the same tokens. Only what is equal on all ranks decides what becomes of the logits: types,
    shapes, placements, options.
    """

    sharded = True

    def __init__(
        self, head: Any, hidden: Tensor, style: Style | None, report: PatchReport, options: HeadOptions | None
    ) -> None:
        self._mesh: Any = head.weight.device_mesh
        self.gives_dtensor = style is None or not style.gives_local
        self.only_loss = is_dtensor(hidden) or self.gives_dtensor
        super().__init__(head, hidden, report, options)

    def operands(self, head: Any, hidden: Any, rows: Rows) -> tuple[Tensor, Tensor, Tensor | None, dict[str, Any]]:
        """Return plain tensors and the range of their classes; DTensors for sharded tokens of which each rank has rows.

        Where only some rows of sharded tokens are asked for, all are gathered: a row's number does not tell its rank.
        """
        weight, bias = head.weight, head.bias
        if is_dtensor(hidden):
            if not hidden.placements[0].is_replicate():
                N = hidden.shape[:-1].numel()
                if all(isinstance(taken, RowView) and taken.is_all(N) for taken in rows):
                    return hidden, weight, bias, {}
                hidden = hidden.redistribute(placements=[_replicate()])
            hidden = hidden.to_local()  # its gradient is the whole one on each rank, as that of Replicate() is
        shard = shard_of_dtensor("linear_weight", weight, self._mesh)
        bias = None if bias is None else bias.to_local()
        return rows_of(hidden, rows), weight.to_local(), bias, {"vocab_shard": shard}

    def of_classes(self, vector: Tensor, weight: Tensor) -> Tensor:
        """Return the part of a vector [V] that goes with ``weight``: this rank's shard, or a DTensor."""
        from torch.distributed.tensor import Shard

        part = _placed(vector, self._mesh, _replicate()).redistribute(placements=[Shard(0)])
        return part if is_dtensor(weight) else part.to_local()  # type: ignore[no-any-return]

    def as_given(self, result: Any) -> Tensor:
        """Return a result as a DTensor if the logits are one, else as a plain tensor."""
        if is_dtensor(result) == self.gives_dtensor:
            return result  # type: ignore[no-any-return]
        return _placed(result, self._mesh, _replicate()) if self.gives_dtensor else result.to_local()  # type: ignore[no-any-return]


def _placed(tensor: Tensor, mesh: Any, placement: Any) -> Any:
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(tensor, mesh, [placement], run_check=False)


def _replicate() -> Any:
    from torch.distributed.tensor import Replicate

    return Replicate()
