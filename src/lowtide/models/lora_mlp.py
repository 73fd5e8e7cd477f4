"""LoRA on a gated MLP's projections, as `lowtide.mlp.adapted` takes it."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lowtide.mlp.adapted import Adapter, Projection
from lowtide.models.adapters import AdaptedLinear, LowRankAdapter


def why_not_together(layers: Sequence[AdaptedLinear]) -> str | None:
    """Return why the adapters of an MLP's projections cannot run along with its products."""
    adapters = [adapter for layer in layers for adapter in layer.adapters]
    if not adapters:
        return None
    if len({linear.weight.dtype for adapter in adapters for linear in (adapter.a, adapter.b)}) > 1:
        return "its LoRA weights are of several dtypes"
    if any(adapter.drops for adapter in adapters):
        if any(len(layer.adapters) > 1 for layer in layers):
            return "it has several LoRA adapters with dropout at a time"
        if torch.compiler.is_compiling():
            return "its LoRA adapters have dropout, and it is compiled"
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return "its LoRA adapters have dropout, and a CUDA graph is captured"  # their generators are their own
    return None


def low_rank_projections(layers: Sequence[AdaptedLinear]) -> list[Projection]:
    """Return each projection with its adapters as one."""
    return [Projection(layer.base.weight, _bias(layer), _adapter(layer.adapters)) for layer in layers]


def _adapter(adapters: Sequence[LowRankAdapter]) -> Adapter | None:
    if not adapters:
        return None
    if len(adapters) == 1:
        (only,) = adapters
        p = float(only.dropout.p) if only.drops else 0.0  # type: ignore[arg-type]
        return Adapter(only.a.weight, only.b.weight, float(only.scale), p)
    # Several are one of the sum of their ranks: a copy of what is thin.
    scales = {float(adapter.scale) for adapter in adapters}
    scale = scales.pop() if len(scales) == 1 else 1.0
    sides = [adapter.b.weight if not scales else adapter.b.weight * adapter.scale for adapter in adapters]
    return Adapter(torch.cat([adapter.a.weight for adapter in adapters]), torch.cat(sides, 1), scale, 0.0)


def _bias(layer: AdaptedLinear) -> Tensor | None:
    """Return the sum of the projection's bias and its adapters'."""
    bias: Tensor | None = layer.base.bias
    for adapter in layer.adapters:
        if adapter.b.bias is not None:
            more = adapter.b.bias * adapter.scale
            bias = more if bias is None else bias + more
    return bias
