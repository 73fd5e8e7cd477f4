"""The hardware's limit: the bare GEMMs of a head. N tokens, C rows of a chunk."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lowtide.bench.problem import Problem, blocks

CHUNKS = (2048, 4096)  # rows; and all of them at once, where that fits
MOST_LOGITS = 24 * 2**30  # bytes: more than that is not tried


def limit_rows(N: int, row_bytes: int) -> tuple[int, ...]:
    """Return the rows per chunk that are tried: 2048, 4096 and N, but none above N or too large to hold."""
    rows = sorted({min(c, N) for c in (*CHUNKS, N)})
    return tuple(c for c in rows if c * row_bytes <= MOST_LOGITS or c == rows[0])


def bare_gemms(problem: Problem, rows: int) -> Callable[[], None]:
    """Return a function that runs the GEMMs a setting cannot do without, in chunks of so many rows.

    With gradients: logits ``z = x W^T`` (twice, where the upstream gradient is known in backward only), ``dX = z W``
    and, unless the head is frozen, ``dW += z^T x``. z stands for its own gradient: it has the same shape. The weight's
    gradient is summed in its own dtype, which is the least work.
    """
    setting = problem.setting
    x, w = problem.x.detach().to(problem.dtype), problem.w.detach().to(problem.dtype)
    dx_dtype, dw_dtype = problem.x.dtype, problem.w.dtype
    again = setting.reduction == "none"

    @torch.no_grad()
    def run() -> None:
        z_CV = torch.empty(min(rows, len(x)), len(w), device=x.device, dtype=x.dtype)
        if again:
            for chunk in blocks(len(x), rows):
                torch.mm(x[chunk], w.T, out=z_CV[: chunk.stop - chunk.start])
        dx = torch.empty_like(x, dtype=dx_dtype) if setting.grad else None
        dw = torch.empty_like(w, dtype=dw_dtype) if setting.grad and not setting.frozen else None
        for chunk in blocks(len(x), rows):
            z = z_CV[: chunk.stop - chunk.start]
            torch.mm(x[chunk], w.T, out=z)
            if dx is not None:
                _multiply(z, w, dx[chunk], add=False)
            if dw is not None:
                _multiply(z.T, x[chunk], dw, add=chunk.start > 0)

    return run


def _multiply(a: Tensor, b: Tensor, out: Tensor, *, add: bool) -> None:
    """Write or add ``a @ b`` to ``out``, which may be float32 while the operands are narrow."""
    if out.dtype == a.dtype:
        torch.addmm(out, a, b, out=out) if add else torch.mm(a, b, out=out)
    elif out.device.type == "cuda":
        if add:
            torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
        else:
            torch.mm(a, b, out_dtype=out.dtype, out=out)
    elif add:
        out += a @ b
    else:
        out.copy_(a @ b)
