"""Counts what a layer does on the meta device: live bytes, FLOP, traffic and operators, with nothing computed."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from operator import add
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowtide.graph import DispatchMode, flop_of, pytree
from lowtide.memory.attention import is_attention
from lowtide.memory.saved import tensors_in
from lowtide.mlp.call import SwigluCall

_ATEN = torch.ops.aten
# Operators of lowtide's MLP, whose scratch no dispatch mode sees: tensors of gate's size that live inside, by whether
# gate and up were saved. Forward has the product; without them also gate and up, the product in gate's place. Backward
# at level 0 has the product, and writes the gradients of gate and up over them.
_SCRATCH = {"lowtide::swiglu": {True: 1, False: 2}, "lowtide::swiglu_backward": {True: 1, False: 3}}
# The same of its experts, in which a row for each expert of a token has the stream's width D besides, for F of an
# expert: the product and its GEMM's result; or gate and up and what they read, or the product. Backward has the rows of
# the output's gradient and the product's; where it recomputes also gate and up, and what these read.
_ROWS: dict[str, dict[bool, Callable[[int, int], int]]] = {
    "lowtide::experts": {True: lambda D, F: D + F, False: lambda D, F: max(D + 2 * F, 3 * F)},
    "lowtide::experts_backward": {True: lambda D, F: D + F, False: lambda D, F: 2 * F + D + max(D, F)},
}
# A matrix by those of all experts, or its transpose by a matrix: PyTorch's table lacks it.
_GROUPED = "aten::_grouped_mm"
_FORMULAS: dict[str, Any] = {_GROUPED: lambda a, b, *_, **__: 2 * a.shape[-2] * a.shape[-1] * b.shape[-1]}
_INDEXED = {"aten::index", "aten::_unsafe_index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}
_ATTENTION_BACKWARD = "attention_backward"
FLASH_ACCUMULATOR = 4  # bytes of each number of the query gradient's float32 sum, inside attention's backward
_SOFTMAX_BACKWARD = "aten::_softmax_backward_data"  # on a GPU by way of a tensor: the gradient times the probabilities


class Work(NamedTuple):
    """Sums over the operators that ran."""

    flop: float = 0.0  # of GEMMs
    rows: float = 0.0  # of all GEMMs' outputs: what small weights add to their time
    attention: float = 0.0  # FLOP of fused attention in forward, the masked half not counted
    thin: float = 0.0  # bytes that all other operators read and write
    operators: float = 0.0  # calls that launch a kernel


class Meter(DispatchMode):  # type: ignore[no-untyped-call]
    """Follows every storage that operators create until it is freed, and adds up their `Work`.

    What depends on data has no value on the meta device. A boolean that is read is True, a number 1. ``nonzero`` of a
    mask has the rows of balanced routing: one for each of the experts, or an expert's share of the entries.

    Args:
        experts: Of a layer of the model; 0: none.
    """

    holds_no_outputs = True  # `lowtide.graph` reads it

    def __init__(self, experts: int = 0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._experts = experts
        self.live = self.peak = self.attended = 0
        self.work = Work()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        if name == "aten::_local_scalar_dense":
            return True if args[0].dtype == torch.bool else 1
        if name in _INDEXED:
            args = (args[0], [x for index in args[1] for x in self._indices(index)], *args[2:])
        if name == "aten::nonzero":
            out = self._nonzero(args[0])
        elif name == _GROUPED:
            out = _grouped(*args)
        else:
            out = func(*args, **kwargs)
        given, made = list(tensors_in((args, kwargs))), list(tensors_in(out))
        there = {x.untyped_storage()._cdata for x in given}
        fresh = {each._cdata: each for x in made if (each := x.untyped_storage())._cdata not in there}
        for storage in fresh.values():
            self.live += storage.nbytes()
            weakref.finalize(storage, self._freed, storage.nbytes())
        if is_attention(func):
            self.attended += sum(x.nbytes for x in made if x.is_floating_point())
        self.peak = max(self.peak, self.live + _scratch(name, args, given, made))
        work = _work(func, name, args, kwargs, [*given, *made], made, writes=bool(fresh))
        self.work = Work(*map(add, self.work, work))
        return out

    def _nonzero(self, mask: Tensor) -> Tensor:
        every = mask.numel() if self._experts in (0, mask.numel()) else max(1, mask.numel() // self._experts)
        return torch.empty(every, mask.dim(), dtype=torch.long, device="meta")

    def _indices(self, index: Tensor | None) -> Sequence[Tensor | None]:
        """Return an index, or in place of a mask of bools those that it selects."""
        return [index] if index is None or index.dtype != torch.bool else self._nonzero(index).unbind(1)

    def _freed(self, size: int) -> None:
        self.live -= size


def _grouped(a: Tensor, b: Tensor, offsets: Tensor, *_: Any) -> Tensor:
    """Return the result of a grouped GEMM: on the meta device PyTorch has it for bfloat16 alone."""
    groups = [len(offsets)] * (a.dim() == b.dim())
    return a.new_empty(*groups, a.shape[-2], b.shape[-1])


def _work(
    func: Any, name: str, args: Any, kwargs: Any, touched: list[Tensor], made: list[Tensor], *, writes: bool
) -> Work:
    """Return the work of one call, from the tensors that it was given and that it made."""
    if is_attention(func):
        return Work(attention=_attention_flop(func, args, kwargs), operators=1)
    if _ATTENTION_BACKWARD in name:  # its time is a multiple of forward's
        return Work(operators=1)
    from torch.utils.flop_counter import flop_registry  # which imports Triton

    formula = _FORMULAS.get(name) or flop_registry.get(func._overloadpacket) or flop_of(func._overloadpacket)
    if formula is not None:
        rows = made[0].numel() / made[0].shape[-1] if made[0].numel() else 0.0
        flop = formula(*args, **kwargs, out_val=made[0] if len(made) == 1 else tuple(made))
        return Work(flop=flop, rows=rows, operators=1)
    if writes or name.endswith("_"):
        passes = 2 if name == _SOFTMAX_BACKWARD else 1
        return Work(thin=passes * sum(x.nbytes for x in touched), operators=1)
    return Work()  # a view


def _scratch(name: str, args: Any, given: list[Tensor], made: list[Tensor]) -> int:
    """Return the bytes that live inside an operator, beside what it is given and returns."""
    if tensors := _SCRATCH.get(name):  # of the gate's size: tokens by intermediate size
        call = SwigluCall(*args[: len(SwigluCall._fields)])
        narrow = call.dtype.itemsize
        backward = name.endswith("backward")
        scratch = tensors[bool(args[-1])] * call.tokens * call.down_shape[1] * narrow
        weights = [x for x in call.tensors[1::4] if x is not None]
        if call.input.dtype.itemsize > narrow:  # autocast's copies of the weights, of the input and its gradient
            scratch += narrow * (sum(w.numel() for w in weights) + (1 + backward) * call.input.numel())
        if backward:  # gate's and up's gradients come when the scratch is gone
            grads = [x for x in made[1:] if x.dim() == 2]
            scratch -= min(scratch, sum(x.nbytes for x in grads[: len(weights) - 1]))
        return int(scratch)
    if rows := _ROWS.get(name):
        (x, _, _, down, _, _, ids, *_), *_ = args
        D = x.shape[-1]
        of_row = rows[bool(args[-1])](D, down[0].numel() // D)
        return int(ids.numel() * of_row * x.element_size())
    if name == _SOFTMAX_BACKWARD:
        return given[0].nbytes
    if _ATTENTION_BACKWARD in name:  # the queries' gradient in float32; those of keys and values for each query head
        query, key = args[1], args[2]
        shared = query.shape[1] != key.shape[1]
        return int(query.numel() * (FLASH_ACCUMULATOR + 2 * query.element_size() * shared))
    return 0


def _attention_flop(func: Any, args: Any, kwargs: Any) -> float:
    given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    q, k, v, *_ = args
    pairs = q.shape[-2] * k.shape[-2] / (2 if given.get("is_causal") else 1)
    return float(2 * q.shape[0] * q.shape[1] * pairs * (q.shape[-1] + v.shape[-1]))


def _fused(
    masked: bool,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Run `torch.nn.functional.scaled_dot_product_attention` as a GPU would, by a kernel that stores no scores.

    A mask of bools is one that flash attention does without: causal, or of a window; with ``masked`` it is each
    sequence's own, and becomes one of numbers. Keys with fewer heads have no such kernel where they are broadcast, as
    in Falcon, without ``enable_gqa``: PyTorch then stores the scores.
    """
    if torch.is_autocast_enabled("cpu"):
        query, key, value = (x.to(torch.get_autocast_dtype("cpu")) for x in (query, key, value))
    if masked and attn_mask is not None and attn_mask.dtype == torch.bool:
        hidden = attn_mask.logical_not()
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(hidden, float("-inf"))
    if query.shape[1] != key.shape[1] and not enable_gqa:
        stored = _ATEN.scaled_dot_product_attention
        return stored(query, key, value, attn_mask, dropout_p, is_causal, scale=scale)  # type: ignore[no-any-return]
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask, is_causal = None, True
    if attn_mask is None and query.shape[-1] == value.shape[-1]:
        flash = _ATEN._scaled_dot_product_flash_attention
        return flash(query, key, value, dropout_p, is_causal, scale=scale)[0]  # type: ignore[no-any-return]
    shared = query.shape[1] // key.shape[1]
    if shared > 1:
        key, value = (x.repeat_interleave(shared, dim=1) for x in (key, value))
    if attn_mask is not None:
        attn_mask = attn_mask.expand(*query.shape[:3], key.shape[2])
    efficient = _ATEN._scaled_dot_product_efficient_attention
    return efficient(  # type: ignore[no-any-return]
        query, key, value, attn_mask, compute_log_sumexp=True, dropout_p=dropout_p, is_causal=is_causal, scale=scale
    )[0]


_NARROW: dict[Any, tuple[str, ...]] = {F: ("linear",), torch: ("matmul", "bmm", "baddbmm", "einsum")}


@contextmanager
def autocast() -> Iterator[None]:
    """Run GEMMs, attention and lowtide's operators in bfloat16, as `torch.autocast` does on a GPU.

    The meta device has no autocast: operands are cast here, each trained parameter once.
    """
    copies: dict[Tensor, Tensor] = {}

    def cast(x: Tensor) -> Tensor:
        if x.dtype != torch.float32:
            return x
        if not isinstance(x, nn.Parameter) or not x.requires_grad:
            return x.to(torch.bfloat16)
        if x not in copies:
            copies[x] = x.to(torch.bfloat16)
        return copies[x]

    def narrow(stock: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.is_autocast_enabled("cpu"):
            args, kwargs = pytree.tree_map_only(Tensor, cast, (args, kwargs))
        return stock(*args, **kwargs)

    gemms = [(home, name, partial(narrow, getattr(home, name))) for home, names in _NARROW.items() for name in names]
    with torch.autocast("cpu", torch.bfloat16), _replaced(*gemms):
        yield


@contextmanager
def _replaced(*functions: tuple[Any, str, Any]) -> Iterator[None]:
    """Set functions in modules and classes, and set back what was there."""
    stock = [(home, name, getattr(home, name)) for home, name, _ in functions]
    try:
        for each in functions:
            setattr(*each)
        yield
    finally:
        for each in stock:
            setattr(*each)


@contextmanager
def stand_ins(visits: int, *, masked: bool = False) -> Iterator[None]:
    """Replace functions that have no form without data.

    Attention runs `_fused`: on the meta device PyTorch would take the path that stores all scores. A list of numbers,
    of tokens for each expert, has equal ones with the sum ``visits``.
    """
    stock_list, stock_autocast = Tensor.tolist, torch.autocast

    def tolist(self: Tensor) -> Any:
        if not self.is_meta:
            return stock_list(self)
        each, more = divmod(visits, self.numel())
        return [each + (i < more) for i in range(self.numel())]

    def autocast(device_type: str, *args: Any, **kwargs: Any) -> Any:  # which peft turns off over experts
        return stock_autocast("cpu" if device_type == "meta" else device_type, *args, **kwargs)

    attention = (F, "scaled_dot_product_attention", partial(_fused, masked))
    with _replaced(attention, (Tensor, "tolist", tolist), (torch, "autocast", autocast)):
        yield
