"""What every function of the head checks before it plans: shapes, dtypes, devices, and no second derivatives."""

import math
from numbers import Integral, Real
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.nn import Parameter

from lowtide.errors import ArgumentTypeError, ArgumentValueError, UnsupportedError, message
from lowtide.head.options import HeadOptions

REDUCTIONS = ("mean", "sum", "none")
NAIVE = "torch.nn.functional.cross_entropy(torch.nn.functional.linear(input, linear_weight, linear_bias), target)"


FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def check_tensor(name: str, value: object) -> Tensor:
    """Return ``value`` as the tensor that it is: dense, and of a dtype that PyTorch computes with.

    Raises:
        ArgumentTypeError: It is not a tensor, or it is nested, sparse, quantised, or float8.
    """
    tensor = check_dense(name, value)
    if tensor.is_quantized:
        raise ArgumentTypeError(message(name, "numbers", str(tensor.dtype), "Pass .dequantize()."))
    if tensor.is_floating_point() and tensor.dtype not in FLOATS:
        hint = "Cast it, and multiply it with its scale if it has one."
        raise ArgumentTypeError(message(name, "float64, float32, bfloat16 or float16", str(tensor.dtype), hint))
    return tensor


def check_dense(name: str, value: object) -> Tensor:
    """Return a tensor of any dtype that has one size an axis, and all of its numbers in memory.

    Raises:
        ArgumentTypeError: It is not a tensor, or it is nested or sparse.
    """
    if not isinstance(value, Tensor):
        raise ArgumentTypeError(message(name, "a torch.Tensor", type(value).__name__))
    if value.is_nested:
        hint = "Pad it with .to_padded_tensor(), or take the tokens of a jagged one, .values()."
        raise ArgumentTypeError(message(name, "a tensor with one size an axis", "a nested tensor", hint))
    if value.layout != torch.strided:
        raise ArgumentTypeError(message(name, "a dense tensor", str(value.layout), "Pass .to_dense()."))
    return value


def check_real(name: str, value: object) -> Tensor:
    """Return a tensor of real numbers, integers and booleans among them.

    Raises:
        ArgumentTypeError: It is none.
    """
    tensor = check_tensor(name, value)
    if tensor.is_complex():
        raise ArgumentTypeError(message(name, "real numbers", str(tensor.dtype), "Pass .real or .abs()."))
    return tensor


def check_head(
    input: Tensor,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    names: tuple[str, str, str] = ("input", "linear_weight", "linear_bias"),
) -> torch.dtype:
    """Check hidden states [..., D], weight [V, D] and bias [V], and return the dtype that the GEMMs' operands take.

    Raises:
        ArgumentTypeError: Not tensors, not floating point, or different dtypes outside autocast.
        ArgumentValueError: Shapes or devices that do not fit.
        UnsupportedError: Inside `torch.jit.trace`, where sizes are no numbers to plan with.
    """
    input_name, weight_name, bias_name = names
    if torch._C._get_tracing_state() is not None:
        hint = "Use torch.compile, which takes the function as one operator."
        raise UnsupportedError(message(input_name, "a call that runs", "one inside torch.jit.trace", hint))
    check_tensor(input_name, input)
    check_whole(weight_name, check_tensor(weight_name, linear_weight), input)
    if linear_weight.dim() != 2:
        swapped = _swapped(names) if input.dim() == 2 and linear_weight.shape[-1:] == input.shape[-1:] else ""
        raise ArgumentValueError(message(weight_name, "shape [V, D]", _shape(linear_weight), swapped))
    V, D = linear_weight.shape
    if input.dim() == 0 or input.shape[-1] != D:
        expected = f"shape [..., {D}], as {weight_name} is [{V}, {D}]"
        raise ArgumentValueError(message(input_name, expected, _shape(input)))
    dtype = operand_dtype(input)
    for name, tensor in zip(names, (input, linear_weight, linear_bias), strict=True):
        if tensor is None:
            continue
        if not check_tensor(name, tensor).is_floating_point():
            raise ArgumentTypeError(message(name, "a floating-point dtype", str(tensor.dtype)))
        check_device(name, tensor, input)
        if operand_dtype(tensor) != dtype:
            hint = "Cast one of them, or run under torch.autocast."
            raise ArgumentTypeError(message(name, f"dtype {input.dtype}, as {input_name} has", str(tensor.dtype), hint))
    if linear_bias is not None and linear_bias.shape != (V,):
        expected = f"shape [{V}], as {weight_name} is [{V}, {D}]"
        raise ArgumentValueError(message(bias_name, expected, _shape(linear_bias)))
    return dtype


def _swapped(names: tuple[str, str, str] = ("input", "linear_weight", "linear_bias")) -> str:
    return (
        f"Are {names[0]} and {names[1]} swapped? The hidden states come first here; Liger's functions take the weight"
        " first."
    )


def is_dtensor(tensor: object) -> bool:
    """Return whether a tensor is one of torch.distributed.tensor, of which this rank holds a part."""
    return type(tensor) is not Tensor and type(tensor) is not Parameter and hasattr(tensor, "device_mesh")


def check_whole(name: str, weight: Tensor, input: Tensor) -> None:
    """Refuse a head of which this rank holds a part, beside hidden states that do not say how they are spread.

    With FSDP2 each rank has tokens of its own, and the weight's gradient is a sum over all of them; under tensor
    parallelism all have the same. A plain tensor does not tell which.

    Raises:
        ArgumentTypeError: A DTensor beside a plain tensor.
    """
    if is_dtensor(weight) and not is_dtensor(input):
        mesh: Any = weight
        got = f"a DTensor {mesh.placements} on {mesh.device_mesh}"
        hint = (
            "Where fully_shard shards it: use it inside the forward of the module that was sharded, or gather that"
            " unit first with .unshard(). full_tensor() would give wrong gradients in silence. Where the vocabulary"
            " is sharded for tensor parallelism: make input a DTensor on the same mesh, Replicate() or Shard of an"
            " axis of tokens."
        )
        raise ArgumentTypeError(message(name, "a plain tensor, as input is", got, hint))


def operand_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype in which autocast, where it is on, would multiply ``tensor``."""
    kind = tensor.device.type
    if tensor.dtype != torch.float64 and kind != "meta" and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return tensor.dtype


def check_target(input: Tensor, target: Tensor, linear_weight: Tensor | None = None, *, several: bool = False) -> None:
    """Check class indices [...] against hidden states [..., D]; with ``several`` also [..., K], K of them a token.

    Where they fit ``linear_weight``, as if that were the hidden states, the error says so.

    Raises:
        ArgumentTypeError: Not integers.
        ArgumentValueError: Another shape or device.
    """
    check_tensor("target", target)
    if target.is_floating_point() or target.is_complex():
        expected = f"class indices, an integer tensor of shape {list(input.shape[:-1])}"
        hint = (
            "For class probabilities use lowtide.linear_apply with your own function of the logits,"
            " or lowtide.linear_divergence with a teacher."
        )
        raise ArgumentTypeError(message("target", expected, f"{target.dtype} of shape {_shape(target)}", hint))
    if target.dtype == torch.bool:
        raise ArgumentTypeError(message("target", "class indices, an integer tensor", "torch.bool"))
    if several and target.dim() == input.dim():
        if target.shape[:-1] != input.shape[:-1] or target.shape[-1] == 0:
            leading = ", ".join(map(str, input.shape[:-1]))
            expected = f"shape [{leading}] or [{leading}{', ' if leading else ''}K] with K above 0"
            expected = f"{expected}, as input is {_shape(input)}"
            raise ArgumentValueError(message("target", expected, _shape(target), _swapped_for(linear_weight, target)))
        check_device("target", target, input)
    else:
        check_per_token("target", target, input, linear_weight)


def _swapped_for(linear_weight: Tensor | None, target: Tensor) -> str:
    fits = linear_weight is not None and target.dim() > 0 and target.shape[0] == linear_weight.shape[0]
    return _swapped() if fits else ""


def check_per_token(name: str, value: Tensor, input: Tensor, linear_weight: Tensor | None = None) -> None:
    """Check a tensor [...] with one value for each of the hidden states [..., D].

    Where it fits ``linear_weight``, as if that were the hidden states, the error says so.

    Raises:
        ArgumentTypeError: Not real numbers.
        ArgumentValueError: Another shape or device.
    """
    if check_real(name, value).shape != input.shape[:-1]:
        expected = f"shape {list(input.shape[:-1])}, as input is {_shape(input)}"
        raise ArgumentValueError(message(name, expected, _shape(value), _swapped_for(linear_weight, value)))
    check_device(name, value, input)


def check_device(name: str, value: Tensor, input: Tensor) -> None:
    """Check that a tensor is where the hidden states are.

    Raises:
        ArgumentValueError: It is not.
    """
    if value.device != input.device:
        raise ArgumentValueError(message(name, f"a tensor on {input.device}, as input is", str(value.device)))


def check_number(name: str, value: object, low: float, high: float, *, above: bool = False) -> float:
    """Return ``value``, a number from ``low`` to ``high``, with ``above`` strictly between them.

    Raises:
        ArgumentTypeError: Not a number.
        ArgumentValueError: Outside the range, or NaN.
    """
    if not _is_number(value):
        raise ArgumentTypeError(message(name, "a number", f"{value!r}"))
    if not (low < value < high if above else low <= value <= high):
        range_ = f"a finite number above {low}" if above else f"a number from {low} to {high}"
        raise ArgumentValueError(message(name, range_, f"{value!r}"))
    return _storable(name, value)


def check_index(name: str, value: object) -> int:
    """Return ``value`` as an int that int64 holds.

    Raises:
        ArgumentTypeError: Not an integer.
        ArgumentValueError: Too large.
    """
    if isinstance(value, torch.SymInt):
        return value  # type: ignore[return-value]
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ArgumentTypeError(message(name, "an int", f"{value!r}"))
    index = int(value)
    if not -(2**63) <= index < 2**63:
        raise ArgumentValueError(message(name, "an int of 64 bits", f"{value!r}"))
    return index


def scalar_tensor(name: str, value: object, dtype: torch.dtype) -> Tensor:
    """Return a number or a 0-d tensor as a 0-d tensor; a tensor is not inspected.

    Raises:
        ArgumentTypeError: Neither, or a tensor of no real number.
        ArgumentValueError: A tensor with axes.
    """
    if isinstance(value, Tensor):
        if check_real(name, value).dim() != 0:
            raise ArgumentValueError(message(name, "a number or a 0-d tensor", f"shape {_shape(value)}"))
        return value
    if not _is_number(value):
        raise ArgumentTypeError(message(name, "a number or a 0-d tensor", f"{value!r}"))
    # torch.compile follows a product where the number changes, not torch.full
    return torch.ones((), dtype=dtype) * _storable(name, value)


def check_reduction(reduction: str) -> None:
    """Check a reduction's name.

    Raises:
        ArgumentValueError: There is none of that name.
    """
    if reduction not in REDUCTIONS:
        raise ArgumentValueError(message("reduction", "'mean', 'sum' or 'none'", f"{reduction!r}"))


def num_items_tensor(num_items: float | Tensor | None, reduction: str) -> Tensor | None:
    """Return what a mean is divided by as a 0-d tensor that needs no gradient, None for None.

    Raises:
        ArgumentTypeError: Neither a number nor a tensor.
        ArgumentValueError: A number not above 0, a tensor with axes, or a reduction that divides by nothing.
    """
    if num_items is None:
        return None
    if reduction != "mean":
        raise ArgumentValueError(
            message("num_items", f"None with reduction={reduction!r}", f"{num_items!r}", "Only a mean is divided.")
        )
    if not isinstance(num_items, Tensor):
        check_number("num_items", num_items, 0, math.inf, above=True)
    return scalar_tensor("num_items", num_items, torch.float64).detach()


def softcap_number(name: str, softcap: object) -> float | None:
    """Return a soft cap, a finite number above 0, or None.

    Raises:
        ArgumentTypeError: Not a number.
        ArgumentValueError: Not finite and above 0.
    """
    return None if softcap is None else check_number(name, softcap, 0, math.inf, above=True)


def logit_scale_tensor(logit_scale: object) -> Tensor | None:
    """Return a logit scale as a 0-d tensor, or None for the number 1, which needs no multiplication."""
    if isinstance(logit_scale, int | float) and not isinstance(logit_scale, bool) and logit_scale == 1:
        return None
    return scalar_tensor("logit_scale", logit_scale, torch.float64)


def check_options(options: HeadOptions | None) -> HeadOptions:
    """Return the options, the defaults for None.

    Raises:
        ArgumentTypeError: Neither.
    """
    if options is not None and not isinstance(options, HeadOptions):
        raise ArgumentTypeError(message("options", "lowtide.HeadOptions or None", type(options).__name__))
    return options or HeadOptions()


def _storable(name: str, value: float) -> float:
    """Return a number as one that a tensor takes: an int beyond 64 bits as a float.

    Raises:
        ArgumentValueError: No float is as large.
    """
    symbolic: Any = (torch.SymFloat, torch.SymInt)
    if isinstance(value, (float, *symbolic)) or abs(value) < 2**63:
        return value
    try:
        return float(value)
    except OverflowError as error:
        raise ArgumentValueError(message(name, "a number that fits a float", "a larger one")) from error


def _is_number(value: object) -> TypeGuard[float]:
    """Return whether ``value`` is a real number; torch.compile hands over its own where one changes between calls."""
    return isinstance(value, Real | torch.SymFloat | torch.SymInt) and not isinstance(value, bool)


def refuse_transforms(
    function: str, *arguments: object, instead: str = NAIVE, way: str = "build the logits for this one"
) -> None:
    """Raise where ``function`` would be differentiated in a way that it has no formula for.

    Args:
        function: Its name.
        arguments: What it would differentiate; of these the tensors count.
        instead: The same by autograd's own derivatives.
        way: What to do for that, in words.

    Raises:
        UnsupportedError: Forward-mode derivatives, or a transform of torch.func.
    """
    forward_ad: Any = torch.autograd.forward_ad
    compiling = torch.compiler.is_compiling()  # its own use of torch.func cannot be told from the user's
    if not compiling and torch._C._functorch.peek_interpreter_stack() is not None:
        got = "a torch.func transform"
    elif forward_ad._current_level >= 0 and (
        compiling or any(isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None for x in arguments)
    ):
        got = "forward-mode derivatives"
    else:
        return
    hint = f"Call .backward() or torch.autograd.grad on its result, or {way}: {instead}."
    raise UnsupportedError(message(function, "reverse-mode autograd", got, hint))


def _shape(tensor: Tensor) -> str:
    return str(list(tensor.shape))


def detached(tensor: Tensor | None) -> Tensor | None:
    """Return a tensor without its graph, None for None."""
    return None if tensor is None else tensor.detach()
