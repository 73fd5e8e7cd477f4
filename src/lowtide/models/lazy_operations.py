"""The table of operations on lazy logits that need no real ones: they are recorded, or computed without logits.

Each takes what PyTorch's function of that name takes, the lazy logits first. Where it is not certain to give what the
real logits would, it returns NotImplemented, and these are built; so they are for arguments that it does not take.
Single logits, as of ``max``, are built: users compare them with the logits to the bit. It runs in the grad mode of the
logits, so that ``torch.is_grad_enabled() and input.requires_grad`` is whether a gradient is needed. `_TABLE` has the
names, docs/models.md the table for users.

Legend: hidden [..., D], logits [..., V].
"""

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowtide.arguments import is_autocast_on
from lowtide.head.apply import linear_apply
from lowtide.head.cross_entropy import linear_cross_entropy
from lowtide.head.options import HeadOptions
from lowtide.head.token_stats import linear_logprobs, linear_token_stats
from lowtide.models.head_call import LogitArguments, RowView, Step, TensorBase, fold, replay, rows_of
from lowtide.models.lazy_logits import OPERATIONS, LazyLogits, reader

# Dtypes of logits: to one of these they are only rounded. float8 is for a quantisation that is meant to be seen.
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_IGNORE_NOTHING = -(2**62)  # an ignore_index that no target has
_ROWS_OF_A_PASS = 256  # a GEMM of so many rows takes about as long as reading the weight

# ---- recorded


def _moved(function: Callable[..., Any], input: LazyLogits, *args: Any, **kwargs: Any) -> Any:
    """Views of whole rows, and what copies all rows in their order where there is no view."""
    meta = input.meta()
    try:
        result = function(meta, *args, **kwargs)
    except (RuntimeError, TypeError, IndexError, ValueError):  # which the real logits raise again
        return NotImplemented
    if result is meta:  # as `flatten` of what is flat: the same tensor
        return input
    if isinstance(result, tuple | list):
        # With gradients PyTorch's own are views that may not be changed in place, which others may.
        if torch.is_grad_enabled() and input.requires_grad:
            return NotImplemented
        views = [input.view_by(part) for part in result]
        return NotImplemented if any(view is NotImplemented for view in views) else tuple(views)
    if not isinstance(result, Tensor) or result.dtype != meta.dtype:
        return NotImplemented
    name = getattr(function, "__name__", "")
    if result.untyped_storage() is meta.untyped_storage():
        return input.view_by(result, detaches=name == "detach")
    selection = RowView.of(result, meta.shape[-1])
    if selection is None or name not in ("reshape", "flatten", "contiguous"):
        return NotImplemented
    return input.then(Step(lambda z: function(z, *args, **kwargs)), result, (selection,))


def _getitem(input: LazyLogits, index: Any) -> Any:
    """A view, or rows that a mask chooses among all."""
    if type(index) is not Tensor or index.dtype != torch.bool:
        return _moved(Tensor.__getitem__, input, index)
    if index.shape != input.shape[:-1] or index.device != input.device:
        return NotImplemented
    chosen = index.flatten().nonzero()[:, 0]  # indexing by a mask does the same, and so waits for the device as well
    like = input.meta().new_empty(len(chosen), input.shape[-1])
    return input.then(Step(lambda z: z.flatten(0, -2)[chosen]), like, (chosen,))


def _clone(input: LazyLogits) -> Any:
    """DDP's, inside a node of its own. Any other is a copy that is to outlast what the logits are computed from."""
    if torch.is_grad_enabled() or not input.requires_grad or not reader().startswith("torch.nn.parallel."):
        return NotImplemented
    return input.then(Step(TensorBase.clone), torch.empty_like(input.meta()))


def _mul(input: LazyLogits, other: Any) -> Any:
    return _valued(input, Step(lambda z: z * other, "scale", other), other)


def _div(input: LazyLogits, other: Any) -> Any:
    factor = 1 / other if type(other) in (int, float) and other else math.inf
    return _valued(input, Step(lambda z: z / other, "scale", factor), other)


def _valued(input: LazyLogits, step: Step, by: Any = 1) -> Any:
    """An operation on each logit, by a number: a trained scale needs its gradient."""
    return input.then(step, torch.empty_like(input.meta())) if type(by) in (int, float) else NotImplemented


def _add(input: LazyLogits, other: Any) -> Any:
    """A vector [V] that is not trained is a bias."""
    if type(other) not in (Tensor, nn.Parameter) or not 0 < other.dim() <= input.dim():
        return NotImplemented
    if other.numel() != input.shape[-1] or other.shape[-1] != input.shape[-1]:
        return NotImplemented
    weight = input.call.linked[1]
    if other.requires_grad or weight is None or other.dtype != weight.dtype or other.device != input.device:
        return NotImplemented
    like = torch.empty_like(input.meta(), dtype=torch.promote_types(input.dtype, other.dtype))
    bias = other.detach().flatten().clone()
    return input.then(Step(lambda z: z + bias, "bias", bias), like)


def _log_softmax(input: LazyLogits, dim: Any = None, dtype: Any = None, _stacklevel: int = 3) -> Any:
    if not _is_last(input, dim) or not (dtype is None or (isinstance(dtype, torch.dtype) and dtype.is_floating_point)):
        return NotImplemented
    step = Step(lambda z: TensorBase.log_softmax(z, -1, dtype), "log_softmax")
    return input.then(step, torch.empty_like(input.meta(), dtype=_dtype_of(input, step.run, dtype)))


def _to(input: LazyLogits, *args: Any, dtype: Any = None, device: Any = None, non_blocking: bool = False) -> Any:  # noqa: ARG001
    targets = [x for x in (*args, dtype, device) if x is not None]
    to = targets[0] if len(targets) == 1 else None
    if to in (input.dtype, input.device) if isinstance(to, torch.dtype | torch.device) else to == str(input.device):
        return input
    if not isinstance(to, torch.dtype) or to not in _DTYPES:
        return NotImplemented
    return input.then(Step(lambda z: z.to(to), "cast"), input.meta().to(to))


# ---- computed


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
    settings: Any = {"weight": weight, "ignore_index": ignore_index, "label_smoothing": label_smoothing}
    per_row = reduction == "none"

    def loss(hidden: Tensor, head: Tensor, **kwargs: Any) -> Tensor:
        y = target.reshape(hidden.shape[:-1])
        result = linear_cross_entropy(hidden, head, y, reduction=reduction, **settings, **kwargs)
        return result.reshape(target.shape) if per_row else result

    result: Tensor = logits.call.without_logits(logits.rows, folded, loss, per_row=per_row)
    return result.to(_dtype_of(input, lambda z: F.cross_entropy(z, z.new_zeros(1, dtype=torch.int64))))


def _gather(input: LazyLogits, dim: Any, index: Any) -> Any:
    """Log-probabilities of some classes of each row, and not logits: those are what building gives."""
    folded = _folded(input, dim)
    if folded is None or type(index) is not Tensor or index.dtype != torch.int64 or index.device != input.device:
        return NotImplemented
    if index.dim() != input.dim() or index.shape[:-1] != input.shape[:-1] or index.shape[-1] == 0:
        return NotImplemented
    if not index.is_cuda and bool(((index < 0) | (index >= input.shape[-1])).any()):  # an error of gather's own
        return NotImplemented
    one = index.shape[-1] == 1
    lse = _of_rows(input, folded, "lse", _lse) if one and _read_in_parts(input) else None

    def logprobs(hidden: Tensor, head: Tensor, **kwargs: Any) -> Tensor:
        if lse is None:
            target = index[..., 0] if one else index
            result = linear_logprobs(hidden, head, target, ignore_index=_IGNORE_NOTHING, **kwargs)
            return result[..., None] if one else result
        return (_lse(hidden, head, support=index, **kwargs) - lse)[..., None]  # of one class: its logit

    return _signed(input.call.without_logits(input.rows, folded, logprobs), folded, input.dtype)


def _lse(hidden: Tensor, head: Tensor, **kwargs: Any) -> Tensor:
    return linear_token_stats(hidden, head, want=("lse",), **kwargs).lse


def _sum(input: LazyLogits, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    """The sum of a row's log-probabilities, as label smoothing needs it."""
    folded = _folded(input, dim)
    if folded is None or (dtype is not None and not dtype.is_floating_point):  # each one is rounded first
        return NotImplemented

    def total(hidden: Tensor, head: Tensor, **kwargs: Any) -> Tensor:
        stats = linear_token_stats(hidden, head, want=("mean_logit", "lse"), **kwargs)
        return (stats.mean_logit - stats.lse) * input.shape[-1]

    dtype = _dtype_of(input, lambda z: TensorBase.sum(z, -1, dtype=dtype), dtype)
    sums = _signed(input.call.without_logits(input.rows, folded, total), folded, dtype)
    return sums[..., None] if keepdim else sums


def _logsumexp(input: LazyLogits, dim: Any, keepdim: bool = False) -> Any:
    folded = _folded(input, dim, normalised=False)
    if folded is None:
        return NotImplemented
    dtype = _dtype_of(input, lambda z: TensorBase.logsumexp(z, -1))
    lse = _signed(_of_rows(input, folded, "lse", _lse), folded, dtype)
    return lse[..., None] if keepdim else lse


def _argmax(input: LazyLogits, dim: Any = None, keepdim: bool = False) -> Any:
    """The first class of the highest logits, which are rounded as the model rounds them: some are equal then.

    So the steps are not folded: each chunk of logits takes them one after another, as built ones do.
    """
    if input.rows is None or not _is_last(input, dim):
        return NotImplemented
    settings = (input.call.dtype, [step for step in input.steps if step.kind not in ("rows", "detach")])

    def argmax(hidden: Tensor, head: Tensor, *, options: HeadOptions | None, **kwargs: Any) -> Any:
        options = None if options is None else replace(options, backend="auto")
        return linear_apply(_argmax_of_rows, hidden, head, params=settings, options=options, **kwargs)

    classes = _of_rows(input, LogitArguments(), "argmax", argmax)
    return classes[..., None] if keepdim else classes


def _argmax_of_rows(logits: Tensor, dtype: torch.dtype, steps: Iterable[Step]) -> Tensor:
    return replay(logits.to(dtype), steps).argmax(-1)


def _folded(input: LazyLogits, dim: Any, *, normalised: bool = True) -> LogitArguments | None:
    """Return the folded steps of log-probabilities, or logits, read along the classes; None of anything else."""
    folded = None if input.rows is None or not _is_last(input, dim) else fold(input.steps)
    return folded if folded is not None and folded.normalised is normalised else None


def _of_rows(input: LazyLogits, folded: LogitArguments, name: str, function: Callable[..., Tensor]) -> Tensor:
    """Return what ``function`` computes of each row, one tensor: of all rows at once, for code that reads a few."""
    if not _read_in_parts(input):
        return input.call.without_logits(input.rows, folded, function)  # type: ignore[no-any-return]
    whole, rows = input.whole, input.rows
    assert rows is not None
    if name not in whole.statistics:
        whole.statistics[name] = whole.call.without_logits(whole.rows, folded, function)
    return rows_of(whole.statistics[name][..., None], rows[-1:])[..., 0].clone(memory_format=torch.contiguous_format)


def _read_in_parts(input: LazyLogits) -> bool:
    """Whether code that reads a few rows will read the others too, so that what all need is computed once.

    lm-evaluation-harness reads the argmax and the log-probabilities of each continuation by itself. A pass over the
    weight for each costs more than the GEMM of a short batch. A log-probability is then a dot product with one row of
    the weight.
    """
    call, rows = input.call, input.shape[:-1].numel()
    N, B = call.hidden.shape[:-1].numel(), call.hidden.shape[0]
    if input.viewed is None or (input.grad_mode and torch.is_grad_enabled()):
        return False
    return rows != N and 2 * B * max(rows, _ROWS_OF_A_PASS) >= N  # two results of each sequence


def _signed(values: Tensor, folded: LogitArguments, dtype: torch.dtype) -> Tensor:
    """Return values in the dtype that the real logits give them, as a tensor that may be changed in place."""
    return (values * float(folded.sign)).to(dtype)


def _dtype_of(input: LazyLogits, function: Callable[[Tensor], Tensor], dtype: torch.dtype | None = None) -> torch.dtype:
    """Return the dtype of what ``function`` makes of logits: theirs, or ``dtype``, or one that autocast has."""
    if not is_autocast_on(input.device.type):
        return dtype or input.dtype
    return function(torch.zeros(1, 1, dtype=input.dtype, device=input.device)).dtype


def _is_last(input: LazyLogits, dim: Any) -> bool:
    """Whether ``dim`` is the axis of the classes."""
    return type(dim) is int and dim in (-1, input.dim() - 1)


# By the names of methods of tensors and of functions of torch and torch.nn.functional; None: `_moved`.
_TABLE: dict[str, Callable[..., Any] | None] = {
    "mul multiply __mul__ __rmul__": _mul,
    "div divide true_divide __truediv__": _div,
    "neg negative __neg__": lambda z: _valued(z, Step(TensorBase.neg, "scale", -1)),
    "tanh": lambda z: _valued(z, Step(TensorBase.tanh, "tanh")),
    "add __add__ __radd__": _add,
    "log_softmax": _log_softmax,
    "to": _to,
    "float": functools.partial(_to, dtype=torch.float32),
    "double": functools.partial(_to, dtype=torch.float64),
    "half": functools.partial(_to, dtype=torch.float16),
    "bfloat16": functools.partial(_to, dtype=torch.bfloat16),
    "clone": _clone,
    "__getitem__": _getitem,
    "cross_entropy": functools.partial(_loss, False),
    "nll_loss": functools.partial(_loss, True),
    "gather": _gather,
    "sum": _sum,
    "logsumexp": _logsumexp,
    "argmax": _argmax,
    "detach reshape view flatten unflatten squeeze unsqueeze transpose permute contiguous expand": None,
    "chunk split unbind": None,
}


def look_up() -> None:
    """Fill the table, by the functions that PyTorch has at `patch`: a user may have replaced some."""
    for names, operation in _TABLE.items():
        for name in names.split():
            for function in (getattr(owner, name) for owner in (Tensor, torch, F) if hasattr(owner, name)):
                OPERATIONS[function] = operation or functools.partial(_moved, function)
