"""The phases of a training step, and the hooks that tell when each begins.

A step is the embedding, the layers' forwards, the head (final norm, output layer, loss), the head's backward, the
layers' backwards from the last to the first, the embedding's, and the optimizer. What a layer computes again in
backward is a phase of its own. Hooks sit on the decoder layers and their children, never on a linear layer: a
hook there would change which code runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from lowtide.bench.ways import Checkpointed
from lowtide.memory.stack import find_stack

EMBEDDING, FORWARD, HEAD = "embedding", "forward", "head"
HEAD_BACKWARD, RECOMPUTE, BACKWARD, EMBEDDING_BACKWARD = "head backward", "recompute", "backward", "embedding backward"
OPTIMIZER, END = "optimizer", "end"
KINDS = (EMBEDDING, FORWARD, HEAD, HEAD_BACKWARD, RECOMPUTE, BACKWARD, EMBEDDING_BACKWARD, OPTIMIZER)
_IN_BACKWARD = {HEAD_BACKWARD, RECOMPUTE, BACKWARD, EMBEDDING_BACKWARD}
_TEXTS = {HEAD_BACKWARD: "backward of the head", EMBEDDING_BACKWARD: "backward of the embedding"}


@dataclass(frozen=True)
class Phase:
    """A part of a step: one of `KINDS`, of a layer where it has one; `END` is where a step ends."""

    kind: str
    layer: int | None = None

    def __str__(self) -> str:
        if self.layer is None:
            return _TEXTS.get(self.kind, self.kind)
        return f"{self.kind} of layer {self.layer}"

    def to_text(self) -> str:
        """Return what `from_text` reads."""
        return self.kind if self.layer is None else f"{self.kind}/{self.layer}"

    @classmethod
    def from_text(cls, text: str) -> Phase:
        """Return the phase that `to_text` wrote."""
        kind, _, layer = text.partition("/")
        return cls(kind, int(layer) if layer else None)


class PhaseMarks:
    """Tells which phase a step is in.

    ``begin(phase)`` is called by whoever runs the step for what no layer can see (the step's begin, backward, the
    optimizer, the end), and by the hooks for the rest. Each goes to ``tell``, and no phase is told twice in a row.
    ``see_weights(module)`` is called when a module's weights are about to be read, gathered where they are sharded.
    """

    def __init__(self) -> None:
        self.current = Phase(END)
        self.tell: Callable[[Phase], object] = lambda _: None
        self.see_weights: Callable[[nn.Module], object] = lambda _: None
        self._running = 0  # modules of the layer that is computed again, in each other
        self._layers = 0

    def begin(self, phase: Phase) -> None:
        """Say that a phase begins, where another one was before."""
        if phase != self.current:
            self.current = phase
            self.tell(phase)

    def install(self, model: nn.Module, *, children: bool) -> None:
        """Put the hooks on a model's layers.

        Args:
            model: With decoder layers.
            children: Whether the layers' children get some too, which a policy's recompute is seen by: it runs the
                layer's forward, and not the layer's call. Not where layers are compiled: it would be compiled too.
        """
        layers = list(find_stack(model).layers.values())
        self._layers = len(layers)
        for index, layer in enumerate(layers):
            # Before FSDP's own hook, which gathers the weights: that is a part of the phase. They are seen after it.
            layer.register_forward_pre_hook(self._before(index), prepend=True, with_kwargs=True)
            layer.register_forward_pre_hook(lambda module, _: self.see_weights(module))
            layer.register_forward_hook(self._after(index, model), always_call=True)
            if isinstance(layer.forward, Checkpointed):  # its recompute calls neither the layer nor a child
                layer.forward.function = self._around(layer.forward.function, index)
            if not children:
                continue
            for child in layer.children():
                if not isinstance(child, nn.Linear):
                    child.register_forward_pre_hook(lambda _, __, index=index: self._enter(index))
                    child.register_forward_hook(lambda _, __, ___: self._leave(), always_call=True)

    def restart(self) -> None:
        """Forget the phase that an error ended."""
        self.current, self._running = Phase(END), 0

    def _before(self, index: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:  # noqa: ARG001
            if self.current.kind in _IN_BACKWARD:
                self._enter(index)
                return
            self.begin(Phase(FORWARD, index))
            if index == 0:
                hidden = _first(args) if _first(args) is not None else _first(kwargs.values())
                if hidden is not None and hidden.requires_grad:
                    hidden.register_hook(lambda _: self.begin(Phase(EMBEDDING_BACKWARD)))  # type: ignore[no-untyped-call]

        return hook

    def _begin_backward(self, index: int, layer: nn.Module) -> None:
        self.begin(Phase(BACKWARD, index))
        self.see_weights(layer)

    def _after(self, index: int, model: nn.Module) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:  # noqa: ARG001
            if self.current.kind in _IN_BACKWARD:
                self._leave()
                return
            if output is None:  # an error ends the forward
                return
            hidden = _first(output if isinstance(output, tuple) else (output,))
            if hidden is not None and hidden.requires_grad:
                hidden.register_hook(lambda _: self._begin_backward(index, module))  # type: ignore[no-untyped-call]
            if index == self._layers - 1:
                self.begin(Phase(HEAD))
                self.see_weights(model)

        return hook

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
        if self.current.kind not in _IN_BACKWARD or not self._running:
            return
        self._running -= 1
        if not self._running:
            self.begin(Phase(BACKWARD, self.current.layer))


def _first(values: Iterable[Any]) -> Tensor | None:
    """Return the first floating-point tensor: the hidden states."""
    return next((value for value in values if isinstance(value, Tensor) and value.is_floating_point()), None)


def mended(phases: Sequence[Phase]) -> list[Phase]:
    """Return a step's phases with what stands between two parts of one layer's recompute as a part of it too.

    Hooks sit on the layer's children, so the additions between them look like backward.
    """
    found = list(phases)
    last: dict[int, int] = {}  # of each layer, where it was computed again last
    for i, phase in enumerate(phases):
        if phase.kind == RECOMPUTE and phase.layer is not None:
            for j in range(last.get(phase.layer, i), i):
                found[j] = phase
            last[phase.layer] = i
    return found
