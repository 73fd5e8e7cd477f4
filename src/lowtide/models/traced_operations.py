"""Operations on lazy logits while torch.compile traces: those that are recorded, and the loss.

Each takes the tracer, the variable of the logits (`traced_logits.TracedLogits`) and the variables of the arguments of
PyTorch's function of that name. Where it is not certain to give what the real logits would, it returns NotImplemented,
and these are built in the graph. `OPERATIONS` lists all.

Legend: hidden [..., D], logits [..., V].
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C import TensorBase
from torch._dynamo import variables as dynamo_variables
from torch._dynamo.variables.base import VariableTracker

from lowtide.arguments import is_autocast_on
from lowtide.head.cross_entropy import linear_cross_entropy
from lowtide.head.options import HeadOptions
from lowtide.models.report import FUSED, count_when_run
from lowtide.models.steps import DTYPES, Step, fold

variables: Any = dynamo_variables  # some of its names are not exported to type checkers
Variable: Any = VariableTracker  # whose methods differ between versions
_GETATTR = "var_getattr" if hasattr(Variable, "var_getattr") else "tp_getattro_impl"


def inline(tx: Any, function: Callable[..., Any], *args: Any) -> Any:
    """Trace a Python function of lowtide; arguments that are no variables are constants."""
    given = [arg if isinstance(arg, Variable) else constant(tx, arg) for arg in args]
    return Variable.build(tx, function).call_function(tx, given, {})


def attribute(tx: Any, variable: Any, name: str) -> Any:
    """Return the variable of an attribute."""
    return getattr(variable, _GETATTR)(tx, name)


def constant(tx: Any, value: Any) -> Any:
    """Return the variable of a number, name, dtype or None."""
    return Variable.build(tx, value) if isinstance(value, torch.dtype) else variables.ConstantVariable.create(value)


def fake(tx: Any, function: Callable[..., Tensor], *args: Any) -> Tensor | None:
    """Return what ``function`` gives, without data; None where it is an error, which the real logits then raise."""
    try:
        with torch.set_grad_enabled(False), tx.fake_mode:
            return function(*args)
    except (RuntimeError, TypeError, IndexError, ValueError):
        return None


def example(variable: Any) -> Any:
    """Return the fake tensor of a tensor's variable, None of any other."""
    is_tensor = isinstance(variable, variables.TensorVariable)
    return variable.as_proxy().node.meta.get("example_value") if is_tensor else None


def is_last(like: Tensor, call: Any) -> bool:
    """Whether the last axis of logits that are shown by ``like`` is still that of the classes."""
    return type(like.shape[-1]) is int and like.shape[-1] == call.classes


def number(variable: Any) -> Any:
    """Return a number or a size (a symbolic one for sizes that may change), or None of anything else."""
    if isinstance(variable, variables.SymNodeVariable):
        return variable.sym_num
    if not isinstance(variable, Variable) or not variable.is_python_constant():
        return None
    value = variable.as_python_constant()
    return value if type(value) in (int, float) else None


def _to(tx: Any, input: Any, *args: Any, dtype: Any = None) -> Any:
    given = [dtype] if dtype is not None else list(args)
    if len(args) + (dtype is not None) != 1 or not given[0].is_python_constant():
        return NotImplemented
    value = given[0].as_python_constant()
    if isinstance(value, str | torch.device):
        return input if torch.device(value) == example(input.hidden).device else NotImplemented
    return _cast(tx, input, dtype=value) if isinstance(value, torch.dtype) else NotImplemented


def _cast(tx: Any, input: Any, *, dtype: torch.dtype) -> Any:
    if dtype == input.like.dtype:
        return input
    if dtype not in DTYPES:
        return NotImplemented
    return _step(tx, input, "to", TensorBase.to, constant(tx, dtype))


def _step(tx: Any, input: Any, name: str, function: Any, *args: Any) -> Any:
    """Record an operation on each value."""
    values = tuple(arg.as_python_constant() for arg in args)
    like = fake(tx, function, input.like, *values)
    return NotImplemented if like is None else input.then(Step(function, values), like, input.hidden, name, *args)


def _scaled(name: str, function: Any) -> Callable[..., Any]:
    def apply(tx: Any, input: Any, other: Any) -> Any:
        if isinstance(other, variables.SymNodeVariable) and type(other.sym_num) is torch.SymFloat:
            other = constant(
                tx, other.evaluate_expr()
            )  # a number of the model's: as one of the graph it has no folding
        return _step(tx, input, name, function, other) if type(number(other)) in (int, float) else NotImplemented

    return apply


def _unary(name: str, function: Any) -> Callable[..., Any]:
    def apply(tx: Any, input: Any) -> Any:
        return _step(tx, input, name, function)

    return apply


def _contiguous(tx: Any, input: Any) -> Any:
    return input if input.like.is_contiguous() else _step(tx, input, "contiguous", TensorBase.contiguous)


def _moved(tx: Any, input: Any, name: str, args: Any, of_hidden: Any, values: Any) -> Any:
    """Record an operation that moves or selects rows: ``of_hidden`` has its arguments for the hidden states."""
    like = fake(tx, getattr(TensorBase, name), input.like, *values)
    if like is None or like.dim() == 0 or not is_last(like, input.call):
        return NotImplemented
    name_of_hidden = "reshape" if name == "view" else name
    hidden = input.hidden.call_method(tx, name_of_hidden, list(of_hidden), {})
    return input.then(Step(getattr(TensorBase, name), tuple(values), _is_moved), like, hidden, name, *args)


def _is_moved(x: Tensor) -> Tensor:
    """Stand for what a step did to the hidden states: here it is done."""
    return x


def _one_or_several(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return sizes or axes that are given one by one, or as a tuple."""
    first = args[0].realize() if len(args) == 1 else None
    return tuple(first.items) if isinstance(first, variables.BaseListVariable) else args


def _shape(name: str) -> Callable[..., Any]:
    """`view` and `reshape` to sizes that end in V."""

    def apply(tx: Any, input: Any, *args: Any) -> Any:
        args = _one_or_several(args)
        sizes = [number(arg) for arg in args]
        if not sizes or any(size is None or isinstance(size, float) for size in sizes):
            return NotImplemented
        V = input.like.shape[-1]
        if not isinstance(sizes[-1], int) or sizes[-1] not in (V, -1):
            return NotImplemented
        D = example(input.hidden).shape[-1]
        return _moved(tx, input, name, args, (*args[:-1], constant(tx, D)), sizes)

    return apply


def _getitem(tx: Any, input: Any, index: Any) -> Any:
    """Numbers and slices before the last axis."""
    parts = index.items if isinstance(index, variables.TupleVariable) else [index]
    values = [_index(part) for part in parts]
    if any(value is None for value in values) or values.count(Ellipsis) > 1:
        return NotImplemented
    rank = input.like.dim()
    at_last = len(values) - values.count(Ellipsis) == rank or (values[-1] is not Ellipsis and Ellipsis in values)
    if at_last and values[-1] != slice(None):
        return NotImplemented
    of_hidden = [index] if isinstance(index, variables.TupleVariable) else [variables.TupleVariable([index])]
    return _moved(tx, input, "__getitem__", of_hidden, of_hidden, [tuple(values)])


def _index(part: Any) -> Any:
    if isinstance(part, variables.SliceVariable):
        ends = [
            None if end.is_python_constant() and end.as_python_constant() is None else number(end) for end in part.items
        ]
        given = [end.is_python_constant() and end.as_python_constant() is None for end in part.items]
        if any(end is None and not none for end, none in zip(ends, given, strict=True)):
            return None
        return slice(*ends)
    if part.is_python_constant() and part.as_python_constant() is Ellipsis:
        return Ellipsis
    value = number(part)
    return value if isinstance(value, int | torch.SymInt) else None


def _flatten(tx: Any, input: Any, start_dim: Any = None, end_dim: Any = None) -> Any:
    dims = [0 if start_dim is None else number(start_dim), -1 if end_dim is None else number(end_dim)]
    rank = input.like.dim()
    if any(type(dim) is not int for dim in dims) or dims[1] % rank == rank - 1:
        return NotImplemented
    args = [constant(tx, dim % rank) for dim in dims]
    return _moved(tx, input, "flatten", args, args, [dim % rank for dim in dims])


def _of_axes(name: str) -> Callable[..., Any]:
    """`squeeze` and `unsqueeze` of an axis before the last."""

    def apply(tx: Any, input: Any, dim: Any) -> Any:
        at, rank = number(dim), input.like.dim() + (name == "unsqueeze")
        if type(at) is not int or at % rank == rank - 1:
            return NotImplemented
        args = [constant(tx, at % rank)]
        return _moved(tx, input, name, args, args, [at % rank])

    return apply


def _swap(tx: Any, input: Any, dim0: Any, dim1: Any) -> Any:
    """[B, V, T] of [B, T, V], as `F.cross_entropy` takes it; nothing else is recorded of it."""
    dims = [number(dim0), number(dim1)]
    if input.like.dim() != 3 or any(type(dim) is not int for dim in dims) or {dim % 3 for dim in dims} != {1, 2}:
        return NotImplemented
    return _step(tx, input, "transpose", TensorBase.transpose, dim0, dim1)


def _permute(tx: Any, input: Any, *dims: Any) -> Any:
    dims = _one_or_several(dims)
    if [number(dim) for dim in dims] not in ([0, 2, 1], [0, -1, 1], [0, -1, -2], [0, 2, -2]):
        return NotImplemented
    return _swap(tx, input, constant(tx, 1), constant(tx, 2))


def _log_softmax(tx: Any, input: Any, dim: Any = None, _stacklevel: Any = 3, dtype: Any = None) -> Any:
    at, to = None if dim is None else number(dim), _value(dtype)
    if at not in (-1, input.like.dim() - 1) or not (to is None or to.is_floating_point):
        return NotImplemented
    return _log_softmax_of(tx, input if to is None else _cast(tx, input, dtype=to))


def _log_softmax_of(tx: Any, input: Any) -> Any:
    """Autocast has it in float32: these are cast before, which is the same."""
    given = fake(tx, lambda: torch.empty(1, 1, dtype=input.like.dtype, device=input.call.kind).log_softmax(-1))
    if given is None:
        return NotImplemented
    return _step(tx, _cast(tx, input, dtype=given.dtype), "log_softmax", TensorBase.log_softmax, constant(tx, -1))


def _size(tx: Any, input: Any, dim: Any = None) -> Any:
    shape = attribute(tx, input, "shape")
    return shape if dim is None or _is_none(dim) else shape.call_method(tx, "__getitem__", [dim], {})


def _rank(tx: Any, input: Any) -> Any:
    return constant(tx, input.like.dim())


def _nll_loss(tx: Any, input: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
    return cross_entropy(tx, input, target, *args, **kwargs, of_logprobs=True)


def cross_entropy(
    tx: Any,
    input: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: Any = -100,
    reduce: Any = None,
    reduction: Any = "mean",
    label_smoothing: Any = 0.0,
    *,
    of_logprobs: bool = False,
) -> Any:
    """`F.cross_entropy` of rows and class indices: `lowtide.linear_cross_entropy` of the hidden states."""
    settings = [_value(given) for given in (ignore_index, reduction, label_smoothing)]
    if not _is_none(size_average) or not _is_none(reduce) or None in settings:
        return NotImplemented
    swapped = bool(input.steps) and input.steps[-1].function is TensorBase.transpose
    folded = fold(input.steps[:-1] if swapped else input.steps)
    if folded is None or folded.normalised is not of_logprobs or folded.sign != 1:
        return NotImplemented
    dtype = _dtype_of_loss(tx, input, example(target), swapped=swapped)
    classes = None if _is_none(weight) else weight
    if dtype is None or (classes is not None and getattr(example(classes), "dtype", None) != input.like.dtype):
        return NotImplemented
    call = input.call
    call.check_unchanged()
    if not call.fused:
        call.fused = True
        inline(tx, count_when_run, call.key, FUSED)
    of_head = call.kind, call.autocast, input.hidden, call.weight, call.bias
    scale_and_cap = folded.logit_scale, folded.softcap
    return inline(tx, _loss, *of_head, target, classes, dtype, *scale_and_cap, call.options, *settings)


def _dtype_of_loss(tx: Any, input: Any, target: Any, *, swapped: bool) -> torch.dtype | None:
    """Return the dtype of a loss of rows and class indices, which depends on autocast; None for other targets."""
    z = input.like
    if target is None or target.dtype != torch.int64 or z.dim() != (3 if swapped else 2):
        return None
    rows = (*z.shape[:1], *z.shape[2:])
    if len(rows) != target.dim() or any(a != b for a, b in zip(rows, target.shape, strict=True)):
        return None
    device = example(input.hidden).device
    if target.device != device:
        return None
    row, label = fake(tx, torch.empty, 1, 1), fake(tx, torch.empty, 1)
    if row is None or label is None:
        return None
    loss = fake(tx, lambda: F.cross_entropy(row.to(device, z.dtype), label.to(device, torch.int64)))
    return None if loss is None else loss.dtype


def _is_none(given: Any) -> bool:
    return given is None or (
        isinstance(given, Variable) and given.is_python_constant() and given.as_python_constant() is None
    )


def _value(given: Any) -> Any:
    """Return a constant; None of what is none."""
    if not isinstance(given, Variable):
        return given
    return given.as_python_constant() if given.is_python_constant() else None


def in_autocast(
    function: Callable[..., Tensor], kind: str, dtype: torch.dtype | None, *args: Any, **kwargs: Any
) -> Tensor:
    """Trace a function in the autocast that the head was called in: of ``dtype``, None: without."""
    if dtype is None and not is_autocast_on(kind):
        return function(*args, **kwargs)
    with torch.autocast(kind, dtype=dtype, enabled=dtype is not None):
        return function(*args, **kwargs)


def _loss(
    kind: str,
    autocast: torch.dtype | None,
    hidden: Tensor,
    head: Tensor,
    bias: Tensor | None,
    target: Tensor,
    weight: Tensor | None,
    dtype: torch.dtype,
    logit_scale: float,
    softcap: float | None,
    options: HeadOptions | None,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
) -> Tensor:
    """What is traced in the place of a cross entropy."""
    result = in_autocast(
        linear_cross_entropy,
        kind,
        autocast,
        hidden,
        head,
        target.reshape(hidden.shape[:-1]),
        linear_bias=bias,
        weight=weight,
        reduction=reduction,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        softcap=softcap,
        logit_scale=logit_scale,
        options=options,
    )
    return (result.reshape(target.shape) if reduction == "none" else result).to(dtype)


def _named(*names: str) -> list[Callable[..., Any]]:
    """Return the functions of these names, as methods of tensors and in torch."""
    return [getattr(owner, name) for owner in (Tensor, torch) for name in names if hasattr(owner, name)]


_MUL = _named("mul", "multiply", "__mul__", "__rmul__")
COMMUTATIVE = frozenset(_MUL)

OPERATIONS: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys(_MUL, _scaled("mul", TensorBase.mul)),
    **dict.fromkeys(_named("div", "divide", "true_divide", "__truediv__"), _scaled("div", TensorBase.div)),
    **dict.fromkeys(_named("tanh"), _unary("tanh", TensorBase.tanh)),
    **dict.fromkeys(_named("neg", "negative", "__neg__"), _unary("neg", TensorBase.neg)),
    Tensor.float: functools.partial(_cast, dtype=torch.float32),
    Tensor.double: functools.partial(_cast, dtype=torch.float64),
    Tensor.half: functools.partial(_cast, dtype=torch.float16),
    Tensor.bfloat16: functools.partial(_cast, dtype=torch.bfloat16),
    Tensor.to: _to,
    Tensor.contiguous: _contiguous,
    Tensor.view: _shape("view"),
    **dict.fromkeys(_named("reshape"), _shape("reshape")),
    **dict.fromkeys(_named("flatten"), _flatten),
    **dict.fromkeys(_named("squeeze"), _of_axes("squeeze")),
    **dict.fromkeys(_named("unsqueeze"), _of_axes("unsqueeze")),
    Tensor.__getitem__: _getitem,
    **dict.fromkeys(_named("transpose", "swapaxes"), _swap),
    **dict.fromkeys(_named("permute"), _permute),
    Tensor.size: _size,
    **dict.fromkeys((Tensor.dim, Tensor.ndimension), _rank),
    **dict.fromkeys(_named("log_softmax"), _log_softmax),
    F.log_softmax: _log_softmax,
    F.nll_loss: _nll_loss,
    F.cross_entropy: cross_entropy,
}
