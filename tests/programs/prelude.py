"""The names that a program uses beside PyTorch's, and the global state that it may change.

A program is text. It runs twice in namespaces that differ by `patch`, `unpatch`, `apply_policy` and `remove_policy`
alone, which do nothing in the stock one.
"""

from __future__ import annotations

import copy
import io
import math
import pickle
import sys
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
from lowtide.memory import ActivationPolicy, apply_policy, remove_policy
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
def sandbox(originals: list[tuple[Any, str, Any]]) -> Iterator[None]:
    """Put everything global back that a program changed: functions, hooks on all modules, modes, random state."""
    hooks = [
        getattr(torch.nn.modules.module, name) for name in dir(torch.nn.modules.module) if name.startswith("_global_")
    ]
    held = [dict(one) for one in hooks if isinstance(one, dict)]
    dtype, rng, threads = torch.get_default_dtype(), torch.get_rng_state(), torch.get_num_threads()
    try:
        with warnings.catch_warnings(), torch.enable_grad():
            warnings.simplefilter("ignore")
            yield
    finally:
        put_back(originals)
        for one, before in zip((one for one in hooks if isinstance(one, dict)), held, strict=True):
            one.clear()
            one.update(before)
        torch.set_default_dtype(dtype)
        torch.set_rng_state(rng)
        torch.set_num_threads(threads)


def put_back(originals: list[tuple[Any, str, Any]]) -> None:
    while originals:
        owner, name, old = originals.pop()
        if old is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, old)


_ABSENT = object()


def namespace(
    recorder: Recorder, originals: list[tuple[Any, str, Any]], *, patched: bool, made: Callable[..., Any] = build
) -> dict[str, Any]:
    """Return the names of a program.

    Args:
        recorder: What its ``see`` and ``log`` write to.
        originals: Where ``replace`` notes what was there.
        patched: Whether ``patch`` and the others are lowtide's, or do nothing.
        made: ``build``.
    """

    def replace(owner: Any, name: str, value: Any) -> None:
        is_property = isinstance(getattr(type(owner), name, None), property)
        originals.append((owner, name, getattr(owner, name) if is_property else vars(owner).get(name, _ABSENT)))
        setattr(owner, name, value)

    def nothing(*args: Any, **kwargs: Any) -> None:
        return None

    def patch(*args: Any, **kwargs: Any) -> None:
        recorder.reports.append(lowtide.patch(*args, **kwargs))

    ours = {"patch": patch, "unpatch": lowtide.unpatch, "apply_policy": apply_policy, "remove_policy": remove_policy}
    return {
        **(ours if patched else dict.fromkeys(ours, nothing)),
        "see": recorder.see, "log": recorder.log, "replace": replace, "restore": lambda: put_back(originals),
        "build": made, "batch": batch, "V": V, "layer": layer,
        "saved_and_loaded": saved_and_loaded, "as_output": as_output, "Scaled": Scaled, "ScaledInput": ScaledInput,
        "torch": torch, "F": F, "nn": nn, "copy": copy, "math": math, "pickle": pickle, "np": np, "peft": peft,
        "accelerate": accelerate, "checkpoint": checkpoint, "nullcontext": nullcontext, "sys": sys,
        "ActivationPolicy": ActivationPolicy, "HeadOptions": lowtide.HeadOptions,
    }  # fmt: skip
