"""FSDP2: a unit that stays gathered between two calls of its module in one forward pass.

A patched head is called twice: by the model, where it answers with logits that are not there, and by the loss, which
needs the weight. A unit of its own would let go of the weight in between and gather it a second time. One that it
shares with other modules (the last norm, the embedding) would wait for a second call of these, and not end its forward.
"""

import sys
from typing import Any

from torch import nn


class Gathered:
    """The unit of a module, told not to let go of its parameters after forward, until `release` or `let_go`.

    Args:
        module: A module that runs its forward just now.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module: Any = module
        # after which mesh it would be, None where it stays gathered anyway: no public name tells it
        self._groups = [(group, group.post_forward_mesh_info) for group in _groups(module)]
        for group, _ in self._groups:
            group.post_forward_mesh_info = None

    def release(self) -> None:
        """Let the unit do again as the user said."""
        for group, mesh_info in self._groups:
            group.post_forward_mesh_info = mesh_info

    def let_go(self) -> None:
        """The same, and let go of the parameters at once, where that is what the user said."""
        self.release()
        if any(mesh_info is not None for _, mesh_info in self._groups):
            self._module.reshard()
        self._groups = []


def end_forward_alone(module: nn.Module) -> None:
    """Tell the unit of a module, which runs once more, that its forward ends when this call does."""
    awaited: set[nn.Module] | None = getattr(_state(module), "_modules_to_run_forward", None)  # by no public name
    if awaited:
        awaited.intersection_update({module})


def _state(module: nn.Module) -> Any:
    """Return FSDP2's state of a module; None where it is no unit of FSDP2."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None or not isinstance(module, fsdp.FSDPModule):
        return None
    return module._get_fsdp_state()


def _groups(module: nn.Module) -> list[Any]:
    """Return what FSDP2 gathers and lets go of together with ``module``; [] where it is no unit of FSDP2."""
    state = _state(module)
    if state is None:
        return []
    groups = getattr(state, "_fsdp_param_groups", None)  # torch 2.13; before, one
    found = groups if groups is not None else [state._fsdp_param_group]
    return [group for group in found if hasattr(group, "post_forward_mesh_info")]
