"""Log-probabilities that were returned without logits: the same ones, built later, get these values.

Two orders of summation differ in the last digits, and comparisons see that: half of the ranks ``(lp > lp.gather(-1,
y)).sum(-1)`` would be one too high.

Legend: N rows of hidden states, V classes, K classes of a row.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C import TensorBase

from lowtide.models.steps import KEEPS_VALUES, Step, fold, replay, rows_of

NO_CLASS = -1  # in the place of a class where there is none: an ignored label


class _Given(NamedTuple):
    """Some log-probabilities of the logits after ``steps``."""

    steps: tuple[Step, ...]
    classes: Tensor  # [..., K], `NO_CLASS` for all K of a row where none was returned
    values: Tensor  # [..., K]


class GivenLogprobs:
    """The log-probabilities returned for one call of the head, with hidden states [*leading, D]."""

    def __init__(self, leading: torch.Size) -> None:
        self._leading = leading
        self._given: list[_Given] = []

    def add(self, steps: tuple[Step, ...], classes: Tensor, values: Tensor, *, sign: int) -> None:
        """Record log-probabilities; those that were returned before get the values that they had then, in place.

        Args:
            steps: The steps applied to the logits, which choose each row at most once.
            classes: [..., K] int64, `NO_CLASS` for all K of a row or for none.
            values: [..., K], ``sign`` times the log-probabilities.
            sign: 1 or -1.
        """
        values = values.data
        for before in self._alike(steps):
            known, given = self._of_rows(before, steps, values.device)
            order = known.sort(-1)
            at = torch.searchsorted(order.values, classes).clamp(max=known.shape[-1] - 1)
            found = (order.values.gather(-1, at) == classes) & (classes != NO_CLASS)
            given = sign * given.gather(-1, order.indices.gather(-1, at)).to(values.dtype)
            values.copy_(given.where(found, values))
        # Copies: the caller may change its classes, and the values that it gets, in place.
        self._given.append(_Given(steps, classes.clone(), sign * values))

    def replay(self, logits: Tensor, steps: tuple[Step, ...]) -> Tensor:
        """Return ``logits`` after the steps, with the returned values where these are the same log-probabilities."""
        ends = range(len(steps), 0, -1) if self._given else ()
        end = next((n for n in ends if (folded := fold(steps[:n])) is not None and folded.normalised), 0)
        logits = replay(logits, steps[:end])
        for before in self._alike(steps[:end]) if end else ():
            folded = fold(steps[:end])
            assert folded is not None
            classes, given = self._of_rows(before, steps[:end], logits.device)
            # past the graph, in which log-softmax keeps its result: to rounding it stays the same
            _put(logits.data, classes, (folded.sign * given).to(logits.dtype))
        return replay(logits, steps[end:])

    def _alike(self, steps: tuple[Step, ...]) -> list[_Given]:
        """Return those of the same scale, bias and soft cap, latest first: the first ones are written last."""
        return [given for given in reversed(self._given) if _same(_changes(given.steps), _changes(steps))]

    def _of_rows(self, given: _Given, steps: tuple[Step, ...], device: torch.device) -> tuple[Tensor, Tensor]:
        """Return classes and values [..., K] of the rows of logits that went through ``steps``."""
        numbers = torch.arange(self._leading.numel(), device=device).view(*self._leading, 1)
        K = given.classes.shape[-1]
        moves = ([step for step in each if step.of_hidden is not None] for each in (given.steps, steps))
        to, rows = (rows_of(numbers, each)[..., 0] for each in moves)
        classes = given.classes.new_full((numbers.numel(), K), NO_CLASS)
        values = given.values.new_zeros(numbers.numel(), K)
        classes[to], values[to] = given.classes, given.values
        return classes[rows], values[rows]


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


def _same(ours: list[Any], others: list[Any]) -> bool:
    return len(ours) == len(others) and all(map(_equal, ours, others))


def _equal(x: Any, y: Any) -> bool:
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        return x is y or (x.shape == y.shape and torch.equal(x, y))
    return not isinstance(x, Tensor) and not isinstance(y, Tensor) and bool(x == y)
