"""The tensor that a patched head returns: logits that are built when an operation needs more than a loss of them.

Legend: hidden [..., D], logits [..., V].
"""

import functools
import inspect
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import FrameType, FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.utils import checkpoint
from torch.utils._pytree import tree_leaves, tree_map_only

from lowtide.distributed.zero import HOOKS
from lowtide.errors import UnsupportedError, message
from lowtide.models.eligibility import is_traced
from lowtide.models.lazy_operations import COMMUTATIVE, OPERATIONS
from lowtide.models.recorded_logits import RecordedLogits, too_late
from lowtide.models.steps import TensorBase

_as_plain = torch._C.DisableTorchFunctionSubclass  # a context in which lazy logits are what their storage says

# These hook and read a module's outputs for the gradients of parameters, and do the same with the loss.
_DISTRIBUTED = ("torch.distributed.", "torch.nn.parallel.", "deepspeed.")


class LazyLogits(RecordedLogits):
    """The logits of one call of the head, built when they are read.

    The operations of `lazy_operations` are recorded, or computed without logits. Any other runs on the real logits,
    which are built once and kept: values, gradients and in-place changes are those of the stock model. A view stays a
    view: it is built from the real logits that it is a view of.
    """

    _real: Tensor | None = None

    @property
    def is_real(self) -> bool:
        """Whether the logits, or those that this is a view of, are built, and may have been changed in place since."""
        return self._real is not None or (self.viewed is not None and self.viewed.is_real)

    def materialise(self, why: str) -> Tensor:
        """Return the logits themselves, built on the first call."""
        if self._passed_on() is not self:
            return self._passed_on().materialise(why)
        if self._real is None:
            modes = {"grad_mode": self.grad_mode, "inference": self.inference}
            with _saved_outside_of_checkpoints():
                if self.viewed is None:
                    self._real = self.call.logits(self.steps, why, **modes)
                else:
                    self._real = self.call.view(self.viewed.materialise(why), self.steps[-1], **modes)
        return self._real

    def __repr__(self, **settings: Any) -> Any:  # type: ignore[override]
        # A debugger or a traceback that shows variables on one rank must not start what needs all ranks.
        if self.call.sharded and not self.is_real:
            return f"{type(self).__name__}(shape={list(self.shape)}, dtype={self.dtype}, device={self.device})"
        return super().__repr__(**settings)  # type: ignore[no-untyped-call]

    def __getattr__(self, name: str) -> Any:
        # Attributes that plain tensors lack: logits that are a DTensor have more.
        if name in _OF_DTENSOR and self.call.gives_dtensor:
            return getattr(self.materialise(f"read by {name}"), name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _passed_on(self) -> "LazyLogits":
        """Return the logits that DeepSpeed passed on as these, or these.

        ZeRO-3 puts a node of its own behind whatever a module returns, which detaches it and changes nothing: there it
        gathers the module's weights for backward. Results computed without logits have one too: the head computes them.
        """
        if self.detached is None:
            return self
        with _as_plain():
            function: Any = getattr(type(self.grad_fn), "_forward_cls", None)
        return self.detached if getattr(function, "__module__", "").startswith(HOOKS) else self

    def _has_another_graph(self) -> bool:
        """Whether a custom autograd function (a reentrant checkpoint) made these and put its own node behind them.

        Then autograd has to see this tensor, not the logits themselves, which have no graph.
        """
        with _as_plain():
            return self.requires_grad and not self.grad_mode

    def _node(self, reader: str) -> Any:
        """Return ``grad_fn`` for code of the module ``reader``: that of the real logits, which are built for it.

        After something was computed without building them, it is a node that raises where it is used.

        Raises:
            UnsupportedError: PyTorch's own code is about to hook it, and it is too late.
        """
        with _as_plain():
            node = self.grad_fn
        if reader.startswith(_DISTRIBUTED) or (node is None and not self.is_cut) or self._has_another_graph():
            return node
        if self._is_passed():
            if reader == "torch.autograd.graph":
                raise UnsupportedError(too_late("to be hooked before the loss"))
            return node
        self.call.hooked = True
        return self.materialise("read by grad_fn").grad_fn

    def _is_passed(self) -> bool:
        """Whether something was computed whose gradient would not go through these logits, once built."""
        return self.call.passed or self.has_children

    def _can_record(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a result computed now has a graph exactly if gradients were recorded for these logits and are now.

        Another argument that requires a gradient would give it one.
        """
        if self.grad_mode or not torch.is_grad_enabled():
            return True
        return not self.is_cut and not any(
            isinstance(x, Tensor) and not isinstance(x, LazyLogits) and x.requires_grad
            for x in (*args, *kwargs.values())
        )

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if is_traced():  # it follows memory, and there is none
            raise UnsupportedError(
                "logits: expected a tensor with memory in torch.jit.trace, got logits of a patched model that were not "
                "built. Pass logits.clone(), made before."
            )
        kwargs = kwargs or {}
        lazies = _found(args, kwargs)
        if any(lazy.detached is not None for lazy in lazies):  # seldom: the walk takes as long as a view
            args, kwargs = tree_map_only(LazyLogits, LazyLogits._passed_on, (args, kwargs))
            lazies = _found(args, kwargs)
        if func == _GRAD_FN and lazies:
            return lazies[0]._node(_reader(sys._getframe(1)))
        has_no_graph = func is Tensor.tolist or (
            func in OPERATIONS and (func in _DETACH or not torch.is_grad_enabled())
        )
        if not has_no_graph and any(lazy._has_another_graph() for lazy in lazies):
            with _as_plain():
                return func(*_real(args, func, graph=True), **_real(kwargs, func, graph=True))
        lazy = next((arg for arg in (*args, *kwargs.values()) if isinstance(arg, LazyLogits)), None)
        distributed = func in _GRADIENT_HOOKS and _is_distributed(args)
        if not distributed:
            _check_gradient(func, args, kwargs)
        if lazy is not None and not lazy.is_real:
            if func == _REQUIRES_GRAD and lazy.is_cut:
                return True
            if func in _METADATA or distributed or (func == _BASE and lazy.viewed is None):
                with _as_plain():
                    return func(*args, **kwargs)
            if func in OPERATIONS and lazy._can_record(args, kwargs):
                with torch.set_grad_enabled(lazy.grad_mode and torch.is_grad_enabled()):
                    result = _operate(func, args, kwargs)
                if result is not NotImplemented:
                    return result
        _check_is_torchs(func)
        return func(*_real(args, func), **_real(kwargs, func))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        # C++ and custom autograd functions arrive here without __torch_function__. Autograd is above this and goes
        # through `_LogitsNode`, so that values are enough.
        return func(*_real(args, func, detach=True), **_real(kwargs or {}, func, detach=True))


def _reader(frame: FrameType | None) -> str:
    """Return the module whose code is running, beneath what `keep_from_compiling` put around `LazyLogits`."""
    name = "torch._dynamo"
    while frame is not None and name.startswith("torch._dynamo"):
        name, frame = frame.f_globals.get("__name__", ""), frame.f_back
    return name


def _saved_outside_of_checkpoints() -> AbstractContextManager[Any]:
    """Return a context in which autograd saves tensors itself where a checkpoint would recompute them.

    The logits are kept, so its recompute does not build them again.
    """
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if hooks is None or getattr(hooks[0], "__module__", None) != checkpoint.__name__:
        return nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(_with_version, _of_version)


def _with_version(tensor: Tensor) -> tuple[Tensor, int | None]:
    return tensor, None if tensor.is_inference() else tensor._version


def _of_version(saved: tuple[Tensor, int | None]) -> Tensor:
    tensor, version = saved
    if version is not None and tensor._version != version:
        got = f"one of shape {list(tensor.shape)} that was changed in place"
        expected = "what a patched model's logits were built from unchanged until backward"
        raise UnsupportedError(message("logits", expected, got, "Change it after backward."))
    return tensor


@functools.cache
def keep_from_compiling() -> None:
    """Have torch.compile run what is done with lazy logits between two graphs. Loads the compiler."""
    why = "lazy logits of lowtide.patch: pass logits.clone() for a graph without breaks"
    for name in ("__torch_function__", "__torch_dispatch__"):
        function = torch.compiler.disable(vars(LazyLogits)[name].__func__, reason=why)  # type: ignore[no-untyped-call]
        setattr(LazyLogits, name, classmethod(function))


def _found(*trees: Any) -> list[LazyLogits]:
    return [leaf for leaf in tree_leaves(trees) if isinstance(leaf, LazyLogits)]


def _real(tree: Any, func: Callable[..., Any], *, detach: bool = False, graph: bool = False) -> Any:
    """Return ``tree`` with real logits, detached if ``detach``; if ``graph``, except those with another graph."""

    def build(lazy: LazyLogits) -> Tensor:
        if graph and lazy._has_another_graph():
            return lazy
        logits = lazy.materialise(f"read by {_name(func)}")
        return logits.detach() if detach else logits

    return tree_map_only(LazyLogits, build, tree)


def _check_gradient(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Check that a gradient of logits that ``func`` takes or hooks is complete.

    Raises:
        UnsupportedError: Something was computed without building them: a loss, or a recorded step.
    """
    if func in _GRADIENT_HOOKS:
        lazies, expected = _found(args[:1]), "to be hooked before the loss"
    elif func in _GRADIENTS:
        lazies = _found(args[1:2] if func is _GRAD else (), kwargs.get("inputs"))
        expected = "to be built before the loss that is differentiated by them"
    else:
        return
    if any(lazy._is_passed() for lazy in lazies):
        raise UnsupportedError(too_late(expected))
    for lazy in lazies:
        lazy.call.hooked |= func in _GRADIENT_HOOKS


def _check_is_torchs(func: Any) -> None:
    """Check that a function is PyTorch's own: one that a user put in its place is running, and would run again.

    Raises:
        UnsupportedError: It is not.
    """
    if type(func) is FunctionType and not func.__globals__.get("__name__", "").startswith("torch."):
        raise UnsupportedError(
            f"logits: expected a function of PyTorch, got {func.__qualname__} of {func.__module__}, which was put in "
            "the place of one. Replace it before lowtide.patch, or pass logits.clone()."
        )


def _operate(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the result of the lazy version of ``func``, NotImplemented if it needs the real logits."""
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
    """Whether FSDP or DeepSpeed registers this hook: these put one on the loss as well."""
    hook = args[1] if len(args) > 1 else None
    return (getattr(hook, "__module__", None) or "").startswith(_DISTRIBUTED)


_OF_DTENSOR = frozenset(("device_mesh", "placements", "to_local", "full_tensor", "redistribute"))

_METADATA: frozenset[Any] = frozenset(
    [
        *(
            getattr(TensorBase, name).__get__
            for name in ("shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_leaf", "is_cuda",
                         "is_cpu", "is_meta", "is_sparse", "is_quantized", "is_nested", "itemsize")
        ),
        Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement, Tensor.element_size, Tensor.stride,
        Tensor.is_contiguous, Tensor.is_floating_point, Tensor.is_complex, Tensor.get_device, Tensor.__hash__,
        Tensor.__len__, torch.numel, torch.is_floating_point, torch.is_complex,
    ]
)  # fmt: skip

_GRAD_FN: Any = vars(TensorBase)["grad_fn"].__get__
_BASE: Any = vars(TensorBase)["_base"].__get__  # Any: torch's stub has it as a tensor
_REQUIRES_GRAD: Any = vars(TensorBase)["requires_grad"].__get__
_GRADIENT_HOOKS: frozenset[Any] = frozenset([Tensor.register_hook, Tensor.retain_grad])
_DETACH: frozenset[Any] = frozenset([Tensor.detach, torch.detach])
_GRAD: Any = torch.autograd.grad
_GRADIENTS: frozenset[Any] = frozenset([_GRAD, torch.autograd.backward])
