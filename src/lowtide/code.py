"""What a module's code consists of: its forward, the functions that it calls, and every name that they look up.

Code that ran once, in a probe or a forward, may be replaced later by assignment: a forward set on a class, a function
set in a module, ``torch.nn.functional.silu`` wrapped. `Code` records the value of each name, and checks in a few
microseconds whether it is still the same.
"""

import _random
import builtins
import functools
from collections.abc import Callable, Iterable, Iterator
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

# Where a module keeps the hooks that run with its calls.
MODULE_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

_MISSING = object()
_Entry = tuple[Any, str, Any]  # owner, name, value


class Code:
    """The current values of all names that some classes of modules and some functions use.

    Functions and the classes' methods are followed; PyTorch's functions and ours are compared by identity.

    Args:
        classes: Module classes: their ``forward``, and the methods and properties that it uses.
        functions: Further functions.
        shallow: Functions whose globals are compared, without following these.
        attributes: Further attributes, each a class and a name.
        names: Further names, each with its module.
    """

    def __init__(
        self,
        classes: Iterable[type],
        functions: Iterable[Any] = (),
        shallow: Iterable[FunctionType] = (),
        attributes: Iterable[tuple[Any, str]] = (),
        names: Iterable[tuple[ModuleType, str]] = (),
    ) -> None:
        self._items: list[_Entry] = []  # in dictionaries: globals, and names in modules
        self._attributes: list[_Entry] = []  # of classes and functions
        self._seen: set[Any] = set()
        self.modules: set[str] = set()  # the names of those that are among the globals
        self.names: set[str] = set()  # that methods of the classes use: the attributes of an instance among them
        for owner, name in ((nn.Module, "__call__"), (nn.Module, "_call_impl"), *attributes):
            self._attribute(owner, name)
        for module, name in names:
            self._item(vars(module), name)
        for kind in classes:
            self._follow_class(kind)
        for function in functions:
            self._follow(function, frozenset())
        for function in shallow:
            self._attribute(function, "__code__")
            for name in sorted(names_of(function.__code__)):
                self._global(function, name)
        del self._seen

        def traced() -> str | None:
            return self._exchanged()

        traced._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as torch._dynamo.assume_constant_result
        self._traced = traced

    def exchanged(self) -> str | None:
        """Return the name of something that was replaced, None if nothing was. Under a compiler: when it is traced."""
        return self._traced() if torch.compiler.is_compiling() else self._exchanged()

    def _exchanged(self) -> str | None:
        for owner, name, value in self._items:
            now = owner.get(name, _MISSING)
            if now is not value and _stock_of(now) is not _stock_of(value):
                return f"{owner.get('__name__', '')}.{name}".lstrip(".")
        for owner, name, value in self._attributes:
            if getattr(owner, name, _MISSING) is not value:
                return f"{owner.__module__}.{owner.__qualname__}.{name}"
        return None

    def _item(self, namespace: dict[str, Any], name: str) -> Any:
        value = namespace.get(name, _MISSING)
        if (id(namespace), name) not in self._seen:
            self._seen.add((id(namespace), name))
            self._items.append((namespace, name, value))
        return value

    def _global(self, function: FunctionType, name: str) -> Any:
        """Return what a function would find under a name, which may be an attribute's and no global's."""
        known = name in function.__globals__ or name in vars(builtins)
        return self._item(function.__globals__, name) if known else None

    def _attribute(self, owner: Any, name: str) -> Any:
        value = getattr(owner, name, _MISSING)
        if (id(owner), name) not in self._seen and getattr(owner, name, _MISSING) is value:  # no new object each time
            self._seen.add((id(owner), name))
            self._attributes.append((owner, name, value))
        return value

    def _follow_class(self, kind: Any) -> None:
        if kind in self._seen:
            return
        self._seen.add(kind)
        self._attribute(kind, "__call__")
        self._function(self._attribute(kind, "forward"), kind)

    def _follow(self, value: Any, names: frozenset[str]) -> None:
        """Follow the value of a name: a module's or a class's attributes of these names, or a function's code."""
        if isinstance(getattr(value, "__self__", None), _random.Random):  # from random import random
            self.modules.add("random")
        if isinstance(value, ModuleType):
            self.modules.add(value.__name__)
            for name in names:
                key = (id(value), name, names)
                if name in vars(value) and key not in self._seen:  # modules name each other in circles
                    self._seen.add(key)
                    self._follow(self._item(vars(value), name), names)
        elif isinstance(value, functools.partial):
            self._follow(value.func, names)
        elif isinstance(value, MethodType):
            self._function(value.__func__, None)
        elif isinstance(value, FunctionType):
            self._function(value, None)
        elif isinstance(value, type):
            for name in names:
                if not name.startswith("__") and isinstance(getattr(value, name, None), FunctionType):
                    self._function(self._attribute(value, name), None)

    def _function(self, function: Any, kind: Any) -> None:
        """Record a function's names; for a method, or property, of ``kind`` the names are looked up there too."""
        if isinstance(function, property):
            function = function.fget
        if not isinstance(function, FunctionType) or (function, kind) in self._seen:
            return
        self._seen.add((function, kind))
        self._attribute(function, "__code__")
        if _is_left(function) and (kind is None or function.__module__.startswith("lowtide")):
            return
        names = names_of(function.__code__)
        for cell in function.__closure__ or ():
            content = _content(cell)
            if isinstance(content, FunctionType | MethodType | functools.partial):
                self._follow(content, names)
        for name in sorted(names):
            self._follow(self._global(function, name), names)
            if hasattr(torch.Tensor, name):
                self._attribute(torch.Tensor, name)
            if kind is not None and hasattr(kind, name):
                value = self._attribute(kind, name)
                if not (isinstance(value, FunctionType) and _is_left(value)):
                    self._function(value, kind)
        if kind is not None:
            self.names |= names


@functools.cache
def names_of(code: CodeType) -> frozenset[str]:
    """Return every name that code, and code inside it, looks up: globals and attributes."""
    inner = (names_of(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return frozenset(code.co_names).union(*inner)


def settings(value: Any, names: Iterable[str]) -> tuple[tuple[str, Any], ...]:
    """Return the instance attributes of an object that have these names, in a form that can be hashed and compared.

    Submodules, parameters, buffers and ``training`` are left out.
    """
    return tuple(_settings(vars(value), names))


def _settings(own: dict[str, Any], names: Iterable[str]) -> Iterator[tuple[str, Any]]:
    for name in names:
        if name in own and name != "training":
            yield name, _frozen(own[name], names)


def functions_in(frozen: Any) -> Iterator[Any]:
    """Return the functions in what `settings` returned."""
    if isinstance(frozen, FunctionType):
        yield frozen
    elif isinstance(frozen, tuple):
        for part in frozen:
            yield from functions_in(part)


_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, type)


def _frozen(value: Any, names: Iterable[str]) -> Any:
    if isinstance(value, (*_PLAIN, FunctionType, BuiltinFunctionType)):
        return value
    if isinstance(value, tuple | list):
        return tuple(_frozen(one, ()) for one in value)
    if isinstance(value, functools.partial):
        return (
            _frozen(value.func, ()),
            _frozen(value.args, ()),
            tuple(_frozen(one, ()) for one in value.keywords.items()),
        )
    if isinstance(value, MethodType):
        return value.__func__
    if hasattr(value, "__dict__") and not isinstance(value, torch.Tensor | nn.Module):  # a config
        return type(value), settings(value, names)
    return type(value)


def _stock_of(function: Any) -> Any:
    """Return a function; for ZeRO-3's permanent replacement of ``torch.nn.functional.linear`` PyTorch's own."""
    return torch._C._nn.linear if getattr(function, "__module__", "") == "deepspeed.runtime.zero.linear" else function


def _is_left(function: FunctionType) -> bool:
    """Whether a function is compared but not followed: PyTorch's and our own."""
    return (function.__module__ or "").partition(".")[0] in ("torch", "lowtide")


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty yet
        return None


def code_and_words(fn: Callable[..., Any]) -> Any:
    """Return what tells functions apart that do different things: code, and the words that it closes over.

    Not the function itself: one that is made anew for each step is the same to us, and must not be kept alive.
    """
    if isinstance(fn, functools.partial):
        return code_and_words(fn.func), tuple(map(_word, fn.args)), tuple((k, _word(v)) for k, v in fn.keywords.items())
    if isinstance(fn, MethodType):
        return code_and_words(fn.__func__), type(fn.__self__)
    if isinstance(fn, FunctionType):
        cells = [cell for cell in fn.__closure__ or () if cell != CellType()]  # others are not filled yet
        return fn.__code__, tuple(map(_word, fn.__defaults__ or ())), tuple(_word(cell.cell_contents) for cell in cells)
    return type(fn)


def _word(value: object) -> Any:
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, FunctionType):
        return value.__code__  # no deeper: a function may close over itself
    return type(value)
