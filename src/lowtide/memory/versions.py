"""Tensors that have to be in backward what they were in forward, and whether somebody has written to one since.

What is written in place counts as a version of a tensor. What a fused optimizer writes does not in some releases of
PyTorch, so its steps are looked at while such tensors are watched. Writes through ``.data`` count nowhere: `Samples`
compares some values of each weight.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

_watched: weakref.WeakSet[Versions] = weakref.WeakSet()


class Versions:
    """Some tensors as they are now.

    Args:
        tensors: Those; inference tensors, which have no versions, are left out.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._tensors = [x for x in tensors if not x.is_inference()]
        self._seen = [x._version for x in self._tensors]
        self._stepped = False
        _watched.add(self)

    def changed(self) -> bool:
        """Return whether one of them was written to since."""
        return self._stepped or [x._version for x in self._tensors] != self._seen

    def see_step(self, stepped: set[int]) -> None:
        """Take note that the tensors of these ids were stepped."""
        self._stepped |= any(id(x) in stepped for x in self._tensors)


def _see_step(optimizer: Any, *_: Any) -> None:
    if _watched:
        fused = [group["params"] for group in optimizer.param_groups if group.get("fused")]
        stepped = {id(p) for params in fused for p in params if p.grad is not None}
        for versions in list(_watched) if stepped else ():
            versions.see_step(stepped)


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
            if type(p) is nn.Parameter and p.numel() and not p.is_meta and not hasattr(p, "ds_id"):
                groups.setdefault((p.device, p.dtype), []).append(p)
        self._groups = list(groups.values())
        self._layouts = [(p.device, p.dtype, p.shape) for group in self._groups for p in group]
        self._seen = self._now()

    def changed(self) -> bool:
        """Return whether a value is another one by now. On a GPU the device asserts that it is not: nobody waits."""
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
    "lowtide: a weight of a layer that is recomputed was written to through .data between its forward and its backward;"
    " write behind backward, or give the layer keep='all'"
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


register_optimizer_step_post_hook(_see_step)
