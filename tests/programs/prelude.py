"""The names that a program uses beside PyTorch's, and the global state that it may change.

A program is text. It runs twice in namespaces that differ by `patch`, `unpatch` and `apply_policy` alone, which do
nothing in the stock one.
"""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import accelerate
import numpy as np
import peft
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide.memory import ActivationPolicy, apply_policy
from programs.families import V, batch, build


class Scaled(accelerate.hooks.ModelHook):
    def post_forward(self, module: nn.Module, output: Any) -> Any:
        return (output[0] * 1.5, *output[1:]) if isinstance(output, tuple) else output * 1.5


class ScaledInput(accelerate.hooks.ModelHook):
    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return (args[0] * 0.5, *args[1:]), kwargs


def layer(model: Any) -> nn.Module:
    """Return the first decoder layer."""
    return next(m[0] for m in model.modules() if isinstance(m, nn.ModuleList) and len(m))


def saved_and_loaded(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def as_output(outputs: Any) -> SimpleNamespace:
    """Return the tuple of a model that was called with ``return_dict=False`` by names: loss, logits."""
    return SimpleNamespace(loss=outputs[0], logits=outputs[1])


class Recorder:
    """What a program shows: `see` keeps copies, in order; ``log`` is for its hooks."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, Any]] = []
        self.log: list[Any] = []
        self.reports: list[lowtide.PatchReport] = []
        self.at = 0  # the statement that runs

    def see(self, value: Any) -> None:
        self.seen.append((self.at, frozen(value)))


def frozen(value: Any) -> Any:
    """Return a value that later changes do not reach; of a tensor what it shows of itself as well."""
    if isinstance(value, Tensor):
        kept = value.detach().cpu().clone()
        return ("tensor", tuple(value.shape), value.dtype, value.requires_grad, kept)
    if isinstance(value, np.ndarray):
        return ("array", value.shape, str(value.dtype), value.copy())
    if isinstance(value, dict):
        return {key: frozen(one) for key, one in value.items()}
    if isinstance(value, tuple | list):
        return [frozen(one) for one in value]
    return value


@contextmanager
def sandbox() -> Iterator[None]:
    """Put everything global back that a program changed: hooks on all modules, modes, random state."""
    scope = vars(torch.nn.modules.module).items()
    hooks = [value for name, value in scope if name.startswith("_global_") and isinstance(value, dict)]
    held, rng = [dict(each) for each in hooks], torch.get_rng_state()
    try:
        with warnings.catch_warnings(), torch.enable_grad():
            warnings.simplefilter("ignore")
            yield
    finally:
        for each, before in zip(hooks, held, strict=True):
            each.clear()
            each.update(before)
        torch.set_rng_state(rng)


def namespace(recorder: Recorder, *, patched: bool, made: Callable[..., Any] = build) -> dict[str, Any]:
    """Return the names of a program.

    Args:
        recorder: What its ``see`` and ``log`` write to.
        patched: Whether ``patch`` and the others are lowtide's, or do nothing.
        made: ``build``.
    """

    def nothing(*args: Any, **kwargs: Any) -> None:
        return None

    def patch(*args: Any, **kwargs: Any) -> None:
        recorder.reports.append(lowtide.patch(*args, **kwargs))

    ours = {"patch": patch, "unpatch": lowtide.unpatch, "apply_policy": apply_policy}
    return {
        **(ours if patched else dict.fromkeys(ours, nothing)),
        "see": recorder.see, "log": recorder.log, "replace": setattr, "build": made, "batch": batch, "V": V,
        "layer": layer, "saved_and_loaded": saved_and_loaded, "as_output": as_output, "Scaled": Scaled,
        "ScaledInput": ScaledInput,
        "torch": torch, "F": F, "nn": nn, "copy": copy, "pickle": pickle, "np": np, "peft": peft,
        "accelerate": accelerate, "checkpoint": checkpoint, "nullcontext": nullcontext,
        "ActivationPolicy": ActivationPolicy, "HeadOptions": lowtide.HeadOptions,
    }  # fmt: skip
