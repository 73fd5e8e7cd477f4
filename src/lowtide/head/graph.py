"""What the head's functions share in autograd's graph: gradients in their places, differentiated no further."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lowtide.errors import UnsupportedError

TWICE = (
    "lowtide: expected gradients that are not differentiated again, got a second derivative."
    " They are computed without a graph of their own; for second derivatives build the logits, as in"
    " torch.nn.functional.cross_entropy(torch.nn.functional.linear(input, linear_weight, linear_bias), target)."
)


def in_places(grads: Sequence[Tensor | None], places: Sequence[int], length: int) -> list[Tensor | None]:
    """Return ``grads`` at their ``places`` among ``length`` arguments, with None elsewhere."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # create_graph=True
        leaves = [g if g is None else g.detach().requires_grad_() for g in grads]
        grads = _DifferentiatedOnce.apply(*leaves)  # type: ignore[no-untyped-call]
    placed: list[Tensor | None] = [None] * length
    for i, grad in zip(places, grads, strict=True):
        placed[i] = grad
    return placed


class _DifferentiatedOnce(torch.autograd.Function):
    """Stands behind gradients, so that a second derivative is an error and not a constant in silence."""

    @staticmethod
    def forward(ctx: Any, *grads: Tensor | None) -> Any:  # noqa: ARG004
        return tuple(g if g is None else g.view_as(g) for g in grads)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:  # noqa: ARG004
        raise UnsupportedError(TWICE)
