"""What the kernels in Gluon do, in PyTorch: there is no interpreter for them."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from head.kernel_plans import counted
from lowtide.skip.kernels.gemms_hopper import Lists

ROWS, COLUMNS = 128, 256


def input_grad(
    e_CV: Tensor, w_VD: Tensor, mass_CP: Tensor, mean_PD: Tensor, ends: Any, lists: Lists, room: Any, used: Any
) -> None:
    """Do what the kernel does, by the programs' parts."""
    (C, D), P = (len(e_CV), mean_PD.shape[1]), len(mean_PD)
    across, means, rows = -(-D // COLUMNS), -(-P // COLUMNS), counted(used, C)
    product, parts = torch.full((C, D), torch.nan), dict[int, Tensor]()
    for program, tile, steps, (start, length, share) in units(lists, across, means):
        r, d = tile // across, slice(tile % across * COLUMNS, tile % across * COLUMNS + COLUMNS)
        at = slice(r * ROWS, r * ROWS + ROWS)
        z = torch.zeros(len(e_CV[at]), len(mean_PD[0, d]))
        for step in steps:
            k = slice(step * COLUMNS, step * COLUMNS + COLUMNS)
            if step < means:
                z += mass_CP[at, k] @ mean_PD[k, d]
            else:
                p = int(lists.across[r, step - means])
                v = slice(p * COLUMNS, p * COLUMNS + COLUMNS)
                z += e_CV[at, v] @ w_VD[v, d]
        if steps.stop < length:
            assert program not in parts
            parts[program] = z
        else:
            product[at, d] = z + sum(parts.pop(other) for other in range(start // share, program))
    assert not parts
    product = product[:rows]
    lost, own, s = ends.rest[:rows, None], w_VD[ends.y[:rows].clamp(0).long()], ends.s[:rows, None]
    product = ((product + torch.where(lost == 0, 0, lost * own)) * s).where(s != 0, 0)
    ends.out.as_strided((len(ends.out), D), (ends.out_stride, 1))[ends.to[:rows]] = product.to(ends.out.dtype)


def units(lists: Lists, across: int, means: int) -> Iterator[tuple[int, int, range, tuple[int, int, int]]]:
    """Yield each program's tiles, as the kernel reads them, with its steps and (start, length, a program's steps)."""
    share = -(-int(lists.starts[-1]) // len(lists.ranges))
    for program, (first, last) in enumerate(lists.ranges.tolist()):
        begin, end = program * share, min(program * share + share, int(lists.starts[-1]))
        for tile in range(last, first - 1, -1):
            length = int(lists.across_count[tile // across]) + means
            start = int(lists.starts[tile // across]) + tile % across * length
            yield program, tile, range(max(begin - start, 0), min(end - start, length)), (start, length, share)


def weight_grad(e_CV: Tensor, scaled_CD: Tensor, out_VD: Tensor, lists: Lists, *, add: bool) -> None:
    """Do what the kernel does."""
    for p, count in enumerate(lists.down_count.tolist()):
        v = slice(p * COLUMNS, p * COLUMNS + COLUMNS)
        z = torch.zeros_like(out_VD[v])
        for r in lists.down[p, :count].tolist():
            at = slice(r * ROWS, r * ROWS + ROWS)
            z += e_CV[at, v].T @ scaled_CD[at]
        if count or not add:
            out_VD[v] = out_VD[v] + z if add else z
