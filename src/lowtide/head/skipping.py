"""Gradients that skip tiles of the softmax: whether a call does, and what the last one did."""

import torch
from torch import Tensor

from lowtide.arguments import check_tensor
from lowtide.errors import UnsupportedError, message
from lowtide.head.backends import skips_ignored
from lowtide.head.call import Head
from lowtide.head.vocabulary_order import Asked, Report, known_order, leaf_of, order_of

OPERANDS = torch.bfloat16


def skipping(head: Head) -> Head:
    """Return the head of a call that may skip tiles: with the number of its order, negative where it is dense."""
    hopper = skips_ignored(head.input.device)
    reasons = {
        "its kernels are for GPUs of compute capability 9.0 and Triton 3.6 or newer": not hopper,
        f"its kernels take bfloat16, and the operands are {head.dtype}": head.dtype != OPERANDS,
        "the weight gets no gradient": not head.weight_VD.requires_grad,
        "the weight is a result of the call, of which nothing is remembered; give the parameter or a view of it": (
            not leaf_of(head.weight_VD).is_leaf
        ),
    }
    for reason, holds in reasons.items():
        if holds:
            hint = f"No tile is skipped: {reason}."
            raise UnsupportedError(message("options", "skip=None", f"skip={head.skip}", hint))
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return head
    known = order_of(head.weight_VD, Asked(head.skip, head.skip_unbiased, head.skip_seed))
    if known.begin():
        return head._replace(order=known.number, ignored_tokens="skip")
    return head._replace(order=-known.number)


def skip_report(linear_weight: Tensor) -> Report | None:
    """Return what the last call with this weight and ``HeadOptions(skip=...)`` did; None before one skipped tiles.

    The host waits for the device. See docs/skipping.md.

    Args:
        linear_weight: The tensor itself that `linear_cross_entropy` or `linear_logprobs` got.

    Returns:
        Report: ``share`` of the tiles that are computed, ``dropped_mass``, ``logit_error``, ``input_error``,
            ``weight_error``, ``threshold``, ``calls``, and ``dense`` of them that skipped nothing.

    Raises:
        ArgumentTypeError: ``linear_weight`` is no tensor.

    Example:
        >>> skip_report(torch.randn(50, 8)) is None
        True
    """
    known = known_order(check_tensor("linear_weight", linear_weight))
    return None if known is None else known.report()
