"""The operations applied to the logits since the head, and log-probabilities that were returned without logits.

Legend: hidden [..., D], logits [..., V].
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C import TensorBase
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True)
class Step:
    """An operation on the logits that can be replayed: ``function(logits, *args)``."""

    function: Callable[..., Tensor]
    args: tuple[Any, ...] = ()
    # the same for hidden states, if it moves or selects rows and leaves the V columns alone
    of_hidden: Callable[[Tensor], Tensor] | None = None
    repeats: bool = False  # it may select a row more than once
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


NO_CLASS = -1  # in the place of a class where there is none: an ignored label


class _Returned(NamedTuple):
    """Some log-probabilities of the logits after ``steps``."""

    steps: tuple[Step, ...]
    classes: Tensor  # [..., K], `NO_CLASS` for all K of a row where none was returned
    values: Tensor  # [..., K]
    extent: range  # of the rows' numbers


class ReturnedLogprobs:
    """The log-probabilities returned without logits for one call of the head, with hidden states [*leading, D].

    The same ones, built later, get these values: two orders of summation differ in the last digits, and comparisons see
    that. Half of the ranks ``(lp > lp.gather(-1, y)).sum(-1)`` would be one too high.
    """

    def __init__(self, leading: torch.Size) -> None:
        self._leading = leading
        self._returned: list[_Returned] = []

    def add(self, steps: tuple[Step, ...], classes: Tensor, values: Tensor, *, sign: int) -> None:
        """Record ``values`` [..., K], ``sign`` times the log-probabilities of ``classes``, after ``steps``.

        Those that were returned before get the values that they had then, in place. ``classes`` are `NO_CLASS` for all
        K of a row or for none.
        """
        values = values.data
        for before in self._alike(steps, values.dtype):
            known, given = self._of_rows(before, steps, values.device)
            order = known.sort(-1)
            at = torch.searchsorted(order.values, classes).clamp(max=known.shape[-1] - 1)
            found = (order.values.gather(-1, at) == classes) & (classes != NO_CLASS)
            given = sign * given.gather(-1, order.indices.gather(-1, at)).to(values.dtype)
            values.copy_(given.where(found, values))
        if not self._repeats_rows(steps, classes.device):
            # Copies: the caller may change its classes, and the values that it gets, in place.
            self._returned.append(_Returned(steps, classes.clone(), sign * values, self._extent(steps)))

    def replay(self, logits: Tensor, steps: tuple[Step, ...]) -> Tensor:
        """Return ``logits`` after the steps, with the returned values where these are the same log-probabilities."""
        # what repeats rows gives tensors that cannot be written to
        once = next((n for n, step in enumerate(steps) if step.repeats), len(steps))
        ends = range(once, 0, -1) if self._returned else ()
        end = next((n for n in ends if (folded := fold(steps[:n])) is not None and folded.normalised), 0)
        logits = replay(logits, steps[:end])
        for before in self._alike(steps[:end], logits.dtype) if end else ():
            folded = fold(steps[:end])
            assert folded is not None
            classes, given = self._of_rows(before, steps[:end], logits.device)
            # past the graph, in which log-softmax keeps its result: to rounding it stays the same
            _put(logits.data, classes, (folded.sign * given).to(logits.dtype))
        return replay(logits, steps[end:])

    def _alike(self, steps: tuple[Step, ...], dtype: torch.dtype) -> list[_Returned]:
        """Return those of the same scale, bias and soft cap, latest first: the first ones are written last.

        Without those of fewer bits than ``dtype``, and those whose rows are all before or behind the ones of ``steps``.
        """
        rows, eps = self._extent(steps), torch.finfo(dtype).eps
        fine = [each for each in reversed(self._returned) if torch.finfo(each.values.dtype).eps <= eps]
        near = [each for each in fine if _overlap(each.extent, rows)]
        return [given for given in near if _same(_changes(given.steps), _changes(steps))]

    def _extent(self, steps: tuple[Step, ...]) -> range:
        """Return a range that has the numbers of all rows that went through ``steps``."""
        every = range(self._leading.numel())
        numbers = torch.empty(*self._leading, 1, device="meta")
        moves = _moves(steps)
        if any(isinstance(x, Tensor) for x in tree_leaves([step.args for step in moves])):
            return every  # a mask
        rows = rows_of(numbers, moves)
        if rows.untyped_storage()._cdata != numbers.untyped_storage()._cdata or rows.numel() == 0:
            return every  # a copy
        last = sum((size - 1) * stride for size, stride in zip(rows.shape, rows.stride(), strict=True))
        return range(rows.storage_offset(), rows.storage_offset() + last + 1)

    def _repeats_rows(self, steps: tuple[Step, ...], device: torch.device) -> bool:
        """Whether a row is chosen more than once."""
        if not any(step.repeats for step in steps):
            return False
        rows = rows_of(self._numbers(device), _moves(steps))
        return len(set(rows.flatten().tolist())) < rows.numel()

    def _numbers(self, device: torch.device) -> Tensor:
        """Return the rows' numbers [*leading, 1]."""
        return torch.arange(self._leading.numel(), device=device).view(*self._leading, 1)

    def _of_rows(self, given: _Returned, steps: tuple[Step, ...], device: torch.device) -> tuple[Tensor, Tensor]:
        """Return classes and values [..., K] of the rows of logits that went through ``steps``."""
        numbers = self._numbers(device)
        K = given.classes.shape[-1]
        to, rows = (rows_of(numbers, _moves(each))[..., 0] for each in (given.steps, steps))
        classes = given.classes.new_full((numbers.numel(), K), NO_CLASS)
        values = given.values.new_zeros(numbers.numel(), K)
        classes[to], values[to] = given.classes, given.values
        return classes[rows], values[rows]


def _overlap(ours: range, others: range) -> bool:
    return max(ours.start, others.start) < min(ours.stop, others.stop)


def _moves(steps: Iterable[Step]) -> list[Step]:
    return [step for step in steps if step.of_hidden is not None]


def _put(values: Tensor, classes: Tensor, given: Tensor) -> None:
    """Put ``given`` [..., K] into ``values`` [..., V] in place.

    With one class per row the other values keep their order to it: those that round to the same value in the logits'
    dtype stay equal to it, and those that it would pass move next to it.
    """
    at, there = classes.clamp(min=0), classes != NO_CLASS
    built = values.gather(-1, at)
    if classes.shape[-1] == 1:
        numbers = torch.finfo(values.dtype)
        step = (given.abs() * numbers.eps).clamp(min=numbers.tiny).where(given.isfinite(), 0)
        moved = torch.where(values > built, values.maximum(given + step), values.minimum(given - step))
        values.copy_(moved.where(values != built, given).where(there, values))
    else:
        values.scatter_(-1, at, given.where(there, built))


def _changes(steps: Sequence[Step]) -> list[Any]:
    """Return the functions, each with its arguments, that changed the logits' values before the log-softmax."""
    changes: list[Any] = []
    for step in steps:
        if step.function is TensorBase.log_softmax:
            break
        if step.of_hidden is None and step.function not in KEEPS_VALUES:
            changes += [step.function, *step.args]
    return changes


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
