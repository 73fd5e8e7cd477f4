"""Samples of weights, to detect writes that version counters miss: those through ``.data``."""

import math
from collections.abc import Iterable
from functools import cache, lru_cache

import torch
from torch import Tensor, nn

from lowtide.kernel_launch import why_no_triton
from lowtide.replay.replayed import on_device

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Samples:
    """A checksum of some values of weights: at least one per row and per column.

    It detects writes of whole weights, rows or columns through ``.data``, and replaced storage, for a few microseconds
    per layer and 8 bytes per weight on a GPU, but not writes of single values between the samples. Only plain,
    unsharded Parameters are sampled.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for p in tensors:
            plain = type(p) is nn.Parameter and not hasattr(p, "ds_id")  # ZeRO-3's
            if plain and p.numel() and not p.is_meta and p.untyped_storage().nbytes():
                groups.setdefault((p.device, p.dtype), []).append(p)
        self._groups = list(groups.values())
        self._layouts = [(p.device, p.dtype, p.shape) for group in self._groups for p in group]
        self._seen = [_checksum(group) for group in self._groups]

    def changed(self) -> bool:
        """Return whether a value has changed. On a GPU a device-side assertion checks it, without a synchronisation."""
        if not all(p.untyped_storage().nbytes() for group in self._groups for p in group):
            return False  # FSDP2 freed it, and will gather it again
        if self._layouts != [(p.device, p.dtype, p.shape) for group in self._groups for p in group]:
            return True
        return any(map(_differs, self._groups, self._seen))


_ON_DEVICE = (
    "lowtide: a weight that is read by a recompute was written to through .data between forward and backward; write "
    "after backward, or recompute nothing there (keep='all', checkpoint_level=0)"
)


def _checksum(group: list[Tensor]) -> Tensor | int:
    """Return the checksum of weights of one device and dtype: a number on a CPU, with Triton one for each weight."""
    if why_no_triton(group[0].device) is None:
        sums = torch.empty(len(group), dtype=torch.int64, device=group[0].device)
        _launch(group, sums)
        return sums
    total = _sum(group)
    return int(total) if total.is_cpu else total


def _differs(group: list[Tensor], seen: Tensor | int) -> bool:
    """Return whether weights have another checksum; assert on another device that they do not, and return False."""
    if not isinstance(seen, Tensor):
        return int(_sum(group)) != seen
    if seen.dim():
        _launch(group, seen, changed=_ON_DEVICE)
    else:
        torch._assert_async(torch.eq(_sum(group), seen), _ON_DEVICE)
    return False


def _launch(group: list[Tensor], sums: Tensor, *, changed: str | None = None) -> None:
    from lowtide.samples.kernels.checksum import sum_samples

    counts, steps = _places(tuple([p.shape for p in group]))
    with on_device(sums.device):
        sum_samples(_contiguous(group), counts, steps, sums, changed=changed)


def _sum(group: list[Tensor]) -> Tensor:
    """Return the sum, modulo 2^64, of the bits of all samples times odd factors that depend on the index."""
    counts, steps = _places(tuple([p.shape for p in group]))
    with torch.no_grad():
        # the bits, which autocast leaves alone
        samples = [
            p.as_strided((count,), (step,)).view(INTEGERS[p.element_size()])
            for p, count, step in zip(_contiguous(group), counts, steps, strict=True)
        ]
        bits = torch.cat(samples).long()
        return bits.mul_(torch.arange(1, 2 * sum(counts), 2, device=bits.device)).sum()


def _contiguous(group: list[Tensor]) -> list[Tensor]:
    return [p if p.is_contiguous() else p.detach().contiguous() for p in group]


@lru_cache(256)
def _places(shapes: tuple[torch.Size, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return of weights of these shapes how many samples are taken, and how far apart: along diagonals."""
    steps = tuple([_stride(shape) for shape in shapes])
    return tuple([-(-shape.numel() // step) for shape, step in zip(shapes, steps, strict=True)]), steps


@cache
def _stride(shape: torch.Size) -> int:
    columns = shape[-1] if shape else 1
    rows = math.prod(shape[:-1])
    return next((step for step in range(min(rows, columns), 1, -1) if math.gcd(step, columns) == 1), 1)
