"""Dot products with the rows of the weight that each token lists, and their gradients, in plain PyTorch.

n tokens, K ids of a set, D hidden size, V rows of the weight here. The kernels of `kernels/support_rows` are the same
with the same arguments, but for ``block``: how many numbers are gathered at a time.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from lowtide.head.matmul import slices


def score(x_nD: Tensor, w_VD: Tensor, rows_nK: Tensor, *, block: int) -> Tensor:
    """Return each listed row's dot product with its token's hidden state [n, K], wide; 0 where a row is negative."""
    z_P = x_nD.new_zeros(rows_nK.numel(), dtype=_wide(x_nD.dtype))
    for part, token, w, here in _gathered(w_VD, rows_nK, x_nD.dtype, block):
        z_P[part] = (w * x_nD.index_select(0, token)).sum(1).where(here, 0)
    return z_P.view(rows_nK.shape)


def input_grad(c_nK: Tensor, w_VD: Tensor, rows_nK: Tensor, out_nD: Tensor, dtype: torch.dtype, *, block: int) -> None:
    """Write the sum of each token's rows, rounded to ``dtype``, times ``c_nK`` (wide) into ``out_nD``."""
    total, c_P = torch.zeros_like(out_nD, dtype=c_nK.dtype), c_nK.view(-1)
    for part, token, w, here in _gathered(w_VD, rows_nK, dtype, block):
        c = c_P[part, None]
        add_rows_(total, token, (c * w.where(here[:, None], 0)).where(c != 0, 0))
    out_nD.copy_(total)


def weight_grad(c_NK: Tensor, x_ND: Tensor, rows_NK: Tensor, out_VD: Tensor, *, block: int) -> None:
    """Write the sum of each row's hidden states times ``c_NK`` into ``out_VD``, in an order that the rows fix."""
    order = rows_NK.view(-1).sort(stable=True).indices
    row_P, c_P, K = rows_NK.view(-1)[order], c_NK.view(-1)[order], rows_NK.shape[1]
    total = out_VD.zero_().to(c_NK.dtype)
    for part in slices(len(order) if len(out_VD) else 0, block // max(1, x_ND.shape[1])):
        c = c_P[part, None].where(row_P[part, None] >= 0, 0)
        x = x_ND.index_select(0, order[part] // K)
        add_rows_(total, row_P[part].clamp(min=0), (c * x).where(c != 0, 0))
    if total is not out_VD:
        out_VD.copy_(total)


def add_rows_(total: Tensor, index: Tensor, rows: Tensor) -> None:
    """Add rows to those of ``total`` at ``index``, in one order: what index_add_ lacks on a GPU."""
    if total.is_cuda:
        total.index_put_((index.long(),), rows, accumulate=True)
    else:
        total.index_add_(0, index, rows)


def _gathered(
    w_VD: Tensor, rows_nK: Tensor, dtype: torch.dtype, block: int
) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
    """Yield some of the pairs of token and row, with their tokens, their rows of the weight, and which are here."""
    row_P, (V, D), K = rows_nK.view(-1), w_VD.shape, rows_nK.shape[1]
    for part in slices(len(row_P) if V else 0, block // max(1, D)):
        token = torch.arange(part.start, part.stop, device=row_P.device) // K
        w = w_VD.index_select(0, row_P[part].clamp(min=0))
        yield part, token, w.to(dtype).to(_wide(dtype)), row_P[part] >= 0


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
