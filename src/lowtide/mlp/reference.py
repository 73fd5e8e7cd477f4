"""The plain-PyTorch twin of `lowtide.swiglu_mlp`, with every intermediate: the specification."""

import torch.nn.functional as F
from torch import Tensor


def act(gate: Tensor, activation: str) -> Tensor:
    """Return the activation of ``gate``: SiLU, or GELU in its tanh approximation."""
    return F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")


def swiglu_mlp(
    input: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    down_weight: Tensor,
    *,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    activation: str = "silu",
) -> Tensor:
    """Return ``(act(x Wg^T + bg) * (x Wu^T + bu)) Wd^T + bd``; arguments as in `lowtide.swiglu_mlp`."""
    gate, up = F.linear(input, gate_weight, gate_bias), F.linear(input, up_weight, up_bias)
    return F.linear(act(gate, activation) * up, down_weight, down_bias)
