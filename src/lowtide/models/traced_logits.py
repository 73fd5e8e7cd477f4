"""Lazy logits while torch.compile traces: a loss in the graph without logits, and `LazyLogits` where they leave it.

Dynamo represents each object of the code that it traces by a variable. `TracedLogits` is the variable of lazy logits:
no node of the graph stands for them. A recorded operation makes another variable; a cross entropy puts
`lowtide.linear_cross_entropy` of the hidden states into the graph; anything else puts the logits there, as the stock
model does. If logits leave the graph unbuilt, the hidden states are its output instead, and the code that dynamo puts
behind the graph makes eager `LazyLogits` of them: read later, they have stock's values and gradients.

This module imports torch's compiler, and is imported while it traces.

Legend: hidden [..., D], logits [..., V].
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.bytecode_transformation import create_call_function
from torch._dynamo.comptime import comptime
from torch._dynamo.exc import Unsupported, raise_observed_exception
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.variables.lists import BaseListVariable
from torch._subclasses.fake_tensor import FakeTensor

from lowtide.arguments import is_autocast_on
from lowtide.errors import UnsupportedError
from lowtide.models.adapters import is_lora
from lowtide.models.eligibility import own_hooks, why_not_class, why_not_now
from lowtide.models.head_call import CHANGED
from lowtide.models.head_kinds import head_call
from lowtide.models.lazy_logits import LazyLogits
from lowtide.models.report import count_when_run, counter_of
from lowtide.models.steps import Step
from lowtide.models.traced_dispatch import intercept
from lowtide.models.traced_operations import (
    COMMUTATIVE,
    OPERATIONS,
    Variable,
    attribute,
    constant,
    example,
    fake,
    in_autocast,
    inline,
    is_last,
    variables,
)

_READ = "read by {} in a graph of torch.compile"
_MODE = "a TorchFunctionMode is active"
_ARGUMENTS = "the output embedding was called with more than hidden states"


class _Marker:
    """What dynamo takes for the value of these variables: an object with a ``__torch_function__``, and operators."""

    @classmethod
    def __torch_function__(cls, *_: Any, **__: Any) -> Any:
        raise AssertionError("the variable traces it")


def _operator(name: str, *, reflected: bool = False) -> Callable[..., Any]:
    def apply(self: Any, other: Any) -> Any:
        return getattr(torch, name)(other, self) if reflected else getattr(torch, name)(self, other)

    return apply


def _method(name: str) -> Callable[..., Any]:
    def apply(self: Any, *args: Any) -> Any:
        return getattr(self, name)(*args)

    return apply


_SHORT = {"true_divide": "truediv", "remainder": "mod", "floor_divide": "floordiv"}
for _name in ("add", "sub", "mul", "true_divide", "pow", "matmul", "remainder", "floor_divide"):
    _short = _SHORT.get(_name, _name)
    setattr(_Marker, f"__{_short}__", _operator(_name))
    setattr(_Marker, f"__r{_short}__", _operator(_name, reflected=True))
    setattr(_Marker, f"__i{_short}__", _method(f"{_name}_"))
for _name in ("eq", "ne", "lt", "le", "gt", "ge", "neg", "abs", "__getitem__", "__setitem__", "__len__", "__iter__"):
    setattr(_Marker, f"__{_name.strip('_')}__", _method(_name))
_Marker.__hash__ = object.__hash__  # type: ignore[method-assign]


@dataclass(eq=False)
class _Call:
    """One traced call of the head."""

    hidden: Any  # variables, and other tensors' too
    weight: Any
    bias: Any
    options: Any
    classes: int  # V
    key: str  # of the patched model's counter
    kind: str  # of device
    autocast: torch.dtype | None
    tracer: Any  # of the graph, or of the part of one, that has it
    made: "list[TracedLogits]" = field(default_factory=list)
    fused: bool = False
    _versions: tuple[int | None, ...] = ()

    def __post_init__(self) -> None:
        self._versions = self._now()

    def _now(self) -> tuple[int | None, ...]:
        tensors = map(example, (self.hidden, self.weight, self.bias))
        return tuple(None if x is None or x.is_inference() else x._version for x in tensors)

    def is_changed(self) -> bool:
        """Whether the traced code has changed in place what the logits are computed from."""
        return self._now() != self._versions

    def check_unchanged(self) -> None:
        """Check that what the logits are computed from is as it was in the call.

        Raises:
            UnsupportedError: The traced code has changed it in place.
        """
        if self.is_changed():
            raise UnsupportedError(CHANGED)


class TracedLogits(variables.UserDefinedObjectVariable):  # type: ignore[misc]
    """The variable of logits after some steps; ``hidden`` are the rows that they are computed from.

    ``like`` is a fake tensor of their shape, strides and dtype, and ``steps`` are as those of eager logits, for `fold`.
    ``parent``, ``name`` and ``args`` have the last step as a method of tensors.
    """

    def __init__(
        self,
        call: _Call,
        hidden: Variable,
        like: Tensor,
        steps: tuple[Step, ...] = (),
        parent: Self | None = None,
        name: str = "",
        args: Sequence[Variable] = (),
    ) -> None:
        super().__init__(_Marker())
        self.call, self.hidden, self.like, self.steps = call, hidden, like, steps
        self.parent, self.name, self.args = parent, name, list(args)
        self.grad_mode = torch.is_grad_enabled()
        self.real: Variable | None = None
        call.made.append(self)

    def then(self, step: Step, like: Tensor, hidden: Variable, name: str, *args: Variable) -> Any:
        """Return the variable of these after one more step."""
        return type(self)(self.call, hidden, like, (*self.steps, step), self, name, args)

    def python_type(self) -> type:
        """Return the class that these have outside of the graph."""
        return LazyLogits

    def as_proxy(self) -> Any:
        """Return the real logits, for a node of the graph that takes them."""
        return self.materialise(InstructionTranslator.current_tx(), "an operation").as_proxy()

    def call_torch_function(self, tx: Any, fn: Any, types: Any, args: Any, kwargs: Any) -> Any:  # noqa: ARG002
        """Trace a function of these."""

        def run(args: list[Any], kwargs: dict[str, Any]) -> Any:
            return fn.call_function(tx, args, kwargs)

        return self._operate(tx, _function(fn), run, args, kwargs)

    def call_method(self, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Trace a method of these."""

        def run(args: list[Any], kwargs: dict[str, Any]) -> Any:
            return args[0].call_method(tx, name, args[1:], kwargs)

        return self._operate(tx, getattr(Tensor, name, name), run, [self, *args], kwargs)

    def var_getattr(self, tx: Any, name: str) -> Any:
        """Trace the reading of an attribute."""
        if self.real is None and is_last(self.like, self.call):
            if name == "shape":
                return inline(tx, _shape_of, self.hidden, self.call.classes)
            if name in ("ndim", "dtype"):
                return constant(tx, getattr(self.like, name))
            if name == "requires_grad":
                inputs = map(example, (self.hidden, self.call.weight, self.call.bias))
                return constant(tx, self.grad_mode and any(x is not None and x.requires_grad for x in inputs))
            if name in ("device", "is_cuda", "is_cpu", "layout"):
                return attribute(tx, self.hidden, name)
        if callable(getattr(Tensor, name, None)):
            return variables.GetAttrVariable(self, name)
        if not hasattr(Tensor, name):
            raise_observed_exception(AttributeError, tx, args=[f"'Tensor' object has no attribute '{name}'"])
        return attribute(tx, self.materialise(tx, name), name)

    def call_obj_hasattr(self, tx: Any, name: str) -> Any:
        """Trace ``hasattr``, which reads nothing."""
        return constant(tx, hasattr(Tensor, name))

    tp_getattro_impl = var_getattr

    def materialise(self, tx: Any, why: str) -> Any:
        """Return the real logits; all that were recorded of this call are built at once, as they may share memory."""
        if self.real is None:
            self.call.check_unchanged()
            inline(tx, count_when_run, self.call.key, _READ.format(why))
            if tx.output.current_tracer is not self.call.tracer:  # what a part computes, as a checkpoint's, stays there
                return self._build(tx)
            for each in self.call.made:
                each.real = each._build(tx)
        return self.real

    def _build(self, tx: Any) -> Any:
        if self.real is not None:
            return self.real
        if self.parent is None:
            call = self.call
            return inline(tx, _logits, self.hidden, call.weight, call.bias, self.grad_mode, call.kind, call.autocast)
        return inline(tx, _stepped, self.parent._build(tx), self.name, self.grad_mode, *self.args)

    def _operate(self, tx: Any, func: Any, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        args, kwargs = list(args), dict(kwargs)
        if not args and "input" in kwargs:
            args.append(kwargs.pop("input"))
        operation = OPERATIONS.get(func)
        given = args[::-1] if func in COMMUTATIVE and args[:1] != [self] else args
        others = (*given[1:], *kwargs.values())
        alone = given[:1] == [self] and not any(isinstance(other, TracedLogits) for other in others)
        # what is made without gradients passes none on later either: the real logits have that
        has_mode = self.grad_mode or not torch.is_grad_enabled()
        if operation is not None and self.real is None and alone and has_mode:
            result = _bound(operation, tx, given, kwargs)
            if result is not NotImplemented:
                return result
        why = getattr(func, "__name__", str(func))
        return run(
            [_built(tx, arg, why) for arg in args], {name: _built(tx, value, why) for name, value in kwargs.items()}
        )

    def reconstruct(self, codegen: Any) -> None:
        """Write the code that has these behind the graph."""
        if self.real is not None:
            codegen(self.real)
            return
        tx = codegen.tx
        if self.parent is None:
            function = _REBUILD
            call = self.call
            settings = self.grad_mode, call.autocast, call.key, call.fused, call.is_changed()
            operands = [self.hidden, *(constant(tx, x) for x in settings)]
        else:
            function = _REBUILD_STEP
            operands = [self.parent, constant(tx, self.grad_mode), constant(tx, self.name), *self.args]
        codegen.add_push_null(lambda: codegen.append_output(codegen.create_load_const_unchecked(function)))
        for operand in operands:
            codegen(operand)
        codegen.extend_output(create_call_function(len(operands), False))


def _function(variable: Any) -> Any:
    """Return the function that a variable stands for; methods of tensors have variables of several kinds."""
    try:
        return variable.as_python_constant()
    except (NotImplementedError, Unsupported):
        return getattr(variable, "value", getattr(variable, "fn", None))


def _bound(operation: Callable[..., Any], tx: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    try:
        bound = inspect.signature(operation).bind(tx, *args, **kwargs)
    except TypeError:
        return NotImplemented
    return operation(*bound.args, **bound.kwargs)


def _built(tx: Any, value: Any, why: str) -> Any:
    if isinstance(value, TracedLogits):
        return value.materialise(tx, why)
    if isinstance(value, BaseListVariable) and any(isinstance(item, TracedLogits) for item in value.items):
        return type(value)([_built(tx, item, why) for item in value.items])
    return value


intercept(TracedLogits, _built)


# What is traced.


def _shape_of(hidden: Tensor, classes: int) -> Any:
    return torch.Size((*hidden.shape[:-1], classes))


def _logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, grad_mode: bool, kind: str, autocast: torch.dtype | None
) -> Tensor:
    with torch.set_grad_enabled(grad_mode):
        return in_autocast(F.linear, kind, autocast, hidden, weight, bias)


def _stepped(logits: Tensor, name: str, grad_mode: bool, *args: Any) -> Any:
    with torch.set_grad_enabled(grad_mode):
        return getattr(logits, name)(*args)


# What runs behind the graph.


def _rebuild(
    hidden: Tensor, grad_mode: bool, autocast: torch.dtype | None, key: str, fused: bool, changed: bool
) -> Tensor:
    """Return the logits of a call of the head, as an eager call would have."""
    state = counter_of(key)
    kind = hidden.device.type
    with torch.set_grad_enabled(grad_mode), torch.autocast(kind, dtype=autocast, enabled=autocast is not None):
        call = head_call(state.head, (hidden,), {}, state.report, state.options)
        if isinstance(call, str):
            state.report.count_materialised(call)
            return F.linear(hidden, state.head.weight, state.head.bias)
        call.fused, call.passed, call.stale = fused, fused and grad_mode, changed
        return LazyLogits.of(call)


def _rebuild_step(logits: Tensor, grad_mode: bool, name: str, *args: Any) -> Any:
    """Return the logits after one more step."""
    with torch.set_grad_enabled(grad_mode):
        return getattr(logits, name)(*args)


# The compiler is still on behind the graph, and would compile these.
_REBUILD, _REBUILD_STEP = map(torch.compiler.disable, (_rebuild, _rebuild_step))


def traced_logits(head: Any, forward: Callable[..., Tensor], args: Any, kwargs: Any, state: Any) -> Any:  # noqa: ARG001
    """Trace a call of a patched head, whose stock ``forward`` is given: lazy logits, or why they are built."""
    why_not: str | None = _ARGUMENTS
    logits: Any = None
    if len(args) == 1 and not kwargs:
        comptime(_become_lazy)
    if why_not is None:
        return logits
    count_when_run(state.key, why_not)
    return forward(*args, **kwargs)


def _become_lazy(context: Any) -> None:
    """While torch.compile traces `traced_logits`: make its variable ``logits`` lazy ones, or set ``why_not``."""
    tx = context._i_will_not_complain_if_bc_breaks_InstructionTranslator()
    head, args, state = (tx.symbolic_locals[name].realize() for name in ("head", "args", "state"))
    hidden = args.items[0].realize()
    rows, module = example(hidden), head.value
    why_not = _MODE if _is_mode_active(tx) else _why_not(module, rows)
    tx.symbolic_locals["why_not"] = constant(tx, why_not)
    if why_not is not None:
        return
    kind, classes = rows.device.type, module.weight.shape[0]
    autocast = torch.get_autocast_dtype(kind) if is_autocast_on(kind) and rows.dtype != torch.float64 else None
    like = fake(tx, lambda: torch.empty(*rows.shape[:-1], classes, dtype=autocast or rows.dtype, device="meta"))
    weight, bias = (attribute(tx, head, name) for name in ("weight", "bias"))
    key, options = (attribute(tx, state, name) for name in ("key", "options"))
    call = _Call(
        hidden, weight, bias, options, classes, key.as_python_constant(), kind, autocast, tx.output.current_tracer
    )
    assert like is not None
    tx.symbolic_locals["logits"] = TracedLogits(call, hidden, like)


def _is_mode_active(tx: Any) -> bool:
    """Whether a ``TorchFunctionMode`` is traced, other than ``with device:``."""
    modes = (mode.python_type() for mode in tx.symbolic_torch_function_state.mode_stack)
    return any(mode.__name__ != "DeviceContext" for mode in modes)


def _why_not(head: Any, rows: Any) -> str | None:
    """Return why a call of ``head`` for hidden states like ``rows`` is traced with real logits."""
    if is_lora(head):
        return "the output embedding has LoRA on it, in a graph of torch.compile"
    if own_hooks(head) or "forward" in vars(head):  # the loss is traced outside of the head's call
        return "the output embedding has a hook or a forward of its own, in a graph of torch.compile"
    why_not = why_not_class(head)
    if why_not is not None:
        return why_not
    if type(rows) is not FakeTensor:
        return f"the hidden states are a {type(rows).__name__}"
    for parameter in (head.weight, head.bias):
        if parameter is not None and type(parameter) is not nn.Parameter:
            return f"the output embedding's weight is a {type(parameter).__name__}, not a plain Parameter"
    return why_not_now(head, rows)
