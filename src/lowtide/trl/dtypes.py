"""Which dtype TRL's functions multiply in, and how the heads get to the same.

TRL casts the weight: to autocast's dtype where autocast is on, elsewhere to that of the hidden states.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

# hidden states, weight [V, D], bias [V] or None
Head = tuple[Tensor, Tensor, Tensor | None]
_NARROW = (torch.float16, torch.bfloat16)


def why_not_tensors(side: str, head: Head) -> str | None:
    """Return why lowtide cannot take a head as TRL does; ``side`` goes before the arguments' names."""
    for name, tensor in zip(("hidden", "weight", "bias"), head, strict=True):
        if tensor is None:
            continue
        if type(tensor) not in (Tensor, nn.Parameter):
            return f"{side}{name} is a {type(tensor).__name__}"
        if hasattr(tensor, "ds_status"):  # gathered for the call alone, and gone before backward
            return f"{side}{name} is partitioned by DeepSpeed ZeRO-3"
    hidden, dtypes = head[0], _dtypes(head)
    if _is_autocast_on(hidden):
        return f"{side}hidden, weight or bias is float64 under autocast" if torch.float64 in dtypes else None
    if len(dtypes) > 1 and not (hidden.dtype in _NARROW and dtypes <= {hidden.dtype, torch.float32}):
        return f"{side}hidden is {hidden.dtype}, and weight or bias is not"
    return None


def why_not_together(student: Head, teacher: Head) -> str | None:
    """Return why two heads, each one fit by itself, cannot run in one call."""
    if _is_autocast_on(student[0]):
        return None
    dtypes = _dtypes(student), _dtypes(teacher)
    if (torch.float64 in dtypes[0]) != (torch.float64 in dtypes[1]):
        return "one of student and teacher is float64"
    if max(map(len, dtypes)) > 1 and student[0].dtype != teacher[0].dtype:  # the autocast of one would cast the other
        return "student's and teacher's hidden states differ in dtype, and a weight or bias from them"
    return None


def as_trl_casts(head: Head) -> AbstractContextManager[object]:
    """Return the context in which a head casts as TRL does: autocast for a float32 weight and narrower hidden states.

    Backward then returns the weight's gradient in float32, as TRL's does, and not rounded to the hidden states' dtype.
    """
    hidden = head[0]
    if _is_autocast_on(hidden) or len(_dtypes(head)) == 1:
        return nullcontext()
    return torch.autocast(hidden.device.type, dtype=hidden.dtype)


def _dtypes(head: Head) -> set[torch.dtype]:
    return {tensor.dtype for tensor in head if tensor is not None}


def _is_autocast_on(hidden: Tensor) -> bool:
    kind = hidden.device.type
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
