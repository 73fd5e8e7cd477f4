"""GEMMs into existing memory, and gradients summed over tiles of tokens."""

import torch
from torch import Tensor


class Sum:
    """The gradient of ``of``, summed over tiles in ``dtype``: for one tile a weight's own, else the wide one.

    ``rows`` are those of ``of`` that something is added to: gate's or up's, where they are one projection. None: all.
    """

    def __init__(self, of: Tensor, dtype: torch.dtype) -> None:
        self._of, self._dtype = of, dtype
        self._total: Tensor | None = None
        self._begun: list[slice | None] = []

    def add_product(self, a: Tensor, b: Tensor, rows: slice | None = None) -> None:
        """Add ``a @ b``, a weight's gradient."""
        place, add = self._place(rows)
        multiply(a, b, place, add=add)

    def add_rows(self, grad: Tensor, rows: slice | None = None) -> None:
        """Add the sum of all rows of ``grad``, a bias's gradient."""
        place, add = self._place(rows)
        if add:
            place.add_(grad.sum(0, dtype=self._dtype))
        else:
            torch.sum(grad, 0, dtype=self._dtype, out=place)

    def _place(self, rows: slice | None) -> tuple[Tensor, bool]:
        """Return the memory of these rows, and whether it has a sum already."""
        if self._total is None:
            self._total = torch.empty(self._of.shape, dtype=self._dtype, device=self._of.device)
        begun = rows in self._begun
        if not begun:
            self._begun.append(rows)
        return self._total if rows is None else self._total[rows], begun

    def finished(self, scale: float) -> Tensor:
        """Return ``scale`` times the sum, to which something was added, in the dtype of ``of``."""
        total, self._total = self._total, None
        assert total is not None
        if scale != 1:
            total.mul_(scale)
        return total if total.dtype == self._of.dtype else total.to(self._of.dtype)


def multiply(a: Tensor, b: Tensor, out: Tensor, *, add: bool) -> None:
    """Write or add ``a @ b`` into ``out``, of the operands' dtype or another."""
    if out.dtype == a.dtype:
        torch.addmm(out, a, b, out=out) if add else torch.mm(a, b, out=out)
    elif a.is_cuda and out.dtype == torch.float32:
        if add:
            torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
        else:
            torch.mm(a, b, out_dtype=out.dtype, out=out)
    elif add:
        out.add_(a @ b)
    else:
        out.copy_(a @ b)
