"""How the ranks of a call share its head, from the user's `VocabShard` or DTensors."""

from typing import Any

import torch
from torch import Tensor

from lowtide.arguments import is_dtensor
from lowtide.errors import ArgumentTypeError, ArgumentValueError, message
from lowtide.head.ranks.parallel import Ranks
from lowtide.head.ranks.shard import VocabShard, shard_of_dtensor


def ranks_of(
    input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, shard: object, *, scale: Tensor | None = None
) -> Ranks:
    """Return how the ranks share a head of DTensors, or with ``shard`` of this rank's rows, all of which is checked."""
    recorded = torch.is_grad_enabled()
    scale_trained = recorded and scale is not None and scale.requires_grad
    trained = scale_trained or (recorded and input.requires_grad)
    tensors = {"input": input, "linear_weight": linear_weight, "linear_bias": linear_bias}
    mesh = axis = None
    if shard is not None:
        shard = _given_shard(tensors, shard)
    else:
        placed: Any = input if is_dtensor(input) else linear_weight
        for name, tensor in tensors.items():
            if tensor is not None and not is_dtensor(tensor):
                hint = "Wrap it with DTensor.from_local or distribute_tensor, or take to_local() of the others."
                raise ArgumentTypeError(message(name, "a DTensor, as others of this call are", "a plain tensor", hint))
        mesh = placed.device_mesh
        shard = shard_of_dtensor("linear_weight", linear_weight, mesh)
        if linear_bias is not None:
            shard_of_dtensor("linear_bias", linear_bias, mesh)
        axis = _axis_of(input)
    return Ranks(shard, input.shape[:-1], input.device, axis, mesh, trained=trained, scale_trained=scale_trained)


def _axis_of(input: Any) -> int | None:
    placement = input.placements[0]
    if placement.is_replicate():
        return None
    if input.device_mesh.ndim == 1 and placement.is_shard() and placement.dim < input.dim() - 1:
        return int(placement.dim)
    expected = "placement Replicate(), or Shard of one axis of tokens"
    raise ArgumentValueError(message("input", expected, str(input.placements), "Redistribute it first."))


def _given_shard(tensors: dict[str, Tensor | None], shard: object) -> VocabShard:
    if not isinstance(shard, VocabShard):
        raise ArgumentTypeError(message("vocab_shard", "lowtide.VocabShard or None", type(shard).__name__))
    for name, tensor in tensors.items():
        if is_dtensor(tensor):
            hint = "The placements of a DTensor are its shard: leave vocab_shard out."
            raise ArgumentTypeError(message(name, "a plain tensor with vocab_shard", "a DTensor", hint))
    weight = tensors["linear_weight"]
    if weight is not None and weight.dim() and weight.shape[0] != shard.rows:
        expected = f"shape [{shard.rows}, D], as vocab_shard has"
        raise ArgumentValueError(message("linear_weight", expected, str(list(weight.shape))))
    return shard
