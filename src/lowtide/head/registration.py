"""What the head's registered operators share: schemas from annotations, when to be an operator, scalars on devices."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, get_type_hints

import torch
from torch import Tensor

_SCHEMA_TYPES = {
    Tensor: "Tensor", Tensor | None: "Tensor?", torch.dtype: "ScalarType", str: "str", int: "SymInt",
    float: "float", float | None: "float?", bool: "bool",
}  # fmt: skip


def schema_of(call: type) -> str:
    """Return the arguments of an operator that takes the fields of ``call``, a NamedTuple, in their order."""
    return ", ".join(f"{_SCHEMA_TYPES[hint]} {name}" for name, hint in get_type_hints(call).items())


def tensor_fields(call: type) -> tuple[int, ...]:
    """Return the places of the fields of ``call`` that hold tensors."""
    return tuple(i for i, hint in enumerate(get_type_hints(call).values()) if hint in (Tensor, Tensor | None))


def watched(args: Sequence[Any]) -> bool:
    """Return whether a compiler, a dispatch mode or a tensor without data has to see an operator."""
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or any(_is_unusual(arg) for arg in args if isinstance(arg, Tensor))
    )


def _is_unusual(tensor: Tensor) -> bool:
    return tensor.is_meta or type(tensor) not in (Tensor, torch.nn.Parameter)


def scalar_on(device: torch.device, scalar: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a 0-d tensor on ``device``: a number that lies on the host is filled in, for a copy would wait."""
    if scalar.device.type == "cpu":
        return torch.full((), scalar.item(), dtype=dtype, device=device)
    return scalar.to(device, dtype)


@contextmanager
def undisturbed(device: torch.device) -> Iterator[None]:
    """Enter a context in which GEMMs keep the dtypes they are given, and kernels go to ``device``."""
    with (
        torch.autocast(device_type=device.type, enabled=False),
        torch.cuda.device(device) if device.type == "cuda" else nullcontext(),
    ):
        yield
