"""What goes wrong on a rank of `lowtide train` where its environment's FAULT says so: ``KIND RANK STEP``."""

from __future__ import annotations

import math
import os
import resource
import signal
from collections.abc import Callable
from functools import partial
from typing import Any

from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin, PartialState
from transformers import Trainer

_FILE_BYTES = 4096  # more than a rank prints, less than each file of a checkpoint that holds tensors


def cause(fault: str) -> None:
    """Let it come to this rank, if it is the one, in the middle of that step or of its save."""
    kind, rank, step = fault.split()
    if rank == os.environ.get("RANK", "0"):
        {
            "kill": _kill,
            "full": _fill,
            "nan": partial(_poison, math.nan),
            "inf": partial(_poison, math.inf),
        }[kind](int(step))


def take_fsdp2(state: Any) -> None:
    """Make of accelerate's state on CPUs what it is on GPUs."""
    if state.distributed_type == DistributedType.MULTI_CPU:
        state.fsdp_plugin = FullyShardedDataParallelPlugin()
        state.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP


def share_on_cpus() -> None:
    """Let the ranks share the model by FSDP2, which accelerate leaves out where there is no GPU."""

    def create(original: Callable[..., Any], trainer: Any) -> None:
        original(trainer)
        take_fsdp2(trainer.accelerator.state)
        trainer.is_fsdp_enabled = True

    _wrap(Trainer, "create_accelerator_and_postprocess", create)


def _wrap(owner: Any, name: str, wrapped: Callable[..., Any]) -> None:
    original = getattr(owner, name)
    setattr(owner, name, lambda *args, **kwargs: wrapped(original, *args, **kwargs))


def _kill(step: int) -> None:
    """Kill this process between forward and backward: the others wait for its gradients."""
    begun = 0

    def backward(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        nonlocal begun
        begun += 1
        if begun == step:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)

    _wrap(Accelerator, "backward", backward)


def _fill(step: int) -> None:
    """Let the kernel refuse what this process writes into files from the checkpoint of a step on."""

    def save(original: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
        if trainer.state.global_step >= step:
            resource.setrlimit(resource.RLIMIT_FSIZE, (_FILE_BYTES, resource.RLIM_INFINITY))
        return original(trainer, *args, **kwargs)

    _wrap(Trainer, "_save_checkpoint", save)


def _poison(factor: float, step: int) -> None:
    """Let this rank's loss of a step, and its gradients, not be finite."""

    def loss(original: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
        value = original(trainer, *args, **kwargs)
        if trainer.state.global_step != step - 1 or not trainer.model.training:
            return value
        return (value[0] * factor, *value[1:]) if isinstance(value, tuple) else value * factor

    _wrap(Trainer, "compute_loss", loss)
