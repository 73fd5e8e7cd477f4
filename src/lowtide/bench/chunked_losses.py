"""The loss in chunks of tokens, as users wrote it before a library had it. N tokens, D hidden size, V vocabulary.

Three forms, for ``x`` [N, D], ``w`` [V, D] and targets ``y``. Two return a function of the logits, chunk by chunk:

- `checkpointed`: each chunk's projection and function under `torch.utils.checkpoint`, which recomputes its logits;
- `projected_first`: all chunks are projected first and their logits saved, upcast and function follow chunk by chunk
  (torchtune's);

and `gradients_in_forward` returns the mean loss: each chunk's logits turn into their gradient in forward, and both
gradient GEMMs run there (the form of the thread pytorch/pytorch issue 124480).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lowtide.bench.problem import blocks

IGNORED = -100
T = TypeVar("T")
OfLogits = Callable[[Tensor, Tensor], T]  # of a chunk's logits [C, V] in their own dtype, and its targets
ToGradient = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # logits, targets, factor, losses to write: dz [C, V]


def token_losses(z: Tensor, y: Tensor) -> Tensor:
    """Return each token's cross entropy from logits in their own dtype, upcast here."""
    return F.cross_entropy(z.float(), y, reduction="none")


def checkpointed(chunks: int, of_logits: OfLogits[T], x: Tensor, w: Tensor, y: Tensor) -> list[T]:
    """Return the function of each chunk, one chunk's logits at a time in memory, forward and backward."""

    def run(x: Tensor, w: Tensor, y: Tensor) -> T:
        return of_logits(x @ w.T, y)

    parts = zip(x.chunk(chunks), [w] * chunks, y.chunk(chunks), strict=False)
    return [checkpoint(run, *part, use_reentrant=False) for part in parts]


def projected_first(chunks: int, of_logits: OfLogits[T], x: Tensor, w: Tensor, y: Tensor) -> list[T]:
    """Return the function of each chunk; backward has all logits in the inputs' dtype, and one chunk in float32."""
    logits = [part @ w.T for part in x.chunk(chunks)]
    return list(map(of_logits, logits, y.chunk(chunks)))


def reduced(losses: Sequence[Tensor], y: Tensor, reduction: str) -> Tensor:
    """Return each token's loss, or their mean over the tokens that are not ignored, from each chunk's losses."""
    found = torch.cat(list(losses))
    return found if reduction == "none" else found.sum() / (y != IGNORED).sum()


def gradients_in_forward(chunks: int, to_gradient: ToGradient, x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    """Return the mean loss; backward scales the gradients that forward has computed, once."""
    loss: Tensor = _InForward.apply(x, w, y, chunks, to_gradient)  # type: ignore[no-untyped-call]
    return loss


class _InForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, y: Tensor, chunks: int, to_gradient: ToGradient) -> Tensor:
        scale = (y != IGNORED).sum().reciprocal()
        losses = torch.empty(len(x), device=x.device, dtype=torch.float32)
        dx = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        dw = torch.zeros_like(w) if ctx.needs_input_grad[1] else None
        for rows in blocks(len(x), -(-len(x) // chunks) or 1):
            dz = to_gradient(x[rows] @ w.T, y[rows], scale, losses[rows])
            if dx is not None:
                torch.mm(dz, w, out=dx[rows])
            if dw is not None:
                dw.addmm_(dz.T, x[rows])
        ctx.save_for_backward(dx, dw)
        return losses.sum() * scale

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        gradients = (None if saved is None else saved.mul_(upstream) for saved in ctx.saved_tensors)
        return (*gradients, None, None, None)


def softmax_in_place(z: Tensor, y: Tensor, scale: Tensor, losses: Tensor) -> Tensor:
    """Return the logits' gradient in their dtype, computed in place in one float32 buffer; write each token's loss."""
    p, valid = z.log_softmax(-1, dtype=torch.float32), y != IGNORED
    at = y.where(valid, 0)[:, None]
    losses.copy_((-p.gather(1, at)[:, 0]).where(valid, 0))
    p.exp_().scatter_add_(1, at, torch.full_like(at, -1, dtype=p.dtype))
    return p.mul_((scale * valid)[:, None]).to(z.dtype)
