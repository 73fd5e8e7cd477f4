"""The part `mlp` of `lowtide.patch` for a mixture's experts: one module with the weights of all, run as fused experts.

Such a module has parameters gate_up_proj and down_proj of three axes, and is called with hidden states, the experts of
each token and their routing weights. A probe finds what it computes with them: the activation and its limits, where
gate's columns are, and in which dtype under autocast.
"""

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lowtide.arguments import FLOATS, is_autocast_on, operand_dtype
from lowtide.distributed.zero import shape_of
from lowtide.mlp.call import JOINED
from lowtide.mlp.experts import Form, experts_mlp
from lowtide.models import probe
from lowtide.models.eligibility import are_untouched, has_nothing_to_save, is_ordinary
from lowtide.models.instance import children_beside, parameters_of, with_fused

INPUTS = 3
LEVEL = "checkpoint_level"
ATTRIBUTES = {LEVEL: 0}  # of a patched module, with their first values
_NAMES = ("gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias")
WEIGHTS = (*_NAMES, "parametrizations")  # of weights with peft's LoRA
_HIDDEN, _WIDE = 8, 12  # of the twin: PyTorch's grouped GEMM takes rows of whole 16 bytes
_TOLERANCE = 1e-5  # of float32 products of 8 and 12 terms


def is_candidate(module: nn.Module) -> bool:
    """Whether the module owns weights of all experts, gate and up in one."""
    weights = (parameters_of(module).get(name) for name in _NAMES[:2])
    return all(weight is not None and len(shape_of(weight)) == 3 for weight in weights)


def find(module: nn.Module, base: Any) -> tuple[str, tuple[Form, bool, bool]] | str:
    """Return what the module computes, as text and as arguments of `overrides`; or why it stays unmodified."""
    own: Any = parameters_of(module)
    if any(p is not None and p.dtype not in FLOATS for p in own.values()):
        return "its weights are quantised"
    gate_up, down = (shape_of(own[name]) for name in _NAMES[:2])
    E = down[0]
    transposed = tuple(gate_up) != (E, 2 * down[2], down[1])
    if 0 in (*gate_up, *down) or (transposed and tuple(gate_up) != (E, down[2], 2 * down[1])):
        return "the shapes of its weights are not those of gate and up together, and down"
    shapes: list[tuple[int, ...]] = [(2 * _WIDE, _HIDDEN), (_HIDDEN, _WIDE), (2 * _WIDE,), (_HIDDEN,)]
    if transposed:
        shapes[:2] = [shape[::-1] for shape in shapes[:2]]
    weights = [
        None if own.get(name) is None else nn.Parameter(probe.random(E, *shape, seed=i + 1))
        for i, (name, shape) in enumerate(zip(_NAMES, shapes, strict=True))
    ]
    held = {name: weight for name, weight in zip(_NAMES, weights, strict=True) if weight is not None}
    twin = probe.twin_of(module, base, parameters=held)
    K = min(2, E)
    scaled = 2 * probe.rows(_HIDDEN).view(-1, _HIDDEN)
    x = scaled.repeat(4 + 2 * E // (K * len(scaled)), 1)  # every expert has a token
    ids = torch.arange(len(x) * K, device="cpu").view(-1, K) % E
    ids[: len(x) // 2] = ids[0]  # and the first ones have more than their share: a capacity shows
    routing = probe.random(len(x), K, seed=5).sigmoid()
    leaves = (x.requires_grad_(), routing.requires_grad_(), *held.values())
    got = probe.outcomes(base, twin, x, ids, routing, leaves=leaves)
    if isinstance(got, str):
        return got
    settings: Any = {"transposed": transposed, "dtype": torch.float32, "checkpoint_level": 0}
    ours = functools.partial(experts_mlp, x, ids, routing, weights, **settings)
    formulas = ((form, functools.partial(ours, form=form)) for form in _forms(module))
    form = probe.first_of(formulas, got, leaves, _TOLERANCE)
    if form is None:
        return "its experts are not down(act(gate(x)) * up(x)) with SiLU or tanh-GELU, weighted and summed"
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = probe.outcomes(base, twin, x, ids, routing, leaves=leaves)
    keeps = not isinstance(cast, str) and probe.agree(cast[0], got[0], _TOLERANCE)
    extra = "" if math.isinf(form.limit) else f", limited to {form.limit:g}"
    text = f"its {E} experts run by grouped GEMMs ({form.activation}{extra}), which keep gate and up"
    return text, (form, transposed, keeps)


def _forms(module: nn.Module) -> Iterator[Form]:
    """Yield what is probed: with the module's own limit and alpha before the form without."""
    limits, alphas = (
        [float(value) for key, value in vars(module).items() if word in key and isinstance(value, int | float)]
        for word in ("limit", "alpha")
    )
    for limit, joined in itertools.product((*limits, math.inf), JOINED):
        for alpha, shift in itertools.product((*alphas, 1.0), (0.0, 1.0)):
            yield Form("silu", limit, alpha, shift, joined)
        yield Form("gelu_tanh", limit, 1.0, 0.0, joined)


def overrides(base: Any, form: Form, transposed: bool, keeps: bool) -> dict[str, Any]:
    """Return what patched experts do differently from ``base``.

    ``transposed``: the weights are [E, D, 2F] and [E, F, D]. ``keeps``: the GEMMs have the weights' dtype under
    autocast too.
    """

    def run(experts: Any, x: Any, ids: Any, routing: Any) -> Tensor | None:
        level: Any = getattr(experts, LEVEL, None)
        if level is None or has_nothing_to_save(x) or not are_untouched(children_beside(experts, WEIGHTS)):
            return None
        weights: list[Any] = [getattr(experts, name, None) for name in _NAMES]
        dtype = _dtype(x, ids, routing, weights, keeps)
        if dtype is None:
            return None
        settings: Any = {"transposed": transposed, "dtype": dtype, "checkpoint_level": level}
        return experts_mlp(x, ids, routing, weights, form=form, **settings)

    return with_fused(base, INPUTS, run)


def _dtype(x: Any, ids: Any, routing: Any, weights: Sequence[Any], keeps: bool) -> torch.dtype | None:
    """Return the dtype in which the GEMMs of a call read their operands, None if it runs the stock code."""
    held = [weight for weight in weights if weight is not None]
    if not is_ordinary((x, ids, routing, *held), ()):
        return None
    dtype = weights[0].dtype
    if any(t.dtype != dtype or t.device != x.device for t in held) or ids.device != x.device:
        return None
    if x.dim() != 2 or ids.shape != (len(x), ids.shape[-1]) or ids.shape != routing.shape or not ids.shape[1]:
        return None
    if x.dtype not in FLOATS or routing.dtype not in FLOATS or dtype not in FLOATS:
        return None
    if ids.is_floating_point() or x.shape[1] not in weights[1].shape[1:]:
        return None
    if is_autocast_on(x.device.type):
        found: torch.dtype = dtype if keeps else operand_dtype(x)
        return found
    return dtype if x.dtype == dtype != torch.float64 else None  # which not all of transformers' ways know
