"""What the head's registered operators share: schemas, when to be an operator, scalars on devices, gradients, FLOP."""

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, get_type_hints

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from lowtide.head.gradients import Gradients

_SCHEMA_TYPES = {
    Tensor: "Tensor", Tensor | None: "Tensor?", torch.dtype: "ScalarType", str: "str", int: "SymInt",
    float: "float", float | None: "float?", bool: "bool", int | None: "SymInt?",
}  # fmt: skip


def schema_of(call: type) -> str:
    """Return the arguments of an operator that takes the fields of ``call``, a NamedTuple, in their order."""
    return ", ".join(f"{_SCHEMA_TYPES[hint]} {name}" for name, hint in get_type_hints(call).items())


def tensor_fields(call: type) -> tuple[int, ...]:
    """Return the places of the fields of ``call`` that hold tensors."""
    return tuple(i for i, hint in enumerate(get_type_hints(call).values()) if hint in (Tensor, Tensor | None))


def watched(args: Sequence[Any]) -> bool:
    """Return whether a compiler, a dispatch mode or a tensor without data has to see an operator."""
    if torch.compiler.is_compiling():
        return True
    if torch._C._len_torch_dispatch_stack() > 0:
        _tell_counters()
        return True
    for arg in args:
        kind = type(arg)
        if kind is Tensor or kind is Parameter:
            if arg.is_meta:
                return True
        elif isinstance(arg, Tensor):
            return True
    return False


_FLOP: dict[Any, Callable[..., int]] = {}


def flop_formula(name: str) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Return what registers a formula of the operator ``name`` of lowtide: its FLOP, from its arguments.

    The operator's own products are hidden from `torch.utils.flop_counter.FlopCounterMode`, whatever they run on.
    """

    def register(formula: Callable[..., int]) -> Callable[..., int]:
        _FLOP[getattr(torch.ops.lowtide, name)] = lambda *args, out_val=None: formula(*args)  # noqa: ARG005
        return formula

    return register


def _tell_counters() -> None:
    """Tell FlopCounterModes at work our formulas: they copied PyTorch's table, whose module is slow to import."""
    counting = sys.modules.get("torch.utils.flop_counter")
    if counting is None:
        return
    for mode in _get_current_dispatch_mode_stack():
        if isinstance(mode, counting._FlopCounterMode):
            table, addmm = mode.counter.flop_registry, torch.ops.aten.addmm
            for operator, formula in _FLOP.items():
                table.setdefault(operator, formula)
            if table.get(addmm) is counting.flop_registry[addmm]:
                table[addmm] = _flop_of_addmm


def _flop_of_addmm(_out: Tensor, a: Tensor, b: Tensor, *_args: Any, **_kwargs: Any) -> int:
    """Return what PyTorch's formula does, which takes no out_dtype: where we are no operator, it would be an error."""
    return 2 * a.numel() * b.shape[1]


def held_elsewhere() -> bool:
    """Return whether a compiler or a dispatch mode may hold on to what an operator returns: it must not be changed.

    Selective checkpointing keeps outputs; a mode with a true attribute ``holds_no_outputs`` says that it does not.
    """
    if torch.compiler.is_compiling():  # first: it cannot trace what follows
        return True
    return any(not getattr(mode, "holds_no_outputs", False) for mode in _get_current_dispatch_mode_stack())


def undisturbed(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which GEMMs keep the dtypes they are given, and kernels go to ``device``."""
    if torch._C._len_torch_dispatch_stack() > 0 and not torch.compiler.is_compiling():
        _tell_counters()
    # Without autocast none is turned off: that takes the host as long as a launch.
    return _without_autocast(device) if torch.is_autocast_enabled(device.type) else on_device(device)


@contextmanager
def _without_autocast(device: torch.device) -> Iterator[None]:
    with torch.autocast(device_type=device.type, enabled=False), on_device(device):
        yield


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which kernels go to ``device``; entered also where it is current, for autograd's threads."""
    return torch.cuda.device(device.index) if device.type == "cuda" else nullcontext()


def head_flop(input: Tensor, linear_weight: Tensor, wanted: Sequence[bool] = ()) -> int:
    """Return the FLOP of one product for the logits, and one for each gradient that is ``wanted`` of the two."""
    return 2 * (1 + sum(wanted[:2])) * math.prod(input.shape[:-1]) * linear_weight.numel()


Found = tuple[Tensor, Tensor, Tensor]  # gradients of input, weight and bias, empty where not wanted


def found_gradients(into: Gradients, input: Tensor, linear_weight: Tensor, wide: torch.dtype) -> Found:
    """Return what a backward operator does: gradients in the shapes and dtypes of what they belong to, bias's wide."""
    return (
        input.new_empty(0) if into.input_ND is None else into.input_ND.view(input.shape),
        linear_weight.new_empty(0) if into.weight_VD is None else into.weight_VD.to(linear_weight.dtype),
        input.new_empty(0, dtype=wide) if into.bias_V is None else into.bias_V,
    )


def fake_gradients(wanted: Sequence[bool], input: Tensor, linear_weight: Tensor, wide: torch.dtype) -> Found:
    """Return the same without numbers."""
    return (
        input.new_empty(input.shape if wanted[0] else 0),
        linear_weight.new_empty(linear_weight.shape if wanted[1] else 0),
        input.new_empty(linear_weight.shape[0] if wanted[2] else 0, dtype=wide),
    )


def wanted_gradients(found: Found, wanted: Sequence[bool], linear_bias: Tensor | None) -> list[Tensor | None]:
    """Return the gradients for autograd, the bias's in its own dtype, None where not wanted."""
    dx, dw, db = found
    in_dtype = db if linear_bias is None else db.to(linear_bias.dtype)
    return [grad if w else None for grad, w in zip((dx, dw, in_dtype), wanted, strict=True)]
