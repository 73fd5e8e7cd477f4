"""What may be done to lazy logits without building them: recorded, or computed from the hidden states.

Each operation takes what PyTorch's function of that name takes, the lazy logits first, and returns NotImplemented to
have the real logits used after all: whenever it is not certain to give what they would.

Legend: hidden [..., D], logits [..., V].
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowtide.head.cross_entropy import linear_cross_entropy
from lowtide.head.options import HeadOptions
from lowtide.head.token_stats import TokenStats, linear_logprobs, linear_token_stats
from lowtide.models.adapted_loss import adapted_cross_entropy
from lowtide.models.eligibility import is_autocast_on
from lowtide.models.head_call import Folded, Step, fold

if TYPE_CHECKING:
    from lowtide.models.lazy_logits import LazyLogits

_NO_CLASS = -(2**62)  # an ignore_index that no target has


# Each logit by itself.


def _scaled(function: Callable[..., Tensor]) -> Callable[..., Any]:
    def apply(input: "LazyLogits", other: Any) -> Any:
        if isinstance(other, Tensor):
            if type(other) not in (Tensor, nn.Parameter) or other.dim() or not other.is_floating_point():
                return NotImplemented
            if other.requires_grad and torch.is_grad_enabled():  # a learned scale needs its gradient
                return NotImplemented
            other = other.detach().clone()
        elif type(other) not in (int, float):
            return NotImplemented
        return input.then(Step(function, (other,)), _alike(input))

    return apply


def _add(input: "LazyLogits", other: Any) -> Any:
    """A vector [V] that is not trained counts as bias."""
    if type(other) not in (Tensor, nn.Parameter) or not 0 < other.dim() <= input.dim():
        return NotImplemented
    if other.numel() != input.shape[-1] or other.shape[-1] != input.shape[-1]:
        return NotImplemented
    weight = input.call.head.weight
    if (other.requires_grad and torch.is_grad_enabled()) or other.dtype != weight.dtype or other.device != input.device:
        return NotImplemented
    like = _alike(input).to(torch.promote_types(input.dtype, other.dtype))
    return input.then(Step(Tensor.add, (other.detach().clone(),)), like)


def _tanh(input: "LazyLogits") -> Any:
    return input.then(Step(Tensor.tanh), _alike(input))


def _neg(input: "LazyLogits") -> Any:
    return input.then(Step(Tensor.neg), _alike(input))


def _log_softmax(input: "LazyLogits", dim: Any = None, dtype: Any = None) -> Any:
    if not _is_last(input, dim) or not (dtype is None or dtype.is_floating_point):
        return NotImplemented
    gives = _gives(input, lambda z: z.log_softmax(-1, dtype))
    return input.then(Step(Tensor.log_softmax, (-1, dtype)), input.meta().log_softmax(-1, gives))


def _gives(input: "LazyLogits", function: Callable[[Tensor], Tensor]) -> torch.dtype:
    """Return the dtype of what ``function`` makes of a row of logits, where autocast may have another one for it."""
    on_device = is_autocast_on(input.device.type)
    return function(torch.zeros(1, 1, dtype=input.dtype, device=input.device if on_device else "meta")).dtype


def _alike(input: "LazyLogits") -> Tensor:
    """Return what an operation on each logit gives, on no device."""
    return torch.empty_like(input.meta())


def _log_softmax_function(input: "LazyLogits", dim: Any = None, _stacklevel: int = 3, dtype: Any = None) -> Any:
    return _log_softmax(input, dim, dtype)


def _cast_to(dtype: torch.dtype) -> Callable[..., Any]:
    def apply(input: "LazyLogits") -> Any:
        return _to(input, dtype)

    return apply


def _to(input: "LazyLogits", *args: Any, **kwargs: Any) -> Any:
    kwargs = {name: value for name, value in kwargs.items() if name != "non_blocking"}
    if len(args) + len(kwargs) != 1 or (kwargs and "dtype" not in kwargs and "device" not in kwargs):
        return NotImplemented
    (wanted,) = (*args, *kwargs.values())
    if isinstance(wanted, torch.dtype):
        if wanted == input.dtype:
            return input
        if wanted.is_floating_point:
            return input.then(Step(Tensor.to, (wanted,)), input.meta().to(wanted))
        return NotImplemented
    # not a number, which is a device of its own kind, and not a tensor, which has a dtype too
    return input if isinstance(wanted, str | torch.device) and torch.device(wanted) == input.device else NotImplemented


# The rows: which ones there are, and in which shape they stand. A step tells how hidden states follow.


def _contiguous(input: "LazyLogits") -> Any:
    if input.is_contiguous():
        return input
    return input.then(Step(Tensor.contiguous), input.meta().contiguous())


def _clone(input: "LazyLogits") -> Any:
    """DDP's, inside a node of its own. Any other is a copy that is to outlast what the logits are computed from."""
    if torch.is_grad_enabled() or not input.requires_grad:
        return NotImplemented
    return input.then(Step(Tensor.clone), _alike(input))


def _detach(input: "LazyLogits") -> Any:
    return input.then(Step(Tensor.detach), input.meta(), view=True)


def _reshaped(function: Callable[..., Tensor]) -> Callable[..., Any]:
    """Rows keep their order and the last axis is theirs: whatever the function is, it is a reshape."""

    def apply(input: "LazyLogits", *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(arg, Tensor | torch.dtype) for arg in (*args, *kwargs.values())):
            return NotImplemented
        meta = input.meta()
        like = _shown(meta, function, args, kwargs)
        if like is meta:  # as `flatten` of what is flat: the same tensor
            return input
        if like is None or like.dim() == 0 or like.shape[-1] != input.shape[-1]:
            return NotImplemented
        rows = like.shape[:-1]
        step = Step(functools.partial(function, **kwargs), args, lambda x: x.reshape(*rows, x.shape[-1]))
        return input.then(step, like, view=like._is_view())

    return apply


def _transpose(input: "LazyLogits", dim0: int, dim1: int) -> Any:
    if _is_last(input, dim0) or _is_last(input, dim1):
        return NotImplemented
    return _moved(input, Tensor.transpose, dim0, dim1)


def _permute(input: "LazyLogits", *dims: Any) -> Any:
    order = tuple(dims[0]) if len(dims) == 1 and isinstance(dims[0], tuple | list) else dims
    return _moved(input, Tensor.permute, order) if order and _is_last(input, order[-1]) else NotImplemented


def _moved(input: "LazyLogits", function: Callable[..., Tensor], *args: Any) -> Any:
    like = _shown(input.meta(), function, args, {})
    if like is None:
        return NotImplemented
    return input.then(Step(function, args, lambda x: function(x, *args)), like, view=True)


def _getitem(input: "LazyLogits", index: Any) -> Any:
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
    like = _shown(input.meta(), Tensor.__getitem__, (full,), {})
    if like is None:
        return NotImplemented
    return input.then(Step(Tensor.__getitem__, (full,), lambda x: x[chosen]), like, view=True)


def _masked(input: "LazyLogits", mask: Tensor) -> Any:
    if not 0 < mask.dim() < input.dim() or mask.shape != input.shape[: mask.dim()] or mask.device != input.device:
        return NotImplemented
    chosen = mask.nonzero(as_tuple=True)  # indexing by a mask does the same, and so waits for the device as well
    like = input.meta().new_empty(len(chosen[0]), *input.shape[mask.dim() :])
    return input.then(Step(Tensor.__getitem__, (chosen,), lambda x: x[chosen]), like)


def _is_int_slice(part: Any) -> bool:
    return isinstance(part, slice) and all(x is None or type(x) is int for x in (part.start, part.stop, part.step))


def _is_last(input: "LazyLogits", dim: Any) -> bool:
    return type(dim) is int and dim in (-1, input.dim() - 1)


def _shown(meta: Tensor, function: Callable[..., Tensor], args: Any, kwargs: Any) -> Tensor | None:
    """Return what ``function`` gives, on no device; None where it is an error, which the real logits then raise."""
    try:
        return function(meta, *args, **kwargs)
    except (RuntimeError, TypeError, IndexError, ValueError):
        return None


# What is computed without logits.


def _cross_entropy(
    input: "LazyLogits",
    target: Tensor,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """`F.cross_entropy`, argument by argument; what only it can do, or refuse, is left to it."""
    folded = _loss_of(input, target, weight, size_average, reduce)
    if folded is None or folded.normalised:
        return NotImplemented
    return _loss(input, folded, target, weight, ignore_index, reduction, label_smoothing)


def _nll_loss(
    input: "LazyLogits",
    target: Tensor,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
) -> Any:
    folded = _loss_of(input, target, weight, size_average, reduce)
    if folded is None or not folded.normalised or folded.sign != 1:
        return NotImplemented
    return _loss(input, folded, target, weight, ignore_index, reduction, 0.0)


def _loss_of(input: "LazyLogits", target: Any, weight: Any, size_average: Any, reduce: Any) -> Folded | None:
    """Return the folded steps of logits whose loss is one of rows and class indices, None for any other."""
    if size_average is not None or reduce is not None or type(target) is not Tensor:
        return None
    if input.dim() != 2 or target.dtype != torch.int64 or target.shape != input.shape[:1]:
        return None
    if target.device != input.device or (weight is not None and weight.dtype != input.dtype):
        return None
    return fold(input.steps)


def _loss(
    input: "LazyLogits",
    folded: Folded,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
) -> Tensor:
    def loss(hidden: Tensor, head: Tensor, **kwargs: Any) -> Tensor:
        compute = adapted_cross_entropy if input.call.adapted else linear_cross_entropy
        return compute(
            hidden,
            head,
            target,
            weight=weight,
            reduction=reduction,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            **kwargs,
        )

    result: Tensor = input.call.without_logits(input.steps, folded, loss)
    return result.to(_gives(input, lambda z: F.cross_entropy(z, torch.zeros(1, dtype=torch.int64, device=z.device))))


def _fold_rows(input: "LazyLogits") -> Folded | None:
    """Return the folded steps of a linear layer's logits; None with adapters, for which there is the loss alone."""
    return None if input.call.adapted else fold(input.steps)


def _gather(input: "LazyLogits", dim: Any, index: Any) -> Any:
    """Log-probabilities of some classes of each row."""
    folded = _fold_rows(input)
    if folded is None or not folded.normalised or not _is_last(input, dim):
        return NotImplemented
    if type(index) is not Tensor or index.dtype != torch.int64 or index.device != input.device:
        return NotImplemented
    if index.dim() != input.dim() or index.shape[:-1] != input.shape[:-1] or index.shape[-1] == 0:
        return NotImplemented
    if not index.is_cuda and bool((index < 0).any()):  # an error of gather's own
        return NotImplemented

    def logprobs(hidden: Tensor, head: Tensor, **kwargs: Any) -> Tensor:
        one = index.shape[-1] == 1
        values = linear_logprobs(hidden, head, index[..., 0] if one else index, ignore_index=_NO_CLASS, **kwargs)
        return values[..., None] if one else values

    return _of_rows(input, folded, logprobs)


def _sum(input: "LazyLogits", dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    """The sum of a row's log-probabilities, as label smoothing needs it."""
    folded = _fold_rows(input)
    if folded is None or not folded.normalised or not _is_last(input, _only(dim)):
        return NotImplemented

    def total(hidden: Tensor, head: Tensor, **kwargs: Any) -> Tensor:
        stats = linear_token_stats(hidden, head, want=("mean_logit", "lse"), **kwargs)
        assert stats.mean_logit is not None
        assert stats.lse is not None
        values = (stats.mean_logit - stats.lse) * input.shape[-1]
        return values[..., None] if keepdim else values

    return _of_rows(input, folded, total, _gives(input, lambda z: z.sum(-1, dtype=dtype)))


def _logsumexp(input: "LazyLogits", dim: Any, keepdim: bool = False) -> Any:
    return _stat(input, "lse", _only(dim), keepdim)


def _argmax(input: "LazyLogits", dim: Any = None, keepdim: bool = False) -> Any:
    return _stat(input, "argmax", dim, keepdim)


def _stat(input: "LazyLogits", name: str, dim: Any, keepdim: bool) -> Any:
    folded = _fold_rows(input)
    if folded is None or folded.normalised or not _is_last(input, dim):
        return NotImplemented

    def stat(hidden: Tensor, head: Tensor, **kwargs: Any) -> Tensor:
        stats: TokenStats = linear_token_stats(hidden, head, want=(name,), **kwargs)
        values: Tensor = getattr(stats, name)
        return values[..., None] if keepdim else values

    return _of_rows(input, folded, stat, _gives(input, lambda z: z.logsumexp(-1)))


def _of_rows(
    input: "LazyLogits", folded: Folded, function: Callable[..., Tensor], dtype: torch.dtype | None = None
) -> Tensor:
    """Return a value of each row, of the dtype that the real logits give it."""

    def values(hidden: Tensor, head: Tensor, *, options: HeadOptions | None, **kwargs: Any) -> Tensor:
        if options is not None and options.gradient == "forward":  # which the loss alone can have
            options = dataclasses.replace(options, gradient="auto")
        return function(hidden, head, options=options, **kwargs)

    result: Tensor = input.call.without_logits(input.steps, folded, values)
    if not result.is_floating_point():
        return result
    return (result * float(folded.sign)).to(dtype or input.dtype)  # a tensor of its own: it may be changed in place


def _only(dim: Any) -> Any:
    """Return the one axis of those that a reduction may be given."""
    return dim[0] if isinstance(dim, tuple | list) and len(dim) == 1 else dim


COMMUTATIVE = frozenset((
    Tensor.mul, Tensor.__mul__, Tensor.__rmul__, Tensor.multiply, torch.mul, torch.multiply, Tensor.add, Tensor.__add__,
    Tensor.__radd__, torch.add,
))  # fmt: skip

OPERATIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    **dict.fromkeys(
        (Tensor.mul, Tensor.__mul__, Tensor.__rmul__, Tensor.multiply, torch.mul, torch.multiply),
        _scaled(Tensor.mul),
    ),
    **dict.fromkeys(
        (Tensor.div, Tensor.__truediv__, Tensor.divide, Tensor.true_divide, torch.div, torch.divide, torch.true_divide),
        _scaled(Tensor.div),
    ),
    **dict.fromkeys((Tensor.add, Tensor.__add__, Tensor.__radd__, torch.add), _add),
    **dict.fromkeys((Tensor.tanh, torch.tanh), _tanh),
    **dict.fromkeys((Tensor.neg, Tensor.__neg__, Tensor.negative, torch.neg, torch.negative), _neg),
    **dict.fromkeys((Tensor.log_softmax, torch.log_softmax), _log_softmax),
    F.log_softmax: _log_softmax_function,
    Tensor.float: _cast_to(torch.float32),
    Tensor.double: _cast_to(torch.float64),
    Tensor.half: _cast_to(torch.float16),
    Tensor.bfloat16: _cast_to(torch.bfloat16),
    Tensor.to: _to,
    Tensor.contiguous: _contiguous,
    **dict.fromkeys((Tensor.clone, torch.clone), _clone),
    **dict.fromkeys((Tensor.detach, torch.detach), _detach),
    Tensor.__getitem__: _getitem,
    **{function: _reshaped(function) for function in (
        Tensor.view, Tensor.reshape, torch.reshape, Tensor.flatten, torch.flatten, Tensor.unflatten, Tensor.squeeze,
        torch.squeeze, Tensor.unsqueeze, torch.unsqueeze,
    )},
    **dict.fromkeys((Tensor.transpose, torch.transpose, Tensor.swapaxes, torch.swapaxes), _transpose),
    **dict.fromkeys((Tensor.permute, torch.permute), _permute),
    F.cross_entropy: _cross_entropy,
    F.nll_loss: _nll_loss,
    **dict.fromkeys((Tensor.gather, torch.gather), _gather),
    **dict.fromkeys((Tensor.sum, torch.sum), _sum),
    **dict.fromkeys((Tensor.logsumexp, torch.logsumexp), _logsumexp),
    **dict.fromkeys((Tensor.argmax, torch.argmax), _argmax),
}  # fmt: skip
