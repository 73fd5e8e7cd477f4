"""The table of operations on lazy logits that need no real ones: they are recorded, or computed without logits.

Each takes what PyTorch's function of that name takes, the lazy logits first. Where it is not certain to give what the
real logits would, it returns NotImplemented, and these are built. `look_up` has the table.

Legend: hidden [..., D], logits [..., V].
"""

import functools
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lowtide.arguments import is_autocast_on
from lowtide.head.apply import linear_apply
from lowtide.head.cross_entropy import linear_cross_entropy
from lowtide.head.options import HeadOptions
from lowtide.head.token_stats import Want, linear_logprobs, linear_token_stats
from lowtide.models.head_kinds import adapted_cross_entropy
from lowtide.models.lazy_logits import OPERATIONS, LazyLogits, reader
from lowtide.models.steps import LogitArguments, RowView, Step, TensorBase, fold, replay, rows_of

# Dtypes of logits: to one of these they are only rounded. float8 is for a quantisation that is meant to be seen.
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_IGNORE_NOTHING = -(2**62)  # an ignore_index that no target has
_ROWS_OF_A_PASS = 256  # a GEMM of so many rows takes about as long as reading the weight


def _shown(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return what ``function`` gives, on no device; None where it is an error, which the real logits then raise."""
    try:
        return function(*args, **kwargs)
    except (RuntimeError, TypeError, IndexError, ValueError):
        return None


def _moved(function: Callable[..., Any], input: LazyLogits, *args: Any, **kwargs: Any) -> Any:
    """Views of whole rows, and what copies all rows in their order where there is no view."""
    if any(isinstance(arg, Tensor) for arg in tree_leaves((args, kwargs))):
        return NotImplemented
    meta = input.meta()
    made = _shown(function, meta, *args, **kwargs)
    if made is meta:  # as `flatten` of what is flat: the same tensor
        return input
    if isinstance(made, tuple | list):
        # With gradients PyTorch's own are views that may not be changed in place, which others may.
        if torch.is_grad_enabled() and input.requires_grad:
            return NotImplemented
        parts = [input.view_by(Step(function, args, kwargs, i, True), part) for i, part in enumerate(made)]
        return NotImplemented if any(part is NotImplemented for part in parts) else tuple(parts)
    if not isinstance(made, Tensor) or made.dtype != meta.dtype:
        return NotImplemented
    step = Step(function, args, kwargs, keeps_values=True)
    if made.untyped_storage() is meta.untyped_storage():
        return input.view_by(step, made)
    taken = RowView.of(made, meta.shape[-1])
    if function not in _COPIES or taken is None:
        return NotImplemented
    return input.then(step, made, (taken,))


def _getitem(input: LazyLogits, index: Any) -> Any:
    """A view, or rows that a mask chooses among all."""
    if type(index) is not Tensor or index.dtype != torch.bool:
        return _moved(Tensor.__getitem__, input, index)
    if index.dim() != input.dim() - 1 or index.shape != input.shape[:-1] or index.device != input.device:
        return NotImplemented
    chosen = index.flatten().nonzero()[:, 0]  # indexing by a mask does the same, and so waits for the device as well
    step = Step(_chosen_rows, (chosen,), keeps_values=True)
    return input.then(step, input.meta().new_empty(len(chosen), input.shape[-1]), (chosen,))


def _chosen_rows(logits: Tensor, chosen: Tensor) -> Tensor:
    return logits.flatten(0, -2)[chosen]


def _clone(input: LazyLogits) -> Any:
    """DDP's, inside a node of its own. Any other is a copy that is to outlast what the logits are computed from."""
    if torch.is_grad_enabled() or not input.requires_grad or not reader().startswith("torch.nn.parallel."):
        return NotImplemented
    return input.then(Step(TensorBase.clone, keeps_values=True), torch.empty_like(input.meta()))


def _valued(function: Callable[..., Tensor], input: LazyLogits, *by: Any) -> Any:
    """An operation on each logit, by a number or none: a trained scale needs its gradient."""
    if any(type(number) not in (int, float) for number in by):
        return NotImplemented
    return input.then(Step(function, by), torch.empty_like(input.meta()))


def _add(input: LazyLogits, other: Any) -> Any:
    """A vector [V] that is not trained is a bias."""
    if type(other) not in (Tensor, nn.Parameter) or not 0 < other.dim() <= input.dim():
        return NotImplemented
    if other.numel() != input.shape[-1] or other.shape[-1] != input.shape[-1]:
        return NotImplemented
    trained = other.requires_grad and torch.is_grad_enabled()
    if trained or other.dtype != input.call.weight_dtype or other.device != input.device:
        return NotImplemented
    like = torch.empty_like(input.meta(), dtype=torch.promote_types(input.dtype, other.dtype))
    return input.then(Step(TensorBase.add, (other.detach().flatten().clone(),)), like)


def _log_softmax(input: LazyLogits, dim: Any = None, dtype: Any = None, _stacklevel: int = 3) -> Any:
    if not _is_last(input, dim) or not (dtype is None or (isinstance(dtype, torch.dtype) and dtype.is_floating_point)):
        return NotImplemented
    given = _dtype_of(input, lambda z: TensorBase.log_softmax(z, -1, dtype), dtype)
    return input.then(Step(TensorBase.log_softmax, (-1, dtype)), torch.empty_like(input.meta(), dtype=given))


def _to(input: LazyLogits, *args: Any, **kwargs: Any) -> Any:
    kwargs = {name: value for name, value in kwargs.items() if name != "non_blocking"}
    if len(args) + len(kwargs) != 1 or (kwargs and "dtype" not in kwargs and "device" not in kwargs):
        return NotImplemented
    (to,) = (*args, *kwargs.values())
    if isinstance(to, torch.dtype):
        if to == input.dtype:
            return input
        return input.then(Step(TensorBase.to, (to,)), input.meta().to(to)) if to in _DTYPES else NotImplemented
    # not a number, which is a device of its own kind, and not a tensor, which has a dtype too
    return input if isinstance(to, str | torch.device) and torch.device(to) == input.device else NotImplemented


def _loss(
    of_logprobs: bool,
    input: LazyLogits,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: Any = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """`F.nll_loss` of log-probabilities, or `F.cross_entropy`, where the loss is one of rows and class indices.

    What only PyTorch's functions can do, or refuse, is left to them.
    """
    logits = input.viewed if input.rows is None else input  # [B, V, T] is a view of [B, T, V]
    if size_average is not None or reduce is not None or type(target) is not Tensor or target.dtype != torch.int64:
        return NotImplemented
    if target.shape != (*input.shape[:1], *input.shape[2:]) or input.dim() != (2 if logits is input else 3):
        return NotImplemented
    if target.device != input.device or (weight is not None and weight.dtype != input.dtype):
        return NotImplemented
    assert logits is not None
    folded = fold(logits.steps)
    if folded is None or folded.normalised is not of_logprobs or folded.sign != 1:
        return NotImplemented

    def loss(hidden: Tensor, head: Tensor, **kwargs: Any) -> Tensor:
        compute = adapted_cross_entropy if "adapter" in kwargs else linear_cross_entropy
        kwargs |= {"weight": weight, "ignore_index": ignore_index, "label_smoothing": label_smoothing}
        result = compute(hidden, head, target.reshape(hidden.shape[:-1]), reduction=reduction, **kwargs)
        return result if reduction != "none" else result.reshape(target.shape)

    result: Tensor = logits.call.without_logits(logits.rows, folded, loss, per_row=reduction == "none")
    return result.to(_dtype_of(input, lambda z: F.cross_entropy(z, z.new_zeros(1, dtype=torch.int64))))


def _gather(input: LazyLogits, dim: Any, index: Any) -> Any:
    """Log-probabilities of some classes of each row, and not logits: those are what building gives."""
    folded = _folded(input)
    if folded is None or not folded.normalised or input.call.built or not _is_last(input, dim):
        return NotImplemented
    if type(index) is not Tensor or index.dtype != torch.int64 or index.device != input.device:
        return NotImplemented
    if index.dim() != input.dim() or index.shape[:-1] != input.shape[:-1] or index.shape[-1] == 0:
        return NotImplemented
    if not index.is_cuda and bool(((index < 0) | (index >= input.shape[-1])).any()):  # an error of gather's own
        return NotImplemented
    one = index.shape[-1] == 1
    lse = _statistic(input, "lse", folded) if one and _read_in_parts(input) else None

    def logprobs(hidden: Tensor, head: Tensor, **kwargs: Any) -> Tensor:
        if lse is None:
            target = index[..., 0] if one else index
            result = linear_logprobs(hidden, head, target, ignore_index=_IGNORE_NOTHING, **kwargs)
            return result[..., None] if one else result
        logit = linear_token_stats(hidden, head, want=("lse",), support=index, **kwargs).lse  # of one class
        return (logit - lse)[..., None]

    return _own(input.call.without_logits(input.rows, folded, logprobs), folded.sign, input.dtype)


def _row_sum(input: LazyLogits, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    """The sum of a row's log-probabilities, as label smoothing needs it."""
    folded = _folded(input)
    if folded is None or not folded.normalised or not _is_last(input, dim):
        return NotImplemented
    if dtype is not None and not dtype.is_floating_point:  # each one is rounded first
        return NotImplemented

    def total(hidden: Tensor, head: Tensor, **kwargs: Any) -> Tensor:
        stats = linear_token_stats(hidden, head, want=("mean_logit", "lse"), **kwargs)
        return (stats.mean_logit - stats.lse) * input.shape[-1]

    values = input.call.without_logits(input.rows, folded, total)
    sums = _own(values, folded.sign, _dtype_of(input, lambda z: TensorBase.sum(z, -1, dtype=dtype), dtype))
    return sums[..., None] if keepdim else sums


def _logsumexp(input: LazyLogits, dim: Any, keepdim: bool = False) -> Any:
    folded = _folded(input)
    if folded is None or folded.normalised or not _is_last(input, dim):
        return NotImplemented
    lse = _own(_statistic(input, "lse", folded), 1, _dtype_of(input, lambda z: TensorBase.logsumexp(z, -1)))
    return lse[..., None] if keepdim else lse


def _argmax(input: LazyLogits, dim: Any = None, keepdim: bool = False) -> Any:
    folded = _folded(input)
    if folded is None or folded.sign != 1 or not _is_last(input, dim):
        return NotImplemented
    if folded.normalised and input.call.sharded:
        return NotImplemented
    argmax = _statistic(input, "argmax", folded)
    return argmax[..., None] if keepdim else argmax


def _folded(input: LazyLogits) -> LogitArguments | None:
    """Return the folded steps of logits of which more than the loss can be computed, None of others."""
    return None if input.call.only_loss or input.rows is None else fold(input.steps)


def _statistic(input: LazyLogits, name: Want, folded: LogitArguments) -> Tensor:
    """Return a field of `TokenStats` for each row; ``folded`` are the steps of ``input``."""
    if not _read_in_parts(input):
        return _computed(input, name, folded)
    found = input.whole.statistics
    if name not in found:
        found[name] = _computed(input.whole, name, folded)
    assert input.rows is not None
    return rows_of(found[name][..., None], input.rows[-1:])[..., 0].clone(memory_format=torch.contiguous_format)


def _computed(input: LazyLogits, name: Want, folded: LogitArguments) -> Tensor:
    def stats(hidden: Tensor, head: Tensor, **kwargs: Any) -> Any:
        return getattr(linear_token_stats(hidden, head, want=(name,), **kwargs), name)

    def rounded(hidden: Tensor, head: Tensor, *, options: HeadOptions | None, linear_bias: Any, **_: Any) -> Any:
        settings = (input.call.dtype(), [step for step in input.steps if not step.keeps_values])
        kwargs = {"linear_bias": linear_bias, "options": None if options is None else replace(options, backend="auto")}
        return linear_apply(_rounded_argmax, hidden, head, params=settings, **kwargs)

    has_ties = name == "argmax" and _has_ties(input)
    how = (LogitArguments(), rounded) if has_ties else (folded, stats)
    return input.call.without_logits(input.rows, *how)  # type: ignore[no-any-return]


def _read_in_parts(input: LazyLogits) -> bool:
    """Whether code that reads a few rows will read the others too, so that what all need is computed once.

    lm-evaluation-harness reads the argmax and the log-probabilities of each continuation by itself. A pass over the
    weight for each costs more than the GEMM of a short batch. A log-probability is then a dot product with one row of
    the weight.
    """
    call, rows = input.call, input.shape[:-1].numel()
    N, B = call.hidden.shape[:-1].numel(), call.hidden.shape[0]
    if not call.scores or call.sharded or input.viewed is None or (input.grad_mode and torch.is_grad_enabled()):
        return False
    return rows != N and 2 * B * max(rows, _ROWS_OF_A_PASS) >= N  # two results of each sequence


def _has_ties(input: LazyLogits) -> bool:
    """Whether the argmax of these logits depends on how they are rounded: some are equal then."""
    between = [x for step in input.steps for x in step.args if isinstance(x, torch.dtype)]
    is_rounded = any(x.itemsize < 4 for x in (input.call.dtype(), *between, input.dtype))
    is_normalised = any(step.function is TensorBase.log_softmax for step in input.steps)
    return (is_rounded or is_normalised) and not input.call.sharded


def _rounded_argmax(logits: Tensor, dtype: torch.dtype, steps: Iterable[Step]) -> Tensor:
    """Return the argmax of rows of logits [C, V] as they are in their own dtype, where they have ties."""
    return replay(logits.to(dtype), steps).argmax(-1)


def _own(values: Tensor, sign: int, dtype: torch.dtype) -> Tensor:
    """Return values in the dtype that the real logits give them, as a tensor that may be changed in place."""
    return (values * float(sign)).to(dtype)


def _dtype_of(input: LazyLogits, function: Callable[[Tensor], Tensor], dtype: torch.dtype | None = None) -> torch.dtype:
    """Return the dtype of what ``function`` makes of logits: theirs, or ``dtype``, or one that autocast has."""
    if not is_autocast_on(input.device.type):
        return dtype or input.dtype
    return function(torch.zeros(1, 1, dtype=input.dtype, device=input.device)).dtype


def _is_last(input: LazyLogits, dim: Any) -> bool:
    """Whether ``dim`` is the axis of the classes."""
    return type(dim) is int and dim in (-1, input.dim() - 1)


def _named(*names: str) -> list[Callable[..., Any]]:
    """Return the functions of these names, as methods of tensors and in torch."""
    return [getattr(owner, name) for owner in (Tensor, torch) for name in names if hasattr(owner, name)]


_COPIES = frozenset(_named("reshape", "flatten", "contiguous"))


def look_up() -> None:
    """Fill the table, by the functions that PyTorch has now: a user may have replaced some."""
    by_functions: list[tuple[list[Any], Any]] = [
        # recorded
        (_named("mul", "multiply", "__mul__", "__rmul__"), functools.partial(_valued, TensorBase.mul)),
        (_named("div", "divide", "true_divide", "__truediv__"), functools.partial(_valued, TensorBase.div)),
        (_named("neg", "negative", "__neg__"), functools.partial(_valued, TensorBase.neg)),
        (_named("tanh"), functools.partial(_valued, TensorBase.tanh)),
        (_named("add", "__add__", "__radd__"), _add),
        ([F.log_softmax, *_named("log_softmax")], _log_softmax),
        ([Tensor.to], _to),
        ([Tensor.float], functools.partial(_to, dtype=torch.float32)),
        ([Tensor.double], functools.partial(_to, dtype=torch.float64)),
        ([Tensor.half], functools.partial(_to, dtype=torch.float16)),
        ([Tensor.bfloat16], functools.partial(_to, dtype=torch.bfloat16)),
        ([Tensor.cpu], functools.partial(_to, device="cpu")),
        (_named("clone"), _clone),
        ([Tensor.__getitem__], _getitem),
        # computed
        ([F.cross_entropy], functools.partial(_loss, False)),
        ([F.nll_loss], functools.partial(_loss, True)),
        (_named("gather"), _gather),
        (_named("sum"), _row_sum),
        (_named("logsumexp"), _logsumexp),
        (_named("argmax"), _argmax),
    ]
    moves = _named("detach", "reshape", "view", "flatten", "unflatten", "squeeze", "unsqueeze", "transpose", "permute",
                   "contiguous", "expand", "chunk", "split", "unbind")  # fmt: skip
    OPERATIONS.update({function: lazy for functions, lazy in by_functions for function in functions})
    OPERATIONS.update({function: functools.partial(_moved, function) for function in moves})


look_up()
