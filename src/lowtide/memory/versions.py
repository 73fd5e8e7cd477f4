"""Tensors that have to be in backward what they were in forward, and whether somebody has written to one since.

What is written in place counts as a version of a tensor. What a fused optimizer writes does not in some releases of
PyTorch, so its steps are looked at while such tensors are watched. Writes through ``.data`` count nowhere:
`lowtide.samples` compares some values of each weight.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor
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


register_optimizer_step_post_hook(_see_step)
