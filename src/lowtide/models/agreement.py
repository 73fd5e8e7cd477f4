"""Whether all ranks that share a module take its fused way: they tell each other once, at its first call.

Fused and stock code exchange different things. A rank that went another way than the others, for a hook or a mode that
it alone has (a logger's on the first rank, say), would wait for what never comes, or take one tensor for another.
"""

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from lowtide.errors import UnsupportedError
from lowtide.head.ranks import exchange

# Of each module the ranks that could not take the fused way when they told each other.
_UNABLE: WeakKeyDictionary[nn.Module, tuple[int, ...]] = WeakKeyDictionary()


def why_not_agreed(module: nn.Module, mesh: Any, device: torch.device, why_not: str | None) -> str | None:
    """Return why ``module`` runs the stock code on every rank of ``mesh``; None where it is fused on every rank.

    Every rank has to call this, at each call of the module. At the first one the host waits.

    Args:
        module: What is in parts over the ranks.
        mesh: Of one axis.
        device: Of its tensors.
        why_not: Why it cannot be fused here, for something that the other ranks may not have.

    Raises:
        UnsupportedError: The ranks have agreed to fuse it, and this one cannot any more.
    """
    if module not in _UNABLE:
        told = exchange.numbers_of_all([int(why_not is not None)], mesh.get_group(), device)
        _UNABLE[module] = tuple(rank for rank, (unable,) in enumerate(told) if unable)
    unable = _UNABLE[module]
    if unable:
        return why_not or f"on ranks {list(unable)} of its group something looks at the calls of this module"
    if why_not is not None:
        raise UnsupportedError(
            f"model: expected what the ranks that share {type(module).__name__} had at its first call, got a change "
            f"since: {why_not}. The others may not know of it. If it is so on every rank (a FlopCounterMode, which has "
            "hooks on all modules), call lowtide.patch(model) again on each."
        )
    return None


def forget(model: nn.Module) -> None:
    """Let the ranks tell each other again at the next call of each module."""
    for module in model.modules():
        _UNABLE.pop(module, None)
