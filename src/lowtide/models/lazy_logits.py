"""A tensor that stands for the logits, and becomes them when anything looks at it that needs more than a loss.

Legend: hidden [..., D], logits [..., V].
"""

import inspect
import sys
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor
from torch._C._dynamo import eval_frame
from torch.utils._pytree import tree_leaves, tree_map_only

from lowtide.distributed.zero import HOOKS
from lowtide.errors import UnsupportedError
from lowtide.models.head_call import HeadCall
from lowtide.models.lazy_operations import COMMUTATIVE
from lowtide.models.lazy_operations import OPERATIONS as _OPERATIONS
from lowtide.models.steps import Step
from lowtide.models.stock_functions import asking, original

_RETAIN_OR_UNPATCH = (
    "Where you compute the loss, call logits.retain_grad() first, and they are built. Where the model does, call "
    "lowtide.unpatch(model)."
)


# What these hook, or look at, of a module's outputs they do for the gradients of parameters, and with the loss as well.
_DISTRIBUTED = ("torch.distributed.", "torch.nn.parallel.", "deepspeed.")


class LazyLogits(Tensor):
    """The logits of one `HeadCall`, or what was made of them: shape, strides, dtype and device, and no storage.

    What `lazy_operations` knows is recorded, or computed without the logits. Whatever else PyTorch is asked to do with
    it, it does with the real logits, which are built once and kept: values, gradients and in-place changes are what
    they would have been. A view stays a view: it is built as one of the real logits that it was taken of.
    """

    _call: HeadCall
    _steps: tuple[Step, ...]
    _real: Tensor | None
    _viewed: "LazyLogits | None"
    _grad_mode: bool  # whether what made them recorded gradients
    _inference: bool  # whether they were made in inference mode
    _is_cut: bool  # a view taken without gradients of logits that have them: it requires a gradient and passes none on
    _detached: "LazyLogits | None"  # what these were detached from, by the last step
    _has_children: bool  # recorded ones, whose graph goes past whatever this is built to

    @classmethod
    def of(cls, call: HeadCall) -> Self:
        """Return what the head gives for ``call``."""
        like = torch.empty((*call.hidden.shape[:-1], call.head.weight.shape[0]), dtype=call.dtype(), device="meta")
        return cls._make(call, (), like, None, grad_mode=torch.is_grad_enabled())

    @classmethod
    def _make(
        cls, call: HeadCall, steps: tuple[Step, ...], like: Tensor, viewed: "LazyLogits | None", *, grad_mode: bool
    ) -> Self:
        def wrapper() -> Any:
            lazy: Any = Tensor._make_wrapper_subclass(
                cls,
                like.shape,
                strides=like.stride(),
                storage_offset=like.storage_offset(),
                dtype=like.dtype,
                device=call.hidden.device,
            )
            torch._C._set_throw_on_mutable_data_ptr(lazy)  # for C++ that asks neither of the two functions below
            return lazy

        with torch.set_grad_enabled(grad_mode), call.as_in_forward(call.linked):
            lazy: Self = _Anchor.apply(wrapper, call, steps, *call.linked)  # type: ignore[no-untyped-call]
        lazy._call, lazy._steps, lazy._real, lazy._viewed = call, steps, None, viewed
        lazy._grad_mode, lazy._inference = grad_mode, torch.is_inference_mode_enabled()
        lazy._is_cut, lazy._has_children, lazy._detached = False, False, None
        return lazy

    @property
    def is_real(self) -> bool:
        """Whether the logits, or those that this is a view of, are built: they may have been changed in place since."""
        return self._real is not None or (self._viewed is not None and self._viewed.is_real)

    def materialise(self, why: str) -> Tensor:
        """Return the logits themselves, built on the first call."""
        if self._passed_on() is not self:
            return self._passed_on().materialise(why)
        if self._real is None:
            if self._viewed is None:
                self._real = self._call.logits(self._steps, why, grad_mode=self._grad_mode, inference=self._inference)
            else:
                base = self._viewed.materialise(why)
                step = self._steps[-1]
                self._real = self._call.view(base, step, grad_mode=self._grad_mode, inference=self._inference)
        return self._real

    def __repr__(self, **settings: Any) -> Any:  # type: ignore[override]
        # A debugger or a traceback that shows variables, on one rank, must not begin what needs all of them.
        if self._call.in_parts and not self.is_real:
            return f"{type(self).__name__}(shape={list(self.shape)}, dtype={self.dtype}, device={self.device})"
        return super().__repr__(**settings)  # type: ignore[no-untyped-call]

    def __getattr__(self, name: str) -> Any:
        # Of attributes that plain tensors have not: logits that are a DTensor have more.
        if name in _OF_DTENSOR and self._call.gives_dtensor:
            return getattr(self.materialise(f"read by {name}"), name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _passed_on(self) -> "LazyLogits":
        """Return the logits that DeepSpeed passed on as these, or these.

        ZeRO-3 puts a node of its own behind whatever a module returns, which detaches it and changes nothing: it is
        where the module's weights are gathered for backward. What is computed of the logits has one as well, for it is
        computed by a call of the head.
        """
        if self._detached is None:
            return self
        with torch._C.DisableTorchFunctionSubclass():
            function: Any = getattr(type(self.grad_fn), "_forward_cls", None)
        return self._detached if getattr(function, "__module__", "").startswith(HOOKS) else self

    def _has_another_graph(self) -> bool:
        """Whether a custom autograd function (a reentrant checkpoint) made these and put its own node behind them.

        Autograd is to see this tensor then, and not the logits themselves, which have no graph.
        """
        with torch._C.DisableTorchFunctionSubclass():
            return self.requires_grad and not self._grad_mode

    def _node(self, reader: str) -> Any:
        """Return ``grad_fn`` for code of the module ``reader``: that of the real logits, for what is done with it.

        Where something was computed past the logits it is too late for that: whoever asks whether there is one gets a
        node that refuses the rest.

        Raises:
            UnsupportedError: PyTorch's own code is about to hook it, and it is too late.
        """
        with torch._C.DisableTorchFunctionSubclass():
            node = self.grad_fn
        if reader.startswith(_DISTRIBUTED) or (node is None and not self._is_cut) or self._has_another_graph():
            return node
        if self._is_passed():
            if reader == "torch.autograd.graph":
                raise UnsupportedError(_too_late("to be hooked before the loss"))
            return node
        self._call.hooked = True
        return self.materialise("read by grad_fn").grad_fn

    def _is_passed(self) -> bool:
        """Whether something was computed that the gradient of these logits, once built, would not be all of."""
        return self._call.passed or self._has_children

    def _can_record(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether what becomes of these logits now has a graph if and only if gradients were recorded then and are now.

        It has another one where something else that takes part brings it.
        """
        if self._grad_mode or not torch.is_grad_enabled():
            return True
        return not self._is_cut and not any(
            isinstance(x, Tensor) and not isinstance(x, LazyLogits) and x.requires_grad
            for x in (*args, *kwargs.values())
        )

    def meta(self) -> Tensor:
        """Return a tensor on no device of the same shape, strides and dtype: on it an operation shows what it gives."""
        return torch.empty_strided(self.shape, self.stride(), dtype=self.dtype, device="meta")

    def then(self, step: Step, like: Tensor, *, view: bool = False) -> "LazyLogits":
        """Return these logits after one more step.

        Args:
            step: What is done.
            like: A tensor of the shape, strides and dtype that it gives.
            view: Whether the result shares these logits' memory.
        """
        grad_mode = self._grad_mode and torch.is_grad_enabled() and step.function is not torch._C.TensorBase.detach
        parent = None if view or not grad_mode else self
        while parent is not None:  # a view is built from what it is a view of, which that goes past as well
            parent._has_children, parent = True, parent._viewed
        child = self._make(self._call, (*self._steps, step), like, self if view else None, grad_mode=grad_mode)
        child._detached = self if step.function is torch._C.TensorBase.detach else None
        child._is_cut = view and not grad_mode and self.requires_grad and child._detached is None
        return child

    @property
    def call(self) -> HeadCall:
        """Return the call of the head that these are the logits of."""
        return self._call

    @property
    def steps(self) -> tuple[Step, ...]:
        """Return what was done to them since."""
        return self._steps

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch._C._get_tracing_state() is not None:  # it follows memory, and there is none
            raise UnsupportedError(
                "logits: expected a tensor with memory in torch.jit.trace, got logits of a patched model that were not "
                "built. Pass logits.clone(), made before."
            )
        func, kwargs = asking(func), kwargs or {}
        lazies = _found(args, kwargs)
        if any(lazy._detached is not None for lazy in lazies):  # seldom: the walk takes as long as a view
            args, kwargs = tree_map_only(LazyLogits, LazyLogits._passed_on, (args, kwargs))
            lazies = _found(args, kwargs)
        if func == _GRAD_FN and lazies:
            return lazies[0]._node(sys._getframe(1).f_globals.get("__name__", ""))
        has_no_graph = func is Tensor.tolist or (
            func in OPERATIONS and (func in _DETACH or not torch.is_grad_enabled())
        )
        if not has_no_graph and any(lazy._has_another_graph() for lazy in lazies):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*_real(args, func, graph=True), **_real(kwargs, func, graph=True))
        lazy = next((arg for arg in (*args, *kwargs.values()) if isinstance(arg, LazyLogits)), None)
        distributed = func in _GRADIENT_HOOKS and _is_distributed(args)
        if not distributed:
            _check_gradient(func, args, kwargs)
        if lazy is not None and not lazy.is_real:
            if func == _REQUIRES_GRAD and lazy._is_cut:
                return True
            if func in _METADATA or distributed or (func == _BASE and lazy._viewed is None):
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **kwargs)
            if func in OPERATIONS and lazy._can_record(args, kwargs):
                with torch.set_grad_enabled(lazy._grad_mode and torch.is_grad_enabled()):
                    result = _operate(func, args, kwargs)
                if result is not NotImplemented:
                    return result
        return func(*_real(args, func), **_real(kwargs, func))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        # Reached past __torch_function__, by C++ and by custom autograd functions. Autograd is above this and goes
        # through `_Anchor`, so values are all that is asked for.
        return func(*_real(args, func, detach=True), **_real(kwargs or {}, func, detach=True))


def _keep_from_compiling(function: Any) -> None:
    """Have torch.compile neither trace a function nor compile what it calls; it runs between two graphs."""
    function._torchdynamo_disable = True
    function._torchdynamo_disable_msg = "lazy logits of lowtide.patch: pass logits.clone() for a graph without breaks"
    skip = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)
    eval_frame.set_code_exec_strategy(function.__code__, skip)


_keep_from_compiling(vars(LazyLogits)["__torch_function__"].__func__)


class _Anchor(torch.autograd.Function):
    """Ties lazy logits to the graph: a gradient that reaches them by any way is passed on as the logits would have."""

    @staticmethod
    def forward(ctx: Any, make: Callable[[], Tensor], call: HeadCall, steps: tuple[Step, ...], *_: Tensor) -> Tensor:
        ctx.call, ctx.steps = call, steps
        ctx.set_materialize_grads(False)
        return make()

    @staticmethod
    def backward(ctx: Any, grad_logits: Tensor | None) -> Any:
        if grad_logits is None:  # of logits that a custom function passed on, and nothing read
            return None, None, None, *(None for _ in ctx.call.linked)
        if ctx.call.hooked:
            raise UnsupportedError(
                "logits: expected operations of PyTorch on logits that have a hook, got a custom autograd function, "
                f"whose gradient does not go through what was hooked. {_RETAIN_OR_UNPATCH}"
            )
        return None, None, None, *ctx.call.vjp(ctx.steps, grad_logits)


def _found(*trees: Any) -> list[LazyLogits]:
    return [leaf for leaf in tree_leaves(trees) if isinstance(leaf, LazyLogits)]


def _real(tree: Any, func: Callable[..., Any], *, detach: bool = False, graph: bool = False) -> Any:
    """Return ``tree`` with real logits, detached if asked for; ``graph`` leaves those in that have another graph."""

    def build(lazy: LazyLogits) -> Tensor:
        if graph and lazy._has_another_graph():
            return lazy
        logits = lazy.materialise(f"read by {_name(func)}")
        return logits.detach() if detach else logits

    return tree_map_only(LazyLogits, build, tree)


def _check_gradient(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Check that whoever asks for the gradient of logits gets all of it.

    Raises:
        UnsupportedError: Something was computed past them, a loss without logits or from a step that was recorded.
    """
    if func in _GRADIENT_HOOKS:
        lazies, expected = _found(args[:1]), "to be hooked before the loss"
    elif func in _GRADIENTS:
        lazies = _found(args[1:2] if func is _GRAD else (), kwargs.get("inputs"))
        expected = "to be built before the loss that is differentiated by them"
    else:
        return
    if any(lazy._is_passed() for lazy in lazies):
        raise UnsupportedError(_too_late(expected))
    for lazy in lazies:
        lazy._call.hooked |= func in _GRADIENT_HOOKS


def _too_late(expected: str) -> str:
    return (
        f"logits: expected {expected}, got logits that something was computed from without building them, so that "
        f"its gradient does not go through them. {_RETAIN_OR_UNPATCH}"
    )


def _operate(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what the lazy version of ``func`` gives; NotImplemented where the real logits are needed."""
    operation = OPERATIONS[func]
    if args and not isinstance(args[0], LazyLogits) and func in COMMUTATIVE:
        args = (*reversed(args[:2]), *args[2:])
    try:
        bound = inspect.signature(operation).bind(*args, **kwargs)
    except TypeError:
        return NotImplemented
    first, *others = bound.arguments.values()
    if not isinstance(first, LazyLogits) or any(isinstance(other, LazyLogits) for other in others):
        return NotImplemented
    return operation(*bound.args, **bound.kwargs)


def _name(func: Any) -> str:
    descriptor = getattr(func, "__self__", None)  # of an attribute: its getter or setter
    return getattr(descriptor, "__name__", None) or getattr(func, "__qualname__", None) or str(func)


def _is_distributed(args: tuple[Any, ...]) -> bool:
    """Whether the hook being registered is FSDP's or DeepSpeed's own: these put one on the loss as well."""
    hook = args[1] if len(args) > 1 else None
    return (getattr(hook, "__module__", None) or "").startswith(_DISTRIBUTED)


def _refuse(*_: Any) -> Any:
    raise UnsupportedError(_too_late("their graph to be looked at before the loss"))


# The node that lazy logits have is not the one that gradients go through.
for _name_of_node in ("register_hook", "register_prehook"):
    setattr(_Anchor._backward_cls, _name_of_node, _refuse)
for _name_of_node in ("next_functions", "metadata"):
    setattr(_Anchor._backward_cls, _name_of_node, property(_refuse))


OPERATIONS = {original(function): operation for function, operation in _OPERATIONS.items()}

_OF_DTENSOR = frozenset(("device_mesh", "placements", "to_local", "full_tensor", "redistribute"))

_METADATA: frozenset[Any] = frozenset(
    [
        *(
            getattr(torch._C.TensorBase, name).__get__
            for name in ("shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_leaf", "is_cuda",
                         "is_cpu", "is_meta", "is_sparse", "is_quantized", "is_nested", "itemsize")
        ),
        Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement, Tensor.element_size, Tensor.stride,
        Tensor.is_contiguous, Tensor.is_floating_point, Tensor.is_complex, Tensor.get_device, Tensor.__hash__,
        Tensor.__len__, torch.numel, torch.is_floating_point, torch.is_complex,
    ]
)  # fmt: skip

_GRAD_FN: Any = vars(torch._C.TensorBase)["grad_fn"].__get__
_BASE: Any = vars(torch._C.TensorBase)["_base"].__get__  # Any: torch's stub has it as a tensor
_REQUIRES_GRAD: Any = vars(torch._C.TensorBase)["requires_grad"].__get__
_GRADIENT_HOOKS: frozenset[Any] = frozenset(map(original, [Tensor.register_hook, Tensor.retain_grad]))
_DETACH: frozenset[Any] = frozenset([Tensor.detach, torch.detach])
_GRAD: Any = original(torch.autograd.grad)
_GRADIENTS: frozenset[Any] = frozenset([_GRAD, original(torch.autograd.backward)])
