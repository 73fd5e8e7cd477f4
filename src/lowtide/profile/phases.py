"""The phases of a training step, and the hooks that mark where each begins.

A step is the embedding, the layers' forwards, the head (final norm, output layer, loss), the head's backward, the
layers' backwards from the last to the first, the embedding's, and the optimizer. What a layer recomputes in backward is
a phase of its own. Hooks sit on the decoder layers and their children, never on a linear layer: a hook there would
change which code runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

from lowtide.bench.models import Checkpointed
from lowtide.memory.stack import find_stack

EMBEDDING, FORWARD, HEAD = "embedding", "forward", "head"
HEAD_BACKWARD, RECOMPUTE, BACKWARD, EMBEDDING_BACKWARD = "head backward", "recompute", "backward", "embedding backward"
OPTIMIZER, END = "optimizer", "end"


class Label(NamedTuple):
    """How tables and the plot show a kind of phase, or an owner."""

    text: str
    color: str
    dark: bool = False  # text on it is white


KINDS = {
    EMBEDDING: Label("embedding", "#b9a3c9"),
    FORWARD: Label("layers, forward", "#2f7fb8", dark=True),
    HEAD: Label("head, forward", "#d1602a", dark=True),
    HEAD_BACKWARD: Label("head, backward", "#eea37e"),
    RECOMPUTE: Label("layers, recomputed", "#8fc1e3"),
    BACKWARD: Label("layers, backward", "#3f9b7a", dark=True),
    EMBEDDING_BACKWARD: Label("embedding, backward", "#d7c9e2"),
    OPTIMIZER: Label("optimizer", "#8d969b", dark=True),
}
_IN_BACKWARD = {HEAD_BACKWARD, RECOMPUTE, BACKWARD, EMBEDDING_BACKWARD}
_TEXTS = {HEAD_BACKWARD: "backward of the head", EMBEDDING_BACKWARD: "backward of the embedding"}


@dataclass(frozen=True)
class Phase:
    """A part of a step: one of `KINDS`, of a layer where it has one; `END` is where a step ends."""

    kind: str
    layer: int | None = None

    def __str__(self) -> str:
        return _TEXTS.get(self.kind, self.kind) if self.layer is None else f"{self.kind} of layer {self.layer}"


class PhaseMarks:
    """Detects which phase a step is in, and calls ``on_begin`` with each, never twice in a row with the same."""

    def __init__(self) -> None:
        self.on_begin: Callable[[Phase], object] = lambda _: None
        self.restart()

    def restart(self) -> None:
        """Forget the phase in which an error ended the step."""
        self.current = Phase(END)
        self._running = 0  # modules of the layer that is recomputed, in each other

    def begin(self, phase: Phase) -> None:
        """Begin a phase, unless the step is in it. The caller is the step (what no layer can see), or a hook."""
        if phase != self.current:
            self.current = phase
            self.on_begin(phase)

    def install(self, model: nn.Module, *, children: bool) -> None:
        """Put the hooks on a model's layers, and with ``children`` on theirs.

        Those detect a policy's recompute, which runs the layer's forward, not the layer's call. Compiled layers go
        without: the hooks would be compiled too.
        """
        layers = list(find_stack(model).layers.values())
        for index, layer in enumerate(layers):
            layer.register_forward_pre_hook(self._before(index), prepend=True, with_kwargs=True)
            layer.register_forward_hook(self._after(index, last=index == len(layers) - 1), always_call=True)
            if isinstance(layer.forward, Checkpointed):  # its recompute calls neither the layer nor a child
                layer.forward.function = self._around(layer.forward.function, index)
            for child in layer.children():
                if children and not isinstance(child, nn.Linear):
                    child.register_forward_pre_hook(lambda _, __, index=index: self._enter(index))
                    child.register_forward_hook(lambda _, __, ___: self._leave(), always_call=True)

    def _before(self, index: int) -> Callable[..., None]:
        def hook(_: nn.Module, args: Any, kwargs: Any) -> None:
            if self.current.kind in _IN_BACKWARD:
                self._enter(index)
                return
            self.begin(Phase(FORWARD, index))
            if index == 0:
                self._begin_at_gradient((*args, *kwargs.values()), Phase(EMBEDDING_BACKWARD))

        return hook

    def _after(self, index: int, *, last: bool) -> Callable[..., None]:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            if self.current.kind in _IN_BACKWARD:
                self._leave()
            elif output is not None:  # None: an error ends the forward
                self._begin_at_gradient(output if isinstance(output, tuple) else (output,), Phase(BACKWARD, index))
                if last:
                    self.begin(Phase(HEAD))

        return hook

    def _begin_at_gradient(self, values: Iterable[Any], phase: Phase) -> None:
        """Begin a phase when the gradient of the hidden states is computed: of the first floating-point tensor."""
        hidden = next((value for value in values if isinstance(value, Tensor) and value.is_floating_point()), None)
        if hidden is not None and hidden.requires_grad:
            hidden.register_hook(lambda _: self.begin(phase))  # type: ignore[no-untyped-call]

    def _around(self, function: Callable[..., Any], index: int) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            self._enter(index)
            try:
                return function(*args, **kwargs)
            finally:
                self._leave()

        return run

    def _enter(self, index: int) -> None:
        if self.current.kind in _IN_BACKWARD:
            self._running += 1
            self.begin(Phase(RECOMPUTE, index))

    def _leave(self) -> None:
        if self.current.kind in _IN_BACKWARD and self._running:
            self._running -= 1
            if not self._running:
                self.begin(Phase(BACKWARD, self.current.layer))


def with_whole_recomputes(phases: Sequence[Phase]) -> list[Phase]:
    """Return a step's phases, with those between two parts of one layer's recompute counted as recompute too.

    Hooks sit on the layer's children, so the additions between them look like backward.
    """
    merged = list(phases)
    last: dict[int, int] = {}  # of each layer, where it was last recomputed
    for i, phase in enumerate(phases):
        if phase.kind == RECOMPUTE and phase.layer is not None:
            start = last.get(phase.layer, i)
            merged[start:i] = [phase] * (i - start)
            last[phase.layer] = i
    return merged
