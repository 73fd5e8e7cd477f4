"""Samples of weights, to detect writes that version counters miss: those through ``.data``."""

import math
from collections.abc import Iterable
from functools import cache

import torch
from torch import Tensor, nn

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Samples:
    """A checksum of some values of weights: at least one per row and per column.

    It detects writes of whole weights, rows or columns through ``.data``, and replaced storage, for a few microseconds
    per layer and 8 bytes on a GPU, but not writes of single values between the samples. Only plain, unsharded
    Parameters are sampled.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for p in tensors:
            if type(p) is nn.Parameter and p.numel() and not p.is_meta and not hasattr(p, "ds_id"):  # ZeRO-3's
                groups.setdefault((p.device, p.dtype), []).append(p)
        self._groups = list(groups.values())
        self._layouts = [(p.device, p.dtype, p.shape) for group in self._groups for p in group]
        self._seen = self._now()

    def changed(self) -> bool:
        """Return whether a value has changed. On a GPU a device-side assertion checks it, without a synchronisation."""
        if any(p.untyped_storage().size() == 0 for group in self._groups for p in group):
            return False  # FSDP2 freed it, and will gather it again
        if self._layouts != [(p.device, p.dtype, p.shape) for group in self._groups for p in group]:
            return True
        for before, now in zip(self._seen, self._now(), strict=True):
            if isinstance(now, Tensor):
                torch._assert_async(torch.eq(now, before), _ON_DEVICE)
            elif before != now:
                return True
        return False

    def _now(self) -> list[Tensor | int]:
        with torch.no_grad():
            return [_checksum(torch.cat([_diagonal(p) for p in group])) for group in self._groups]


_ON_DEVICE = (
    "lowtide: a weight that is read by a recompute was written to through .data between forward and backward; write "
    "after backward, or recompute nothing there (keep='all', checkpoint_level=0)"
)


def _checksum(values: Tensor) -> Tensor | int:
    """Return the sum, modulo 2^64, of all bits times odd factors that depend on the index: a number on a CPU."""
    bits = values.long()
    total = bits.mul_(torch.arange(1, 2 * len(bits), 2, device=bits.device)).sum()
    return int(total) if total.is_cpu else total


def _diagonal(p: Tensor) -> Tensor:
    """Return values of ``p`` along its diagonals, their bits: autocast's torch.cat refuses the other 16-bit dtype."""
    flat = p.detach() if p.is_contiguous() else p.detach().contiguous()
    step = _stride(p.shape)
    return flat.view(INTEGERS[p.element_size()]).as_strided((-(-p.numel() // step),), (step,))


@cache
def _stride(shape: torch.Size) -> int:
    columns = shape[-1] if shape else 1
    rows = math.prod(shape[:-1])
    return next((step for step in range(min(rows, columns), 1, -1) if math.gcd(step, columns) == 1), 1)
