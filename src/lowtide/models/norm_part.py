"""The part `norm` of `lowtide.patch`: RMS norms that run as `lowtide.layers.rms_norm`.

A norm is a module without children, with one weight of one axis and an epsilon; a probe finds its offset and its order
of rounding.
"""

import functools
import itertools
import math
from typing import Any

import torch
from torch import Tensor, nn

from lowtide.distributed.zero import shape_of
from lowtide.layers import rms_norm
from lowtide.layers.norm import checked_rms_norm
from lowtide.models import probe
from lowtide.models.eligibility import is_ordinary, runs_stock
from lowtide.models.instance import children_of, parameters_of, with_fused

INPUTS, WEIGHTS = 1, None
ATTRIBUTES: dict[str, Any] = {}
_EPSILONS = ("variance_epsilon", "eps")
_NARROW = (torch.bfloat16, torch.float16, torch.float32)
_CANDIDATES: Any = tuple(itertools.product(("before_weight", "after_weight"), (0.0, 1.0)))
_EQUAL = 0.97  # of the values in a narrow dtype: another order of rounding changes every fourth
_TOLERANCE = 1e-5  # of float32 gradients


def is_candidate(module: nn.Module) -> bool:
    """Whether the module owns one weight of one axis and an epsilon, as RMS norms do."""
    weight = parameters_of(module).get("weight")
    owns_more = (
        children_of(module) or any(True for _ in module.buffers(recurse=False)) or len(parameters_of(module)) != 1
    )
    return weight is not None and len(shape_of(weight)) == 1 and not owns_more and _epsilon(module) is not None


def _epsilon(module: nn.Module) -> str | None:
    return next((name for name in _EPSILONS if name in vars(module)), None)


def find(module: Any, base: Any) -> tuple[str, tuple[str, float, str]] | str:
    """Return what the module computes, as text and as arguments of `overrides`; or why it stays unmodified."""
    name = _epsilon(module)
    assert name is not None
    eps = getattr(module, name)
    if type(eps) not in (int, float) or not 0 <= eps < math.inf:
        return f"its {name} is {eps!r}, not a finite number of at least 0"
    if shape_of(module.weight).numel() == 0:
        return "its weight is elsewhere (sharded, with nothing here)"
    left = list(_CANDIDATES)
    for x_dtype, w_dtype in probe.DTYPES:
        weight = nn.Parameter(probe.random(shape_of(module.weight)[0], seed=1).to(w_dtype))
        x = probe.rows(len(weight))
        if eps > 0:  # a mean square of the epsilon's size: where that is added shows
            x[0, 0] *= eps**0.5 / probe.ROW_SCALES[0]
        leaves = (x.to(x_dtype).requires_grad_(), weight)
        got = probe.outcomes(base, probe.twin_of(module, base, parameters={"weight": weight}), leaves[0], leaves=leaves)
        if isinstance(got, str):
            return got
        for rounding, offset in list(left):
            ours = probe.outcome(functools.partial(rms_norm, *leaves, eps, offset=offset, rounding=rounding), leaves)
            if not all(_is_near(one, ours) for one in got):
                left.remove((rounding, offset))
    if not left:
        return "it is not an RMS norm whose arithmetic is float32"
    rounding, offset = left[0]
    weight_is, order = "(1 + weight)" if offset else "weight", rounding.removesuffix("_weight")
    return f"runs as lowtide.layers.rms_norm, rounded {order} {weight_is}", (rounding, offset, name)


def _is_near(got: Any, expected: Any) -> bool:
    """Whether results are equal to a last bit, and gradients, of float32 rows, to rounding."""
    (y, *gradients), (expected_y, *expected_gradients) = got, expected
    if not probe.is_like(y, expected_y):
        return False
    # A last bit may differ (a root of another form), a rounding more may not.
    near = torch.isclose(y, expected_y, rtol=2 * torch.finfo(expected_y.dtype).eps, atol=0)
    if not near.all() or (expected_y.dtype != torch.float32 and (y == expected_y).float().mean() < _EQUAL):
        return False
    return expected_gradients[0].dtype != torch.float32 or probe.agree(gradients, expected_gradients, _TOLERANCE)


def overrides(base: Any, rounding: Any, offset: float, name: str) -> dict[str, Any]:
    """Return what a patched norm, whose epsilon is its attribute ``name``, does differently from ``base``."""

    def run(norm: Any, x: Any) -> Tensor | None:
        if runs_stock(x) or not _is_ours(norm.weight, x):
            return None
        return checked_rms_norm(x, norm.weight, getattr(norm, name), offset, rounding)

    return with_fused(base, INPUTS, run)


def _is_ours(weight: nn.Parameter, x: Tensor) -> bool:
    if not is_ordinary((x,), (weight,)) or x.shape[-1:] != weight.shape or x.device != weight.device:
        return False
    if x.dtype not in _NARROW or x.layout != torch.strided:
        return False
    return weight.dtype in (x.dtype, torch.float32)  # as probed
