"""The part `rope` of `lowtide.patch`: attention whose rotary embedding runs as `lowtide.layers.rotary`.

An attention is a module whose forward uses global functions with "rotary" in their names, such as
``apply_rotary_pos_emb``; a probe calls each to find what it computes and how it takes its arguments. The patched
attention has the same code with globals of its own, in which these names are our functions. These globals are a copy
of those at `patch`.
"""

import functools
import inspect
from collections.abc import Iterator
from itertools import product
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lowtide.layers.rope import PAIRS, checked_rotary, why_not_rotary
from lowtide.models.eligibility import is_ordinary, runs_stock
from lowtide.models.instance import copied, is_code_of, part_of, redecorated, undecorated, with_forward
from lowtide.models.probe import DTYPES, agree, outcome, random

INPUTS, WEIGHTS = None, None
ATTRIBUTES: dict[str, Any] = {}
_SIZES = (2, 5, 4, 2, 8)  # B, T, Hq, Hk, d of the probe
_ROUNDINGS = 8  # of the products and the sum, in units of the dtype's epsilon
# What a function may take, in this order: queries and keys or one of them, and the tables.
_COMPLEX = ("q", "k", "cos + i sin")
_ORDERS = (("q", "k", "cos", "sin"), ("x", "cos", "sin"), ("x", "sin", "cos"), _COMPLEX)
# A layout is the axis of the heads, which the tables lack; or: tables [T, r] beside [T, H, d] or [B, T, H, d].
_FLAT = 0
_OWN = "transformers."
_LAYOUTS: tuple[tuple[int, ...], ...] = ((1, 2), (_FLAT,), (1,), (2,))
_Dtypes = tuple[torch.dtype, torch.dtype]


class _Form(NamedTuple):
    """What a function of an attention computes, as arguments of `rotary`, and how it takes its own."""

    order: tuple[str, ...]
    layouts: tuple[int, ...]  # those it can be called for: two where an argument ``unsqueeze_dim`` chooses
    pairs: str
    promote: bool


_Forms = tuple[tuple[str, _Form], ...]  # of each name


def _rotations(forward: FunctionType) -> dict[str, Any]:
    """Return the global functions that a forward uses and that are rotary embeddings by their names."""
    named = {name: forward.__globals__.get(name) for name in forward.__code__.co_names if "rotary" in name}
    return {name: value for name, value in named.items() if callable(value)}


def is_candidate(module: nn.Module) -> bool:
    """Whether the module's forward uses a function that is a rotary embedding by its name."""
    if part_of(module) is not None:  # patched: `find` looks at the stock forward
        return True
    forward = inspect.unwrap(type(module).forward)
    return isinstance(forward, FunctionType) and bool(_rotations(forward))


def find(module: nn.Module, base: Any) -> tuple[str, tuple[_Forms, tuple[int, ...]]] | str:  # noqa: ARG001
    """Return what the module's rotary embedding computes, as text and as arguments of `overrides`; or why it stays."""
    forward = undecorated(base.forward)
    if forward is None or not _rotations(forward):
        return "its forward is wrapped in another function"
    rotations = _rotations(forward)
    if is_code_of(forward, _OWN):  # else the user has named the class
        foreign = ", ".join(name for name, stock in rotations.items() if not is_code_of(stock, _OWN))
        if foreign:
            return f"its {foreign} is not transformers' own code"
    forms = {name: _form_of(stock) for name, stock in rotations.items()}
    found = tuple((name, form) for name, form in forms.items() if form is not None)
    others = ", ".join(name for name, form in forms.items() if form is None)
    if not found:
        orders = " or ".join(f"({', '.join(order)})" for order in _ORDERS)
        return f"its {others} does not take {orders}, or rotates other pairs than lowtide.layers.rotary"
    pairs = sorted({form.pairs for _, form in found})
    which = f" (pairs {', '.join(pairs)})" if pairs != ["halves"] else ""
    stay = f", but not by its {others}" if others else ""
    code = (forward, *map(forward.__globals__.get, forward.__code__.co_names))
    return f"rotates queries and keys by lowtide.layers.rotary{which}{stay}", (found, tuple(map(id, code)))


@functools.lru_cache
def _form_of(stock: Any) -> _Form | None:
    """Return what a function computes, None if `rotary` does not."""
    for order, layouts, pairs, promote in product(_ORDERS, _LAYOUTS, PAIRS, (False, True)):
        form = _Form(order, layouts, pairs, promote)
        every = [dtypes for dtypes in DTYPES if order != _COMPLEX or dtypes[1] == torch.float32]
        if not all(_computes(stock, form, layout, dtypes) for dtypes in every for layout in layouts):
            continue
        if _computes(stock, form, layouts[0], DTYPES[0], share=2) is not False:
            return form
    return None


def _computes(stock: Any, form: _Form, layout: int, dtypes: _Dtypes, share: int = 1) -> bool | None:
    """Return whether a function computes what `rotary` does by ``form``; None if it raises."""
    chosen = {"unsqueeze_dim": 2} if layout == 2 and len(form.layouts) == 2 else {}
    for args, heads in _arguments(form, layout, dtypes, share):
        got = outcome(functools.partial(stock, *args, **chosen), heads)
        if isinstance(got, Exception):
            return None
        expected = outcome(functools.partial(_rotated, form.order, layout, form.pairs, form.promote, args), heads)
        if not agree(got, expected, _ROUNDINGS * torch.finfo(dtypes[0]).eps):
            return False
    return True


def _arguments(form: _Form, layout: int, dtypes: _Dtypes, share: int) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """Yield random arguments in each shape of a layout, the tables for a ``share`` of a head; and which are heads."""
    B, T, Hq, Hk, d = _SIZES
    r = d // share // (2 if PAIRS[form.pairs].entries == "short" else 1)
    shapes = [[(B, Hq, T, d), (B, Hk, T, d), (B, T, r)] if layout == 1 else [(B, T, Hq, d), (B, T, Hk, d), (B, T, r)]]
    if layout == _FLAT:
        shapes = [[(T, Hq, d), (T, Hk, d), (T, r)], [*shapes[0][:2], (T, r)]]
    for q_shape, k_shape, table in shapes:
        q, k = (random(*shape, seed=i).to(dtypes[0]).requires_grad_() for i, shape in enumerate((q_shape, k_shape)))
        cos, sin = (random(*table, seed=i).to(dtypes[1]) for i in (2, 3))
        given = {"q": q, "x": q, "k": k, "cos": cos, "sin": sin}
        args = [given[name] if name in given else torch.complex(cos, sin) for name in form.order]
        yield args, [x for x in args if x.requires_grad]


def _operands(order: tuple[str, ...], layout: int, args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the queries, keys and tables of a call; beside one tensor, keys of no heads."""
    if order == _COMPLEX:
        q, k, (cos, sin) = args[0], args[1], torch.view_as_real(args[2].resolve_conj()).unbind(-1)
    elif "k" in order:
        q, k, cos, sin = args
    else:
        q, (cos, sin) = args[0], args[1:] if order[1] == "cos" else args[:0:-1]
        heads = 1 if layout == 1 else q.dim() - 2
        k = q.new_empty([0 if axis == heads else size for axis, size in enumerate(q.shape)])
    if layout == _FLAT:
        q, k = (x if x.dim() == 4 else x.unsqueeze(0) for x in (q, k))
        cos, sin = cos.unsqueeze(0), sin.unsqueeze(0)
    return q, k, cos, sin


def _rotated(order: tuple[str, ...], layout: int, pairs: str, promote: bool, args: Any) -> Any:
    """Return what a function returns for these arguments, by lowtide's own; None: they are of another form."""
    operands, dim = _operands(order, layout, args), layout or 2
    if why_not_rotary(*operands, dim, PAIRS[pairs]) is not None:
        return None
    q, k = checked_rotary(*operands, dim, promote, pairs)
    if "k" not in order:
        return q.view_as(args[0]) if layout == _FLAT else q
    return (q.view_as(args[0]), k.view_as(args[1])) if layout == _FLAT else (q, k)


def overrides(base: Any, forms: _Forms, code: tuple[int, ...]) -> dict[str, Any]:  # noqa: ARG001
    """Return what a patched attention does differently from ``base``: the same code, other globals.

    ``code`` are the ids of its forward and its globals: a class is made for each, so that `patch` again takes new ones.
    """
    stock = undecorated(base.forward)
    assert stock is not None
    # Without the module's name torch.compile looks names up here, and not in the module.
    own = {name: value for name, value in stock.__globals__.items() if name != "__name__"}
    own |= {name: _rotation(own[name], form) for name, form in forms}
    return with_forward(base, redecorated(base.forward, copied(stock, own, stock.__closure__)))


def _rotation(stock: Any, form: _Form) -> Any:
    """Return a function that rotates as ``stock`` does, of a form."""
    order, layouts, pairs, promote = form  # of which torch.compile traces no attributes

    def rotation(*args: Any, **kwargs: Any) -> Any:
        layout = kwargs.get("unsqueeze_dim", layouts[0])
        if len(args) != len(order) or len(kwargs) != ("unsqueeze_dim" in kwargs) or layout not in layouts:
            return stock(*args, **kwargs)
        if runs_stock(args[0]) or not is_ordinary(args, ()):
            return stock(*args, **kwargs)
        if args[0].dtype == torch.float64 or args[-1].dtype.is_complex != (order == _COMPLEX):
            return stock(*args, **kwargs)
        results = _rotated(order, layout, pairs, promote, args)
        return stock(*args, **kwargs) if results is None else results

    return rotation
