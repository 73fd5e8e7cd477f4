"""How far from the exact gradients of the loss a narrow dtype's roundings lead, whatever else is exact.

N tokens, D hidden size, V vocabulary; logits in float32 exist for `ROWS` tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from lowtide.bench.problem import ROWS, Problem, blocks
from lowtide.bench.task import Truth, exact_products, relative_error


class Floor(NamedTuple):
    """Relative errors of the two gradients that the roundings alone cause; None where there is no such gradient."""

    dx: float | None
    dw: float | None


@torch.no_grad()
def rounding_floor(problem: Problem, true: Truth, chunk_rows: int | None) -> Floor:
    """Return the errors of the unnormalised exponentials when nothing but their roundings is wrong.

    With t a token's target logit and r the sum of ``E = exp(z - t)`` over the other classes, ``s = g / (1 + r)``,

        dX = diag(s) (E W - r w_y)        dW = E^T (diag(s) X)        with E_y = -r in dW

    Rounded to the operands' dtype are E, ``diag(s) X``, and, in dW alone, E_y; then the outputs to their own dtype.
    In dX the target's coefficient is exact, which an implementation gets by adding the part that rounding lost.

    Args:
        problem: whose gradients.
        true: its exact gradients.
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
                s = problem.g[at, None] / (1 + r)
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
