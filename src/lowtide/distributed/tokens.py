"""Labels and denominators for ranks with different tokens: other sequences, or parts of each sequence."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lowtide.arguments import check_tensor
from lowtide.errors import ArgumentTypeError, ArgumentValueError, message


def count_items(target: Tensor, *, ignore_index: int = -100, group: Any = None, averaged: bool = True) -> Tensor:
    """Return the ``num_items`` with which the mean of the ranks' losses is the mean over all ranks' valid tokens.

    A mean per rank would weigh a token more if its rank has few. With K valid tokens on W ranks and
    ``num_items = K / W``, each rank's loss is W / K times its sum, and their mean is the sum over all tokens divided by
    K; so are the gradients, which DDP and FSDP2 average over the ranks. A rank without a valid token has a loss of 0
    that is connected to its inputs, and takes part in every collective. This function is one too: it sums one number
    over the ranks, on the device.

    Args:
        target: This rank's labels, already shifted if they need to be: any shape, also empty.
        ignore_index: Labels of this value are not counted.
        group: The process group whose gradients are averaged. None: all ranks.
        averaged: Whether the engine averages gradients over the ranks, as DDP and FSDP2 do. False if it sums them:
            the result is K itself.

    Returns:
        Tensor: 0-d float32, never below 1 / W.

    Raises:
        ArgumentTypeError: ``target`` is not a tensor of integers.

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
    """Return the label of each position's next token if each rank has its part of the sequence.

    The last position's next token is the first of the next nonempty part; the last part has none. One column of labels
    is exchanged. Parts that are not in the ranks' order (such as an early and a late piece per rank, to balance causal
    attention) have to be shifted before they are split.

    Args:
        labels: This rank's labels [..., T_r], the leading axes the same on every rank. A rank may have no position.
        ignore_index: The label if there is no next token.
        group: The ranks of the sequence, in its order. None: all ranks.

    Returns:
        Tensor: [..., T_r], for `linear_cross_entropy` without ``shift``.

    Raises:
        ArgumentValueError: ``labels`` has no axis.
    """
    if check_tensor("labels", labels).dim() == 0:
        expected = "shape [..., T]: this rank's part of the sequence"
        raise ArgumentValueError(message("labels", expected, str(list(labels.shape))))
    # a rank without a position takes part too: an ignored column, and a 0
    column = labels[..., :1] if labels.shape[-1] else labels.new_full((*labels.shape[:-1], 1), ignore_index)
    mine = torch.cat((column.reshape(-1), column.new_full((1,), min(1, labels.shape[-1]))))
    columns = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(columns, mine, group=group)
    following = torch.full_like(mine[:-1], ignore_index)
    for first in reversed(columns[dist.get_rank(group) + 1 :]):
        following = first[:-1].where(first[-1] != 0, following)
    return torch.cat((labels[..., 1:], following.view_as(column)), -1)[..., : labels.shape[-1]]
