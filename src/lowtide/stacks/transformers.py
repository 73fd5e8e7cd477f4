"""transformers' own hooks: layers for its `KernelConfig`, and an implementation of experts of the name "lowtide".

Importing this module registers the experts, for ``from_pretrained(..., experts_implementation="lowtide")`` or
``model.set_experts_implementation("lowtide")``. `lowtide.patch` does more, and needs neither.
"""

from typing import Any

from torch import Tensor, nn
from torch.nn.functional import silu
from transformers.activations import ACT2FN
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from lowtide.arguments import operand_dtype
from lowtide.errors import UnsupportedError, message
from lowtide.layers import rms_norm, rotary
from lowtide.mlp.experts import Form, experts_mlp


class RMSNorm(nn.Module):
    """For "RMSNorm": Llama's norm, whose rows are rounded before they are multiplied by the weight."""

    can_torch_compile = True
    weight: Tensor
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return `rms_norm` of the rows."""
        return rms_norm(hidden_states, self.weight, self.variance_epsilon, rounding="before_weight")


class RMSNormRoundedLast(nn.Module):
    """For "RMSNorm" of models that round after the weight, such as OLMo 2."""

    can_torch_compile = True
    weight: Tensor
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return `rms_norm` of the rows."""
        return rms_norm(hidden_states, self.weight, self.variance_epsilon)


class Rotary(nn.Module):
    """For "rotary_pos_emb": halves, with tables of a head's size or (gpt-oss) of half of it."""

    can_torch_compile = True

    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        """Return `rotary` of queries and keys."""
        pairs = "halves" if cos.shape[-1] == q.shape[-1] else "short"
        return rotary(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim, promote=True, pairs=pairs)


_ACTIVATIONS = {
    type(ACT2FN["silu"]): "silu",
    type(ACT2FN["gelu_pytorch_tanh"]): "gelu_tanh",
    nn.SiLU: "silu",
    silu: "silu",
}


def experts(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Return the output [T, D] of a mixture's experts by grouped GEMMs, which save gate and up alone: `experts_mlp`.

    Args:
        self: The module with the weights of all experts.
        hidden_states: [T, D].
        top_k_index: The experts of each token [T, K].
        top_k_weights: Their factors [T, K].

    Raises:
        UnsupportedError: The experts are not ``down(act(gate(x)) * up(x))`` with SiLU or tanh-GELU.
    """
    act: Any = getattr(self, "act_fn", None)
    activation = _ACTIVATIONS.get(type(act) if isinstance(act, nn.Module) else act)
    own_gate = type(self)._apply_gate.__module__ != "transformers.integrations.moe"
    if activation is None or own_gate or not self.has_gate or self.has_post_expert_norm:
        expected, hint = "down(act(gate(x)) * up(x)) with SiLU or tanh-GELU", "Use lowtide.patch(model)."
        raise UnsupportedError(message('experts_implementation="lowtide"', expected, type(self).__name__, hint))
    biases = (self.gate_up_proj_bias, self.down_proj_bias) if self.has_bias else (None, None)
    return experts_mlp(
        hidden_states,
        top_k_index,
        top_k_weights,
        (self.gate_up_proj, self.down_proj, *biases),
        form=Form(activation),
        transposed=self.is_transposed,
        dtype=operand_dtype(hidden_states),
        checkpoint_level=0,
    )


ALL_EXPERTS_FUNCTIONS.register("lowtide", experts)
