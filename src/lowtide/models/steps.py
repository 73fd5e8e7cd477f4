"""What was done to logits since the head: the rows that were taken, and the operations on their values.

Legend: hidden [..., D], logits [..., V].
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

from torch import Tensor

# The class of tensors' methods as PyTorch has them, whatever is assigned to torch.Tensor.
TensorBase: Any = Tensor.__base__


@dataclass(frozen=True)
class Step:
    """An operation on the logits that can be done again.

    Args:
        run: The operation.
        kind: What it does to values: nothing ("rows", "detach"), "cast", "scale", "tanh", "bias" or "log_softmax".
        by: The factor of a scale, or the vector [V] of a bias.
    """

    run: Callable[[Tensor], Tensor]
    kind: str = "rows"
    by: Any = None


def replay(logits: Tensor, steps: Iterable[Step]) -> Tensor:
    """Return ``logits`` after the steps."""
    for step in steps:
        logits = step.run(logits)
    return logits


class RowView(NamedTuple):
    """A view of the rows of a tensor, its strides and offset counted in rows: the same of logits and hidden states."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, view: Tensor, V: int) -> Self | None:
        """Return what ``view``, of the memory of logits [..., V], has of its rows; None if it has no whole rows."""
        if not view.dim() or view.shape[-1] != V or view.stride(-1) != 1:
            return None
        *strides, offset = (*view.stride()[:-1], view.storage_offset())
        if any(number % V for number in (*strides, offset)):
            return None
        return cls(tuple(view.shape[:-1]), tuple(stride // V for stride in strides), offset // V)

    def is_all(self, rows: int) -> bool:
        """Whether these are all the rows, in their order."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return self.offset == 0 and expected == rows


# Rows, one after another: a view, or the numbers of those that a mask has chosen.
Rows = tuple[RowView | Tensor, ...]


def rows_of(tensor: Tensor, rows: Rows) -> Tensor:
    """Return ``rows`` of a tensor [..., *]."""
    for taken in rows:
        width = tensor.shape[-1]
        if isinstance(taken, Tensor):
            tensor = tensor.flatten(0, -2)[taken]
        elif taken.is_all(tensor.shape[:-1].numel()):
            tensor = tensor.reshape(*taken.shape, width)
        else:
            whole = tensor.contiguous()
            strides = (*(stride * width for stride in taken.strides), 1)
            offset = whole.storage_offset() + taken.offset * width
            tensor = whole.as_strided((*taken.shape, width), strides, offset)
    return tensor


@dataclass(frozen=True)
class LogitArguments:
    """Steps as arguments of `linear_cross_entropy` and the other functions of the head."""

    logit_scale: float = 1.0  # applied after `offsets`
    softcap: float | None = None
    offsets: tuple[Tensor, ...] = ()  # vectors [V] that are added like a bias
    normalised: bool = False  # the steps end in a log-softmax
    sign: int = 1  # the factor of that log-softmax, 1 or -1


def fold(steps: Iterable[Step]) -> LogitArguments | None:
    """Return steps as arguments of lowtide's functions, None where they are not of that form.

    Any ``tanh(z * a) * c`` is a cap at c of ``z * (a * c)``. Changes of dtype and shape are left out.
    """
    scale, sign, normalised = 1.0, 1, False
    cap: float | None = None
    offsets: list[Tensor] = []
    for step in steps:
        kind, by = step.kind, step.by
        if kind in ("rows", "detach", "cast"):
            continue
        if normalised and kind == "scale" and by == -1:
            sign = -sign
        elif normalised:
            return None
        elif kind == "log_softmax":
            normalised = True
        elif kind == "bias" and scale == 1 and cap is None:
            offsets.append(by)
        elif kind == "tanh" and cap is None:
            cap = 1.0
        elif kind != "scale":
            return None
        elif cap is None:
            scale *= by
        else:
            cap *= by
    if cap is not None:
        scale, cap = scale * cap, abs(cap)  # tanh is odd
    if any(number == 0 or not math.isfinite(number) for number in (scale, 1 if cap is None else cap)):
        return None
    return LogitArguments(scale, cap, tuple(offsets), normalised, sign)
