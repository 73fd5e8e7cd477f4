"""Whether weights are what they were: what version counters do not see, a write through ``.data``."""

import math
from collections.abc import Iterable
from functools import cache

import torch
from torch import Tensor, nn

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Samples:
    """Some values of some weights as they are now: at least one of every row and of every column.

    Finds what writes whole weights, rows or columns through ``.data``, and other storage put there, for a few
    microseconds and kilobytes a layer. A few values written one by one may lie between the samples.

    Args:
        tensors: Those; only plain Parameters that are here as a whole are looked at.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for p in tensors:
            if type(p) is nn.Parameter and p.numel() and not p.is_meta and not hasattr(p, "ds_id"):  # ZeRO-3's
                groups.setdefault((p.device, p.dtype), []).append(p)
        self._groups = list(groups.values())
        self._layouts = [(p.device, p.dtype, p.shape) for group in self._groups for p in group]
        self._seen = self._now()

    @property
    def nbytes(self) -> int:
        """What is kept of them."""
        return sum(values.nbytes for values in self._seen)

    def changed(self) -> bool:
        """Return whether a value is another one by now. On a GPU the device asserts that it is not: nobody waits."""
        if any(p.untyped_storage().size() == 0 for group in self._groups for p in group):
            return False  # FSDP2 has freed it, and will gather it again
        if self._layouts != [(p.device, p.dtype, p.shape) for group in self._groups for p in group]:
            return True
        for before, now in zip(self._seen, self._now(), strict=True):
            if now.is_cpu:
                if not torch.equal(before, now):
                    return True
            else:
                torch._assert_async((before == now).all(), _ON_DEVICE)
        return False

    def _now(self) -> list[Tensor]:
        with torch.no_grad():
            cats = (torch.cat([_diagonal(p) for p in group]) for group in self._groups)
            return [values.view(_BITS[values.element_size()]) for values in cats]


_ON_DEVICE = (
    "lowtide: a weight that a recompute reads was written to through .data between forward and backward; write behind "
    "backward, or recompute nothing there (keep='all', checkpoint_level=0)"
)


def _diagonal(p: Tensor) -> Tensor:
    """Return values of ``p`` that lie on diagonals of its rows."""
    flat = p.detach() if p.is_contiguous() else p.detach().contiguous()
    step = _stride(p.shape)
    return flat.as_strided((-(-p.numel() // step),), (step,))


@cache
def _stride(shape: torch.Size) -> int:
    columns = shape[-1] if shape else 1
    rows = math.prod(shape[:-1])
    return next((step for step in range(min(rows, columns), 1, -1) if math.gcd(step, columns) == 1), 1)
