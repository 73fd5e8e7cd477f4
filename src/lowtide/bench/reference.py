"""The exact loss and gradients, by products in a wider dtype, and how far from them a narrow dtype's roundings lead.

N tokens, D hidden size, V vocabulary, C rows of a chunk; `ROWS` tokens of wide logits exist at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from lowtide.bench.problem import ROWS, Problem, blocks


@dataclass(frozen=True)
class Reference:
    """Each token's loss [N] and the two gradients [N, D] and [V, D] in `wide`; None where the setting has none."""

    loss_N: Tensor
    dx: Tensor | None
    dw: Tensor | None


@dataclass(frozen=True)
class Floor:
    """Relative errors of the two gradients that the roundings alone cause; None where there is no such gradient."""

    dx: float | None
    dw: float | None


@contextmanager
def exact_products() -> Iterator[None]:
    """Keep float32 products in float32: no TF32, no bfloat16."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def wide(problem: Problem) -> torch.dtype:
    """Return the dtype of the truth: float32, and float64 where the products are float32 themselves."""
    return torch.float32 if problem.dtype.itemsize < 4 else torch.float64


@torch.no_grad()
def reference(problem: Problem) -> Reference:
    """Return the loss and the gradients, from copies of the inputs in the dtype that `wide` says."""
    setting, dtype = problem.setting, wide(problem)
    w, g_N = problem.w.to(dtype), problem.g_N.to(dtype)
    loss_N = torch.empty(problem.shape.N, device=problem.device, dtype=dtype)
    dx = torch.empty_like(problem.x, dtype=dtype) if setting.grad else None
    dw = torch.zeros_like(w) if setting.grad and not setting.frozen else None
    with exact_products():
        for rows in blocks(problem.shape.N, ROWS):
            x, y = problem.x[rows].to(dtype), problem.y[rows, None]
            z = x @ w.T
            lse = z.logsumexp(1, keepdim=True)
            loss_N[rows] = (lse - z.gather(1, y))[:, 0]
            if dx is None:
                continue
            z.sub_(lse).exp_()
            z.scatter_add_(1, y, z.new_full(y.shape, -1.0)).mul_(g_N[rows, None])
            torch.mm(z, w, out=dx[rows])
            if dw is not None:
                dw.addmm_(z.T, x)
    return Reference(loss_N, dx, dw)


@torch.no_grad()
def rounding_floor(problem: Problem, true: Reference, chunk_rows: int | None) -> Floor:
    """Return the errors of the unnormalised exponentials when nothing but their roundings is wrong.

    With t a token's target logit and r the sum of ``E = exp(z - t)`` over the other classes, ``s = g / (1 + r)``,

        dX = diag(s) (E W - r w_y)        dW = E^T (diag(s) X)        with E_y = -r in dW

    Rounded to the operands' dtype are E, ``diag(s) X``, and, in dW alone, E_y; then the outputs to their own dtype.
    In dX the target's coefficient is exact, which an implementation gets by adding the part that rounding lost.

    Args:
        problem: whose gradients.
        true: its `reference`.
        chunk_rows: dW is rounded to its own dtype after every so many tokens; None: summed in float32, rounded once.
    """
    if true.dx is None:
        return Floor(None, None)
    N, narrow = problem.shape.N, problem.dtype
    w = problem.w.float()
    dx_error = dx_norm = torch.zeros((), device=problem.device, dtype=torch.float64)
    total = None if true.dw is None else torch.zeros_like(problem.w.detach())  # in dW's own dtype
    chunk_sum = None if total is None else torch.zeros_like(w)
    with exact_products():
        for chunk in blocks(N, chunk_rows or N):
            for rows in blocks(chunk.stop - chunk.start, ROWS):
                at = slice(chunk.start + rows.start, chunk.start + rows.stop)
                x, y = problem.x[at].float(), problem.y[at, None]
                E = x @ w.T
                E.sub_(E.gather(1, y)).exp_().scatter_(1, y, 0.0)
                r = E.sum(1, keepdim=True)
                s = problem.g_N[at, None] / (1 + r)
                E = E.to(narrow).float()
                dx = (s * (E @ w - r * w[y[:, 0]])).to(problem.x.dtype).double()
                dx_error = dx_error + (dx - true.dx[at]).square().sum()
                dx_norm = dx_norm + true.dx[at].double().square().sum()
                if chunk_sum is not None:
                    E.scatter_(1, y, (-r).to(narrow).float())
                    chunk_sum.addmm_(E.T, (s * x).to(narrow).float())
                del E
            if total is not None and chunk_sum is not None:
                total.copy_(chunk_sum.add_(total))  # rounds
                chunk_sum.zero_()
    dw_error = None if total is None or true.dw is None else relative_error(total, true.dw)
    return Floor((dx_error / dx_norm).sqrt().item(), dw_error)


@torch.no_grad()
def relative_error(got: Tensor, true: Tensor) -> float:
    """Return ``||got - true|| / ||true||``, a block at a time."""
    error = norm = torch.zeros((), device=true.device, dtype=torch.float64)
    for rows in blocks(len(true), 2**24 // true.shape[1] + 1):
        block = true[rows].double()
        error = error + (got[rows].double() - block).square().sum()
        norm = norm + block.square().sum()
    return (error / norm).sqrt().item()
