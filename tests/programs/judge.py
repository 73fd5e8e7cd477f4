"""Compares what a program showed patched with what it showed stock.

Floating values are equal if they are so to a few roundings of their dtype. If not, stock's own uncertainty decides: the
distance of stock from itself in float64, and from itself with weights shaken by a rounding. What is discrete (an index,
a comparison, a count) may differ only where that noise moves it too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from programs.grammar import Program
    from programs.run import Outcome

_FEW = 32  # roundings that a sum may be off by
_NOTHING = 1e-6  # what rounding leaves of a gradient that is 0
_FACTOR = 4  # of stock's own uncertainty
_NOISES = ("exact", "noise-1", "noise-2", "noise-3", "noise-4", "noise-5", "noise-6")
_MORE = tuple(f"noise-{number}" for number in range(7, 31))  # ties come out otherwise in few of them


class Judge:
    def __init__(self, program: Program, stock: Outcome, patched: Outcome, again: Callable[[str], Outcome]) -> None:
        self.program, self.stock, self.patched = program, stock, patched
        self._again = again
        self._runs: dict[str, Outcome] = {}
        self.gradients = False  # what is compared
        self.recomputes = "apply_policy" in program.text

    def other(self, how: str) -> Outcome:
        if how not in self._runs:
            self._runs[how] = self._again(how)
        return self._runs[how]

    def seen(self, before: int | None = None) -> str:
        """Return what is wrong with the values that were shown, "" if nothing."""
        ours, theirs = self.patched.seen, self.stock.seen
        if before is not None:
            ours, theirs = ([one for one in seen if one[0] < before] for seen in (ours, theirs))
        if len(ours) != len(theirs):
            return f"{len(ours)} values shown, stock {len(theirs)}"
        for number, ((at, got), (_, expected)) in enumerate(zip(ours, theirs, strict=True)):
            # What is computed without the logits equals what is computed of them to rounding, not to the bit.
            statement = self.program.statements[at]
            self.gradients = "grad" in statement
            floor = _NOTHING if self.gradients else 0.0
            if any(word in statement for word in ("logsumexp", "softmax")):
                floor = 1e-5
            wrong = self.compare(got, expected, lambda o, n=number: o.seen[n][1] if n < len(o.seen) else None, floor)
            if wrong:
                return f"statement {at} ({self.program.statements[at][-100:]!r}): {wrong}"
        return ""

    def log(self) -> str:
        """Return what is wrong with what hooks wrote. Their order is not part of the promise."""
        self.gradients = True  # most hooks see gradients
        ours, theirs = _sorted(self.patched.log), _sorted(self.stock.log)
        if self.recomputes:  # hooks inside a layer run in its second forward too
            return "" if all(any(self._alike(one, other) for other in ours) for one in theirs) else "log of hooks"
        if len(ours) != len(theirs):
            return f"hooks and wrappers ran {len(ours)} times, in stock {len(theirs)}"
        wrong = self.compare(ours, theirs, lambda o: _sorted(o.log))
        return f"log of hooks: {wrong}" if wrong else ""

    def _alike(self, one: Any, other: Any) -> bool:
        if isinstance(one, float) and isinstance(other, float):
            if not (math.isfinite(one) and math.isfinite(other)):  # see `_tensors`
                return not (math.isfinite(one) or math.isfinite(other))
            near, nothing = (3e-2, 1e-4) if "bfloat16" in self.program.text else (1e-4, 1e-6)
            return math.isclose(one, other, rel_tol=near, abs_tol=nothing)  # a gradient of 0 is one of rounding
        return bool(one == other)

    def state(self) -> str:
        """Return what is wrong with parameters and gradients at the end."""
        ours, theirs = self.patched.state, self.stock.state
        if list(ours) != list(theirs):
            return f"other parameters: {sorted(set(ours) ^ set(theirs))}"
        self.gradients = True
        most = max([self.stock.largest, *(largest(grad) for _, _, grad in theirs.values() if grad is not None)])
        low = "bfloat16" in self.program.text
        # of what cancels, or is 0 but for rounding: within a step, or a step with another
        part = (2.0**-6 if self.stock.backwards > 1 else 1e-3) if low else 1e-6
        for name, (needs, value, grad) in ours.items():
            needed, expected, gradient = theirs[name]
            if needs != needed:
                return f"{name}.requires_grad is {needs}"
            wrong = self.compare(value, expected, lambda o, n=name: o.state[n][1] if n in o.state else None)
            if wrong:
                return f"{name}: {wrong}"
            if (grad is None) != (gradient is None):
                return f"{name}.grad is {'None, in stock not' if grad is None else 'not None, in stock it is'}"
            if grad is not None:
                wrong = self.compare(
                    grad,
                    gradient,
                    lambda o, n=name: o.state[n][2] if n in o.state else None,
                    floor=max(part * most, _NOTHING),
                )
                if wrong:
                    return f"{name}.grad: {wrong}"
        return ""

    def compare(self, got: Any, expected: Any, of: Callable[[Outcome], Any], floor: float = 0.0) -> str:
        """Return how ``got`` differs from ``expected``, "" if not; ``of`` finds the same value in another run."""
        ours, theirs = _leaves(got), _leaves(expected)
        if len(ours) != len(theirs):
            return f"{got!r:.100}, in stock {expected!r:.100}"
        for at, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            if isinstance(one, Tensor) and isinstance(other, Tensor):
                wrong = self._tensors(one, other, lambda o, at=at: _tensor_at(of(o), at), floor)
            else:
                same = type(one) is type(other) and one == other
                wrong = "" if same else f"{one!r:.100}, in stock {other!r:.100}"
            if wrong:
                return wrong
        return ""

    def _tensors(self, got: Tensor, expected: Tensor, of: Callable[[Outcome], Tensor | None], floor: float) -> str:
        if got.dtype != expected.dtype or got.shape != expected.shape:
            return f"{got.dtype} {tuple(got.shape)}, in stock {expected.dtype} {tuple(expected.shape)}"
        if torch.equal(got, expected):  # most: the rest of this takes ten times as long
            return ""
        if not got.is_floating_point():
            return self._numbers(got, expected, of)
        if self.gradients:  # which oddity an overflow gives depends on the order of products
            got, expected = got.masked_fill(got.isinf(), math.nan), expected.masked_fill(expected.isinf(), math.nan)
        # the models compute in float32 themselves
        eps = max(torch.finfo(got.dtype).eps, torch.finfo(torch.float32).eps)
        a, b = got.double(), expected.double()
        odd = ~(a.isfinite() & b.isfinite())
        strange = odd & ~((a == b) | (a.isnan() & b.isnan()))
        a, b = a.masked_fill(odd, 0), b.masked_fill(odd, 0)
        allowed = _FEW * eps * b.abs().amax().item() + floor
        off = (a - b).abs().masked_fill(strange, math.inf)
        if off.amax().item() <= allowed:
            return ""
        spread, limit = torch.zeros_like(b), torch.full_like(b, allowed)
        low = any(word in self.program.text for word in ("bfloat16", "half"))
        for how in (*_NOISES, *_MORE) if low else _NOISES:
            other = of(self.other(how))
            if other is None or other.shape != b.shape:
                continue
            c = other.double()
            apart = (c - b).abs().nan_to_num(math.inf, math.inf, math.inf).masked_fill(odd, 0)
            # what noise makes odd, rounding may
            apart = apart.masked_fill(strange & ~((c == expected.double()) | (c.isnan() & expected.isnan())), math.inf)
            spread = torch.maximum(spread, apart)
            limit = allowed + _FACTOR * torch.maximum(spread, spread.square().mean().sqrt())
            if bool((off <= limit).all()):
                return ""
        at = (off - limit).flatten().argmax().item()
        one, other, error, most = (t.flatten()[at].item() for t in (got, expected, off, limit))
        return f"off by {error:.3g} at {at} of {tuple(got.shape)}: {one:.9g}, in stock {other:.9g} +- {most:.2g}"

    def _numbers(self, got: Tensor, expected: Tensor, of: Callable[[Outcome], Tensor | None]) -> str:
        """Return how indices, comparisons and counts differ, but for those that noise moves too."""
        unequal = got != expected
        for how in (*_NOISES, *_MORE):
            other = of(self.other(how))
            if other is None or other.shape != expected.shape:
                return ""
            unequal = unequal & (other == expected)
            if not unequal.any():
                return ""
        at = tuple(unequal.nonzero()[0].tolist())
        return f"{int(unequal.sum())} of {got.numel()} differ, at {at} {got[at]}, in stock {expected[at]}"


def largest(tensor: Tensor) -> float:
    finite = tensor.double().nan_to_num(0, 0, 0)
    return finite.abs().amax().item() if tensor.numel() else 0.0


def _leaves(value: Any) -> list[Any]:
    """Return the parts of a value, one after another: numbers as tensors, and how many there are of each."""
    if isinstance(value, np.ndarray):
        return [torch.from_numpy(value)]
    if isinstance(value, float) or type(value) is int:
        return [torch.tensor(value)]
    if isinstance(value, dict):
        return [*value, *(leaf for part in value.values() for leaf in _leaves(part))]
    if isinstance(value, tuple | list):
        if value and all(isinstance(part, float) for part in value):
            return [torch.tensor(value)]
        return [f"{len(value)} values", *(leaf for part in value for leaf in _leaves(part))]
    return [value]


def _tensor_at(value: Any, at: int) -> Tensor | None:
    """Return one of a value's parts where it is a tensor; None of a run that did not come so far."""
    leaves = _leaves(value)
    return leaves[at] if at < len(leaves) and isinstance(leaves[at], Tensor) else None


def _number(one: Tensor) -> float | str:
    try:
        return float(one.detach())
    except RuntimeError:
        return "a batch"


def _sorted(log: list[Any]) -> list[Any]:
    # A batch of gradients (is_grads_batched) is no number outside of the call that brings it.
    log = [_number(one) if isinstance(one, Tensor) else one for one in log]
    numbers = sorted(one for one in log if isinstance(one, float))
    return [*sorted((one for one in log if not isinstance(one, float)), key=repr), *numbers]
