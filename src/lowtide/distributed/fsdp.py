"""FSDP2: a unit that stays gathered between two calls of its module in one forward pass.

A patched head is called twice: by the model, for which it returns lazy logits, and by the loss, which needs the weight.
A unit of its own would reshard the weight in between and gather it again. One that it shares with other modules (the
last norm, the embedding) would wait for a second call of these, and not end its forward. Backward reshards all units,
and logits may be read after it.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


class Gathered:
    """The unit of a module in its forward, which does not reshard its parameters until `release` or `let_go`."""

    def __init__(self, module: nn.Module) -> None:
        self._module: Any = module
        # the mesh it reshards to after forward, None if it stays gathered anyway: there is no public name
        self._groups = [(group, group.post_forward_mesh_info) for group in _groups(module)]
        for group, _ in self._groups:
            group.post_forward_mesh_info = None

    def release(self) -> None:
        """Restore the user's setting."""
        for group, mesh_info in self._groups:
            group.post_forward_mesh_info = mesh_info

    def let_go(self) -> None:
        """Restore the user's setting, and if that is to reshard, do it at once."""
        self.release()
        if any(mesh_info is not None for _, mesh_info in self._groups):
            self._module.reshard()
        self._groups = []


def end_forward_alone(module: nn.Module) -> None:
    """End the forward of a module's unit with this call, in which the module runs again."""
    awaited: set[nn.Module] | None = getattr(_state(module), "_modules_to_run_forward", None)  # there is no public name
    if awaited:
        awaited.intersection_update({module})


def unit_of(module: nn.Module, root: nn.Module) -> nn.Module | None:
    """Return the unit that shards the weights of ``module``: it is its own, or the root's; None of neither."""
    return next((unit for unit in (module, root) if _state(unit) is not None), None)


def versions(unit: nn.Module | None) -> tuple[int, ...]:
    """Return the version counters of what a unit shards: a step of an optimizer changes these, no gathered weight's."""
    return tuple(parameter.sharded_param._version for group in _groups(unit) for parameter in group.fsdp_params)


@contextmanager
def gathered(unit: Any) -> Iterator[None]:
    """Gather what a unit has resharded, until the end of the block."""
    unit.unshard()
    try:
        yield
    finally:
        unit.reshard()


def _state(module: nn.Module | None) -> Any:
    """Return FSDP2's state of a module; None if it is not a unit of FSDP2."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None or not isinstance(module, fsdp.FSDPModule):
        return None
    return module._get_fsdp_state()


def _groups(module: nn.Module | None) -> list[Any]:
    """Return what FSDP2 gathers and reshards together with ``module``; [] if it is not a unit of FSDP2."""
    state = _state(module)
    if state is None:
        return []
    groups = getattr(state, "_fsdp_param_groups", None)  # torch 2.13; before, one
    found = groups if groups is not None else [state._fsdp_param_group]
    return [group for group in found if hasattr(group, "post_forward_mesh_info")]
