"""A tensor that stands for the logits, and becomes them when anything but the model's loss looks at it.

Legend: hidden [..., D], logits [..., V].
"""

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from lowtide.errors import UnsupportedError
from lowtide.models.head_call import HeadCall, Step, fold


class LazyLogits(Tensor):
    """The logits of one `HeadCall`: their shape, dtype and device, and no storage.

    Scalar operations are recorded (multiplication and division by a number or a 0-d tensor, tanh, a change of float
    dtype); the model's loss then takes the fused path. Whatever else PyTorch is asked to do with it, it does with the
    real logits, which are built once and kept: values, gradients and in-place changes are what they would have been.
    """

    _call: HeadCall
    _steps: tuple[Step, ...]
    _real: Tensor | None
    _scoring: bool

    @classmethod
    def of(cls, call: HeadCall) -> Self:
        """Return what the head gives for ``call``."""
        return cls._make(call, (), (*call.hidden.shape[:-1], call.head.weight.shape[0]), call.dtype(), scoring=False)

    @classmethod
    def _make(
        cls, call: HeadCall, steps: tuple[Step, ...], shape: tuple[int, ...], dtype: torch.dtype, *, scoring: bool
    ) -> Self:
        def wrapper() -> Any:
            return Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=call.hidden.device)

        lazy: Self = _Anchor.apply(wrapper, call, steps, *call.tensors)  # type: ignore[no-untyped-call]
        lazy._call, lazy._steps, lazy._real, lazy._scoring = call, steps, None, scoring
        return lazy

    def scoring(self) -> Tensor:
        """Return what the model's loss function is to be called with: these logits, for it alone to consume."""
        if self._real is not None:  # may have been changed in place since
            return self._real
        return LazyLogits._make(self._call, self._steps, self.shape, self.dtype, scoring=True)

    def materialise(self, why: str) -> Tensor:
        """Return the logits themselves, built on the first call."""
        if self._real is None:
            self._real = self._call.logits(self._steps, why)
        return self._real

    def _has_another_graph(self) -> bool:
        """Whether a custom autograd function (a reentrant checkpoint) ran the model and put its own node behind these.

        Autograd is to see this tensor then, and not the logits themselves, which have no graph.
        """
        with torch._C.DisableTorchFunctionSubclass():
            return self.requires_grad and not self._call.grad_mode

    def then(
        self,
        function: Callable[..., Tensor],
        *args: Any,
        shape: tuple[int, ...] | None = None,
        dtype: torch.dtype | None = None,
    ) -> "LazyLogits":
        """Return these logits with one more step applied, and the shape and dtype that it changes."""
        steps = (*self._steps, (function, args))
        return LazyLogits._make(self._call, steps, shape or self.shape, dtype or self.dtype, scoring=self._scoring)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        lazy = next((arg for arg in (*args, *kwargs.values()) if isinstance(arg, LazyLogits)), None)
        if lazy is not None and lazy._has_another_graph():
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if lazy is not None and func in _GRADIENT_HOOKS and lazy._call.fused and not _is_distributed(args):
            raise UnsupportedError(
                "logits: expected to be hooked before the loss, got a hook on logits that the loss did not go "
                "through. Call lowtide.unpatch(model) to look at their gradient."
            )
        if lazy is not None and lazy._real is None:
            if func in _METADATA or func in _GRADIENT_HOOKS:
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **kwargs)
            # In another grad mode than the model ran in (torch.no_grad, the inside of a custom autograd function) what
            # becomes of the logits has another graph than they have, which steps to be replayed cannot tell.
            if func in _LAZY and torch.is_grad_enabled() == lazy._call.grad_mode and _takes(func, args, kwargs):
                result = _LAZY[func](*args, **kwargs)
                if result is not NotImplemented:
                    return result
        return func(*_real(args, func), **_real(kwargs, func))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        # Reached past __torch_function__, by C++ and by custom autograd functions. Autograd is above this and goes
        # through `_Anchor`, so values are all that is asked for.
        return func(*_real(args, func, detach=True), **_real(kwargs or {}, func, detach=True))


class _Anchor(torch.autograd.Function):
    """Ties lazy logits to the graph: a gradient that reaches them by any way is passed on as the logits would have."""

    @staticmethod
    def forward(ctx: Any, make: Callable[[], Tensor], call: HeadCall, steps: tuple[Step, ...], *_: Tensor) -> Tensor:
        ctx.call, ctx.steps = call, steps
        return make()

    @staticmethod
    def backward(ctx: Any, grad_logits: Tensor) -> Any:
        return None, None, None, *ctx.call.vjp(ctx.steps, grad_logits)


def _real(tree: Any, func: Callable[..., Any], *, detach: bool = False) -> Any:
    def build(lazy: LazyLogits) -> Tensor:
        logits = lazy.materialise(f"read by {_name(func)}")
        return logits.detach() if detach else logits

    return tree_map_only(LazyLogits, build, tree)


@functools.cache
def _signature(func: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(_LAZY[func])


def _takes(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the lazy version of ``func`` knows these arguments; what it does not know, the real logits get."""
    try:
        _signature(func).bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def _name(func: Any) -> str:
    descriptor = getattr(func, "__self__", None)  # of an attribute: its getter or setter
    return getattr(descriptor, "__name__", None) or getattr(func, "__qualname__", None) or str(func)


def _is_distributed(args: tuple[Any, ...]) -> bool:
    """Whether the hook being registered is FSDP's own: the fused call registers its own on the loss."""
    hook = args[1] if len(args) > 1 else None
    return (getattr(hook, "__module__", None) or "").startswith("torch.distributed.")


# The operations that keep logits lazy. Each returns NotImplemented to have the real logits used after all.


def _scaled(function: Callable[..., Tensor]) -> Callable[..., Any]:
    def apply(input: Any, other: Any) -> Any:
        lazy, factor = (input, other) if isinstance(input, LazyLogits) else (other, input)
        if lazy is factor or (function is Tensor.div and lazy is not input):
            return NotImplemented
        if isinstance(factor, Tensor):
            if type(factor) not in (Tensor, nn.Parameter) or factor.dim() or not factor.is_floating_point():
                return NotImplemented
            if factor.requires_grad and torch.is_grad_enabled():  # a learned scale needs its gradient
                return NotImplemented
            factor = factor.detach().clone()
        elif type(factor) not in (int, float):
            return NotImplemented
        return lazy.then(function, factor)

    return apply


def _tanh(input: LazyLogits) -> Any:
    return input.then(Tensor.tanh)


def _cast_to(dtype: torch.dtype) -> Callable[..., Any]:
    def apply(input: LazyLogits) -> Any:
        return _to(input, dtype)

    return apply


def _to(input: LazyLogits, *args: Any, **kwargs: Any) -> Any:
    kwargs = {name: value for name, value in kwargs.items() if name != "non_blocking"}
    if len(args) + len(kwargs) != 1 or (kwargs and "dtype" not in kwargs and "device" not in kwargs):
        return NotImplemented
    (wanted,) = (*args, *kwargs.values())
    if wanted == input.dtype or wanted == input.device:
        return input
    if isinstance(wanted, torch.dtype) and wanted.is_floating_point:
        return input.then(Tensor.to, wanted, dtype=wanted)
    return NotImplemented


def _contiguous(input: LazyLogits) -> Any:
    return input


def _getitem(input: LazyLogits, index: Any) -> Any:
    """Indexing that takes everything gives the same logits."""
    parts = index if isinstance(index, tuple) else (index,)
    if any(not (part is Ellipsis or _is_int_slice(part)) for part in parts) or parts.count(Ellipsis) > 1:
        return NotImplemented
    slices = [part for part in parts if part is not Ellipsis]
    if len(slices) > input.dim():
        return NotImplemented
    at = parts.index(Ellipsis) if Ellipsis in parts else len(slices)
    sizes = [*input.shape[:at], *input.shape[input.dim() - (len(slices) - at) :]]
    everything = all(part.indices(size) == (0, size, 1) for part, size in zip(slices, sizes, strict=True))
    return input if everything else NotImplemented


def _is_int_slice(part: Any) -> bool:
    return isinstance(part, slice) and all(x is None or type(x) is int for x in (part.start, part.stop, part.step))


def _view(input: LazyLogits, *shape: Any) -> Any:
    """Flattening the tokens keeps logits lazy inside the loss function alone: elsewhere a view shares memory."""
    flat = (math.prod(input.shape[:-1]), input.shape[-1])
    if not input._scoring or shape not in ((-1, input.shape[-1]), flat):
        return NotImplemented
    return input.then(Tensor.view, *flat, shape=flat)


def _cross_entropy(
    input: Any,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """`F.cross_entropy`, argument by argument; what only it can do, or refuse, is left to it."""
    if not isinstance(input, LazyLogits) or not input._scoring or size_average is not None or reduce is not None:
        return NotImplemented
    folded = fold(input._steps)
    if folded is None or input.dim() != 2 or target.dtype != torch.int64 or target.shape != input.shape[:1]:
        return NotImplemented
    loss = input._call.cross_entropy(
        target,
        softcap=folded[1],
        logit_scale=folded[0],
        weight=weight,
        reduction=reduction,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
    )
    return (loss.reshape(target.shape) if reduction == "none" else loss).to(input.dtype)


_LAZY: dict[Callable[..., Any], Callable[..., Any]] = {
    **dict.fromkeys(
        (Tensor.mul, Tensor.__mul__, Tensor.__rmul__, Tensor.multiply, torch.mul, torch.multiply),
        _scaled(Tensor.mul),
    ),
    **dict.fromkeys(
        (Tensor.div, Tensor.__truediv__, Tensor.divide, Tensor.true_divide, torch.div, torch.divide, torch.true_divide),
        _scaled(Tensor.div),
    ),
    **dict.fromkeys((Tensor.tanh, torch.tanh), _tanh),
    Tensor.float: _cast_to(torch.float32),
    Tensor.double: _cast_to(torch.float64),
    Tensor.half: _cast_to(torch.float16),
    Tensor.bfloat16: _cast_to(torch.bfloat16),
    Tensor.to: _to,
    Tensor.contiguous: _contiguous,
    Tensor.__getitem__: _getitem,
    Tensor.view: _view,
    F.cross_entropy: _cross_entropy,
}  # fmt: skip

_METADATA: frozenset[Any] = frozenset(
    [
        *(
            getattr(Tensor, name).__get__
            for name in ("shape", "dtype", "device", "ndim", "layout", "requires_grad", "grad_fn", "is_leaf", "is_cuda",
                         "is_cpu", "is_meta", "is_sparse", "is_quantized", "is_nested", "itemsize", "_base")
        ),
        Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement, Tensor.element_size, Tensor.stride,
        Tensor.is_contiguous, Tensor.is_floating_point, Tensor.is_complex, Tensor.get_device, Tensor.__hash__,
        Tensor.__len__, torch.numel, torch.is_floating_point, torch.is_complex,
    ]
)  # fmt: skip

_GRADIENT_HOOKS: frozenset[Any] = frozenset([Tensor.register_hook, Tensor.retain_grad])
