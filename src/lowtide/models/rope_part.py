"""The part `rope` of `lowtide.patch`: attention whose rotary embedding runs as `lowtide.layers.rotary`.

An attention is a module whose forward calls a global function ``apply_rotary_pos_emb``; a probe calls it to find what
it computes. The patched attention has the same code with globals of its own, in which that name is our function. These
globals are a copy: after a name that the code uses has got another value, the stock code runs.
"""

import dis
import inspect
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from lowtide.code import Code, names_of
from lowtide.layers import rotary
from lowtide.layers.pairs import PAIRS, Pairs
from lowtide.layers.rope import checked_rotary, why_not_rotary
from lowtide.models.eligibility import has_nothing_to_save, is_ordinary
from lowtide.models.instance import PROBED, part_of, why_not_forward, with_forward
from lowtide.models.probe import DTYPES, ProbedCode, is_like, outcome, random

_NAME = "apply_rotary_pos_emb"
_SIZES = (2, 5, 4, 2, 8)  # B, T, Hq, Hk, d of the probe
_WRITES = ("STORE_GLOBAL", "DELETE_GLOBAL")
_ROUNDINGS = 4  # of the products and the sum, in units of the dtype's epsilon


def is_candidate(module: nn.Module) -> bool:
    """Whether the module's forward calls a rotary embedding by its usual name."""
    if part_of(module) is not None:  # patched: `find` looks at the stock forward
        return True
    forward = inspect.unwrap(type(module).forward)
    return isinstance(forward, FunctionType) and _NAME in forward.__code__.co_names and _NAME in forward.__globals__


def find(module: nn.Module, base: Any) -> tuple[str, tuple[bool, str, bool]] | str:
    """Return what the module's rotary embedding computes, as text and as arguments of `overrides`; or why it stays."""
    forward = base.forward
    why_not = why_not_forward(module, base)
    if why_not is not None:
        return why_not
    if not isinstance(forward, FunctionType) or _NAME not in forward.__code__.co_names:
        return "its forward is wrapped in another function"
    if "globals" in names_of(forward.__code__) or any(i.opname in _WRITES for i in dis.get_instructions(forward)):
        return "its forward writes to globals of its module"
    stock = forward.__globals__[_NAME]
    cases = [(dtypes, dim) for dtypes in DTYPES for dim in (1, 2)]
    for pairs in (kind.value for kind in Pairs):
        entries = _SIZES[-1] // (2 if pairs == Pairs.SHORT.value else 1)
        mixed = _outcome(stock, torch.bfloat16, torch.float32, entries, 1)
        promote = isinstance(mixed, tuple) and isinstance(mixed[0], Tensor) and mixed[0].dtype == torch.float32
        if all(_computes(stock, promote, pairs, dtypes, entries, dim) for dtypes, dim in cases):
            break
    else:
        return f"its {_NAME} is not of the form rotary(q, k, cos, sin), halves or neighbours rotated"
    partial = _outcome(stock, *DTYPES[0], entries // 2, 1)
    if not isinstance(partial, Exception) and not _computes(stock, promote, pairs, DTYPES[0], entries // 2, 1):
        return f"its {_NAME} rotates a part of a head in another way"
    double = _computes(stock, promote, pairs, (torch.float64, torch.float64), entries, 1)
    which = "" if pairs == Pairs.HALVES.value else f" (pairs {pairs})"
    return f"rotates queries and keys by lowtide.layers.rotary{which}", (promote, pairs, double)


def _inputs(x_dtype: torch.dtype, table_dtype: torch.dtype, r: int, dim: int) -> tuple[Tensor, ...]:
    B, T, Hq, Hk, d = _SIZES
    shapes = ((B, Hq, T, d), (B, Hk, T, d)) if dim == 1 else ((B, T, Hq, d), (B, T, Hk, d))
    # a third: in float64 no number of float32, which shows where that is computed in
    q, k = (random(*shape, seed=i).to(x_dtype) / 3 for i, shape in enumerate(shapes))
    cos, sin = (random(B, T, r, seed=i).to(table_dtype) / 3 for i in (2, 3))
    return q, k, cos, sin


def _outcome(stock: Any, x_dtype: torch.dtype, table_dtype: torch.dtype, r: int, dim: int) -> Any:
    inputs = _inputs(x_dtype, table_dtype, r, dim)
    return outcome(lambda: stock(*inputs) if dim == 1 else stock(*inputs, unsqueeze_dim=dim))


def _computes(stock: Any, promote: bool, pairs: str, dtypes: tuple[torch.dtype, torch.dtype], r: int, dim: int) -> bool:
    x_dtype, table_dtype = dtypes
    got = _outcome(stock, x_dtype, table_dtype, r, dim)
    q, k, cos, sin = _inputs(x_dtype, table_dtype, r, dim)
    expected = rotary(q, k, cos, sin, unsqueeze_dim=dim, promote=promote, pairs=pairs)
    if not isinstance(got, tuple) or len(got) != 2:
        return False
    tolerance = _ROUNDINGS * torch.finfo(x_dtype).eps
    return all(
        is_like(a, b) and bool(((a - b).abs() <= tolerance * b.abs().amax()).all())
        for a, b in zip(got, expected, strict=True)
    )


def overrides(base: Any, promote: bool, pairs: str, double: bool) -> dict[str, Any]:
    """Return what a patched attention does differently from ``base``: the same code, another global.

    ``double``: float64 is rotated in float64, as lowtide does; else the stock code rotates it.
    """
    rotating = _rotating(base.forward, promote, pairs, double)

    def look() -> Code:
        nonlocal rotating
        rotating = _rotating(base.forward, promote, pairs, double)
        stock = base.forward
        return Code((), functions=(stock.__globals__[_NAME],), shallow=(stock,), attributes=((base, "forward"),))

    probed = ProbedCode(base, look, None, lambda attention: find(attention, base)[1:] == ((promote, pairs, double),))

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if probed.differs(self):
            return base.forward(self, *args, **kwargs)
        return rotating(self, *args, **kwargs)

    return with_forward(base, forward, **{PROBED: probed})


def _rotating(stock: FunctionType, promote: bool, pairs: str, double: bool) -> FunctionType:
    """Return ``stock`` with our rotation among its globals."""
    turn: Any = stock.__globals__[_NAME]

    def apply_rotary_pos_emb(*args: Any, **kwargs: Any) -> Any:
        dim = kwargs.get("unsqueeze_dim", 1)
        if len(args) != 4 or len(kwargs) != ("unsqueeze_dim" in kwargs) or has_nothing_to_save(args[0]):
            return turn(*args, **kwargs)
        if not is_ordinary(args, ()) or why_not_rotary(*args, dim, PAIRS[pairs]) is not None:
            return turn(*args, **kwargs)
        if args[0].dtype == torch.float64 and not double:
            return turn(*args, **kwargs)
        return checked_rotary(*args, dim, promote, pairs)

    # Without the module's name torch.compile looks names up here, and not in the module.
    own = {name: value for name, value in stock.__globals__.items() if name != "__name__"}
    own[_NAME] = apply_rotary_pos_emb
    forward = FunctionType(stock.__code__, own, stock.__name__, stock.__defaults__, stock.__closure__)
    forward.__kwdefaults__ = stock.__kwdefaults__
    return forward
