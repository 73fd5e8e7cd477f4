"""Checks of arguments that are made once for all calls with the same facts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lowtide.replay.facts import device_of, facts_of

MOST_CALLS = 256  # of one function


class Checked:
    """A function that checks and orders arguments, which is called once for all with the same facts.

    It returns records (NamedTuples) of its arguments themselves and of what follows from their facts, then other values
    that do. What has made another tensor of one is called each time.
    """

    def __init__(self, check: Callable[..., tuple[Any, ...]]) -> None:
        self.check = check
        self._known: dict[tuple[Any, ...], list[_Template]] = {}

    def __call__(self, *args: Any) -> tuple[Any, ...]:
        """Return what the function returns."""
        facts = None if torch.compiler.is_compiling() or _is_transformed() else facts_of(args)
        if facts is None:
            return self.check(*args)
        facts += tuple([f() for f in _MODES])
        try:
            known = self._known.get(facts)
        except TypeError:  # an argument of a wrong kind, for which the check has words
            return self.check(*args)
        if known is not None:
            return tuple([template(args) for template in known])
        found = self.check(*args)
        templates = [_Template.of(part, args) for part in found]
        if None not in templates and device_of(args) is not None:
            if len(self._known) >= MOST_CALLS:
                self._known.clear()
            self._known[facts] = templates  # type: ignore[assignment]
        return found


# What checks, and autograd, depend on besides the arguments.
_MODES: list[Callable[[], Any]] = [torch.is_grad_enabled, torch.is_inference_mode_enabled]
_MODES += [partial(f, kind) for kind in ("cuda", "cpu") for f in (torch.is_autocast_enabled, torch.get_autocast_dtype)]


def _is_transformed() -> bool:
    """Return whether a call may be one of torch.func's transforms, of forward-mode derivatives or of a trace."""
    c: Any = torch._C
    level = torch.autograd.forward_ad._current_level
    return level >= 0 or c._functorch.peek_interpreter_stack() is not None or c._get_tracing_state() is not None


@dataclass(frozen=True)
class _Template:
    """A record whose tensors are those of another call, of which it keeps none; or another value."""

    values: Any
    make: Callable[[Any], Any] | None = None
    places: tuple[tuple[int, int], ...] = ()  # of a value, and of the argument that goes there

    @classmethod
    def of(cls, found: Any, args: Sequence[Any]) -> "_Template | None":
        """Return the template of a record; None if it holds a tensor that follows from others, or is two arguments."""
        if not hasattr(found, "_make"):
            return None if isinstance(found, Tensor) else cls(found)
        numbers_only = not any(isinstance(arg, Tensor) and arg.dim() == 0 for arg in args)
        values, places = list(found), []
        for at, value in enumerate(found):
            if isinstance(value, Tensor):
                origins = [i for i, arg in enumerate(args) if arg is value]
                if len(origins) > 1:  # in a like call they may be two tensors
                    return None
                if origins:
                    places.append((at, origins[0]))
                    values[at] = None  # else it lives as long as the template, and so does its graph
                elif value.dim() or value.device.type != "cpu" or not numbers_only:
                    return None
        return cls(values, found._make, tuple(places))

    def __call__(self, args: Sequence[Any]) -> Any:
        """Return the record of these arguments."""
        if self.make is None:
            return self.values
        values = self.values.copy()
        for at, origin in self.places:
            values[at] = args[origin]
        return self.make(values)
