"""verl's log-probabilities and entropies by lowtide: importing this module replaces its two fused heads.

In every worker, before verl's own modules: ``VERL_USE_EXTERNAL_MODULES=lowtide.stacks.verl``, with
``actor_rollout_ref.model.use_fused_kernels=True`` and either of its backends. Written for verl 0.9.1.

A vocabulary that is sharded over several ranks goes to verl's own kernels, which return a part of the hidden states'
gradient.
"""

from typing import Any

import torch
import torch.distributed as dist
import verl.utils.experimental.torch_functional as torch_heads
import verl.utils.kernel.linear_cross_entropy as triton_heads
from torch import Tensor

from lowtide.head.token_stats import linear_token_stats

_TritonHead: Any = triton_heads.LinearCrossEntropy


def logprobs_and_entropies(
    hidden_states: Tensor, vocab_weights: Tensor, input_ids: Tensor, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return the log-probability of each token's target and the entropy of its distribution.

    ``z = hidden_states @ vocab_weights.T / temperature``, ``log p = z_y - lse(z)``, ``H = lse(z) - E_p[z]``.

    Args:
        hidden_states: [..., D].
        vocab_weights: [V, D].
        input_ids: The targets, [...].
        temperature: Divides the logits.

    Returns:
        tuple[Tensor, Tensor]: Both [...] in float32; verl's rounds entropies to the hidden states' dtype.
    """
    stats = linear_token_stats(
        hidden_states, vocab_weights, input_ids.long(), want=("logprob", "entropy"), logit_scale=1 / temperature
    )
    return stats.logprob, stats.entropy


class FusedLinearForPPO(torch.nn.Module):
    """verl's module of this name; ``chunk_size`` and ``impl_backend`` choose nothing."""

    def __init__(self, chunk_size: int = 512, impl_backend: str = "torch") -> None:
        super().__init__()
        self.chunk_size, self.impl_backend = chunk_size, impl_backend

    def forward(
        self, hidden_states: Tensor, vocab_weights: Tensor, input_ids: Tensor, temperature: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """Return what `logprobs_and_entropies` returns."""
        return logprobs_and_entropies(hidden_states, vocab_weights, input_ids, temperature)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float = 1.0,
    reduction: str = "none",
    dist_process_group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and entropies as verl's function of this name does, flat.

    Args:
        hidden: [..., D], N tokens.
        weight: [V, D].
        labels: The targets, [...].
        temperature: Divides the logits.
        reduction: Of the entropies; other than "none" goes to verl's own.
        dist_process_group: The ranks that share the vocabulary; more than one go to verl's own.

    Returns:
        tuple[Tensor, Tensor]: Both [N] in float32.
    """
    whole = dist_process_group is None or dist.get_world_size(dist_process_group) == 1
    if not whole or reduction != "none":
        theirs: tuple[Tensor, Tensor] = _TritonHead.apply(
            hidden, weight, labels, temperature, reduction, dist_process_group
        )
        return theirs
    return logprobs_and_entropies(hidden.flatten(0, -2), weight, labels.flatten(), temperature)


torch_heads.FusedLinearForPPO = FusedLinearForPPO
triton_heads.linear_cross_entropy = linear_cross_entropy
