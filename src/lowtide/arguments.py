"""Checks of arguments: tensors, numbers, names; and of derivatives that a function has no formula for."""

import math
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from lowtide.errors import ArgumentTypeError, ArgumentValueError, UnsupportedError, message

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def check_tensor(name: str, value: object) -> Tensor:
    """Return a dense tensor of a dtype that PyTorch computes in: neither quantised nor float8."""
    tensor = check_dense(name, value)
    if tensor.is_quantized:
        raise ArgumentTypeError(message(name, "numbers", str(tensor.dtype), "Pass .dequantize()."))
    if tensor.is_floating_point() and tensor.dtype not in FLOATS:
        hint = "Cast it, and multiply it with its scale if it has one."
        raise ArgumentTypeError(message(name, "float64, float32, bfloat16 or float16", str(tensor.dtype), hint))
    return tensor


def check_dense(name: str, value: object) -> Tensor:
    """Return a dense, not nested tensor of any dtype."""
    if not isinstance(value, Tensor):
        raise ArgumentTypeError(message(name, "a torch.Tensor", type(value).__name__))
    if value.is_nested:
        hint = "Pad it with .to_padded_tensor(), or take the tokens of a jagged one, .values()."
        raise ArgumentTypeError(message(name, "a tensor with one size an axis", "a nested tensor", hint))
    if value.layout != torch.strided:
        raise ArgumentTypeError(message(name, "a dense tensor", str(value.layout), "Pass .to_dense()."))
    return value


def check_real(name: str, value: object) -> Tensor:
    """Return a tensor of real numbers, integers and booleans among them."""
    tensor = check_tensor(name, value)
    if tensor.is_complex():
        raise ArgumentTypeError(message(name, "real numbers", str(tensor.dtype), "Pass .real or .abs()."))
    return tensor


def detached(tensor: Tensor) -> Tensor:
    """Return the tensor without its graph: itself where it has none."""
    return tensor.detach() if tensor.requires_grad else tensor


def check_device(name: str, value: Tensor, input: Tensor, input_name: str = "input") -> None:
    """Check that a tensor is on the device of the hidden states, which the caller has as ``input_name``."""
    if value.device != input.device:
        raise ArgumentValueError(message(name, f"a tensor on {input.device}, as {input_name} is", str(value.device)))


def is_dtensor(tensor: object) -> bool:
    """Return whether a tensor is a DTensor, of which this rank has a shard."""
    return type(tensor) is not Tensor and type(tensor) is not Parameter and hasattr(tensor, "device_mesh")


def why_not_local(name: str, value: object, gather: str) -> ArgumentTypeError | None:
    """Return the error for anything but a dense floating-point tensor that is whole on this rank, None for that.

    ``gather`` is the hint for a DTensor.
    """
    try:
        tensor = check_tensor(name, value)
    except ArgumentTypeError as error:
        return error
    if not tensor.is_floating_point():
        return ArgumentTypeError(message(name, "float64, float32, bfloat16 or float16", str(tensor.dtype)))
    if is_dtensor(tensor):
        return ArgumentTypeError(message(name, "a tensor that is whole on this rank", "a DTensor", gather))
    return None


def is_autocast_on(device_type: str) -> bool:
    """Return whether autocast is on for a device type; False for one that has no autocast."""
    # Compilers before PyTorch 2.13 cannot trace the first; they trace devices that run.
    available = torch.compiler.is_compiling() or torch.amp.is_autocast_available(device_type)
    return available and torch.is_autocast_enabled(device_type)


def operand_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype in which a GEMM reads ``tensor``: its own, or that of an enabled autocast."""
    kind = "cpu" if tensor.is_meta else tensor.device.type  # the meta device has no autocast of its own
    if tensor.dtype != torch.float64 and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return tensor.dtype


def check_number(name: str, value: object, low: float, high: float, *, above: bool = False) -> float:
    """Return a number from ``low`` to ``high``, with ``above`` strictly between them."""
    if not _is_number(value):
        raise ArgumentTypeError(message(name, "a number", f"{value!r}"))
    if not (low < value < high if above else low <= value <= high):
        range_ = f"a number from {low} to {high}"
        if above:
            range_ = f"a finite number above {low}" if high == math.inf else f"a number above {low} and below {high}"
        raise ArgumentValueError(message(name, range_, f"{value!r}"))
    return _storable(name, value)


def check_index(name: str, value: object) -> int:
    """Return an int that fits int64."""
    if isinstance(value, torch.SymInt):
        return value  # type: ignore[return-value]
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ArgumentTypeError(message(name, "an int", f"{value!r}"))
    if not -(2**63) <= int(value) < 2**63:
        raise ArgumentValueError(message(name, "an int of 64 bits", f"{value!r}"))
    return int(value)


def check_flag(name: str, value: object) -> None:
    """Check that a value is True or False."""
    if not isinstance(value, bool):
        raise ArgumentTypeError(message(name, "True or False", f"{value!r}"))


def check_name(name: str, value: object, allowed: Sequence[str]) -> None:
    """Check that a value is one of the allowed names."""
    if value not in allowed:
        expected = f"{', '.join(map(repr, allowed[:-1]))} or {allowed[-1]!r}"
        raise ArgumentValueError(message(name, expected, f"{value!r}"))


def scalar_tensor(name: str, value: object, dtype: torch.dtype) -> Tensor:
    """Return a number or a 0-d tensor as a 0-d tensor; a tensor is not inspected."""
    if isinstance(value, Tensor):
        if check_real(name, value).dim() != 0:
            raise ArgumentValueError(message(name, "a number or a 0-d tensor", f"shape {list(value.shape)}"))
        return value
    if not _is_number(value):
        raise ArgumentTypeError(message(name, "a number or a 0-d tensor", f"{value!r}"))
    # torch.compile traces a product with a number that changes, but not torch.full
    return torch.ones((), dtype=dtype) * _storable(name, value)


def positive_scalar(name: str, value: object, dtype: torch.dtype) -> Tensor:
    """Return a number above 0, or a 0-d tensor, which is not inspected, as a 0-d tensor."""
    if not isinstance(value, Tensor):
        check_number(name, value, 0, math.inf, above=True)
    return scalar_tensor(name, value, dtype)


def _storable(name: str, value: float) -> float:
    """Return a number that a tensor can store: a fraction, or an int beyond 64 bits, as a float."""
    symbolic: Any = (torch.SymFloat, torch.SymInt)
    if isinstance(value, (float, *symbolic)) or (isinstance(value, int) and abs(value) < 2**63):
        return value
    try:
        return float(value)
    except OverflowError as error:
        raise ArgumentValueError(message(name, "a number that fits a float", "a larger one")) from error


def _is_number(value: object) -> TypeGuard[float]:
    """Return whether ``value`` is a real number; torch.compile passes its own types."""
    return isinstance(value, Real | torch.SymFloat | torch.SymInt) and not isinstance(value, bool)


def refuse_transforms(
    function: str, *arguments: object, instead: str, way: str = "build the logits for this one"
) -> None:
    """Raise where ``function`` would be differentiated by forward-mode derivatives or a transform of torch.func.

    ``instead`` is an expression with autograd's own derivatives, ``way`` how to use it, for the hint.
    """
    forward_ad: Any = torch.autograd.forward_ad
    compiling = torch.compiler.is_compiling()  # its own use of torch.func looks like the user's
    if not compiling and _is_in_transform():
        got = "a torch.func transform"
    elif forward_ad._current_level >= 0 and (
        compiling or any(isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None for x in arguments)
    ):
        got = "forward-mode derivatives"
    else:
        return
    hint = f"Call .backward() or torch.autograd.grad on its result, or {way}: {instead}."
    raise UnsupportedError(message(function, "reverse-mode autograd", got, hint))


def is_transformed() -> bool:
    """Return whether a torch.func transform or forward-mode differentiation is active."""
    level: int = torch.autograd.forward_ad._current_level  # that no level is entered has no public name
    return level >= 0 or _is_in_transform()


def _is_in_transform() -> bool:
    return torch._C._functorch.peek_interpreter_stack() is not None  # torch.func tells nobody that it runs


def hooks_of(module: nn.Module) -> tuple[dict[int, Any], ...]:
    """Return the hooks that run with a module's calls: before forward, after it, and the two of backward."""
    return module._forward_pre_hooks, module._forward_hooks, module._backward_hooks, module._backward_pre_hooks
