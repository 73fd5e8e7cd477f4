"""The loss in chunks of tokens, as users wrote it before a library had it. N tokens, D hidden size, V vocabulary.

Three forms, each of which returns the loss of ``x`` [N, D], ``w`` [V, D] and ``y`` [N]:

- `checkpointed`: each chunk's projection and loss under `torch.utils.checkpoint`, which recomputes its logits;
- `gradients_in_forward`: each chunk's logits turn into their gradient in forward, and both gradient GEMMs run there
  (the form of the thread pytorch/pytorch issue 124480);
- `projected_first`: all chunks are projected first and their logits saved, upcast and loss follow chunk by chunk
  (torchtune's).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lowtide.bench.problem import blocks

IGNORED = -100
TokenLosses = Callable[[Tensor, Tensor], Tensor]  # logits [C, V] and targets [C] to each token's loss
ToGradient = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # logits, targets, factor, losses to write: dz [C, V]


def token_losses(z: Tensor, y: Tensor) -> Tensor:
    """Return each token's cross entropy from logits in their own dtype, upcast here."""
    return F.cross_entropy(z.float(), y, reduction="none")


def checkpointed(chunks: int, of_logits: TokenLosses, x: Tensor, w: Tensor, y: Tensor, reduction: str) -> Tensor:
    """Return the loss, one logits chunk at a time in memory, forward and backward."""

    def run(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
        return of_logits(x @ w.T, y)

    parts = [
        checkpoint(run, *part, use_reentrant=False)
        for part in zip(x.chunk(chunks), [w] * chunks, y.chunk(chunks), strict=False)
    ]
    return _reduced(torch.cat(parts), y, reduction)


def projected_first(chunks: int, of_logits: TokenLosses, x: Tensor, w: Tensor, y: Tensor, reduction: str) -> Tensor:
    """Return the loss; backward has all logits in the inputs' dtype, and one chunk of them in float32."""
    logits = [part @ w.T for part in x.chunk(chunks)]
    return _reduced(torch.cat(list(map(of_logits, logits, y.chunk(chunks)))), y, reduction)


def _reduced(losses: Tensor, y: Tensor, reduction: str) -> Tensor:
    return losses if reduction == "none" else losses.sum() / (y != IGNORED).sum()


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
