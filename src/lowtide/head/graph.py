"""What the head's functions share in autograd's graph: gradients in their places, differentiated no further."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lowtide.errors import UnsupportedError, message
from lowtide.samples import Samples

TWICE = (
    "lowtide: expected gradients that are not differentiated again, got a second derivative."
    " They are computed without a graph of their own; for second derivatives build the logits, as in"
    " torch.nn.functional.cross_entropy(torch.nn.functional.linear(input, linear_weight, linear_bias), target)."
)


def save_for_recompute(ctx: Any, *tensors: Any) -> None:
    """Save the tensors (or None) from which backward recomputes, with samples for `saved_for_recompute`."""
    ctx.samples = Samples(() if torch.compiler.is_compiling() else (x for x in tensors if x is not None))
    ctx.save_for_backward(*tensors)


def saved_for_recompute(ctx: Any, function: str) -> tuple[Any, ...]:
    """Return what `save_for_recompute` saved on a node of ``function``.

    Raises:
        UnsupportedError: A Parameter has other values, or another dtype, than in forward, after a write to its
            ``.data`` that autograd does not see. Values on a GPU are checked by a device-side assertion.
    """
    if ctx.samples.changed():
        hint = "Change weights after backward."
        raise UnsupportedError(message(function, "in backward the weights of its forward", "others", hint))
    return tuple(ctx.saved_tensors)


def in_places(
    grads: Sequence[Tensor | None], places: Sequence[int], length: int, sources: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Return ``grads`` at their ``places`` among ``length`` arguments, with None elsewhere."""
    placed: list[Tensor | None] = [None] * length
    for i, grad in zip(places, differentiable_once(grads, sources), strict=True):
        placed[i] = grad
    return placed


def differentiable_once(
    grads: Sequence[Tensor | None], sources: Sequence[Tensor | None], error: str = TWICE
) -> list[Tensor | None]:
    """Return gradients whose own derivative, where create_graph=True asks for one, is an `UnsupportedError`.

    Args:
        grads: The gradients.
        sources: What they depend on. Without these in the graph, a derivative by one of them alone would not pass here,
            and would be 0 in silence.
        error: What to say.
    """
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return list(grads)
    leaves = [g if g is None else g.detach().requires_grad_() for g in grads]
    return list(_DifferentiatedOnce.apply(error, len(leaves), *leaves, *sources))  # type: ignore[no-untyped-call]


def refuse_batched(function: str, *upstream: Tensor | None) -> None:
    """Raise where gradients of several outputs come at once, for which ``function`` has no formula.

    Raises:
        UnsupportedError: ``is_grads_batched=True``, or ``vectorize=True`` of ``torch.autograd.functional``.
    """
    if torch.compiler.is_compiling() or not any(map(_is_batch, upstream)):
        return
    hint = "Call torch.autograd.grad once for each, without is_grads_batched or vectorize."
    raise UnsupportedError(message(function, "one gradient of its output at a time", "a batch of them", hint))


def _is_batch(tensor: Tensor | None) -> bool:
    functorch: Any = torch._C._functorch
    if tensor is None:
        return False
    return functorch.is_legacy_batchedtensor(tensor) or functorch.is_batchedtensor(tensor)  # type: ignore[no-any-return]


def is_last_backward() -> bool:
    """Return whether this backward is the last use of what forward stored."""
    return not torch.compiler.is_compiling() and not torch._C._autograd._get_current_graph_task_keep_graph()


class _DifferentiatedOnce(torch.autograd.Function):
    """Stands behind gradients, so that a second derivative is an error and not a constant in silence."""

    @staticmethod
    def forward(ctx: Any, error: str, count: int, *tensors: Tensor | None) -> Any:
        ctx.error = error
        return tuple(g if g is None else g.view_as(g) for g in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:  # noqa: ARG004
        raise UnsupportedError(ctx.error)
