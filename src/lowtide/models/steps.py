"""The operations applied to the logits since the head.

Legend: hidden [..., D], logits [..., V].
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# The class of tensors' methods as PyTorch has them, whatever is assigned to torch.Tensor.
TensorBase: Any = Tensor.__base__


@dataclass(frozen=True)
class Step:
    """An operation on the logits that can be replayed: ``function(logits, *args)``."""

    function: Callable[..., Tensor]
    args: tuple[Any, ...] = ()
    # the same for hidden states, if it moves or selects rows and leaves the V columns alone
    of_hidden: Callable[[Tensor], Tensor] | None = None
    keeps_rows: bool = False  # the rows are the same, in the same order; their shape may differ


@dataclass(frozen=True)
class LogitArguments:
    """Steps as arguments of `linear_cross_entropy` and the other functions of the head."""

    logit_scale: float | Tensor  # applied after `offsets`
    softcap: float | None
    offsets: tuple[Tensor, ...]  # vectors [V] that are added like a bias
    normalised: bool  # the steps end in a log-softmax
    sign: int  # the factor of that log-softmax, 1 or -1


# Dtypes of logits: to one of these they are only rounded. float8 is for a quantisation that is meant to be seen.
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

# After detach the rest has no graph.
KEEPS_VALUES = (TensorBase.to, TensorBase.contiguous, TensorBase.clone, TensorBase.detach)


def fold(steps: tuple[Step, ...]) -> LogitArguments | None:
    """Return steps as arguments of lowtide's functions, None where they are not of that form.

    Any ``tanh(z * a / b) * c`` is a cap at c of ``z * (a * c / b)``. Changes of dtype and shape are left out.
    """
    above: float | Tensor = 1.0
    below: float | Tensor = 1.0
    cap: Any = None
    offsets: list[Tensor] = []
    normalised, sign, untouched = False, 1, True
    for step in steps:
        function, args = step.function, step.args
        if step.of_hidden is not None or function in KEEPS_VALUES:
            continue
        if function is TensorBase.neg and normalised:
            sign = -sign
        elif normalised:
            return None
        elif function is TensorBase.add and untouched:
            offsets.append(args[0].flatten())
            continue
        elif function is TensorBase.log_softmax:
            normalised = True
        elif function is TensorBase.mul or function is TensorBase.neg:
            factor = args[0] if args else -1.0
            above, cap = (above * factor, None) if cap is None else (above, cap * factor)
        elif function is TensorBase.div and (cap is None or _is_usable(args[0])):
            below, cap = (below * args[0], None) if cap is None else (below, cap / args[0])
        elif function is TensorBase.tanh and cap is None:
            cap = 1.0
        else:
            return None
        untouched = False
    if not _is_usable(above) or not _is_usable(below):
        return None
    scale = above / below
    if cap is not None:
        if isinstance(cap, Tensor) or not 0 < abs(cap) < math.inf:
            return None
        scale, cap = above * cap / below, abs(cap)  # tanh is odd
    return LogitArguments(scale, cap, tuple(offsets), normalised, sign)


def _is_usable(factor: float | Tensor) -> bool:
    return isinstance(factor, Tensor) or (factor != 0 and math.isfinite(factor))


def rows_of(tensor: Tensor, steps: Iterable[Step]) -> Tensor:
    """Return the rows of a tensor [..., *] that ``steps``, which all move or select rows, take of the logits."""
    for step in steps:
        assert step.of_hidden is not None
        tensor = step.of_hidden(tensor)
    return tensor


def replay(logits: Tensor, steps: tuple[Step, ...]) -> Tensor:
    """Return ``logits`` after the steps."""
    for step in steps:
        logits = step.function(logits, *step.args)
    return logits


def same_steps(ours: Sequence[Step], others: Sequence[Step]) -> bool:
    """Whether two sequences of steps have the same functions and arguments."""
    values = ([x for step in steps for x in (step.function, *step.args)] for steps in (ours, others))
    return _same(*values)


def _same(ours: list[Any], others: list[Any]) -> bool:
    return len(ours) == len(others) and all(map(_equal, ours, others))


def _equal(x: Any, y: Any) -> bool:
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        return x is y or (x.shape == y.shape and torch.equal(x, y))
    return not isinstance(x, Tensor) and not isinstance(y, Tensor) and bool(x == y)
