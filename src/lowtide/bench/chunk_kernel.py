"""One kernel as users write it: a chunk of logits becomes its own gradient, in place. C rows, V vocabulary."""

from contextlib import nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 8192  # most classes that a program reads at a time


@triton.jit(do_not_specialize=["V"])  # type: ignore[untyped-decorator]
def _gradient(  # type: ignore[no-untyped-def]
    z_ptr, y_ptr, loss_ptr, scale_ptr, V, IGNORED: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    z_ptr += row * V
    y = tl.load(y_ptr + row)
    kept = (y != IGNORED).to(tl.float32)
    largest, total = tl.full((), float("-inf"), tl.float32), tl.full((), 0.0, tl.float32)
    for start in range(0, V, BLOCK):
        column = start + tl.arange(0, BLOCK)
        z = tl.load(z_ptr + column, mask=column < V, other=float("-inf")).to(tl.float32)
        new = tl.maximum(largest, tl.max(z, 0))
        total = total * tl.exp(largest - new) + tl.sum(tl.exp(z - new), 0)
        largest = new
    lse = largest + tl.log(total)
    target = tl.load(z_ptr + tl.where(y != IGNORED, y, 0)).to(tl.float32)
    scale = tl.load(scale_ptr) * kept
    tl.store(loss_ptr + row, (lse - target) * kept)
    for start in range(0, V, BLOCK):
        column = start + tl.arange(0, BLOCK)
        z = tl.load(z_ptr + column, mask=column < V, other=0.0).to(tl.float32)
        gradient = (tl.exp(z - lse) - (column == y).to(tl.float32)) * scale
        tl.store(z_ptr + column, gradient.to(z_ptr.dtype.element_ty), mask=column < V)


def gradient_in_place(z_CV: Tensor, y_C: Tensor, scale: Tensor, losses_C: Tensor, *, ignored: int) -> Tensor:
    """Write ``scale * (softmax(z) - onehot(y))`` over the logits and each token's loss; 0 for ignored tokens.

    Args:
        z_CV: logits, contiguous; returned.
        y_C: targets, int64.
        scale: 0-d, float32: the gradient of the result by each token's loss.
        losses_C: float32, written.
        ignored: the target of tokens without loss.
    """
    C, V = z_CV.shape
    block = min(BLOCK, triton.next_power_of_2(V))
    sizes = {"IGNORED": ignored, "BLOCK": block, "num_warps": 16 if block > 2048 else 4}
    with torch.cuda.device(z_CV.device) if z_CV.is_cuda else nullcontext():
        _gradient[(C,)](z_CV, y_C, losses_C, scale, V, **sizes)
    return z_CV
