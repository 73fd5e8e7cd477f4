"""The part `mlp` of `lowtide.patch`: gated MLPs that run as `lowtide.swiglu_mlp`.

An MLP is a module with children gate_proj, up_proj and down_proj, or gate_up_proj and down_proj; a probe finds what it
computes with them, and which rows of gate_up_proj are gate's.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowtide.arguments import FLOATS, is_autocast_on
from lowtide.distributed.zero import gather_for, gathers_for
from lowtide.mlp.call import JOINED
from lowtide.mlp.swiglu import adapted_mlp
from lowtide.models import probe
from lowtide.models.adapters import (
    AdaptedLinear,
    adapted_linear,
    gemm_dtype,
    is_here,
    low_rank_projections,
    why_not_together,
)
from lowtide.models.eligibility import are_untouched, has_nothing_to_save, is_ordinary
from lowtide.models.instance import children_beside, children_of, with_fused

INPUTS = 1
LEVEL = "checkpoint_level"
TILE = "tile_tokens"
ATTRIBUTES = {LEVEL: 0, TILE: None}  # of a patched MLP, with their first values
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_JOINED = ("gate_up_proj", "down_proj")
WEIGHTS = (*_PROJECTIONS, *_JOINED)
_HIDDEN, _WIDE = 6, 10  # of the twin
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
}
_TOLERANCE = 1e-5  # of float32 products of 6 and 10 terms; the exact GELU is 1e-3 from its tanh form
_Layers = tuple[AdaptedLinear, ...]


def is_candidate(module: nn.Module) -> bool:
    """Whether the module's children have the names of a gated MLP's."""
    children = dict(module.named_children()).keys()
    return set(_PROJECTIONS) <= children or set(_JOINED) <= children


def find(module: nn.Module, base: Any) -> tuple[str, tuple[str, str]] | str:
    """Return what the module computes, as text and as arguments of `overrides`; or why it stays unmodified."""
    names, layers = _names(module), _layers(module)
    if isinstance(layers, str):
        return layers
    # a twin of the same names and biases
    biases = [layer.base.bias is not None for layer in layers]
    wide = [2 * _WIDE] if names is _JOINED else [_WIDE] * 2
    into = [probe.linear(width, _HIDDEN, 1 + i, bias=biases[i]) for i, width in enumerate(wide)]
    small = (*into, probe.linear(_HIDDEN, _WIDE, 3, bias=biases[-1]))
    twin = probe.twin_of(module, base, modules=dict(zip(names, small, strict=True)))
    x = (2 * probe.rows(_HIDDEN)).requires_grad_()
    leaves = (x, *twin.parameters())
    got = probe.outcomes(base, twin, x, leaves=leaves)
    if isinstance(got, str):
        return got
    found = probe.first_of(_formulas(small, x), got, leaves, _TOLERANCE)
    if found is None:
        return "it is not down(act(gate(x)) * up(x)) with SiLU or tanh-GELU"
    activation, joined = found
    adapted = [name for name, layer in zip(names, layers, strict=True) if layer.adapter]
    with_what = f", LoRA on {', '.join(adapted)} with it" if adapted else ""
    if any(layer.four_bit for layer in layers):
        with_what += ", weights in 4 bits dequantised for one GEMM at a time"
    kept = f"gate and up, one projection ({joined})" if joined else "gate and up"
    return f"runs as lowtide.swiglu_mlp ({activation}), which keeps {kept}{with_what}", found


def _formulas(projections: tuple[nn.Linear, ...], x: Tensor) -> Iterator[tuple[tuple[str, str], Callable[[], Tensor]]]:
    """Yield an MLP of these projections for each activation and, of one projection for both, place of gate and up."""
    *into, down = projections

    def formula(act: Callable[[Tensor], Tensor], joined: str) -> Tensor:
        outputs = [layer(x) for layer in into]
        gate, up = [outputs[0][..., rows] for rows in JOINED[joined](_WIDE)] if joined else outputs
        y: Tensor = down(act(gate) * up)
        return y

    for name, act in _ACTIVATIONS.items():
        for joined in JOINED if len(into) == 1 else ("",):
            yield (name, joined), functools.partial(formula, act, joined)


def _names(mlp: nn.Module) -> tuple[str, ...]:
    """Return the names of the projections: of gate, up and down, or of gate and up together and down."""
    return _PROJECTIONS if children_of(mlp).get(_JOINED[0]) is None else _JOINED


def _layers(mlp: nn.Module) -> _Layers | str:
    """Return what the projections would run, or why that is not linear layers with LoRA or without."""
    layers: list[AdaptedLinear] = []
    modules = [*children_beside(mlp, WEIGHTS)]
    for name in _names(mlp):
        layer = adapted_linear(getattr(mlp, name))
        if isinstance(layer, str):
            return f"{name} {layer}"
        layers.append(layer)
        modules += layer.around + layer.linears
    if not are_untouched(modules):
        return "a projection has hooks or a forward of its own"
    return why_not_together(layers) or tuple(layers)


def overrides(base: Any, activation: str, joined: str) -> dict[str, Any]:
    """Return what a patched MLP does differently from ``base``.

    ``joined`` is where gate and up are in their one projection, empty if they are two (`lowtide.mlp.call.JOINED`).
    """

    def run(mlp: Any, x: Any) -> Tensor | None:
        # None: not patched. Somebody made it from this class, or holds this method of one that was unpatched since.
        level: Any = getattr(mlp, LEVEL, None)
        # Checked before all that follows, which takes as long as the MLP of a token.
        if level is None or (has_nothing_to_save(x) and not (_drops(mlp) or gathers_for(mlp))):
            return None
        layers = _layers(mlp)
        if isinstance(layers, str) or not _is_ordinary(mlp, x, layers):
            return None
        # A compiler fuses the model's own code with what is around it, and saves gate and up too, as level 0 does.
        if level == 0 and torch.compiler.is_compiling() and not any(layer.four_bit for layer in layers):
            return None
        dtype = _dtype(x, layers)
        if dtype is None:
            return None
        tile: int | None = getattr(mlp, TILE, None)
        settings: Any = {"activation": activation, "checkpoint_level": level, "tile_tokens": tile}
        first, *second, last = low_rank_projections(layers, dtype)
        return adapted_mlp(x, first, second[0] if second else None, last, joined=joined, **settings)

    return with_fused(base, INPUTS, run)


def _drops(mlp: nn.Module) -> bool:
    """Whether LoRA's dropout is active, which our kernels draw in their own way.

    A reentrant checkpoint runs a layer without gradients first and with them later, and both must drop the same.
    """
    dropouts = (children_of(getattr(mlp, name)).get("lora_dropout") for name in _names(mlp))
    children = (module for dropout in dropouts if dropout is not None for module in dropout.children())
    return any(module.training and type(module) is nn.Dropout for module in children)


def _is_ordinary(mlp: Any, x: Any, layers: _Layers) -> bool:
    """Whether input and weights are plain, whole and here."""
    dense = [(p.weight, p.bias) for layer in layers for p in layer.linears[layer.four_bit :]]
    packed = [layer.base for layer in layers if layer.four_bit]
    parameters = [p for pair in (*dense, *((layer.bias,) for layer in packed)) for p in pair if p is not None]
    if not is_ordinary((x,), parameters) or not all(is_here(layer.weight) for layer in packed):
        return False
    return gather_for(mlp, (*parameters, *(layer.weight for layer in packed)))


def _dtype(x: Tensor, layers: _Layers) -> torch.dtype | None:
    """Return the one dtype in which projections compute with ``x``; None: they have several, or not of an MLP's.

    A dense projection computes in the dtype of ``x``, unless autocast changes that.
    """
    if x.dtype not in FLOATS or x.layout != torch.strided:
        return None
    autocast = is_autocast_on(x.device.type)
    dtypes = {gemm_dtype(layer.base, x) if layer.four_bit else layer.base.weight.dtype for layer in layers}
    if not all(layer.four_bit for layer in layers):
        if autocast and not any(layer.four_bit for layer in layers):
            return x.dtype
        dtypes.add(None if autocast else x.dtype)
    return dtypes.pop() if len(dtypes) == 1 else None
