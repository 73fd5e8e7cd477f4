"""What tests of the experts share: their operands, and every pair of a token and an expert in plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lowtide.mlp.experts import Form, experts_mlp

GPT_OSS = Form("silu", 0.8, 1.702, 1.0, "interleaved")
FORMS = [GPT_OSS, Form("silu"), Form("gelu_tanh", joined="up first"), Form("silu", limit=0.5)]
SIZES = (23, 3, 5, 10, 14)  # T tokens, K of the E experts each, D, F


def operands(
    sizes: Sequence[int] = SIZES,
    *,
    dtype: torch.dtype = torch.float64,
    bias: bool = True,
    transposed: bool = False,
    device: str = "cpu",
    empty: int | None = 2,
) -> tuple[list[Any], Tensor]:
    """Return the leaves x, routing, gate_up, down and two biases, and the ids; expert ``empty`` has no token."""
    T, K, E, D, size = sizes
    generator = torch.Generator().manual_seed(T + E)

    def leaf(*shape: int, scale: float = 1.0) -> Tensor:
        numbers = torch.randn(*shape, generator=generator, dtype=torch.float64) * scale
        return numbers.to(device, dtype).requires_grad_()

    gate_up, down = (E, 2 * size, D), (E, D, size)
    if transposed:
        gate_up, down = (E, D, 2 * size), (E, size, D)
    leaves: list[Any] = [leaf(T, D), leaf(T, K), leaf(*gate_up, scale=D**-0.5), leaf(*down, scale=size**-0.5)]
    leaves += [leaf(E, 2 * size), leaf(E, D)] if bias else [None, None]
    scores = torch.rand(T, E, generator=generator)
    if empty is not None:
        scores[:, empty] = -1.0
    return leaves, scores.topk(K).indices.to(device)


def fused(leaves: Sequence[Any], ids: Tensor, form: Form, **options: Any) -> Tensor:
    x, routing, *weights = leaves
    settings = {"transposed": False, "dtype": x.dtype, "checkpoint_level": 0, **options}
    return experts_mlp(x, ids, routing, weights, form=form, **settings)


def by_pairs(leaves: Sequence[Any], ids: Tensor, form: Form, *, transposed: bool = False) -> Tensor:
    """The experts with a weight for every pair, in plain PyTorch: every intermediate of every pair."""
    x, routing, gate_up, down, gate_up_bias, down_bias = leaves
    if transposed:
        gate_up, down = gate_up.mT, down.mT
    E = gate_up.shape[0]
    inside, ids = ids < E, ids.clamp(max=E - 1)
    both = torch.einsum("td,tkfd->tkf", x, gate_up[ids])
    if gate_up_bias is not None:
        both = both + gate_up_bias[ids]
    half = both.shape[-1] // 2
    g, u = {
        "gate first": (both[..., :half], both[..., half:]),
        "up first": (both[..., half:], both[..., :half]),
        "interleaved": (both[..., ::2], both[..., 1::2]),
    }[form.joined]
    g, u = g.clamp(max=form.limit), u.clamp(-form.limit, form.limit)
    act = g * torch.sigmoid(form.alpha * g) if form.activation == "silu" else F.gelu(g, approximate="tanh")
    y = torch.einsum("tkf,tkdf->tkd", act * (u + form.shift), down[ids])
    if down_bias is not None:
        y = y + down_bias[ids]
    return (y * (routing * inside)[..., None].to(y.dtype)).sum(1)


def with_gradients(y: Tensor, leaves: Sequence[Any], **kwargs: Any) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    upstream = torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y.device, y.dtype)
    trained = [t for t in leaves if t is not None and t.requires_grad]
    return [y.detach(), *torch.autograd.grad(y, trained, upstream, **kwargs)]
