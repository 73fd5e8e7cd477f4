"""Which tiles of E a chunk's gradients keep, and what stands for the others; `kernels.lists` says who computes what.

C rows of a chunk, V vocabulary, P tiles across it, R tiles of rows, g a token's factor, p its probabilities. E is
unnormalised: with a row's s, ``s E = g p``. A tile counts for

    q = sum over its rows of s^2 (sum over its classes of E^2 - (sum of E)^2 / 256), the target's entry left out

(256, or the number of classes in the last one), what is left of it without each row's mean. In place of row i of a tile
that is left out, whose entries sum to m_i, stands m_i times the mean row of W in the tile, and in dW's rows of that
tile s_i m_i x_i over the number of its classes.

So the gradient of the logits loses as much, squared, as the q of these tiles sum to. As many are left out, the smallest
first, as this sum allows: it is at most T^2 times the squared norm of the chunk's gradient. A tile with a target of its
rows stays in any case: rows lie in the order of their targets, so these are R + P tiles at most.
"""

import torch
from torch import Tensor

from lowtide.skip.kernels.ordered import COLUMNS, ROWS

UNITS = 2**30  # of what may be lost: sums of whole numbers do not depend on an order


def sizes_of_tiles(V: int, device: torch.device) -> Tensor:
    """Return how many classes each tile across has, float32 [P]."""
    columns = COLUMNS.value
    return (V - torch.arange(0, V, columns, dtype=torch.float32, device=device)).clamp(max=columns)


def choose(
    masses_CP: Tensor, squares_CP: Tensor, y_C: Tensor, s_C: Tensor, entry_C: Tensor, sizes_P: Tensor,
    threshold: Tensor, mass_CP: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return which tiles are kept, bool [R, P], and what a report needs [3]; write the other tiles' masses.

    From what rows of E sum to in each tile and their squares do, without targets; the targets (-1 where ignored) and
    their entries; and s over the sum of the tokens' factors, so that small gradients have squares. Of the report: g p
    that is in the other tiles, and the squares of what is lost of s E, and of s E.
    """
    (C, P), rows = masses_CP.shape, ROWS.value
    valid = y_C >= 0
    counts = valid & (s_C != 0)
    s_C = s_C.abs().where(counts, 0)
    part = torch.addcmul(squares_CP, masses_CP, masses_CP / sizes_P, value=-1).clamp_(min=0)
    part.mul_(s_C[:, None]).mul_(s_C[:, None]).masked_fill_(~counts[:, None], 0)  # s^2 may be no number of float32
    part = part if C % rows == 0 else torch.nn.functional.pad(part, (0, 0, 0, -C % rows))
    q = part.view(-1, rows, P).sum(1)
    whole = squares_CP.sum(1).addcmul_(entry_C, entry_C).mul_(s_C).mul_(s_C).where(counts, 0).sum()

    homes = torch.arange(C, device=q.device) // rows * P + y_C.clamp(min=0) // COLUMNS.value
    away = (torch.zeros_like(q, dtype=torch.int32).view(-1).scatter_add_(0, homes, counts.int()) == 0).view(q.shape)
    allowed = threshold.square() * whole
    ordered = torch.nn.functional.pad(q.where(away, torch.inf).view(-1), (0, 1), value=torch.inf).sort().values
    units = (ordered / allowed.where(allowed.isfinite(), 0)).clamp(max=2).nan_to_num(2).mul(UNITS).ceil().long()
    least = ordered.take((units.cumsum(0) <= UNITS).sum())  # the last never fits; indexing would wait for the device
    some = ~away.all(1, keepdim=True)  # rows with a gradient
    left = (q < least) & away & some  # NaN is kept
    kept = some ^ left

    of_row = (~kept)[:, None].expand(-1, rows, -1).reshape(-1, P)[:C]
    mass_CP.copy_(masses_CP.where(of_row & valid[:, None], 0))
    dropped = (mass_CP.sum(1, dtype=torch.float32) * s_C).where(counts, 0).sum()
    return kept, torch.stack((dropped, q.where(left, 0).sum(), whole))


def save_tiles(
    sums_CP: Tensor, masses_CP: Tensor, squares_CP: Tensor, miss_C: Tensor, y_C: Tensor, sizes_P: Tensor
) -> Tensor:
    """Return what backward chooses tiles by [C, 2, P]: sums of a row's p, and of p^2 less ``(sum of p)^2 / 256``.

    Over a tile's classes but the target; p are the probabilities, with a soft cap times ``1 - (z / softcap)^2``, as E
    is. Of rows that do not count all is 0. ``sums_CP`` are those of the exponentials themselves.
    """
    whole = sums_CP.sum(1, keepdim=True)
    factor = -torch.expm1(-miss_C)[:, None] / whole.where(whole != 0, 1)
    varied = torch.addcmul(squares_CP, masses_CP, masses_CP / sizes_P, value=-1).clamp_(min=0).sqrt_()
    saved = torch.stack((masses_CP * factor, (varied * factor).square_()), 1)
    return saved.where((y_C >= 0)[:, None, None], 0)


def take_tiles(saved: Tensor, factor_C: Tensor, sizes_P: Tensor) -> tuple[Tensor, Tensor]:
    """Return what rows of E, p times a factor of each, sum to in each tile, and their squares do."""
    masses, varied = (saved[:, 0].float() * factor_C[:, None], saved[:, 1].float() * factor_C.square()[:, None])
    return masses, torch.addcmul(varied, masses, masses / sizes_P)
