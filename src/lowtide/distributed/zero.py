"""DeepSpeed's ZeRO-3: Parameters sharded over the ranks, gathered around the calls of their module.

Outside of these calls such a Parameter has no elements, and DeepSpeed has its attributes. Nothing here imports
DeepSpeed: where there is such a Parameter, it is imported.
"""

import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

# The modules of the hooks that gather; some of them are wrapped.
HOOKS = ("deepspeed.runtime.zero.", "deepspeed.utils.nvtx")


def is_partitioned(x: object) -> bool:
    """Return whether ``x`` is a Parameter that ZeRO-3 shards, gathered or not."""
    return hasattr(x, "ds_id")


def shape_of(parameter: Tensor) -> torch.Size:
    """Return the full shape of a Parameter, also of one that is not gathered."""
    shape: torch.Size = getattr(parameter, "ds_shape", parameter.shape)
    return shape


def gather_for(module: Any, parameters: Iterable[Any]) -> bool:
    """Gather Parameters of other modules for the running call of ``module`` and for all later ones.

    For a module that computes with its children's weights itself. In backward and in later calls DeepSpeed gathers and
    releases them with the module's own, with prefetching. ``parameters`` that are not sharded are skipped. Return
    whether all are gathered: if not, DeepSpeed is gathering some for the children's calls.
    """
    shared = [p for p in parameters if is_partitioned(p)]
    known = vars(module).get("_external_params", ())
    for parameter in shared:
        if id(parameter) not in known:  # also one that is gathered now: in backward it may not be
            sys.modules["deepspeed"].zero.register_external_parameter(module, parameter)
    missing = [p for p in shared if p.ds_status.name != "AVAILABLE"]
    if any(p.ds_status.name == "INFLIGHT" for p in missing):
        return False
    if missing:
        missing[0].all_gather(missing)
    return True


def gathers_for(module: Any) -> bool:
    """Return whether `gather_for` did so for ``module``: the order of the modules' calls must not change after that."""
    return bool(vars(module).get("_external_params"))


def forget(module: Any) -> None:
    """Undo `gather_for`: DeepSpeed gathers Parameters of the modules inside ``module`` only for their own calls."""
    own = {id(parameter) for parameter in module.parameters()}
    for parameter in list(vars(module).get("_external_params", {}).values()):
        if id(parameter) in own:
            sys.modules["deepspeed"].zero.partition_parameters.unregister_external_parameter(module, parameter)


class Kept:
    """Parameters that stay gathered after the running call, until `release` or `let_go`.

    A patched head is called twice: by the model, for which it returns lazy logits, and by the loss, which needs the
    weight. DeepSpeed might partition it in between and gather it again. Tensors that are not sharded are skipped.
    """

    def __init__(self, parameters: Iterable[Any]) -> None:
        self._parameters = [p for p in parameters if is_partitioned(p)]
        for parameter in self._parameters:
            parameter.ds_active_sub_modules.add(self)  # its users; DeepSpeed has numbers of modules there

    def release(self) -> None:
        """Let DeepSpeed partition them when it would."""
        for parameter in self._parameters:
            parameter.ds_active_sub_modules.discard(self)

    def let_go(self) -> None:
        """Partition them now: no call follows after which DeepSpeed would."""
        self.release()
        for parameter in self._parameters:
            if not (parameter.ds_active_sub_modules or parameter.ds_persist or parameter.ds_status.name != "AVAILABLE"):
                parameter.partition()


def keep_for_backward(parameters: Iterable[Any]) -> None:
    """Keep Parameters gathered from the next call that gathers them until the end of the running backward.

    For gradients of a call within backward, which autograd accumulates when that has ended.
    """
    kept = Kept(parameters)
    torch.autograd.Variable._execution_engine.queue_callback(kept.let_go)
