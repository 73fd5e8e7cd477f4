"""The part `mlp` of `lowtide.patch`: gated MLPs that run as `lowtide.swiglu_mlp`.

An MLP is a module with children gate_proj, up_proj and down_proj; what lies between them is found by a probe.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowtide.mlp.swiglu import swiglu_mlp
from lowtide.models.eligibility import plain_class
from lowtide.models.ordinary import are_plain_linears, is_ordinary
from lowtide.models.probe import agree, outcome, random, rows, twin_of

LEVEL = "checkpoint_level"
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_SIZES = {"gate_proj": (10, 6), "up_proj": (10, 6), "down_proj": (6, 10)}  # of the twin
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
}
_TOLERANCE = 1e-5  # of float32 products of 6 and 10 terms; the exact GELU is 1e-3 from its tanh form


def is_candidate(module: nn.Module) -> bool:
    """Whether the names of the module's children say that it is a gated MLP."""
    children = dict(module.named_children())
    return all(name in children for name in _PROJECTIONS) or {"gate_up_proj", "down_proj"} <= children.keys()


def find(module: nn.Module, base: Any) -> tuple[str, tuple[str]] | str:
    """Return what the module computes, as text and as arguments of `overrides`; or why it stays as it is."""
    children = dict(module.named_children())
    if "gate_up_proj" in children:
        return "gate and up are one projection (gate_up_proj)"
    for name in _PROJECTIONS:
        if plain_class(children[name]) is not nn.Linear:  # an adapter, or quantised
            return f"{name} is a {type(children[name]).__name__}, not a plain torch.nn.Linear"
    others = [child for name, child in children.items() if name not in _PROJECTIONS]
    if not are_plain_linears(tuple(children[name] for name in _PROJECTIONS), tuple(others)):
        return "a child has hooks or a forward of its own"
    if any(True for child in (*others, module) for _ in child.parameters(recurse=child is not module)):
        return "it has weights beside its three projections"
    if "forward" in vars(module):
        return "its forward was replaced on the instance"
    if len(inspect.signature(base.forward).parameters) != 2:
        return "its forward takes more than one input"
    activation = _activation(module, base, children)
    if activation not in _ACTIVATIONS:
        return activation
    return f"runs as lowtide.swiglu_mlp ({activation}), which keeps gate and up", (activation,)


def _activation(module: nn.Module, base: Any, children: dict[str, nn.Module]) -> str:
    """Return the name of the activation that makes the module's twin what swiglu_mlp computes, or why none does."""
    small = {name: _small(name, children[name]) for name in _PROJECTIONS}
    twin = twin_of(module, base, modules={**children, **small}, parameters={})
    x = 2 * rows(6)
    got = outcome(lambda: base.forward(twin, x))
    if isinstance(got, Exception):
        return f"its forward does not run on its projections alone ({type(got).__name__})"
    with torch.no_grad():
        for name, function in _ACTIVATIONS.items():
            if agree(got, small["down_proj"](function(small["gate_proj"](x)) * small["up_proj"](x)), _TOLERANCE):
                return name
    return "it is not down(act(gate(x)) * up(x)) with SiLU or tanh-GELU"


def _small(name: str, linear: nn.Module) -> nn.Linear:
    out_features, in_features = _SIZES[name]
    small = nn.Linear(in_features, out_features, bias=linear.bias is not None, device="meta")
    seed = _PROJECTIONS.index(name) + 1
    small.weight = nn.Parameter(random(*_SIZES[name], seed=seed))
    if small.bias is not None:
        small.bias = nn.Parameter(random(_SIZES[name][0], seed=10 + seed))
    return small


def overrides(base: Any, activation: str) -> dict[str, Any]:
    """Return what a patched MLP does differently from ``base``."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) != 1 or kwargs or not _is_ours(self, args[0]):
            return base.forward(self, *args, **kwargs)
        gate, up, down = self.gate_proj, self.up_proj, self.down_proj
        return swiglu_mlp(
            args[0],
            gate.weight,
            up.weight,
            down.weight,
            gate_bias=gate.bias,
            up_bias=up.bias,
            down_bias=down.bias,
            activation=activation,
            checkpoint_level=self.checkpoint_level,
        )

    forward.__signature__ = inspect.signature(base.forward)  # type: ignore[attr-defined]
    forward.__doc__ = base.forward.__doc__
    return {"forward": forward}


def _is_ours(mlp: Any, x: Tensor) -> bool:
    linears = (mlp.gate_proj, mlp.up_proj, mlp.down_proj)
    if not are_plain_linears(linears, tuple(mlp.children())):
        return False
    biases = tuple(linear.bias for linear in linears if linear.bias is not None)
    if not is_ordinary((x,), (*(linear.weight for linear in linears), *biases)):
        return False
    return x.is_floating_point() and (x.dtype == mlp.gate_proj.weight.dtype or torch.is_autocast_enabled(x.device.type))
