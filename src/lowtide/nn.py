"""The modules: their parameters, around the functions."""

import math
from typing import Any

import torch
from torch import Tensor

from lowtide.errors import ArgumentValueError, message
from lowtide.head.cross_entropy import linear_cross_entropy
from lowtide.head.options import HeadOptions, Reduction
from lowtide.mlp.swiglu import check_level, check_plain, swiglu_mlp

__all__ = ["LinearCrossEntropyLoss", "SwiGLU"]


class LinearCrossEntropyLoss(torch.nn.Module):
    """`torch.nn.LinearCrossEntropyLoss` without the logits: same arguments, same state dict.

    The module owns the head: ``linear.weight`` [num_classes * prod(out_features), in_features], ``linear.bias`` and
    the buffer ``weight``, so state dicts load in both directions.

    Args:
        in_features: Size D of each hidden state.
        num_classes: Number of classes V.
        out_features: Axes of several outputs per token, each with its own weight; () for one.
        bias: Whether the head has a bias.
        device: Device of the head.
        dtype: dtype of the head.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
        weight: Class weights [V], or None.
        ignore_index: Target value of ignored tokens; None means -100.
        label_smoothing: From 0 to 1.
        options: Memory and implementation: see `lowtide.HeadOptions`, which replaces torch's own options.

    Shape:
        ``input`` [N, D] or [D] (with one output, any leading axes); ``target`` [N, *out_features]; the loss is a
        float32 scalar (float64 for float64), or of the target's shape with reduction "none".

    Example:
        >>> loss = LinearCrossEntropyLoss(16, 1000)
        >>> loss(torch.randn(8, 16), torch.randint(0, 1000, (8,))).backward()
    """

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        out_features: tuple[int, ...] = (),
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        reduction: Reduction = "mean",
        weight: Tensor | None = None,
        ignore_index: int | None = None,
        label_smoothing: float = 0.0,
        options: HeadOptions | None = None,
    ) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.out_features = tuple(out_features)
        self.reduction = reduction
        self.ignore_index = ignore_index
        self.label_smoothing = label_smoothing
        self.options = options
        self.weight: Tensor | None
        self.register_buffer("weight", weight)
        rows = num_classes * math.prod(self.out_features)
        self.linear = torch.nn.Linear(in_features, rows, bias=bias, device=device, dtype=dtype)

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """Return the loss of hidden states ``input`` against class indices ``target``."""
        ignore_index = -100 if self.ignore_index is None else self.ignore_index
        settings: dict[str, Any] = {"weight": self.weight, "ignore_index": ignore_index}
        settings |= {"label_smoothing": self.label_smoothing, "options": self.options}
        weight, bias, reduction = self.linear.weight, self.linear.bias, self.reduction
        if not self.out_features:
            return linear_cross_entropy(input, weight, target, linear_bias=bias, reduction=reduction, **settings)
        expected, K = (*input.shape[:-1], *self.out_features), math.prod(self.out_features)
        if target.shape != expected:
            raise ArgumentValueError(message("target", f"shape {list(expected)}", str(list(target.shape))))
        # Heads that read the same hidden states, one at a time: row v * K + k of the weight is class v of output k.
        # unbind, and not an index for each output: its backward fills one gradient, not K of the whole weight's size
        weights = weight.view(self.num_classes, K, weight.shape[1]).unbind(1)
        biases = [None] * K if bias is None else bias.view(self.num_classes, K).unbind(1)
        targets = target.reshape((*input.shape[:-1], K)).unbind(-1)
        settings["reduction"] = "none" if reduction == "none" else "sum"
        heads = zip(weights, targets, biases, strict=True)
        losses = torch.stack([linear_cross_entropy(input, w, y, linear_bias=b, **settings) for w, y, b in heads], -1)
        if reduction != "mean":
            return losses.view(expected) if reduction == "none" else losses.sum()
        kept = target != ignore_index
        if self.weight is None:
            return losses.sum() / kept.sum()
        # in the loss's dtype: a module cast to bfloat16 has class weights in it, whose sum would have 8 bits
        return losses.sum() / (self.weight.to(losses.dtype)[target.where(kept, 0)] * kept).sum()

    def extra_repr(self) -> str:
        """Return the settings, for ``repr``."""
        return (
            f"in_features={self.linear.in_features}, num_classes={self.num_classes}, out_features={self.out_features},"
            f" bias={self.linear.bias is not None}, reduction={self.reduction}, ignore_index={self.ignore_index},"
            f" label_smoothing={self.label_smoothing}, options={self.options}"
        )


class SwiGLU(torch.nn.Module):
    """The gated MLP ``(SiLU(x Wg^T) * x Wu^T) Wd^T``; ``checkpoint_level`` chooses what it saves for backward.

    The projections are bias-free `torch.nn.Linear` modules with the names of Hugging Face's Llama MLP, so state dicts
    load in both directions. This module's own forward reads their weights: under FSDP2 wrap this module or one that
    contains it, not the projections. They must be plain linear layers: if one was replaced (by a LoRA layer, a
    quantised one) or has hooks, forward raises.

    Args:
        hidden: Size D of each hidden state.
        intermediate: Size F of gate and up.
        checkpoint_level: 0 saves the input, gate and up, 1 the input alone: see `lowtide.swiglu_mlp`. An attribute that
            may be set at any time, as may ``tile_tokens``, which is None at first.
        device: Device of the weights.
        dtype: dtype of the weights.

    Shape:
        ``input`` [..., D], the output of the same shape.

    Example:
        >>> mlp = SwiGLU(16, 40, checkpoint_level=0)
        >>> mlp(torch.randn(2, 5, 16)).sum().backward()
    """

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        *,
        checkpoint_level: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.checkpoint_level = check_level(checkpoint_level)
        self.tile_tokens: int | None = None
        self.gate_proj = torch.nn.Linear(hidden, intermediate, bias=False, device=device, dtype=dtype)
        self.up_proj = torch.nn.Linear(hidden, intermediate, bias=False, device=device, dtype=dtype)
        self.down_proj = torch.nn.Linear(intermediate, hidden, bias=False, device=device, dtype=dtype)

    def forward(self, input: Tensor) -> Tensor:
        """Return the MLP's output for hidden states ``input``."""
        gate, up, down = self.gate_proj, self.up_proj, self.down_proj
        check_plain(gate_proj=gate, up_proj=up, down_proj=down)
        return swiglu_mlp(
            input,
            gate.weight,
            up.weight,
            down.weight,
            gate_bias=gate.bias,
            up_bias=up.bias,
            down_bias=down.bias,
            checkpoint_level=self.checkpoint_level,
            tile_tokens=self.tile_tokens,
        )

    def extra_repr(self) -> str:
        """Return the settings that the submodules do not show, for ``repr``."""
        return f"checkpoint_level={self.checkpoint_level}"
