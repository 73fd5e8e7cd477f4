"""The phases of a training step, and the hooks that mark where each begins.

A step is the embedding, the layers' forwards, the head (final norm, output layer, loss), the head's backward, the
layers' backwards from the last to the first, the embedding's, and the optimizer. What PyTorch's checkpoint recomputes
in backward is a phase of its own. Hooks sit on the decoder layers, never on a linear layer: a hook there would change
which code runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils import checkpoint

from lowtide.memory.stack import find_stack

EMBEDDING, FORWARD, HEAD = "embedding", "forward", "head"
HEAD_BACKWARD, RECOMPUTE, BACKWARD, EMBEDDING_BACKWARD = "head backward", "recompute", "backward", "embedding backward"
OPTIMIZER, END = "optimizer", "end"
KINDS = {
    EMBEDDING: "embedding",
    FORWARD: "layers, forward",
    HEAD: "head, forward",
    HEAD_BACKWARD: "head, backward",
    RECOMPUTE: "layers, recomputed",
    BACKWARD: "layers, backward",
    EMBEDDING_BACKWARD: "embedding, backward",
    OPTIMIZER: "optimizer",
}
MARK = "lowtide: "  # and a phase: the range in a trace where it begins
_TEXTS = {HEAD_BACKWARD: "backward of the head", EMBEDDING_BACKWARD: "backward of the embedding"}
# record_function is an operator, which a selective checkpoint counts
profiler_range = torch._C._profiler._RecordFunctionFast


@dataclass(frozen=True)
class Phase:
    """A part of a step: one of `KINDS`, of a layer where it has one; `END` is where a step ends."""

    kind: str
    layer: int | None = None

    def __str__(self) -> str:
        return _TEXTS.get(self.kind, self.kind) if self.layer is None else f"{self.kind} of layer {self.layer}"


class PhaseMarks:
    """The phases of a model's last step, each with the moment when it began, by a GPU's own clock there."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._begun: list[tuple[Phase, Any]] = []
        layers = list(find_stack(model).layers.values())
        for index, layer in enumerate(layers):
            layer.register_forward_pre_hook(self._before(index), prepend=True, with_kwargs=True)
            layer.register_forward_hook(self._after(index, last=index == len(layers) - 1))

    @property
    def phases(self) -> list[Phase]:
        """The phases in order; when the step is over, the last is `END`."""
        return [phase for phase, _ in self._begun]

    def lengths_ms(self) -> list[float]:
        """Return the time of each phase but `END`; on a GPU this waits for the step."""
        if not self._cuda:
            return [(end - begin) / 1e6 for (_, begin), (_, end) in pairwise(self._begun)]
        torch.cuda.synchronize()
        return [float(begin.elapsed_time(end)) for (_, begin), (_, end) in pairwise(self._begun)]

    @contextmanager
    def step(self) -> Iterator[None]:
        """Mark the phases of a step from its embedding to its end, or to the error that ends it."""
        stock = checkpoint._checkpoint_without_reentrant_generator

        def marked(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            return stock(self._recomputed(function), *args, **kwargs)

        self._begun.clear()
        self.begin(Phase(EMBEDDING))
        with patch.object(checkpoint, stock.__name__, marked):
            try:
                yield
            finally:
                self.begin(Phase(END))

    def begin(self, phase: Phase) -> None:
        """Begin a phase, unless the step is in it. The caller is the step (what no layer can see), or a hook."""
        if not self._begun or phase != self._begun[-1][0]:
            self._begun.append((phase, _gpu_now() if self._cuda else time.perf_counter_ns()))
            with profiler_range(f"{MARK}{phase}"):
                pass

    def _before(self, index: int) -> Callable[..., None]:
        def hook(_: nn.Module, args: Any, kwargs: Any) -> None:
            self.begin(Phase(FORWARD, index))
            if index == 0:
                self._begin_at_gradient((*args, *kwargs.values()), Phase(EMBEDDING_BACKWARD))

        return hook

    def _after(self, index: int, *, last: bool) -> Callable[..., None]:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            self._begin_at_gradient(output if isinstance(output, tuple) else (output,), Phase(BACKWARD, index))
            if last:
                self.begin(Phase(HEAD))

        return hook

    def _begin_at_gradient(self, values: Iterable[Any], phase: Phase) -> None:
        """Begin a phase when the gradient of the hidden states is computed: of the first floating-point tensor."""
        hidden = next((value for value in values if isinstance(value, Tensor) and value.is_floating_point()), None)
        if hidden is not None and hidden.requires_grad:
            hidden.register_hook(lambda _: self.begin(phase))  # type: ignore[no-untyped-call]

    def _recomputed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that a checkpoint calls in forward and again in backward, there in a phase of its own."""

        def run(*args: Any, **kwargs: Any) -> Any:
            before = self._begun[-1][0]
            if before.kind == FORWARD:
                return function(*args, **kwargs)
            self.begin(Phase(RECOMPUTE, before.layer))
            try:
                return function(*args, **kwargs)
            finally:  # the checkpoint ends it by an exception when it has what it needs
                self.begin(before)

        return run


def _gpu_now() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
