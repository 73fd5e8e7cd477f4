"""What is computed of lazy logits without building them: losses, log-probabilities and other values of each row.

Each takes what PyTorch's function of that name takes, the lazy logits first, and returns NotImplemented as those of
`lazy_operations` do.

Legend: hidden [..., D], logits [..., V].
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C import TensorBase

from lowtide.arguments import is_dtensor
from lowtide.head.apply import linear_apply
from lowtide.head.cross_entropy import linear_cross_entropy
from lowtide.head.options import HeadOptions
from lowtide.head.token_stats import TokenStats, linear_logprobs, linear_token_stats
from lowtide.models.adapted_loss import adapted_cross_entropy
from lowtide.models.eligibility import is_autocast_on
from lowtide.models.given_logprobs import NO_CLASS
from lowtide.models.recorded_logits import RecordedLogits
from lowtide.models.steps import Folded, Step, fold
from lowtide.models.stock_functions import original

_cross_entropy: Any = original(F.cross_entropy)
_IGNORE_NOTHING = -(2**62)  # an ignore_index that no target has


def cross_entropy(
    input: RecordedLogits,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """`F.cross_entropy`, argument by argument; what only it can do, or refuse, is left to it."""
    steps = _steps_of_rows(input)
    folded = _loss_of(input, steps, target, weight, size_average, reduce)
    if folded is None or folded.normalised:
        return NotImplemented
    return _loss(input, steps, folded, target, weight, ignore_index, reduction, label_smoothing)


def nll_loss(
    input: RecordedLogits,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
) -> Any:
    """`F.nll_loss` of log-probabilities, likewise."""
    steps = _steps_of_rows(input)
    folded = _loss_of(input, steps, target, weight, size_average, reduce)
    if folded is None or not folded.normalised or folded.sign != 1:
        return NotImplemented
    return _loss(input, steps, folded, target, weight, ignore_index, reduction, 0.0)


def _steps_of_rows(input: RecordedLogits) -> tuple[Step, ...]:
    """Return the steps of logits; where the last one moved their classes second, those before, of [B, T, V]."""
    last = input.steps[-1] if input.steps and input.dim() == 3 else None
    moved = last is not None and last.function in (TensorBase.transpose, TensorBase.permute) and last.of_hidden is None
    return input.steps[:-1] if moved else input.steps


def _loss_of(
    input: RecordedLogits, steps: tuple[Step, ...], target: Any, weight: Any, size_average: Any, reduce: Any
) -> Folded | None:
    """Return the folded steps of logits whose loss is one of rows and class indices, None for any other."""
    if size_average is not None or reduce is not None or type(target) is not Tensor:
        return None
    if target.dtype != torch.int64 or target.shape != (*input.shape[:1], *input.shape[2:]):
        return None
    if input.dim() != (2 if steps is input.steps else 3):
        return None
    if target.device != input.device or (weight is not None and weight.dtype != input.dtype):
        return None
    return fold(steps)


def _loss(
    input: RecordedLogits,
    steps: tuple[Step, ...],
    folded: Folded,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
) -> Any:
    each = reduction == "none" and weight is None and label_smoothing == 0  # then they are log-probabilities
    if each and input.call.built:
        return NotImplemented

    def loss(hidden: Tensor, head: Tensor, *, options: HeadOptions | None, **kwargs: Any) -> Tensor:
        compute = adapted_cross_entropy if input.call.adapted else linear_cross_entropy
        result = compute(
            hidden,
            head,
            target.reshape(hidden.shape[:-1]),
            weight=weight,
            reduction=reduction,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            options=_of_tokens(options) if reduction == "none" else options,
            **kwargs,
        )
        return result if reduction != "none" else result.reshape(target.shape)

    result: Tensor = input.call.without_logits(steps, folded, loss)
    result = result.to(gives(input, lambda z: _cross_entropy(z, torch.zeros(1, dtype=torch.int64, device=z.device))))
    if each and not is_dtensor(result):
        classes = target.where(target != ignore_index, NO_CLASS)
        input.call.given.add(steps, classes[..., None], result[..., None], sign=-1)
    return result


def _fold_rows(input: RecordedLogits) -> Folded | None:
    """Return the folded steps of logits of which more than the loss can be computed, None of others."""
    return None if input.call.only_loss else fold(input.steps)


def gather(input: RecordedLogits, dim: Any, index: Any) -> Any:
    """Log-probabilities of some classes of each row, and not logits: those are compared with what is built."""
    folded = _fold_rows(input)
    if folded is None or not folded.normalised or input.call.built or not is_last(input, dim):
        return NotImplemented
    if type(index) is not Tensor or index.dtype != torch.int64 or index.device != input.device:
        return NotImplemented
    if index.dim() != input.dim() or index.shape[:-1] != input.shape[:-1] or index.shape[-1] == 0:
        return NotImplemented
    if not index.is_cuda and bool(((index < 0) | (index >= input.shape[-1])).any()):  # an error of gather's own
        return NotImplemented

    def logprobs(hidden: Tensor, head: Tensor, **kwargs: Any) -> Tensor:
        one = index.shape[-1] == 1
        values = linear_logprobs(hidden, head, index[..., 0] if one else index, ignore_index=_IGNORE_NOTHING, **kwargs)
        return values[..., None] if one else values

    result = _of_rows(input, folded, logprobs)
    input.call.given.add(input.steps, index, result, sign=folded.sign)
    return result


def row_sum(input: RecordedLogits, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    """The sum of a row's log-probabilities, as label smoothing needs it."""
    folded = _fold_rows(input)
    if folded is None or not folded.normalised or not is_last(input, _only(dim)):
        return NotImplemented

    def total(hidden: Tensor, head: Tensor, **kwargs: Any) -> Tensor:
        stats = linear_token_stats(hidden, head, want=("mean_logit", "lse"), **kwargs)
        assert stats.mean_logit is not None
        assert stats.lse is not None
        values = (stats.mean_logit - stats.lse) * input.shape[-1]
        return values[..., None] if keepdim else values

    return _of_rows(input, folded, total, gives(input, lambda z: TensorBase.sum(z, -1, dtype=dtype)))


def logsumexp(input: RecordedLogits, dim: Any, keepdim: bool = False) -> Any:
    """`torch.logsumexp` of each row."""
    return _stat(input, "lse", _only(dim), keepdim)


def argmax(input: RecordedLogits, dim: Any = None, keepdim: bool = False) -> Any:
    """`torch.argmax` of each row."""
    return _stat(input, "argmax", dim, keepdim)


def _stat(input: RecordedLogits, name: str, dim: Any, keepdim: bool) -> Any:
    folded = _fold_rows(input)
    if folded is None or folded.normalised or not is_last(input, dim):
        return NotImplemented

    def stat(hidden: Tensor, head: Tensor, **kwargs: Any) -> Tensor:
        stats: TokenStats = linear_token_stats(hidden, head, want=(name,), **kwargs)
        values: Tensor = getattr(stats, name)
        return values[..., None] if keepdim else values

    def rounded(hidden: Tensor, head: Tensor, *, linear_bias: Any, options: HeadOptions | None, **_: Any) -> Tensor:
        options = None if options is None else dataclasses.replace(options, backend="auto")
        settings = (name, input.call.dtype(), [step for step in input.steps if step.of_hidden is None])
        values: Tensor = linear_apply(
            _rounded_stat, hidden, head, linear_bias=linear_bias, params=settings, options=options
        )
        return values[..., None] if keepdim else values

    dtype, differentiable = gives(input, lambda z: TensorBase.logsumexp(z, -1)), name != "argmax"
    if input.call.dtype().itemsize < 4 and not input.call.in_parts:
        plain = Folded(1.0, None, (), normalised=False, sign=1)
        return _of_rows(input, plain, rounded, dtype, differentiable=differentiable)
    return _of_rows(input, folded, stat, dtype, differentiable=differentiable)


def _rounded_stat(logits: Tensor, name: str, dtype: torch.dtype, steps: list[Step]) -> Tensor:
    """Return a statistic of rows of logits as they are in their own dtype: it is compared with these, or has ties."""
    z = logits.to(dtype)
    for step in steps:
        args = tuple(x.flatten() if isinstance(x, Tensor) and x.dim() else x for x in step.args)  # a vector [V]
        z = step.function(z, *args)
    return TensorBase.logsumexp(z, -1) if name == "lse" else TensorBase.argmax(z, -1)


def _of_rows(
    input: RecordedLogits,
    folded: Folded,
    function: Callable[..., Tensor],
    dtype: torch.dtype | None = None,
    *,
    differentiable: bool = True,
) -> Tensor:
    """Return a value of each row, of the dtype that the real logits give it."""

    def values(hidden: Tensor, head: Tensor, *, options: HeadOptions | None, **kwargs: Any) -> Tensor:
        return function(hidden, head, options=_of_tokens(options), **kwargs)

    result: Tensor = input.call.without_logits(input.steps, folded, values, differentiable=differentiable)
    if not result.is_floating_point():
        return result
    return (result * float(folded.sign)).to(dtype or input.dtype)  # a tensor of its own: it may be changed in place


def _of_tokens(options: HeadOptions | None) -> HeadOptions | None:
    """Return options for a value of each token: gradients in forward are what a loss that is one number can have."""
    if options is None or options.gradient != "forward":
        return options
    return dataclasses.replace(options, gradient="auto")


def _only(dim: Any) -> Any:
    """Return the one axis of those that a reduction may be given."""
    return dim[0] if isinstance(dim, tuple | list) and len(dim) == 1 else dim


def gives(input: RecordedLogits, function: Callable[[Tensor], Tensor]) -> torch.dtype:
    """Return the dtype of what ``function`` makes of a row of logits, where autocast may have another one for it."""
    on_device = is_autocast_on(input.device.type)
    return function(torch.zeros(1, 1, dtype=input.dtype, device=input.device if on_device else "meta")).dtype


def is_last(input: RecordedLogits, dim: Any) -> bool:
    """Whether ``dim`` is the axis of the classes."""
    return type(dim) is int and dim in (-1, input.dim() - 1)
