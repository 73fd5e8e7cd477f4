"""The part `mlp` of `lowtide.patch`: gated MLPs that run as `lowtide.swiglu_mlp`.

An MLP is a module with children gate_proj, up_proj and down_proj, or gate_up_proj and down_proj; a probe finds what it
computes with them, and which rows of gate_up_proj are gate's.
"""

import copy
import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowtide.arguments import FLOATS, is_autocast_on
from lowtide.distributed.zero import gather_for, gathers_for
from lowtide.mlp.call import JOINED
from lowtide.mlp.swiglu import adapted_mlp, plain_mlp
from lowtide.models import probe
from lowtide.models.adapters import AdaptedLinear, adapted_linear, low_rank_projections, why_not_together
from lowtide.models.eligibility import are_plain_linears, has_nothing_to_save, is_ordinary
from lowtide.models.four_bit import gemm_dtype, is_four_bit, is_here, kind_of
from lowtide.models.instance import PROBED, children_of, part_of, why_not_forward, with_forward
from lowtide.models.parallel_mlp import is_cut_over, is_hooked, mesh_of_mlp, run_sharded
from lowtide.models.parallel_style import why_not_agreed

LEVEL = "checkpoint_level"
TILE = "tile_tokens"
ATTRIBUTES = {LEVEL: 0, TILE: None}  # of a patched MLP, with their first values
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_JOINED = ("gate_up_proj", "down_proj")
_HIDDEN, _WIDE = 6, 10  # of the twin
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
}
_TOLERANCE = 1e-5  # of float32 products of 6 and 10 terms; the exact GELU is 1e-3 from its tanh form
_HOOKED = "a child has hooks or a forward of its own"


def is_candidate(module: nn.Module) -> bool:
    """Whether the module's children have the names of a gated MLP's."""
    children = dict(module.named_children()).keys()
    return set(_PROJECTIONS) <= children or set(_JOINED) <= children


def find(module: nn.Module, base: Any) -> tuple[str, tuple[str, str, tuple[type, ...], probe.Settings]] | str:
    """Return what the module computes, as text and as arguments of `overrides`; or why it stays unmodified."""
    children, names = dict(module.named_children()), _names(module)
    layers = _layers(module)
    if isinstance(layers, str):  # adapters of another form, or quantised in another way
        return layers
    others, mesh = _others(module), mesh_of_mlp(layers)
    if isinstance(mesh, str):
        return mesh
    if mesh is None and not _are_plain(layers, others):  # sharded ones are checked at each call, on all ranks
        return _HOOKED
    why_not = why_not_together(layers)
    if why_not is not None:
        return why_not
    states = ((child.parameters, child.buffers, child is not module) for child in (*others, module))
    if any(True for parameters, buffers, recurse in states for _ in (*parameters(recurse), *buffers(recurse))):
        return "it has weights or buffers beside its projections"
    if LEVEL in vars(module) and part_of(module) is None:
        return f"it has a {LEVEL} of its own"
    why_not = why_not_forward(module, base, inputs=1)
    if why_not is not None:
        return why_not
    formula = _formula(module, base, children, layers)
    if isinstance(formula, str):
        return formula
    activation, joined = formula
    adapted = [name for name, layer in zip(names, layers, strict=True) if layer.adapters]
    with_what = f", LoRA on {', '.join(adapted)} with it" if adapted else ""
    if mesh is not None:
        with_what = ", each rank with its part of them, unless one has hooks there"
    types = tuple(map(type, others))
    settings = probe.settings_of((module, *others))
    kinds = sorted({kind_of(layer.base) for layer in layers if layer.four_bit})
    if kinds:
        with_what += f", {' and '.join(kinds)} weights dequantised for one GEMM at a time"
    kept = f"gate and up, one projection ({joined})" if joined else "gate and up"
    what = f"runs as lowtide.swiglu_mlp ({activation}), which keeps {kept}{with_what}"
    return what, (activation, joined, types, settings)


def _names(mlp: nn.Module) -> tuple[str, ...]:
    """Return the names of the projections: of gate, up and down, or of gate and up together and down."""
    return _PROJECTIONS if children_of(mlp).get(_JOINED[0]) is None else _JOINED


def _layers(mlp: nn.Module) -> tuple[AdaptedLinear, ...] | str:
    """Return what the projections would run, or which of them is not a linear layer, and why."""
    found = []
    for name in _names(mlp):
        layer = adapted_linear(getattr(mlp, name), four_bit=True)
        if isinstance(layer, str):
            return f"{name} {layer}"
        found.append(layer)
    return tuple(found)


def _are_plain(layers: tuple[AdaptedLinear, ...], others: tuple[nn.Module, ...]) -> bool:
    """Whether nothing but the projections' own code runs; `adapted_linear` has looked at that of `Linear4bit`."""
    linears = tuple(linear for layer in layers for linear in layer.linears[layer.four_bit :])
    packed = (layer.base for layer in layers if layer.four_bit)
    around = (module for layer in layers for module in layer.around)
    return are_plain_linears(linears, (*others, *packed, *around))


def _parameters(layers: tuple[AdaptedLinear, ...]) -> list[Tensor]:
    """Return the Parameters of every linear layer; a weight in 4 bits, of a class of its own, is not among them."""
    dense = [(p.weight, p.bias) for layer in layers for p in layer.linears[layer.four_bit :]]
    packed = [(layer.base.bias,) for layer in layers if layer.four_bit]
    return [p for pair in (*dense, *packed) for p in pair if p is not None]


def _others(module: nn.Module) -> tuple[nn.Module, ...]:
    """Return the children beside the projections: the activation, as a rule."""
    children, names = children_of(module).items(), _names(module)
    return tuple(child for name, child in children if name not in names and child is not None)


def _formula(
    module: nn.Module, base: Any, children: dict[str, nn.Module], layers: tuple[AdaptedLinear, ...]
) -> tuple[str, str] | str:
    """Return the activation, and the places of gate and up, with which swiglu_mlp is the module; or why it is not."""
    names, biases = _names(module), [layer.base.bias is not None for layer in layers]
    wide = [2 * _WIDE] if names is _JOINED else [_WIDE] * 2
    into = [probe.linear(wide[i], _HIDDEN, 1 + i, bias=biases[i]) for i in range(len(wide))]
    down = probe.linear(_HIDDEN, _WIDE, 3, bias=biases[-1])
    others = {name: copy.deepcopy(child) for name, child in children.items() if name not in names}
    small = dict(zip(names, (*into, down), strict=True))
    twin = probe.twin_of(module, base, modules={**others, **small}, parameters={})
    x = 2 * probe.rows(_HIDDEN)
    got = probe.outcomes(base, twin, x)
    for one in got:
        if isinstance(one, Exception):
            return f"its forward does not run on its projections alone ({type(one).__name__})"

    def formula(act: Callable[[Tensor], Tensor], joined: str) -> Tensor:
        outputs = [layer(x) for layer in into]
        gate, up = [outputs[0][..., rows] for rows in JOINED[joined](_WIDE)] if joined else outputs
        y: Tensor = down(act(gate) * up)
        return y

    places = [joined for joined in JOINED if bool(joined) == (names is _JOINED)]
    for (name, act), joined in itertools.product(_ACTIVATIONS.items(), places):
        expected = probe.outcome(functools.partial(formula, act, joined))
        if all(probe.agree(one, expected, _TOLERANCE) for one in got):
            return name, joined
    return "it is not down(act(gate(x)) * up(x)) with SiLU or tanh-GELU"


def overrides(
    base: Any, activation: str, joined: str, other_types: tuple[type, ...], found: probe.Settings
) -> dict[str, Any]:
    """Return what a patched MLP does differently from ``base``.

    ``joined`` is where gate and up are in their one projection, empty if they are two (`lowtide.mlp.call.JOINED`).
    ``other_types`` are the classes of the children beside the projections, and ``found`` the settings of the MLP and of
    these children.
    """
    probed = probe.StockForward(base)

    def is_changed(mlp: nn.Module, others: tuple[nn.Module, ...]) -> bool:
        return probed.is_replaced() or probe.have_changed((mlp, *others), found)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        ours = len(args) == 1 and not kwargs
        # None: not patched. Somebody made it from this class, or holds this method of one that was unpatched since.
        level: Any = getattr(self, LEVEL, None) if ours else None
        # Checked before all that follows, which takes as long as the MLP of a token.
        if level is None or (has_nothing_to_save(args[0]) and not (_drops(self) or gathers_for(self))):
            return base.forward(self, *args, **kwargs)
        layers, mesh = _projections(self, args[0], other_types, is_changed)
        tile: int | None = getattr(self, TILE, None)
        if layers is None:
            return base.forward(self, *args, **kwargs)
        packed = _has_packed(layers)
        dtype = _dtype(args[0], layers) if packed else None
        if mesh is not None:
            return run_sharded(args[0], layers, mesh, activation, level, tile)
        settings: Any = {"activation": activation, "checkpoint_level": level, "tile_tokens": tile}
        if joined:
            gate_up, down_only = low_rank_projections(layers, dtype)
            return adapted_mlp(args[0], gate_up, None, down_only, joined=joined, **settings)
        if packed or any(layer.adapters for layer in layers):
            return adapted_mlp(args[0], *low_rank_projections(layers, dtype), **settings)
        gate, up, down = (layer.base for layer in layers)
        weights = gate.weight, up.weight, down.weight
        return plain_mlp(args[0], *weights, gate.bias, up.bias, down.bias, **settings)

    return with_forward(base, forward, **{PROBED: probed})


def _drops(mlp: Any) -> bool:
    """Whether LoRA's dropout is active, which our kernels draw in their own way.

    A reentrant checkpoint runs a layer without gradients first and with them later, and both must drop the same.
    """
    if not any(_may_drop(getattr(mlp, name)) for name in _names(mlp)):
        return False
    layers = _layers(mlp)
    return not isinstance(layers, str) and any(adapter.drops for layer in layers for adapter in layer.adapters)


def _may_drop(projection: nn.Module) -> bool:
    """Whether a projection may drop: a quick check, for generating with adapters."""
    dropouts = children_of(projection).get("lora_dropout")
    if dropouts is None:
        return type(projection) is not nn.Linear and not is_four_bit(projection)
    return any(module.training and type(module) is nn.Dropout for module in dropouts.children())


def _projections(
    mlp: Any, x: Tensor, other_types: tuple[type, ...], is_changed: Callable[..., bool]
) -> tuple[tuple[AdaptedLinear, ...] | None, Any]:
    """Return the projections of a call that may run fused, else None; and their mesh if they are sharded over ranks."""
    others, layers = _others(mlp), _layers(mlp)
    if isinstance(layers, str) or tuple(map(type, others)) != other_types:
        return None, None
    if _are_plain(layers, others):
        parameters, packed = _parameters(layers), [layer.base.weight for layer in layers if layer.four_bit]
        if is_changed(mlp, others) or not is_ordinary((x,), parameters) or not all(map(is_here, packed)):
            return None, None
        if not gather_for(mlp, (*parameters, *packed)):
            return None, None
        return (layers if why_not_together(layers) is None and _fits(x, layers) else None), None
    # Up to the agreement, all that is checked is equal on all ranks.
    if torch.compiler.is_compiling() or type(x) is not Tensor:  # the compiler traces DTensors by itself
        return None, None
    mesh = mesh_of_mlp(layers)
    if mesh is None or isinstance(mesh, str) or not is_cut_over(layers, mesh) or not _fits(x, layers):
        return None, None
    alone = are_plain_linears((), others) and not is_hooked(layers) and is_ordinary((x,), ())
    alone = alone and not is_changed(mlp, others)
    why_not = why_not_agreed(mlp, mesh, x.device, None if alone else _HOOKED)
    return (layers, mesh) if why_not is None else (None, None)


def _has_packed(layers: tuple[AdaptedLinear, ...]) -> bool:
    """Whether a projection is in 4 bits."""
    return True in [layer.four_bit for layer in layers]


def _fits(x: Tensor, layers: tuple[AdaptedLinear, ...]) -> bool:
    if x.dtype not in FLOATS or x.layout != torch.strided:
        return False
    if _has_packed(layers):
        return _dtype(x, layers) is not None
    return all(layer.base.weight.dtype == x.dtype for layer in layers) or is_autocast_on(x.device.type)


def _dtype(x: Tensor, layers: tuple[AdaptedLinear, ...]) -> torch.dtype | None:
    """Return the one dtype in which projections, some of them in 4 bits, compute with ``x``; None: they have several.

    A dense one among them computes in the dtype of ``x``, unless autocast changes that.
    """
    dtypes = {gemm_dtype(layer.base, x) if layer.four_bit else layer.base.weight.dtype for layer in layers}
    if not all(layer.four_bit for layer in layers):
        dtypes.add(None if is_autocast_on(x.device.type) else x.dtype)
    return dtypes.pop() if len(dtypes) == 1 else None
