"""Several outputs a token, each with its own weight: what `torch.nn.LinearCrossEntropyLoss` calls out_features."""

import math
from typing import Any

import torch
from torch import Tensor

from lowtide.errors import ArgumentValueError, message
from lowtide.head.cross_entropy import linear_cross_entropy
from lowtide.head.options import HeadOptions


def multi_output_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    out_features: tuple[int, ...],
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    options: HeadOptions | None = None,
) -> Tensor:
    """Return the cross entropy of K = prod(out_features) heads that read the same hidden states, one head at a time.

    Args:
        input: [N, D], or [D] for one token.
        linear_weight: [V * K, D], row ``v * K + k`` for class v of output k.
        target: Class indices [N, *out_features], or [*out_features] for one token.
        out_features: The axes of the outputs; () means one output.
        linear_bias: [V * K], or None.
        weight: As in `linear_cross_entropy`, and so are the arguments after it. "mean" is over all outputs of all
            tokens.

    Raises:
        ArgumentValueError: ``target`` has another shape.
    """
    K = math.prod(out_features)
    expected = (*input.shape[:-1], *out_features)
    if target.shape != expected:
        raise ArgumentValueError(message("target", f"shape {list(expected)}", str(list(target.shape))))
    # unbind, and not an index for each output: its backward fills one gradient, not K of the whole weight's size
    rows, D = linear_weight.shape
    weights = linear_weight.view(rows // K, K, D).unbind(1)
    biases = [None] * K if linear_bias is None else linear_bias.view(rows // K, K).unbind(1)
    targets = target.reshape((*input.shape[:-1], K)).unbind(-1)
    settings: dict[str, Any] = {"weight": weight, "ignore_index": ignore_index, "label_smoothing": label_smoothing}
    settings |= {"reduction": "none" if reduction == "none" else "sum", "options": options}
    losses = [
        linear_cross_entropy(input, w, y, linear_bias=b, **settings)
        for w, y, b in zip(weights, targets, biases, strict=True)
    ]
    if reduction == "none":
        return torch.stack(losses, -1).view(expected)
    total = torch.stack(losses).sum()
    if reduction == "sum":
        return total
    kept = target != ignore_index
    if weight is None:
        return total / kept.sum()
    # in the loss's dtype: a module cast to half precision has class weights of it, whose sum has 8 digits or overflows
    return total / (weight.to(total.dtype)[target.where(kept, 0)] * kept).sum()
