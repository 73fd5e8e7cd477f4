"""Operations on lazy logits that need no real ones: they are recorded, or computed from the hidden states.

Each takes what PyTorch's function of that name takes, the lazy logits first. Where it is not certain to give what the
real logits would, it returns NotImplemented, and these are built. `OPERATIONS` lists all.

Legend: hidden [..., D], logits [..., V].
"""

import functools
import inspect
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel.distributed import _DDPSink

from lowtide.models.lazy_results import argmax, cross_entropy, gather, gives, is_last, logsumexp, nll_loss, row_sum
from lowtide.models.recorded_logits import RecordedLogits
from lowtide.models.steps import DTYPES, Step, TensorBase


def _shown(meta: Tensor, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Return what ``function`` gives, on no device; None where it is an error, which the real logits then raise."""
    try:
        return function(meta, *args)
    except (RuntimeError, TypeError, IndexError, ValueError):
        return None


def _recorded(
    input: RecordedLogits,
    function: Callable[..., Tensor],
    args: tuple[Any, ...] = (),
    of_hidden: Callable[[Tensor], Tensor] | None = None,
    *,
    view: bool = False,
) -> Any:
    """Record ``function(logits, *args)``; ``of_hidden`` does the same to hidden states, if it moves or selects rows."""
    like = _shown(input.meta(), function, args)
    return NotImplemented if like is None else input.then(Step(function, args, of_hidden), like, view=view)


def _unary(function: Callable[..., Tensor], *, view: bool = False) -> Callable[..., Any]:
    def apply(input: RecordedLogits) -> Any:
        return _recorded(input, function, view=view)

    return apply


def _scaled(function: Callable[..., Tensor]) -> Callable[..., Any]:
    def apply(input: RecordedLogits, other: Any) -> Any:
        if isinstance(other, Tensor):
            if type(other) not in (Tensor, nn.Parameter) or other.dim() or not other.is_floating_point():
                return NotImplemented
            if other.requires_grad and torch.is_grad_enabled():  # a learned scale needs its gradient
                return NotImplemented
            other = other.detach().clone()
        elif type(other) not in (int, float):
            return NotImplemented
        return input.then(Step(function, (other,)), torch.empty_like(input.meta()))

    return apply


def _add(input: RecordedLogits, other: Any) -> Any:
    """A vector [V] that is not trained is a bias."""
    if type(other) not in (Tensor, nn.Parameter) or not 0 < other.dim() <= input.dim():
        return NotImplemented
    if other.numel() != input.shape[-1] or other.shape[-1] != input.shape[-1]:
        return NotImplemented
    trained = other.requires_grad and torch.is_grad_enabled()
    if trained or other.dtype != input.call.weight_dtype or other.device != input.device:
        return NotImplemented
    like = torch.empty_like(input.meta(), dtype=torch.promote_types(input.dtype, other.dtype))
    return input.then(Step(TensorBase.add, (other.detach().clone(),)), like)


def _log_softmax(input: RecordedLogits, dim: Any = None, dtype: Any = None) -> Any:
    if not is_last(input, dim) or not (dtype is None or dtype.is_floating_point):
        return NotImplemented
    like = TensorBase.log_softmax(input.meta(), -1, gives(input, lambda z: TensorBase.log_softmax(z, -1, dtype)))
    return input.then(Step(TensorBase.log_softmax, (-1, dtype)), like)


def _log_softmax_function(input: RecordedLogits, dim: Any = None, _stacklevel: int = 3, dtype: Any = None) -> Any:
    # As PyTorch's own does, so that a method put in the place of torch.Tensor's runs as it would there.
    if type(dim) is not int:
        return NotImplemented
    return input.log_softmax(dim) if dtype is None else input.log_softmax(dim, dtype=dtype)


def _to(input: RecordedLogits, *args: Any, **kwargs: Any) -> Any:
    kwargs = {name: value for name, value in kwargs.items() if name != "non_blocking"}
    if len(args) + len(kwargs) != 1 or (kwargs and "dtype" not in kwargs and "device" not in kwargs):
        return NotImplemented
    (to,) = (*args, *kwargs.values())
    if isinstance(to, torch.dtype):
        if to == input.dtype:
            return input
        return _recorded(input, TensorBase.to, (to,)) if to in DTYPES else NotImplemented
    # not a number, which is a device of its own kind, and not a tensor, which has a dtype too
    return input if isinstance(to, str | torch.device) and torch.device(to) == input.device else NotImplemented


def _cpu(input: RecordedLogits) -> Any:
    return input if input.is_cpu else NotImplemented


def _contiguous(input: RecordedLogits) -> Any:
    return input if input.is_contiguous() else _recorded(input, TensorBase.contiguous)


_NEAR = 12  # frames between DDP's node and the operation in it, and some more


def _called_by(function: Any) -> bool:
    """Whether a function is among the nearest callers."""
    frame, left = inspect.currentframe(), _NEAR
    while frame is not None and left and frame.f_code is not function.__code__:
        frame, left = frame.f_back, left - 1
    return frame is not None and left > 0


def _clone(input: RecordedLogits) -> Any:
    """DDP's, inside a node of its own. Any other is a copy that is to outlast what the logits are computed from."""
    if torch.is_grad_enabled() or not input.requires_grad or not _called_by(_DDPSink.forward):
        return NotImplemented
    return _recorded(input, TensorBase.clone)


def _reshaped(function: Callable[..., Tensor]) -> Callable[..., Any]:
    """Rows keep their order and the last axis is theirs: whatever the function is, it is a reshape."""

    def apply(input: RecordedLogits, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(arg, Tensor | torch.dtype) for arg in (*args, *kwargs.values())):
            return NotImplemented
        reshape, meta = functools.partial(function, **kwargs), input.meta()
        like = _shown(meta, reshape, args)
        if like is meta:  # as `flatten` of what is flat: the same tensor
            return input
        if like is None or like.dim() == 0 or like.shape[-1] != input.shape[-1]:
            return NotImplemented
        rows = like.shape[:-1]
        step = Step(reshape, args, lambda x: x.reshape(*rows, x.shape[-1]), keeps_rows=True)
        view = like.untyped_storage() is meta.untyped_storage()  # a reshape may copy
        return input.then(step, like, view=view)

    return apply


def _transpose(input: RecordedLogits, dim0: int, dim1: int) -> Any:
    if is_last(input, dim0) or is_last(input, dim1):
        swaps = type(dim0) is int and type(dim1) is int and {dim0 % input.dim(), dim1 % input.dim()} == {1, 2}
        return _with_classes_second(input, TensorBase.transpose, dim0, dim1) if swaps else NotImplemented
    return _recorded(
        input, TensorBase.transpose, (dim0, dim1), lambda x: TensorBase.transpose(x, dim0, dim1), view=True
    )


def _permute(input: RecordedLogits, *dims: Any) -> Any:
    order = tuple(dims[0]) if len(dims) == 1 and isinstance(dims[0], tuple | list) else dims
    if order in ((0, 2, 1), (0, -1, 1), (0, -1, -2), (0, 2, -2)):
        return _with_classes_second(input, TensorBase.permute, order)
    return _moved(input, TensorBase.permute, order) if order and is_last(input, order[-1]) else NotImplemented


def _moved(input: RecordedLogits, function: Callable[..., Tensor], *args: Any) -> Any:
    return _recorded(input, function, args, lambda x: function(x, *args), view=True)


def _with_classes_second(input: RecordedLogits, function: Callable[..., Tensor], *args: Any) -> Any:
    """[B, V, T] of [B, T, V], as `F.cross_entropy` takes it; `fold` has no such step, so that nothing else is fused."""
    return _recorded(input, function, args, view=True) if input.dim() == 3 else NotImplemented


def _getitem(input: RecordedLogits, index: Any) -> Any:
    """Numbers and slices before the last axis; a mask, which chooses among all rows."""
    if type(index) is Tensor and index.dtype == torch.bool:
        return _masked(input, index)
    parts = index if isinstance(index, tuple) else (index,)
    if any(not (part is Ellipsis or type(part) is int or _is_int_slice(part)) for part in parts):
        return NotImplemented
    if parts.count(Ellipsis) > 1 or len(parts) - parts.count(Ellipsis) > input.dim():
        return NotImplemented
    at = parts.index(Ellipsis) if Ellipsis in parts else len(parts)
    missing = input.dim() - len(parts) + parts.count(Ellipsis)
    full = (*parts[:at], *[slice(None)] * missing, *parts[at + 1 :])
    if not full or type(full[-1]) is int or full[-1].indices(input.shape[-1]) != (0, input.shape[-1], 1):
        return NotImplemented
    takes = zip(full, input.shape, strict=True)
    everything = all(type(part) is slice and part.indices(size) == (0, size, 1) for part, size in takes)
    if everything and not (input.requires_grad and not torch.is_grad_enabled()):
        return input
    chosen = full[:-1]
    return _recorded(input, TensorBase.__getitem__, (full,), lambda x: x[chosen], view=True)


def _unbind(input: RecordedLogits, dim: Any = 0) -> Any:
    """The rows of an axis one by one, as by iterating."""
    return _along(input, dim, lambda meta: range(meta.shape[dim]))


def _chunk(input: RecordedLogits, chunks: Any, dim: Any = 0) -> Any:
    return _along(input, dim, lambda meta: _bounds(meta.chunk(chunks, dim), dim))


def _split(input: RecordedLogits, split_size: Any, dim: Any = 0) -> Any:
    return _along(input, dim, lambda meta: _bounds(torch.split(meta, split_size, dim), dim))


def _bounds(parts: Sequence[Tensor], dim: int) -> list[slice]:
    ends = itertools.accumulate((part.shape[dim] for part in parts), initial=0)
    return list(itertools.starmap(slice, itertools.pairwise(ends)))


def _along(input: RecordedLogits, dim: Any, indices: Callable[[Tensor], Any]) -> Any:
    """Return views of the logits, one for each index that ``indices`` returns for an axis of a meta tensor."""
    # With gradients PyTorch's own are views that may not be changed in place, which those of `_getitem` may.
    if torch.is_grad_enabled() and input.requires_grad:
        return NotImplemented
    if type(dim) is not int or not -input.dim() <= dim < input.dim() or is_last(input, dim):
        return NotImplemented
    taken = _shown(input.meta(), indices, ())
    before = (slice(None),) * (dim % input.dim())
    return NotImplemented if taken is None else tuple(_getitem(input, (*before, index)) for index in taken)


def _expand(input: RecordedLogits, *sizes: Any) -> Any:
    sizes = tuple(sizes[0]) if len(sizes) == 1 and isinstance(sizes[0], tuple | list) else sizes
    if any(type(size) is not int for size in sizes) or not sizes or sizes[-1] not in (-1, input.shape[-1]):
        return NotImplemented
    rows = sizes[:-1]
    return _recorded(input, TensorBase.expand, sizes, lambda x: x.expand(*rows, x.shape[-1]), view=True)


def _masked(input: RecordedLogits, mask: Tensor) -> Any:
    if not 0 < mask.dim() < input.dim() or mask.shape != input.shape[: mask.dim()] or mask.device != input.device:
        return NotImplemented
    chosen = mask.nonzero(as_tuple=True)  # indexing by a mask does the same, and so waits for the device as well
    like = input.meta().new_empty(len(chosen[0]), *input.shape[mask.dim() :])
    return input.then(Step(TensorBase.__getitem__, (chosen,), lambda x: x[chosen]), like)


def _is_int_slice(part: Any) -> bool:
    return isinstance(part, slice) and all(x is None or type(x) is int for x in (part.start, part.stop, part.step))


def _named(*names: str) -> list[Callable[..., Any]]:
    """Return the functions of these names, as methods of tensors and in torch."""
    return [getattr(owner, name) for owner in (Tensor, torch) for name in names if hasattr(owner, name)]


OPERATIONS: dict[Callable[..., Any], Callable[..., Any]] = {}
COMMUTATIVE: set[Callable[..., Any]] = set()


def look_up() -> None:
    """Look the functions up that PyTorch has now: one that a user replaced passes what stands in its place."""
    mul, add = _named("mul", "multiply", "__mul__", "__rmul__"), _named("add", "__add__", "__radd__")
    reshapes: tuple[Any, ...] = (*_named("reshape", "flatten", "squeeze", "unsqueeze"), Tensor.view, Tensor.unflatten)
    COMMUTATIVE.update(mul, add)
    OPERATIONS.update(
        {
            **dict.fromkeys(mul, _scaled(TensorBase.mul)),
            **dict.fromkeys(_named("div", "divide", "true_divide", "__truediv__"), _scaled(TensorBase.div)),
            **dict.fromkeys(add, _add),
            **dict.fromkeys(_named("tanh"), _unary(TensorBase.tanh)),
            **dict.fromkeys(_named("neg", "negative", "__neg__"), _unary(TensorBase.neg)),
            **dict.fromkeys(_named("log_softmax"), _log_softmax),
            F.log_softmax: _log_softmax_function,
            Tensor.float: functools.partial(_to, dtype=torch.float32),
            Tensor.double: functools.partial(_to, dtype=torch.float64),
            Tensor.half: functools.partial(_to, dtype=torch.float16),
            Tensor.bfloat16: functools.partial(_to, dtype=torch.bfloat16),
            Tensor.to: _to,
            Tensor.cpu: _cpu,
            Tensor.contiguous: _contiguous,
            **dict.fromkeys(_named("clone"), _clone),
            **dict.fromkeys(_named("detach"), _unary(TensorBase.detach, view=True)),
            Tensor.__getitem__: _getitem,
            **{function: _reshaped(function) for function in reshapes},
            **dict.fromkeys(_named("transpose", "swapaxes"), _transpose),
            **dict.fromkeys(_named("permute"), _permute),
            **dict.fromkeys(_named("unbind"), _unbind),
            **dict.fromkeys(_named("chunk"), _chunk),
            **dict.fromkeys(_named("split"), _split),
            Tensor.expand: _expand,
            F.cross_entropy: cross_entropy,
            F.nll_loss: nll_loss,
            **dict.fromkeys(_named("gather"), gather),
            **dict.fromkeys(_named("sum"), row_sum),
            **dict.fromkeys(_named("logsumexp"), logsumexp),
            **dict.fromkeys(_named("argmax"), argmax),
        }
    )


look_up()
