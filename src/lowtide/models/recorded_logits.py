"""Recorded logits: the call of the head that gives them, and the operations applied since.

Legend: hidden [..., D], logits [..., V].
"""

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor

from lowtide.errors import UnsupportedError
from lowtide.models.head_call import HeadCall
from lowtide.models.steps import Step, TensorBase

_RETAIN_OR_UNPATCH = (
    "Where you compute the loss, call logits.retain_grad() first, and they are built. Where the model does, call "
    "lowtide.unpatch(model)."
)


class RecordedLogits(Tensor):
    """The logits of one `HeadCall` after some operations: shape, strides, dtype and device, and no storage."""

    call: HeadCall
    steps: tuple[Step, ...]
    viewed: Self | None  # the logits that these are a view of, by the last step
    grad_mode: bool  # gradients were recorded when these were made
    inference: bool  # they were made in inference mode
    is_cut: bool  # a view, taken without gradients, of logits that have them: requires a gradient and passes none on
    detached: Self | None  # the logits that these were detached from, by the last step
    has_children: bool  # others were recorded from these: their graph does not go through these, once built

    @classmethod
    def of(cls, call: HeadCall) -> Self:
        """Return the logits of ``call``, before any operation."""
        like = torch.empty((*call.hidden.shape[:-1], call.classes), dtype=call.dtype(), device="meta")
        return cls._make(call, (), like, None, grad_mode=torch.is_grad_enabled())

    @classmethod
    def _make(
        cls, call: HeadCall, steps: tuple[Step, ...], like: Tensor, viewed: Self | None, *, grad_mode: bool
    ) -> Self:
        def wrapper() -> Any:
            lazy: Any = Tensor._make_wrapper_subclass(
                cls,
                like.shape,
                strides=like.stride(),
                storage_offset=like.storage_offset(),
                dtype=like.dtype,
                device=call.hidden.device,
            )
            torch._C._set_throw_on_mutable_data_ptr(lazy)  # for C++ that asks neither of LazyLogits' two functions
            return lazy

        with torch.set_grad_enabled(grad_mode), call.as_in_forward(call.linked):
            lazy: Self = _LogitsNode.apply(wrapper, call, steps, *call.linked)  # type: ignore[no-untyped-call]
        lazy.call, lazy.steps, lazy.viewed = call, steps, viewed
        lazy.grad_mode, lazy.inference = grad_mode, torch.is_inference_mode_enabled()
        lazy.is_cut, lazy.has_children, lazy.detached = False, False, None
        return lazy

    def meta(self) -> Tensor:
        """Return a meta tensor of the same shape, strides and dtype, for the shape of an operation's result."""
        return torch.empty_strided(self.shape, self.stride(), dtype=self.dtype, device="meta")

    def then(self, step: Step, like: Tensor, *, view: bool = False) -> Self:
        """Return these logits after one more step, with shape, strides and dtype of ``like``.

        ``view``: whether the result shares these logits' memory.
        """
        grad_mode = self.grad_mode and torch.is_grad_enabled() and step.function is not TensorBase.detach
        parent = None if view or not grad_mode else self
        while parent is not None:  # also of what a view is a view of, from which it is built
            parent.has_children, parent = True, parent.viewed
        child = self._make(self.call, (*self.steps, step), like, self if view else None, grad_mode=grad_mode)
        child.detached = self if step.function is TensorBase.detach else None
        child.is_cut = view and not grad_mode and self.requires_grad and child.detached is None
        return child


class _LogitsNode(torch.autograd.Function):
    """The graph's node of recorded logits: passes on a gradient that reaches them as the real logits would."""

    @staticmethod
    def forward(ctx: Any, make: Callable[[], Tensor], call: HeadCall, steps: tuple[Step, ...], *_: Tensor) -> Tensor:
        ctx.call, ctx.steps = call, steps
        ctx.set_materialize_grads(False)
        return make()

    @staticmethod
    def backward(ctx: Any, grad_logits: Tensor | None) -> Any:
        if grad_logits is None:  # a custom function passed the logits on, and nothing read them
            return None, None, None, *(None for _ in ctx.call.linked)
        if ctx.call.hooked:
            raise UnsupportedError(
                "logits: expected operations of PyTorch on logits that have a hook, got a custom autograd function, "
                f"whose gradient does not go through what was hooked. {_RETAIN_OR_UNPATCH}"
            )
        return None, None, None, *ctx.call.vjp(ctx.steps, grad_logits)


def too_late(expected: str) -> str:
    """Return the error's text for ``expected`` after something was computed without building the logits."""
    return (
        f"logits: expected {expected}, got logits that something was computed from without building them, so that "
        f"its gradient does not go through them. {_RETAIN_OR_UNPATCH}"
    )


def _refuse(*_: Any) -> Any:
    raise UnsupportedError(too_late("their graph to be looked at before the loss"))


# The node that lazy logits have is not the one that gradients go through.
for _name_of_node in ("register_hook", "register_prehook"):
    setattr(_LogitsNode._backward_cls, _name_of_node, _refuse)
for _name_of_node in ("next_functions", "metadata"):
    setattr(_LogitsNode._backward_cls, _name_of_node, property(_refuse))
