"""What is computed of lazy logits without building them: losses, log-probabilities and other values of each row.

Each takes what PyTorch's function of that name takes, the lazy logits first, and returns NotImplemented as those of
`lazy_operations` do.

Legend: hidden [..., D], logits [..., V].
"""

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from lowtide.arguments import is_autocast_on
from lowtide.head.apply import linear_apply
from lowtide.head.cross_entropy import linear_cross_entropy
from lowtide.head.options import HeadOptions
from lowtide.head.token_stats import TokenStats, linear_logprobs, linear_token_stats
from lowtide.models.head_kinds import adapted_cross_entropy
from lowtide.models.recorded_logits import RecordedLogits
from lowtide.models.row_scores import (
    UNFOLDED,
    changing,
    in_torch,
    is_rounded,
    lse_and_argmax,
    of_tokens,
    rounded,
    row_scores,
)
from lowtide.models.steps import LogitArguments, Step, TensorBase, fold

_IGNORE_NOTHING = -(2**62)  # an ignore_index that no target has


def _loss(*, of_logprobs: bool) -> Callable[..., Any]:
    """Return `F.nll_loss` of log-probabilities, or `F.cross_entropy`, where the loss is one of rows and class indices.

    What only PyTorch's functions can do, or refuse, is left to them.
    """

    def apply(
        input: RecordedLogits,
        target: Tensor,
        weight: Tensor | None = None,
        size_average: Any = None,
        ignore_index: int = -100,
        reduce: Any = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> Any:
        steps = _steps_of_rows(input)
        if size_average is not None or reduce is not None or type(target) is not Tensor or target.dtype != torch.int64:
            return NotImplemented
        if target.shape != (*input.shape[:1], *input.shape[2:]) or input.dim() != (2 if steps is input.steps else 3):
            return NotImplemented
        if target.device != input.device or (weight is not None and weight.dtype != input.dtype):
            return NotImplemented
        folded = fold(steps)
        if folded is None or folded.normalised is not of_logprobs or folded.sign != 1:
            return NotImplemented

        def loss(hidden: Tensor, head: Tensor, *, options: HeadOptions | None, **kwargs: Any) -> Tensor:
            compute = adapted_cross_entropy if "adapters" in kwargs else linear_cross_entropy
            kwargs |= {"weight": weight, "ignore_index": ignore_index, "label_smoothing": label_smoothing}
            kwargs |= {"reduction": reduction, "options": of_tokens(options) if reduction == "none" else options}
            result = compute(hidden, head, target.reshape(hidden.shape[:-1]), **kwargs)
            return result if reduction != "none" else result.reshape(target.shape)

        result: Tensor = input.call.without_logits(steps, folded, loss)
        return result.to(gives(input, lambda z: F.cross_entropy(z, z.new_zeros(1, dtype=torch.int64))))

    return apply


cross_entropy, nll_loss = _loss(of_logprobs=False), _loss(of_logprobs=True)


def _steps_of_rows(input: RecordedLogits) -> tuple[Step, ...]:
    """Return the steps of logits; if the last one moved the classes of [B, T, V] to second place, those before it."""
    last = input.steps[-1] if input.steps and input.dim() == 3 else None
    moved = last is not None and last.function in (TensorBase.transpose, TensorBase.permute) and last.of_hidden is None
    return input.steps[:-1] if moved else input.steps


def _fold_rows(input: RecordedLogits) -> LogitArguments | None:
    """Return the folded steps of logits of which more than the loss can be computed, None of others."""
    return None if input.call.only_loss else fold(input.steps)


def gather(input: RecordedLogits, dim: Any, index: Any) -> Any:
    """Log-probabilities of some classes of each row, and not logits: those are what building gives."""
    folded = _fold_rows(input)
    if folded is None or not folded.normalised or input.call.built or not is_last(input, dim):
        return NotImplemented
    if type(index) is not Tensor or index.dtype != torch.int64 or index.device != input.device:
        return NotImplemented
    if index.dim() != input.dim() or index.shape[:-1] != input.shape[:-1] or index.shape[-1] == 0:
        return NotImplemented
    if not index.is_cuda and bool(((index < 0) | (index >= input.shape[-1])).any()):  # an error of gather's own
        return NotImplemented

    one = index.shape[-1] == 1
    scores = row_scores(input, folded) if one else None

    def logprobs(hidden: Tensor, head: Tensor, **kwargs: Any) -> Tensor:
        if scores is None:
            target = index[..., 0] if one else index
            return linear_logprobs(hidden, head, target, ignore_index=_IGNORE_NOTHING, **kwargs)
        logit = linear_token_stats(hidden, head, want=("lse",), support=index, **kwargs).lse  # of one class
        assert logit is not None
        return logit - scores.lse_of(input)

    return _of_rows(input, folded, logprobs, input.dtype, keepdim=one)


def row_sum(input: RecordedLogits, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    """The sum of a row's log-probabilities, as label smoothing needs it."""
    folded = _fold_rows(input)
    if folded is None or not folded.normalised or not is_last(input, _only(dim)):
        return NotImplemented
    if dtype is not None and not dtype.is_floating_point:  # each one is rounded first
        return NotImplemented

    def total(hidden: Tensor, head: Tensor, **kwargs: Any) -> Tensor:
        stats = linear_token_stats(hidden, head, want=("mean_logit", "lse"), **kwargs)
        assert stats.mean_logit is not None
        assert stats.lse is not None
        return (stats.mean_logit - stats.lse) * input.shape[-1]

    given = gives(input, lambda z: TensorBase.sum(z, -1, dtype=dtype))
    return _of_rows(input, folded, total, given, keepdim=keepdim)


def logsumexp(input: RecordedLogits, dim: Any, keepdim: bool = False) -> Any:
    """`torch.logsumexp` of each row."""
    return _stat(input, "lse", _only(dim), keepdim)


def argmax(input: RecordedLogits, dim: Any = None, keepdim: bool = False) -> Any:
    """`torch.argmax` of each row."""
    return _stat(input, "argmax", dim, keepdim)


def _stat(input: RecordedLogits, name: str, dim: Any, keepdim: bool) -> Any:
    folded = _fold_rows(input)
    if folded is None or not is_last(input, dim):
        return NotImplemented
    if folded.normalised and (name != "argmax" or input.call.sharded):
        return NotImplemented
    scores = row_scores(input, folded) if name == "argmax" else None
    if scores is not None:
        return scores.argmax_of(input)[..., None] if keepdim else scores.argmax_of(input)
    if folded.sign != 1 and not is_rounded(input):
        return NotImplemented
    normalised = folded.normalised

    def stat(hidden: Tensor, head: Tensor, **kwargs: Any) -> Tensor:
        if normalised:
            return lse_and_argmax(hidden, head, normalised=True, **kwargs)[1]
        stats: TokenStats = linear_token_stats(hidden, head, want=(name,), **kwargs)
        values: Tensor = getattr(stats, name)
        return values

    def rounded_stat(hidden: Tensor, head: Tensor, *, linear_bias: Any, options: Any, **_: Any) -> Tensor:
        settings = (name, input.call.dtype(), changing(input.steps))
        values: Tensor = linear_apply(
            _rounded_stat, hidden, head, linear_bias=linear_bias, params=settings, options=in_torch(options)
        )
        return values

    dtype, function = gives(input, lambda z: TensorBase.logsumexp(z, -1)), cast("Callable[..., Tensor]", stat)
    if is_rounded(input):
        folded, function = UNFOLDED, rounded_stat
    return _of_rows(input, folded, function, dtype, keepdim=keepdim)


def _rounded_stat(logits: Tensor, name: str, dtype: torch.dtype, steps: tuple[Step, ...]) -> Tensor:
    """Return a statistic of rows of logits as they are in their own dtype: it is compared with these, or has ties."""
    z = rounded(logits, dtype, steps)
    values: Tensor = TensorBase.logsumexp(z, -1) if name == "lse" else TensorBase.argmax(z, -1)
    return values


def _of_rows(
    input: RecordedLogits,
    folded: LogitArguments,
    function: Callable[..., Tensor],
    dtype: torch.dtype,
    *,
    keepdim: bool,
) -> Tensor:
    """Return a value per row, of the dtype that the real logits give it."""

    def values(hidden: Tensor, head: Tensor, *, options: HeadOptions | None, **kwargs: Any) -> Tensor:
        result = function(hidden, head, options=of_tokens(options), **kwargs)
        return result[..., None] if keepdim else result

    result: Tensor = input.call.without_logits(input.steps, folded, values)
    if not result.is_floating_point():
        return result
    return (result * float(folded.sign)).to(dtype)  # a tensor of its own: it may be changed in place


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
