"""The part `mlp` of `lowtide.patch`: gated MLPs that run as `lowtide.swiglu_mlp`.

An MLP is a module with children gate_proj, up_proj and down_proj; what lies between them is found by a probe.
"""

import copy
import functools
import inspect
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowtide.distributed.zero import gather_for, gathers_for
from lowtide.mlp.adapted import adapted_mlp
from lowtide.mlp.swiglu import swiglu_mlp
from lowtide.models.adapters import AdaptedLinear, adapted_linear, low_rank_projections, why_not_together
from lowtide.models.eligibility import are_plain_linears, has_nothing_to_save, is_autocast_on, is_ordinary
from lowtide.models.instance import WATCH, part_of
from lowtide.models.parallel_mlp import is_cut_over, is_looked_at, mesh_of_mlp, run_in_parts
from lowtide.models.parallel_style import why_not_agreed
from lowtide.models.probe import Settings, Watch, agree, code_of, outcome, outcomes, random, rows, settings_of, twin_of

LEVEL = "checkpoint_level"
TILE = "tile_tokens"
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_SIZES = {"gate_proj": (10, 6), "up_proj": (10, 6), "down_proj": (6, 10)}  # of the twin
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
}
_TOLERANCE = 1e-5  # of float32 products of 6 and 10 terms; the exact GELU is 1e-3 from its tanh form
_LOOKED_AT = "a child has hooks or a forward of its own"


def is_candidate(module: nn.Module) -> bool:
    """Whether the names of the module's children say that it is a gated MLP."""
    children = dict(module.named_children())
    return all(name in children for name in _PROJECTIONS) or {"gate_up_proj", "down_proj"} <= children.keys()


def find(module: nn.Module, base: Any) -> tuple[str, tuple[str, tuple[type, ...], Settings]] | str:
    """Return what the module computes, as text and as arguments of `overrides`; or why it stays as it is."""
    children = dict(module.named_children())
    if "gate_up_proj" in children:
        return "gate and up are one projection (gate_up_proj)"
    layers = _layers(module)
    if isinstance(layers, str):  # adapters of another form, or quantised
        return layers
    others, mesh = _others(module), mesh_of_mlp(layers)
    if isinstance(mesh, str):
        return mesh
    if mesh is None and not _are_plain(layers, others):  # over ranks it is asked at the calls, of all of them
        return _LOOKED_AT
    why_not = why_not_together(layers)
    if why_not is not None:
        return why_not
    if any(True for child in (*others, module) for _ in _state(child, recurse=child is not module)):
        return "it has weights or buffers beside its three projections"
    if LEVEL in vars(module) and part_of(module) is None:
        return f"it has a {LEVEL} of its own"
    if "forward" in vars(module):
        return "its forward was replaced on the instance"
    if len(inspect.signature(base.forward).parameters) != 2:
        return "its forward takes more than one input"
    activation = _activation(module, base, children, layers)
    if activation not in _ACTIVATIONS:
        return activation
    adapted = [name for name, layer in zip(_PROJECTIONS, layers, strict=True) if layer.adapters]
    with_what = f", LoRA on {', '.join(adapted)} with it" if adapted else ""
    if mesh is not None:
        with_what = ", each rank with its part of them, unless one has hooks there"
    types = tuple(map(type, others))
    found = settings_of((module, *others), code_of((base, *types)))
    what = f"runs as lowtide.swiglu_mlp ({activation}), which keeps gate and up{with_what}"
    return what, (activation, types, found)


def _layers(mlp: nn.Module) -> tuple[AdaptedLinear, ...] | str:
    """Return what the projections would run, or which of them is no linear layer, and why."""
    found = []
    for name in _PROJECTIONS:
        layer = adapted_linear(getattr(mlp, name))
        if isinstance(layer, str):
            return f"{name} {layer}"
        found.append(layer)
    return tuple(found)


def _are_plain(layers: tuple[AdaptedLinear, ...], others: tuple[nn.Module, ...]) -> bool:
    gate, up, down = layers
    return are_plain_linears(_linears(layers), (*others, *gate.around, *up.around, *down.around))


def _linears(layers: tuple[AdaptedLinear, ...]) -> tuple[nn.Linear, ...]:
    gate, up, down = layers
    return (*gate.linears, *up.linears, *down.linears)


def _others(module: nn.Module) -> tuple[nn.Module, ...]:
    """Return the children beside the projections: the activation, as a rule."""
    children = module._modules.items()
    return tuple(child for name, child in children if name not in _PROJECTIONS and child is not None)


def _state(module: nn.Module, *, recurse: bool) -> Iterator[Tensor]:
    return itertools.chain(module.parameters(recurse), module.buffers(recurse))


def _activation(module: nn.Module, base: Any, children: dict[str, nn.Module], layers: tuple[AdaptedLinear, ...]) -> str:
    """Return the name of the activation that makes the module's twin what swiglu_mlp computes, or why none does."""
    small = {name: _small(name, layer.base) for name, layer in zip(_PROJECTIONS, layers, strict=True)}
    others = {name: copy.deepcopy(child) for name, child in children.items() if name not in _PROJECTIONS}
    twin = twin_of(module, base, modules={**others, **small}, parameters={})
    x = 2 * rows(6)
    got = outcomes(base, twin, x)
    for one in got:
        if isinstance(one, Exception):
            return f"its forward does not run on its projections alone ({type(one).__name__})"
    for name, function in _ACTIVATIONS.items():
        expected = outcome(functools.partial(_written_out, small, function, x))
        if all(agree(one, expected, _TOLERANCE) for one in got):
            return name
    return "it is not down(act(gate(x)) * up(x)) with SiLU or tanh-GELU"


def _written_out(small: dict[str, nn.Linear], act: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    y: Tensor = small["down_proj"](act(small["gate_proj"](x)) * small["up_proj"](x))
    return y


def _small(name: str, linear: nn.Module) -> nn.Linear:
    out_features, in_features = _SIZES[name]
    small = nn.Linear(in_features, out_features, bias=linear.bias is not None, device="meta")
    seed = _PROJECTIONS.index(name) + 1
    small.weight = nn.Parameter(random(*_SIZES[name], seed=seed))
    if small.bias is not None:
        small.bias = nn.Parameter(random(_SIZES[name][0], seed=10 + seed))
    return small


def overrides(base: Any, activation: str, other_types: tuple[type, ...], found: Settings) -> dict[str, Any]:
    """Return what a patched MLP does differently from ``base``.

    Args:
        base: The stock class.
        activation: As `swiglu_mlp` takes it.
        other_types: Of the children beside the projections, which were a part of what the probe ran.
        found: The settings of the MLP and of these children.
    """
    args = (activation, other_types, found)
    watch = Watch(base, lambda: code_of((base, *other_types), found), found, lambda mlp: find(mlp, base)[1:] == (args,))

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        ours = len(args) == 1 and not kwargs
        # None: not patched. Somebody made it from this class, or holds this method of one that was unpatched since.
        level: Any = getattr(self, LEVEL, None) if ours else None
        # Asked before all that follows, which takes as long as the MLP of a token.
        if level is not None and has_nothing_to_save(args[0]) and not (_drops(self) or gathers_for(self)):
            level = None
        layers = None if level is None else _ours(self, args[0], other_types, watch)
        if layers is None:
            cut = None if level is None else _in_parts(self, args[0], other_types, watch)
            if cut is None:
                return base.forward(self, *args, **kwargs)
            return run_in_parts(args[0], *cut, activation, level, getattr(self, TILE, None))
        if any(layer.adapters for layer in layers):
            projections = low_rank_projections(layers)
            tile: int | None = getattr(self, TILE, None)
            return adapted_mlp(args[0], *projections, activation=activation, checkpoint_level=level, tile_tokens=tile)
        gate, up, down = (layer.base for layer in layers)
        return swiglu_mlp(
            args[0],
            gate.weight,
            up.weight,
            down.weight,
            gate_bias=gate.bias,
            up_bias=up.bias,
            down_bias=down.bias,
            activation=activation,
            checkpoint_level=level,
            tile_tokens=getattr(self, TILE, None),
        )

    forward.__signature__ = inspect.signature(base.forward)  # type: ignore[attr-defined]
    forward.__doc__ = base.forward.__doc__
    return {"forward": forward, WATCH: watch}


def _drops(mlp: Any) -> bool:
    """Whether LoRA's dropout is at work, which ours draws in its own way.

    A reentrant checkpoint runs a layer without gradients first and with them later, and both must drop the same.
    """
    if not any(_may_drop(getattr(mlp, name)) for name in _PROJECTIONS):
        return False
    layers = _layers(mlp)
    return not isinstance(layers, str) and any(adapter.drops for layer in layers for adapter in layer.adapters)


def _may_drop(projection: nn.Module) -> bool:
    """A quick no, for generating with adapters."""
    dropouts = projection._modules.get("lora_dropout")
    if dropouts is None:
        return type(projection) is not nn.Linear
    return any(module.training and type(module) is nn.Dropout for module in dropouts.children())


def _ours(mlp: Any, x: Tensor, other_types: tuple[type, ...], watch: Watch) -> tuple[AdaptedLinear, ...] | None:
    """Return the projections of a call that is ours to run, None where it is not."""
    others = _others(mlp)
    layers = _layers(mlp)
    if isinstance(layers, str) or tuple(map(type, others)) != other_types or not _are_plain(layers, others):
        return None
    if watch.differs(mlp, others):
        return None
    parameters = [p for linear in _linears(layers) for p in (linear.weight, linear.bias) if p is not None]
    if not is_ordinary((x,), parameters) or not gather_for(mlp, parameters):
        return None
    if why_not_together(layers) is not None:
        return None
    return layers if _fits(x, layers) else None


def _in_parts(
    mlp: Any, x: Tensor, other_types: tuple[type, ...], watch: Watch
) -> tuple[tuple[AdaptedLinear, ...], Any] | None:
    """Return the projections of a call that is ours to run on this rank's part, and their mesh; None where it is not.

    What is asked first is alike on all ranks; of what may not be they tell each other, and so all do the same.
    """
    if torch.compiler.is_compiling():  # which traces DTensors by itself
        return None
    others, layers = _others(mlp), _layers(mlp)
    if isinstance(layers, str) or tuple(map(type, others)) != other_types or type(x) is not Tensor:
        return None
    mesh = mesh_of_mlp(layers)
    if mesh is None or isinstance(mesh, str) or not is_cut_over(layers, mesh) or not _fits(x, layers):
        return None
    alone = are_plain_linears((), others) and not is_looked_at(layers) and is_ordinary((x,), ())
    alone = alone and not watch.differs(mlp, others)
    why_not = why_not_agreed(mlp, mesh, x.device, None if alone else _LOOKED_AT)
    return (layers, mesh) if why_not is None else None


def _fits(x: Tensor, layers: tuple[AdaptedLinear, ...]) -> bool:
    return x.is_floating_point() and (x.dtype == layers[0].base.weight.dtype or is_autocast_on(x.device.type))
