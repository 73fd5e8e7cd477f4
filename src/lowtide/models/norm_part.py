"""The part `norm` of `lowtide.patch`: RMS norms that run as `lowtide.layers.rms_norm`.

A norm is a module without children, with one weight of one axis and an epsilon; a probe finds its offset and its order
of rounding.
"""

import itertools
import math
from typing import Any

import torch
from torch import Tensor, nn

from lowtide.distributed.zero import shape_of
from lowtide.layers import rms_norm
from lowtide.layers.norm import checked_rms_norm
from lowtide.models import probe
from lowtide.models.eligibility import has_nothing_to_save, is_ordinary
from lowtide.models.instance import PROBED, children_of, parameters_of, why_not_forward, with_forward
from lowtide.models.parallel_style import is_parallel_hook

_EPSILONS = ("variance_epsilon", "eps")
_NARROW = (torch.bfloat16, torch.float16, torch.float32)
_CANDIDATES = tuple(itertools.product(("before_weight", "after_weight"), (0.0, 1.0)))
_EQUAL = 0.97  # of the values in a narrow dtype: another order of rounding changes every fourth


def is_candidate(module: nn.Module) -> bool:
    """Whether the module owns one weight of one axis and an epsilon, as RMS norms do."""
    weight = parameters_of(module).get("weight")
    owns_more = (
        children_of(module) or any(True for _ in module.buffers(recurse=False)) or len(parameters_of(module)) != 1
    )
    return weight is not None and len(shape_of(weight)) == 1 and not owns_more and _epsilon(module) is not None


def _epsilon(module: nn.Module) -> str | None:
    return next((name for name in _EPSILONS if name in vars(module)), None)


def find(module: Any, base: Any) -> tuple[str, tuple[str, float, str, probe.Settings]] | str:
    """Return what the module computes, as text and as arguments of `overrides`; or why it stays unmodified."""
    name = _epsilon(module)
    assert name is not None
    if not _is_number(getattr(module, name)):
        return f"its {name} is {getattr(module, name)!r}, not a finite number of at least 0"
    why_not = why_not_forward(module, base, inputs=1)
    if why_not is not None:
        return why_not
    if any(map(is_parallel_hook, (*module._forward_pre_hooks.values(), *module._forward_hooks.values()))):
        return "tensor parallelism makes DTensors of its input and weight"
    if shape_of(module.weight).numel() == 0:
        return "its weight is elsewhere (sharded, with nothing here)"
    for rounding, offset in _CANDIDATES:
        if all(_computes(module, base, name, rounding, offset, *dtypes) for dtypes in probe.DTYPES):
            weight = "(1 + weight)" if offset else "weight"
            order = "before" if rounding == "before_weight" else "after"
            settings = probe.settings_of((module,), but=name)
            return f"runs as lowtide.layers.rms_norm, rounded {order} {weight}", (rounding, offset, name, settings)
    return "it is not an RMS norm whose arithmetic is float32"


def _computes(
    module: Any, base: Any, name: str, rounding: Any, offset: float, x_dtype: torch.dtype, w_dtype: torch.dtype
) -> bool:
    D = shape_of(module.weight)[0]
    weight = nn.Parameter(probe.random(D, seed=1).to(w_dtype))
    twin = probe.twin_of(module, base, modules={}, parameters={"weight": weight})
    x = probe.rows(D)
    eps = getattr(module, name)
    if eps > 0:
        x[0, 0] *= eps**0.5 / probe.ROW_SCALES[0]  # its mean square is of the epsilon's size: where that is added shows
    x = x.to(x_dtype)
    with torch.no_grad():
        expected = rms_norm(x, weight, eps, offset=offset, rounding=rounding)
    return all(_is_near(got, expected) for got in probe.outcomes(base, twin, x))


def _is_near(got: object, expected: Tensor) -> bool:
    if not probe.is_like(got, expected):
        return False
    # A last bit may differ (a root of another form), a rounding more may not.
    near = torch.isclose(got, expected, rtol=2 * torch.finfo(expected.dtype).eps, atol=0)
    return bool(near.all()) and bool((got == expected).float().mean() >= _EQUAL or expected.dtype == torch.float32)


def _is_number(eps: object) -> bool:
    return type(eps) in (int, float) and 0 <= eps < math.inf  # type: ignore[operator]


def overrides(base: Any, rounding: Any, offset: float, name: str, settings: probe.Settings) -> dict[str, Any]:
    """Return what a patched norm does differently from ``base``; ``settings`` are those beside its epsilon."""
    plus_one = offset == 1.0
    probed = probe.StockForward(base)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) != 1 or kwargs or has_nothing_to_save(args[0]) or not _is_ours(self.weight, args[0]):
            return base.forward(self, *args, **kwargs)
        eps: Any = getattr(self, name)
        if probed.is_replaced() or probe.have_changed((self,), settings) or not _is_number(eps):
            return base.forward(self, *args, **kwargs)
        # Written here: a number that layers share is a variable of the first one's checkpoint to compile(dynamic=True).
        added = 1.0 if plus_one else 0.0
        return checked_rms_norm(args[0], self.weight, eps, added, rounding)

    return with_forward(base, forward, **{PROBED: probed})


def _is_ours(weight: nn.Parameter, x: Tensor) -> bool:
    if not is_ordinary((x,), (weight,)) or x.shape[-1:] != weight.shape or x.device != weight.device:
        return False
    if x.dtype not in _NARROW or x.layout != torch.strided:
        return False
    return weight.dtype in (x.dtype, torch.float32)  # as probed
