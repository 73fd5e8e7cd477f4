"""DeepSpeed's ZeRO-3: Parameters sharded over the ranks, gathered around the calls of their module.

Outside of these calls such a Parameter has no elements, and DeepSpeed has its attributes. Nothing here imports
DeepSpeed: where there is such a Parameter, it is imported.
"""

import importlib
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self

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


def mark_gathered(args: Iterable[Any]) -> None:
    """Give tensors that ZeRO-3 does not shard the state of those that it has gathered, for code that asks for it."""
    states = importlib.import_module("deepspeed.runtime.zero.partition_parameters").ZeroParamStatus
    for tensor in args:
        if isinstance(tensor, Tensor):
            tensor.ds_status = states.AVAILABLE  # type: ignore[attr-defined]


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
    _when_backward_ends(Kept(parameters).let_go)


def _when_backward_ends(function: Callable[[], None]) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(function)  # as DDP and FSDP do


class _Whole:
    """Parameters that are gathered while this is entered: by it, or by others before."""

    def __init__(self, parameters: Iterable[Any]) -> None:
        self._parameters = list({id(p): p for p in parameters if is_partitioned(p)}.values())
        self._kept: tuple[Kept, ...] = ()  # of others' too, and of its own

    def __enter__(self) -> Self:
        if not self._kept:
            missing = [p for p in self._parameters if p.ds_status.name != "AVAILABLE"]
            if missing:
                missing[0].all_gather(missing)
            self._kept = Kept(self._parameters), Kept(missing)
        return self

    def close(self) -> None:
        """Partition what it gathered, and nothing else needs."""
        if self._kept:
            (all_of_them, own), self._kept = self._kept, ()
            all_of_them.release()
            own.let_go()

    def __exit__(self, *_: object) -> None:
        self.close()


class _Gathers(torch.autograd.Function):
    """Returns results as they are, and gathers Parameters in backward, before that of what returned them."""

    @staticmethod
    def forward(ctx: Any, whole: _Whole, *results: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.whole = whole
        ctx.set_materialize_grads(False)
        found = tuple(None if x is None else x.view_as(x) for x in results)
        pairs = zip(results, found, strict=True)
        ctx.mark_non_differentiable(*(new for x, new in pairs if x is not None and not x.requires_grad))
        return found

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> Any:
        if any(g is not None for g in upstream):
            whole = ctx.whole.__enter__()
            _when_backward_ends(whole.close)  # where `_Partitions` has no backward
        return None, *upstream


class _Partitions(torch.autograd.Function):
    """Returns hidden states as they are, and partitions Parameters once their gradient is there."""

    @staticmethod
    def forward(ctx: Any, whole: _Whole, hidden: Tensor) -> Tensor:
        ctx.whole = whole
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Any:
        ctx.whole.close()
        return None, upstream


def called_whole(function: Callable[..., tuple[Tensor | None, ...]], args: Sequence[Any]) -> tuple[Tensor | None, ...]:
    """Return ``function(*args)`` with the Parameters among ``args`` gathered in it, and again in its backward.

    For a call outside of the module that they belong to, which needs them in backward. The first of ``args`` are the
    hidden states. Where no Parameter is sharded, the function is called, and nothing else happens.
    """
    if not any(map(is_partitioned, args)):
        return function(*args)
    whole, (hidden, *others) = _Whole(args), args
    if torch.is_grad_enabled() and hidden.requires_grad:
        hidden = _Partitions.apply(whole, hidden)  # type: ignore[no-untyped-call]
    with whole:
        results = function(hidden, *others)
    return _Gathers.apply(whole, *results)  # type: ignore[no-any-return, no-untyped-call]
