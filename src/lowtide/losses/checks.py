"""What every loss checks before it computes, and how log-probabilities and masks are made ready."""

import math

import torch
from torch import Tensor

from lowtide.arguments import check_number, check_tensor
from lowtide.errors import ArgumentTypeError, ArgumentValueError, message

LARGEST_EXPONENT = 80.0  # exp(80) = 5.5e34: finite in float32 even after a sum over a batch or a product with rewards


def check_floats(name: str, value: object) -> Tensor:
    """Return a floating-point tensor in float32, or in float64 if it is."""
    tensor = check_tensor(name, value)
    if not tensor.is_floating_point():
        raise ArgumentTypeError(message(name, "a floating-point tensor", str(tensor.dtype)))
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def check_alike(**values: object) -> list[Tensor]:
    """Return tensors, given by name, in float32 or float64, all of the first one's shape and on its device."""
    (like_name, like), *others = values.items()
    like = check_floats(like_name, like)
    return [like, *(check_like(name, value, like_name, like) for name, value in others)]


def check_tokens(**values: object) -> list[Tensor]:
    """Return values of tokens [..., T], given by name, as `check_alike` does."""
    first, *others = check_alike(**values)
    if first.dim() == 0:
        expected = "shape [..., T], the last axis being a sequence's tokens"
        raise ArgumentValueError(message(next(iter(values)), expected, "no axes"))
    return [first, *others]


def check_like(name: str, value: object, like_name: str, like: Tensor) -> Tensor:
    """Return ``value`` in float32 or float64, of the shape and on the device of ``like``; no broadcasting."""
    return check_place(name, check_floats(name, value), like_name, like)


def check_place(name: str, value: Tensor, like_name: str, like: Tensor) -> Tensor:
    """Return ``value`` if it has the shape and the device of ``like``."""
    if value.shape != like.shape:
        expected = f"shape {list(like.shape)}, as {like_name} has"
        raise ArgumentValueError(message(name, expected, f"shape {list(value.shape)}"))
    if value.device != like.device:
        raise ArgumentValueError(message(name, f"a tensor on {like.device}, as {like_name} is", f"{value.device}"))
    return value


def check_mask(mask: object, like_name: str, like: Tensor) -> Tensor:
    """Return ``mask`` as bool, True where a token counts; all of them where it is None."""
    return torch.ones_like(like, dtype=torch.bool) if mask is None else check_bool("mask", mask, like_name, like)


def check_bool(name: str, value: object, like_name: str, like: Tensor) -> Tensor:
    """Return a bool tensor of the shape and on the device of ``like``; integers are True where they are not 0."""
    tensor = check_tensor(name, value)
    if tensor.is_floating_point() or tensor.is_complex():
        hint = f"Write {name} != 0; to weigh tokens, multiply the values."
        raise ArgumentTypeError(message(name, "a bool or integer tensor", str(tensor.dtype), hint))
    check_place(name, tensor, like_name, like)
    return tensor if tensor.dtype == torch.bool else tensor != 0


def check_valid(mask: object, **values: object) -> list[Tensor]:
    """Return the mask as bool, and values of tokens [..., T] as `check_tokens` does, 0 where masked."""
    tensors = check_tokens(**values)
    keep = check_mask(mask, next(iter(values)), tensors[0])
    return [keep, *(tensor.where(keep, 0) for tensor in tensors)]


def check_positive(name: str, value: object) -> float:
    """Return a finite number above 0."""
    return check_number(name, value, 0, math.inf, above=True)


def check_not_negative(name: str, value: object) -> float:
    """Return a finite number, 0 or above."""
    if (number := check_number(name, value, 0, math.inf)) == math.inf:
        raise ArgumentValueError(message(name, "a finite number, 0 or above", f"{value!r}"))
    return number


def bounded_exp(x: Tensor) -> Tensor:
    """Return exp(x), held at exp(80) above x = 80, where the gradient is 0.

    exp overflows float32 at 88.7, and the gradient of what min and clamp then leave out would be 0 * inf = NaN.
    """
    return x.clamp(max=LARGEST_EXPONENT).exp()


def bounded_expm1(x: Tensor) -> Tensor:
    """Return exp(x) - 1, exact for small x, held as `bounded_exp` holds it."""
    return x.clamp(max=LARGEST_EXPONENT).expm1()
