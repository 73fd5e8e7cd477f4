"""Copy autograd's gradient of a piece of logits to the GEMMs' operand, in one pass.

c rows of the piece, V vocabulary.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowtide.kernel_launch import Launcher

ROWS, COLUMNS = 16, 256  # of a tile
ROWS_PER_PROGRAM = 128


@Launcher
@triton.jit  # type: ignore[untyped-decorator]
def _put_logit_grad(  # type: ignore[no-untyped-def]
    g_ptr, g_row, g_column, scale_ptr, out_ptr, out_row, sums_ptr, C, V, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    EACH: tl.constexpr,
):  # fmt: skip
    """out = scale * g in out's dtype; sums_v += sum_i scale g_iv over each program's rows, before that rounding."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    scale = tl.load(scale_ptr) if scale_ptr is not None else 1.0
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for c in range(0, EACH, ROWS):
        row = (tl.program_id(1) * EACH + c + tl.arange(0, ROWS)).to(tl.int64)
        inside = (row < C)[:, None] & (column < V)[None, :]
        g = tl.load(g_ptr + row[:, None] * g_row + column[None, :] * g_column, mask=inside, other=0.0)
        if scale_ptr is not None:
            g *= scale
        if sums_ptr is not None:
            total += g
        tl.store(out_ptr + row[:, None] * out_row + column[None, :], g.to(out_ptr.dtype.element_ty), mask=inside)
    if sums_ptr is not None:
        at = sums_ptr + tl.program_id(1).to(tl.int64) * V + column
        tl.store(at, tl.load(at, mask=column < V, other=0.0) + tl.sum(total, 0), mask=column < V)


def bias_sums(most_rows: int, V: int, device: torch.device) -> Tensor:
    """Return zeros [programs, V] for `put_logit_grad` to add a bias's gradient to, for pieces of up to so many rows."""
    return torch.zeros(triton.cdiv(most_rows, ROWS_PER_PROGRAM), V, device=device)


def put_logit_grad(g_cV: Tensor, scale: Tensor | None, out_cV: Tensor, sums_PV: Tensor | None) -> None:
    """Write ``scale * g`` to ``out_cV``, and add its column sums, in parts, to ``sums_PV``, which is from `bias_sums`.

    ``g_cV`` is float32, of any strides, and shares no memory with ``out_cV``, whose rows are contiguous.
    """
    C, V = g_cV.shape
    if not C:
        return
    _put_logit_grad[(triton.cdiv(V, COLUMNS), triton.cdiv(C, ROWS_PER_PROGRAM))](
        g_cV, *g_cV.stride(), scale, out_cV, out_cV.stride(0), sums_PV, C, V, ROWS=ROWS, COLUMNS=COLUMNS,
        EACH=ROWS_PER_PROGRAM,
    )  # fmt: skip
