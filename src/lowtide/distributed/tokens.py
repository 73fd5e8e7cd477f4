"""Labels and denominators where each rank has tokens of its own: other sequences, or its part of each sequence."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lowtide.arguments import check_tensor
from lowtide.errors import ArgumentTypeError, ArgumentValueError, message


def count_items(target: Tensor, *, ignore_index: int = -100, group: Any = None, averaged: bool = True) -> Tensor:
    """Return the ``num_items`` with which the ranks' losses make up the mean over all ranks' kept tokens.

    A mean on each rank weighs a token by how few its rank has. With K tokens kept on W ranks and ``num_items = K / W``,
    each rank's loss is W / K times its sum, and their mean is the sum over all tokens divided by K; the gradients
    likewise, as DDP and FSDP2 average them over the ranks. A rank without any kept token has a loss of 0 that is
    connected to its inputs, and takes part in every collective as the others do. So does this function: one number is
    summed over the ranks, on the device.

    Args:
        target: This rank's labels, already shifted where they are to be: any shape, also of no token.
        ignore_index: Labels of this value do not count.
        group: The process group whose gradients are averaged. None: all ranks.
        averaged: Whether the engine averages gradients over the ranks, as DDP and FSDP2 do. False where it sums them:
            K itself is returned.

    Returns:
        Tensor: 0-d float32, never below 1 / W.

    Raises:
        ArgumentTypeError: ``target`` is no tensor of integers.

    Example:
        >>> items = count_items(labels[..., 1:])
        >>> loss = linear_cross_entropy(hidden, head.weight, labels, shift=True, num_items=items)
    """
    if check_tensor("target", target).is_floating_point() or target.is_complex():
        raise ArgumentTypeError(message("target", "class indices, an integer tensor", str(target.dtype)))
    count = (target != ignore_index).sum(dtype=torch.float64)
    dist.all_reduce(count, group=group)
    ranks = dist.get_world_size(group) if averaged else 1
    return (count.clamp(min=1) / ranks).float()


def shift_labels(labels: Tensor, *, ignore_index: int = -100, group: Any = None) -> Tensor:
    """Return the label of each position's next token, where each rank holds its part of the sequence.

    The last position's next token is the first of the next part that has any; after the last one there is none. One
    column of labels is exchanged. Parts that are not in the ranks' order (each rank an early and a late piece, to share
    causal attention's work evenly) have to be shifted before they are cut.

    Args:
        labels: This rank's labels [..., T_r], the leading axes the same on every rank. A rank may have no position.
        ignore_index: What stands where there is no next token.
        group: The ranks that hold the sequence, in its order. None: all ranks.

    Returns:
        Tensor: [..., T_r], for `linear_cross_entropy` without ``shift``.

    Raises:
        ArgumentValueError: ``labels`` has no axis.
    """
    if check_tensor("labels", labels).dim() == 0:
        expected = "shape [..., T]: this rank's part of the sequence"
        raise ArgumentValueError(message("labels", expected, str(list(labels.shape))))
    # a rank without a position takes part as the others do: a column of nothing, and a 0 beside it
    column = labels[..., :1] if labels.shape[-1] else labels.new_full((*labels.shape[:-1], 1), ignore_index)
    mine = torch.cat((column.reshape(-1), column.new_full((1,), min(1, labels.shape[-1]))))
    told = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(told, mine, group=group)
    following = torch.full_like(mine[:-1], ignore_index)
    for first in reversed(told[dist.get_rank(group) + 1 :]):
        following = first[:-1].where(first[-1] != 0, following)
    return torch.cat((labels[..., 1:], following.view_as(column)), -1)[..., : labels.shape[-1]]
