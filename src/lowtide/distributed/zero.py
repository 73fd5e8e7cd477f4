"""DeepSpeed's ZeRO-3: Parameters of which each rank holds a part, gathered around the calls of the module they are of.

Outside of these calls such a Parameter has no elements, and DeepSpeed keeps what it is beside it. Nothing here imports
DeepSpeed: a Parameter of it was made by one that is imported.
"""

import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

# Where the hooks that gather are from; some of them are wrapped.
HOOKS = ("deepspeed.runtime.zero.", "deepspeed.utils.nvtx")


def is_partitioned(x: object) -> bool:
    """Whether ``x`` is a Parameter that ZeRO-3 shares out, gathered just now or not."""
    return hasattr(x, "ds_id")


def shape_of(parameter: Tensor) -> torch.Size:
    """Return the shape of a Parameter, which one that is shared out has where it is gathered."""
    shape: torch.Size = getattr(parameter, "ds_shape", parameter.shape)
    return shape


def gather_for(module: Any, parameters: Iterable[Any]) -> bool:
    """Gather Parameters of other modules for the call of ``module`` that is running and for all later ones.

    For a module that computes with its children's weights itself. In backward and in later calls DeepSpeed gathers and
    releases them with the module's own, prefetched as any others.

    Args:
        module: The module.
        parameters: What it is about to read, and maybe Parameters that nothing shares out.

    Returns:
        Whether they are all here. Where not, DeepSpeed is gathering some for the children's calls, as it used to.
    """
    shared = [p for p in parameters if is_partitioned(p)]
    known = vars(module).get("_external_params", ())
    for parameter in shared:
        if id(parameter) not in known:  # also one that happens to be here now: in backward it may not
            sys.modules["deepspeed"].zero.register_external_parameter(module, parameter)
    missing = [p for p in shared if p.ds_status.name != "AVAILABLE"]
    if any(p.ds_status.name == "INFLIGHT" for p in missing):
        return False
    if missing:
        missing[0].all_gather(missing)
    return True


def gathers_for(module: Any) -> bool:
    """Whether `gather_for` has done so for ``module``: the order in which modules run is to stay what it was then."""
    return bool(vars(module).get("_external_params"))


def forget(module: Any) -> None:
    """Let DeepSpeed gather Parameters of the modules inside ``module`` for their own calls alone, as before."""
    own = {id(parameter) for parameter in module.parameters()}
    for parameter in list(vars(module).get("_external_params", {}).values()):
        if id(parameter) in own:
            sys.modules["deepspeed"].zero.partition_parameters.unregister_external_parameter(module, parameter)


class Kept:
    """Parameters that stay gathered after the call that is running, until `release` or `let_go`.

    A patched head is called twice: by the model, where it answers with logits that are not there, and by the loss,
    which needs the weight. DeepSpeed may let go of it in between and gather it a second time.

    Args:
        parameters: Gathered ones or ones about to be, and maybe tensors that nothing shares out.
    """

    def __init__(self, parameters: Iterable[Any]) -> None:
        self._parameters = [p for p in parameters if is_partitioned(p)]
        for parameter in self._parameters:
            parameter.ds_active_sub_modules.add(self)  # whom it is gathered for; DeepSpeed has numbers of modules there

    def release(self) -> None:
        """Let DeepSpeed do as it would."""
        for parameter in self._parameters:
            parameter.ds_active_sub_modules.discard(self)

    def let_go(self) -> None:
        """The same where no call follows, after which DeepSpeed would."""
        self.release()
        for parameter in self._parameters:
            if not (parameter.ds_active_sub_modules or parameter.ds_persist or parameter.ds_status.name != "AVAILABLE"):
                parameter.partition()


def keep_for_backward(parameters: Iterable[Any]) -> None:
    """Keep Parameters from the next call that gathers them until the end of the backward that is running.

    For gradients that reach them from a call within backward: autograd takes them in when that is over.
    """
    kept = Kept(parameters)
    torch.autograd.Variable._execution_engine.queue_callback(kept.let_go)
