"""The part `mlp` of `lowtide.patch` for a mixture's experts: one module with the weights of all, run as fused experts.

Such a module has parameters gate_up_proj and down_proj of three axes, and is called with hidden states, the experts of
each token and their routing weights. A probe finds what it computes with them: the activation and its limits, where
gate's columns are, and in which dtype under autocast.
"""

import copy
import functools
import inspect
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lowtide.arguments import FLOATS, is_autocast_on, operand_dtype
from lowtide.distributed.zero import shape_of
from lowtide.mlp.call import JOINED
from lowtide.mlp.experts import experts_mlp
from lowtide.mlp.groups import Form
from lowtide.models import probe
from lowtide.models.eligibility import are_plain_linears, has_nothing_to_save, is_ordinary
from lowtide.models.instance import PROBED, children_of, parameters_of, part_of, why_not_forward, with_forward

LEVEL = "checkpoint_level"
ATTRIBUTES = {LEVEL: 0}  # of a patched module, with their first values
_WEIGHTS = ("gate_up_proj", "down_proj")
_NAMES = (*_WEIGHTS, "gate_up_proj_bias", "down_proj_bias")
_HIDDEN, _WIDE = 8, 12  # of the twin: PyTorch's grouped GEMM takes rows of whole 16 bytes
_TOLERANCE = 1e-5  # of float32 products of 8 and 12 terms
_SETTING = "_experts_implementation"  # in the config


def is_candidate(module: nn.Module) -> bool:
    """Whether the module owns weights of all experts, gate and up in one or, without a gate, up alone."""
    own = parameters_of(module)
    found = [own.get(name) for name in (*_WEIGHTS, "up_proj")]
    deep = [weight is not None and len(shape_of(weight)) == 3 for weight in found]
    return deep[1] and (deep[0] or deep[2])


def find(module: nn.Module, base: Any) -> tuple[str, tuple[Any, ...]] | str:
    """Return what the module computes, as text and as arguments of `overrides`; or why it stays unmodified."""
    others = _others(module)
    if parameters_of(module).get(_WEIGHTS[0]) is None:
        return "gate and up of its experts are not one weight, gate_up_proj"
    children = ((child.parameters(), child.buffers()) for child in others)
    beside = [
        *(name for name in parameters_of(module) if name not in _NAMES),
        *dict(module.named_buffers(recurse=False)),
    ]
    if beside or any(True for states in children for state in states for _ in state):
        return "it has weights or buffers beside those of its experts"
    if any(p is not None and p.dtype not in FLOATS for p in parameters_of(module).values()):
        return "its weights are quantised"
    if not are_plain_linears((), others):
        return "a child has hooks or a forward of its own"
    if LEVEL in vars(module) and part_of(module) is None:
        return f"it has a {LEVEL} of its own"
    why_not = why_not_forward(module, base)
    if why_not is not None:
        return why_not
    if len(inspect.signature(base.forward).parameters) != 4:
        return "its forward does not take hidden states, the experts of each token and their weights"
    transposed = _is_transposed(*(shape_of(parameters_of(module)[name]) for name in _WEIGHTS))  # type: ignore[arg-type]
    if transposed is None:
        return "the shapes of its weights are not those of gate and up together, and down"
    formula = _formula(module, base, transposed)
    if isinstance(formula, str):
        return formula
    form, keeps, double = formula
    choice = getattr(getattr(module, "config", None), _SETTING, None)
    types = tuple(map(type, others))
    found = probe.settings_of((module, *others), but=LEVEL, all_of=True)
    extra = [] if math.isinf(form.limit) else [f"limited to {form.limit:g}"]
    what = ", ".join((form.activation, *extra))
    count = shape_of(parameters_of(module)[_WEIGHTS[1]])[0]  # type: ignore[arg-type]
    text = f"its {count} experts run by grouped GEMMs ({what}), which keep gate and up"
    return text, (form, transposed, keeps, double, choice, types, found)


def _others(module: nn.Module) -> tuple[nn.Module, ...]:
    """Return the children: the activation, as a rule. Parametrised weights (peft's LoRA) are read as such."""
    return tuple(
        child for name, child in children_of(module).items() if child is not None and name != "parametrizations"
    )


def _is_transposed(gate_up: Sequence[int], down: Sequence[int]) -> bool | None:
    """Return whether the weights are [E, D, 2F] and [E, F, D]; None if they are not [E, 2F, D] and [E, D, F] either."""
    if len(gate_up) != 3 or gate_up[0] != down[0] or 0 in (*gate_up, *down):
        return None
    if (gate_up[1], gate_up[2]) == (2 * down[2], down[1]):
        return False
    return True if (gate_up[1], gate_up[2]) == (down[2], 2 * down[1]) else None


def _formula(module: nn.Module, base: Any, transposed: bool) -> tuple[Form, bool, bool] | str:
    """Return the form with which fused experts are the module, or why they are not.

    And whether it keeps the weights' dtype under autocast, and whether it computes float64 in float64.
    """
    E = shape_of(parameters_of(module)[_WEIGHTS[1]])[0]  # type: ignore[arg-type]
    shapes: list[tuple[int, ...]] = [(2 * _WIDE, _HIDDEN), (_HIDDEN, _WIDE), (2 * _WIDE,), (_HIDDEN,)]
    if transposed:
        shapes[:2] = [shape[::-1] for shape in shapes[:2]]
    weights: list[Tensor | None] = [
        None if parameters_of(module).get(name) is None else probe.random(E, *shape, seed=i + 1)
        for i, (name, shape) in enumerate(zip(_NAMES, shapes, strict=True))
    ]
    children = {name: copy.deepcopy(child) for name, child in children_of(module).items() if child is not None}
    children.pop("parametrizations", None)
    twin = probe.twin_of(module, base, modules=children, parameters={})
    K = min(2, E)
    scaled = 2 * probe.rows(_HIDDEN).view(-1, _HIDDEN)
    x = scaled.repeat(4 + 2 * E // (K * len(scaled)), 1)  # every expert has a token
    ids = torch.arange(len(x) * K, device="cpu").view(-1, K) % E
    ids[: len(x) // 2] = ids[0]  # and the first ones have more than their share: a capacity shows
    routing = probe.random(len(x), K, seed=5).sigmoid()

    def stock(dtype: torch.dtype) -> Any:  # not by twin.to: FSDP2's class has rules for it
        own = {name: nn.Parameter(w.to(dtype)) for name, w in zip(_NAMES, weights, strict=True) if w is not None}
        vars(twin)["_parameters"] = own
        return base.forward(twin, x.to(dtype), ids, routing.to(dtype))

    def ours(form: Form, dtype: torch.dtype) -> Tensor:
        settings: Any = {"transposed": transposed, "dtype": dtype, "checkpoint_level": 0}
        own = [None if w is None else w.to(dtype) for w in weights]
        return experts_mlp(x.to(dtype), ids, routing.to(dtype), own, form=form, **settings)

    narrow, wide = (functools.partial(stock, dtype) for dtype in (torch.float32, torch.float64))
    got = []
    for mode in (True, False):
        twin.train(mode)
        got.append(probe.outcome(narrow))
    for one in got:
        if isinstance(one, Exception):
            return f"its forward does not run on a CPU, on its weights and routing alone ({type(one).__name__})"
    for form in _forms(module):
        expected = probe.outcome(functools.partial(ours, form, torch.float32))
        if all(probe.agree(one, expected, _TOLERANCE) for one in got):
            keeps = probe.agree(probe.outcome(functools.partial(_under_autocast, narrow)), expected, _TOLERANCE)
            exact = probe.outcome(functools.partial(ours, form, torch.float64))
            return form, keeps, probe.agree(probe.outcome(wide), exact, _TOLERANCE**2)
    return "its experts are not down(act(gate(x)) * up(x)) with SiLU or tanh-GELU, weighted and summed"


def _under_autocast(call: functools.partial[Any]) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return call()


def _forms(module: nn.Module) -> Iterator[Form]:
    """Yield what is probed: with the module's own limit and alpha before the form without."""
    limits, alphas = (
        [value for key, value in vars(module).items() if word in key and isinstance(value, int | float) and value > 0]
        for word in ("limit", "alpha")
    )
    joined = [key for key in JOINED if key]
    for limit, key in itertools.product((*map(float, limits), math.inf), joined):
        for alpha, shift in itertools.product((*map(float, alphas), 1.0), (1.0, 0.0)):
            yield Form("silu", limit, alpha, shift, key)
        yield Form("gelu_tanh", limit, 1.0, 0.0, key)


def overrides(
    base: Any,
    form: Form,
    transposed: bool,
    keeps: bool,
    double: bool,
    choice: str | None,
    types: tuple[type, ...],
    found: probe.Settings,
) -> dict[str, Any]:
    """Return what patched experts do differently from ``base``.

    ``keeps``: the GEMMs have the weights' dtype under autocast too. ``double``: float64 runs fused. ``choice`` is the
    implementation that the config had, ``types`` are the classes of the children, and ``found`` the settings of the
    module and of these.
    """
    probed = probe.StockForward(base)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        ours = len(args) == 3 and not kwargs
        level: Any = getattr(self, LEVEL, None) if ours else None
        if level is None or has_nothing_to_save(args[0]):
            return base.forward(self, *args, **kwargs)
        weights: list[Any] = [getattr(self, name, None) for name in _NAMES]
        others = _others(self)
        if tuple(map(type, others)) != types or not are_plain_linears((), others):
            return base.forward(self, *args)
        if probed.is_replaced() or probe.have_changed((self, *others), found):
            return base.forward(self, *args)
        if getattr(getattr(self, "config", None), _SETTING, None) != choice:
            return base.forward(self, *args)
        dtype = _operands(args, weights, keeps)
        if dtype is None or (dtype == torch.float64 and not double):
            return base.forward(self, *args)
        if _is_transposed(weights[0].shape, weights[1].shape) is not transposed:
            return base.forward(self, *args)
        settings: Any = {"transposed": transposed, "dtype": dtype, "checkpoint_level": level}
        return experts_mlp(args[0], args[1], args[2], weights, form=form, **settings)

    return with_forward(base, forward, **{PROBED: probed})


def _operands(args: Sequence[Any], weights: Sequence[Any], keeps: bool) -> torch.dtype | None:
    """Return the dtype in which the GEMMs of a call read their operands, None if it runs the stock code."""
    held = [weight for weight in weights if weight is not None]
    if not is_ordinary((*args, *held), ()):
        return None
    x, ids, routing = args
    dtype, D = weights[0].dtype, x.shape[-1]
    if any(t.dtype != dtype or t.device != x.device for t in held) or ids.device != x.device:
        return None
    if x.dim() != 2 or ids.dim() != 2 or ids.shape != routing.shape or ids.shape[0] != x.shape[0] or not ids.shape[1]:
        return None
    floats = x.dtype in FLOATS and routing.dtype in FLOATS and dtype in FLOATS
    if not floats or ids.is_floating_point() or D not in weights[1].shape[1:]:
        return None
    if is_autocast_on(x.device.type):
        found: torch.dtype = dtype if keeps else operand_dtype(x)
        return found
    return dtype if x.dtype == dtype else None
