"""Calls of the gated MLP as its tests make them: on the leaves that `support.mlp` returns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lowtide import swiglu_mlp

BIASES = ("gate_bias", "up_bias", "down_bias")


def call(leaves: Sequence[Any], **options: Any) -> Tensor:
    return swiglu_mlp(*leaves[:4], **dict(zip(BIASES, leaves[4:], strict=True)), **options)


def grads(y: Tensor, tensors: Sequence[Any], upstream: Tensor | None = None, **kwargs: Any) -> list[Tensor]:
    trained = [t for t in tensors if t is not None and t.requires_grad]
    return list(torch.autograd.grad(y, trained, upstream, **kwargs))


def in_float64(tensors: Sequence[Any]) -> list[Any]:
    return [None if t is None else t.detach().double().requires_grad_() for t in tensors]


def plain_mlp(leaves: Sequence[Any], activation: str) -> Tensor:
    """The MLP in plain PyTorch, with every intermediate."""
    x, gate, up, down, gate_bias, up_bias, down_bias = leaves
    a = F.linear(x, gate, gate_bias)
    act = F.silu(a) if activation == "silu" else F.gelu(a, approximate="tanh")
    return F.linear(act * F.linear(x, up, up_bias), down, down_bias)
