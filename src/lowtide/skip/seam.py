"""What the head takes from this room: the one file of it that the head imports, and that no file of the room does."""

import torch

from lowtide.errors import UnsupportedError, message
from lowtide.head.backends import skips_ignored
from lowtide.head.call import Head
from lowtide.skip.losses import TiledCrossEntropy
from lowtide.skip.memory import leaf_of, remembered_of
from lowtide.skip.order import sorted_rows

__all__ = ["OPERANDS", "TiledCrossEntropy", "begin", "sorted_rows"]

OPERANDS = torch.bfloat16


def begin(head: Head) -> Head:
    """Begin a call; return its head, with what is remembered of its weight where it skips tiles."""
    reasons = {
        "its kernels are for GPUs of compute capability 9.0 and Triton 3.6 or newer": (
            not skips_ignored(head.input.device)
        ),
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
    known = remembered_of(head.weight_VD, head.skip)
    return head._replace(remembered=known, ignored_tokens="skip") if known.begin() else head
