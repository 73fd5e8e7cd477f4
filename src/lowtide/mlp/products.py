"""GEMMs into existing memory, and gradients summed over tiles of tokens."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Sum:
    """The gradient of ``of``, summed over tiles in ``dtype``: for one tile a weight's own, else the wide one."""

    of: Tensor
    dtype: torch.dtype
    total: Tensor | None = None

    def add_product(self, a: Tensor, b: Tensor) -> None:
        """Add ``a @ b``, a weight's gradient."""
        if self.total is not None:
            multiply(a, b, self.total, add=True)
        elif a.dtype == self.dtype:
            self.total = a @ b
        else:
            self.total = torch.empty(self.of.shape, dtype=self.dtype, device=self.of.device)
            multiply(a, b, self.total, add=False)

    def add_rows(self, rows: Tensor) -> None:
        """Add the sum of all rows, a bias's gradient."""
        part = rows.sum(0, dtype=self.dtype)
        self.total = part if self.total is None else self.total.add_(part)

    def finished(self, scale: float) -> Tensor:
        """Return ``scale`` times the sum, to which something was added, in the dtype of ``of``."""
        total, self.total = self.total, None
        assert total is not None
        if scale != 1:
            total.mul_(scale)
        return total if total.dtype == self.of.dtype else total.to(self.of.dtype)


@dataclass
class RowSum:
    """Rows of a `Sum`, written into its tensor: the gradient of gate or up where they are one projection."""

    whole: Sum
    rows: slice
    begun: bool = False

    def add_product(self, a: Tensor, b: Tensor) -> None:
        """Add ``a @ b``, the weight's gradient."""
        multiply(a, b, self._place(), add=self.begun)
        self.begun = True

    def add_rows(self, rows: Tensor) -> None:
        """Add the sum of all rows, the bias's gradient."""
        part, place = rows.sum(0, dtype=self.whole.dtype), self._place()
        place.copy_(place + part if self.begun else part)
        self.begun = True

    def _place(self) -> Tensor:
        whole = self.whole
        if whole.total is None:
            whole.total = torch.empty(whole.of.shape, dtype=whole.dtype, device=whole.of.device)
        return whole.total[self.rows]


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
