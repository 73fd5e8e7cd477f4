"""What a rank of `lowtide train` prints about itself where its environment's SPY names it."""

from __future__ import annotations

import gc
import importlib
import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

import lowtide.train
from lowtide.measure.resident import peak_resident_bytes, resident_bytes
from lowtide.measure.units import mib
from lowtide.train import prepare
from lowtide.train.trainers import Measured


def spy(kinds: Sequence[str]) -> None:
    """Begin to spy: ``head``, ``result``, ``dtypes``, ``memory``; ``zero``: let DeepSpeed use gloo."""
    for kind in kinds:
        {
            "head": _forbid_head,
            "result": _spy_result,
            "dtypes": _spy_dtypes,
            "memory": _spy_memory,
            "zero": _gloo_alone,
        }[kind]()


def _print(kind: str, **values: Any) -> None:
    sys.stdout.write(f"spied {kind} {json.dumps(values)}\n")


def _gloo_alone() -> None:
    """Leave out DeepSpeed's own operator for the CPU, which it would compile for minutes at first."""
    ops: Any = importlib.import_module("deepspeed.ops")
    ops.__compatible_ops__["deepspeed_shm_comm"] = False
    gc.freeze()  # DeepSpeed collects garbage often, and would look through all of torch each time


def _forbid_head() -> None:
    """Let TRL's own head raise."""

    def raises(*_: Any) -> None:
        raise AssertionError("TRL's head was called")

    importlib.import_module("trl.trainer.utils")._ChunkedLogProbFunction.apply = raises


def _spy_result() -> None:
    """Print what the run returns on this rank, and whether DeepSpeed was imported."""
    train = lowtide.train.train

    def spied(*args: Any, **kwargs: Any) -> Any:
        result = train(*args, **kwargs)
        calls = {"fused": result.calls_fused, "materialised": result.calls_materialised}
        _print("result", losses=result.losses, **calls, deepspeed=bool(sys.modules.get("deepspeed")))
        return result

    lowtide.train.train = spied


def _has_more(tensor: Any) -> bool:
    """Return whether a tensor, or this rank's part of it, has digits that bfloat16 has not."""
    own = getattr(tensor, "to_local", lambda: tensor)().detach()
    return own.dtype == torch.float32 and bool((own.bfloat16().float() != own).any())


def _spy_dtypes() -> None:
    """Print how many digits this rank's losses and gradients have."""
    step = Measured.training_step

    def spied(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        loss = step(self, model, *args, **kwargs)
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        _print("dtypes", loss=_has_more(loss), gradients=len(gradients), finer=sum(map(_has_more, gradients)))
        return loss

    Measured.training_step = spied  # type: ignore[method-assign]


def _spy_memory() -> None:
    """Print how far this rank's memory grew by the model."""

    def spied(read: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        began = resident_bytes()
        model = read(*args, **kwargs)
        held = sum(getattr(p, "ds_tensor", p).numel() * p.element_size() for p in model.parameters())
        _print("memory", read=mib(peak_resident_bytes() - began), held=mib(held))
        return model

    prepare.pretrained_model = partial(spied, prepare.pretrained_model)
    prepare.random_model = partial(spied, prepare.random_model)
