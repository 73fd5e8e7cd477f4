"""PyTorch's own functions, also those that a user replaced by assignment.

After ``torch.nn.functional.cross_entropy = mine``, PyTorch's own function, which ``mine`` calls, passes to
`__torch_function__` what it looks up under its name: ``mine``. Calling that would run ``mine`` a second time.
"""

import gc
import sys
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodDescriptorType, WrapperDescriptorType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, _jit_internal
from torch._C import TensorBase
from torch.overrides import handle_torch_function

# Functions written in C are no wrapper of a user's.
_OF_C = (MethodDescriptorType, WrapperDescriptorType, BuiltinFunctionType)
_OWNERS: tuple[Any, ...] = (F, torch.autograd, Tensor, torch)
# PyTorch's functions by their code, filled as they are looked up.
_by_code: dict[CodeType, Any] = {}


def asking(function: Any) -> Any:
    """Return PyTorch's function that passed ``function`` to the `__torch_function__` that calls this."""
    if isinstance(function, _OF_C):
        return function
    frame = sys._getframe(2)
    if frame.f_code is not handle_torch_function.__code__:  # by C, which looks its own name up in torch.Tensor
        return _of_c(function)
    caller = frame.f_back
    assert caller is not None
    if getattr(function, "__code__", None) is caller.f_code or not caller.f_globals["__name__"].startswith("torch."):
        return function
    # A function that PyTorch itself has in front of several, as max_pool1d, which is one of two.
    where = getattr(function, "__globals__", None)
    if where is caller.f_globals or where is vars(_jit_internal):
        return function
    return _of_code(caller.f_code, caller.f_globals)


def original(function: Any) -> Any:
    """Return PyTorch's function that ``function`` replaced; ``function`` itself if it replaced none."""
    for owner in () if isinstance(function, _OF_C) else _OWNERS:
        for name, value in vars(owner).items():
            if value is function:
                if is_defined_in(function, torch.functional, name):  # PyTorch's own, as torch.split
                    return function
                found = _defined_in(owner, name)
                if found is not None:
                    return _by_code.setdefault(found.__code__, found)
                return getattr(torch._C._VariableFunctions, name, function) if owner is torch else _of_c(function)
    return function


def is_defined_in(function: Any, module: Any, qualname: str) -> bool:
    """Whether a function is the one that the source of ``module`` defines as ``qualname``."""
    if type(function) is not FunctionType or function.__globals__ is not vars(module):
        return False
    return function.__code__.co_qualname == qualname


def _defined_in(owner: Any, name: str) -> Any:
    """Return the function that the source of a module, or of torch.Tensor, defines under a name, None if none."""
    module, qualname = (torch._tensor, f"Tensor.{name}") if owner is Tensor else (owner, name)
    found = vars(owner)[name]
    if is_defined_in(found, module, qualname):
        return found
    # gc.freeze() hides some, which the wrapper, and the wrapper inside it, can call.
    seen: list[Any] = [found]
    for function in seen:
        seen += [x for x in _held(function) if callable(x) and not any(x is other for other in seen)]
    return next((x for x in (*seen, *gc.get_objects()) if is_defined_in(x, module, qualname)), None)


def _held(function: Any) -> list[Any]:
    """Return what a function of Python holds: in its closure, as defaults, and by the global names in its code."""
    if type(function) is not FunctionType or function.__globals__["__name__"].startswith("torch."):
        return []
    cells = [cell.cell_contents for cell in function.__closure__ or () if cell != CellType()]
    names = [function.__globals__.get(name) for name in function.__code__.co_names]
    return [*cells, *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values(), *names]


def _of_c(function: Any) -> Any:
    """Return the C method, or getter, that ``function`` replaces in torch.Tensor; itself if it replaces none."""
    for name, value in vars(Tensor).items():
        of_c = vars(TensorBase).get(name)
        if of_c is not None and value is function:
            return of_c
        if of_c is not None and type(value) is property and value.__get__ == function:
            return of_c.__get__
    return function


def _of_code(code: CodeType, namespace: dict[str, Any]) -> Any:
    """Return the function of a module that has this code."""
    if code not in _by_code:
        found = [x for x in gc.get_referrers(code) if type(x) is FunctionType and x.__code__ is code]
        # None that gc.freeze() hid: its defaults are not needed, for it passes all of its arguments on.
        _by_code[code] = found[0] if found else FunctionType(code, namespace)
    return _by_code[code]
