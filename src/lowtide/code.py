"""The code of a module: its forward, the functions that it calls, and every name that they look up.

Code that ran once, in a probe or a forward, can be replaced later by assignment: a forward on a class, a function in a
module, ``torch.nn.functional.silu`` wrapped. `Code` records the value of each name, and compares them in microseconds.
"""

import _random
import builtins
import functools
from collections.abc import Callable, Iterable, Iterator
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

# The attributes of a module with the hooks that run with its calls.
MODULE_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

_MISSING = object()
_Entry = tuple[Any, str, Any]  # owner, name, value


class Code:
    """The current values of all names that some module classes and some functions use.

    It follows functions, and of module classes their ``forward`` and the methods and properties that it uses; PyTorch's
    functions and ours are compared by identity. Of ``shallow`` functions the globals are compared, but not followed.
    """

    def __init__(
        self,
        classes: Iterable[type],
        functions: Iterable[Any] = (),
        shallow: Iterable[FunctionType] = (),
        attributes: Iterable[tuple[Any, str]] = (),
        names: Iterable[tuple[ModuleType | dict[Any, Any], Any]] = (),
    ) -> None:
        self._items: list[_Entry] = []  # in dictionaries: globals, names in modules, entries of tables
        self._attributes: list[_Entry] = []  # of classes and functions
        self._seen: set[Any] = set()
        self.modules: set[str] = set()  # names of modules among the globals
        self.names: set[str] = set()  # names in the classes' methods, attributes of the instance included
        for owner, name in ((nn.Module, "__call__"), (nn.Module, "_call_impl"), *attributes):
            self._attribute(owner, name)
        for module, name in names:
            self._item(module if isinstance(module, dict) else vars(module), name)
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
        """Return the name of something that was replaced, or None. Under a compiler: as of tracing."""
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
        """Return a function's global of that name; None if there is none, as for an attribute's name."""
        known = name in function.__globals__ or name in vars(builtins)
        return self._item(function.__globals__, name) if known else None

    def _attribute(self, owner: Any, name: str) -> Any:
        value = getattr(owner, name, _MISSING)
        again = getattr(owner, name, _MISSING)
        if (id(owner), name) not in self._seen and again is value:  # the same object at each look-up
            self._seen.add((id(owner), name))
            self._attributes.append((owner, name, value))
        return value

    def _follow_class(self, kind: Any) -> None:
        if kind in self._seen:
            return
        self._seen.add(kind)
        self._attribute(kind, "__call__")
        for value in self._definitions(kind, "forward"):
            self._function(value, kind)

    def _definitions(self, kind: Any, name: str) -> list[Any]:
        """Return a method or property of a class, and those of its bases that it overrides and may call."""
        self._attribute(kind, name)
        bases = (base for base in kind.__mro__ if name in vars(base) and base not in (nn.Module, object))
        return [self._attribute(base, name) for base in bases]

    def _follow(self, value: Any, names: frozenset[str]) -> None:
        """Follow the value of a name: a module's or class's attributes that are in ``names``, or a function's code."""
        if isinstance(getattr(value, "__self__", None), _random.Random):  # from random import random
            self.modules.add("random")
        if isinstance(value, ModuleType):
            self.modules.add(value.__name__)
            for name in names:
                key = (id(value), name, names)
                if name in vars(value) and key not in self._seen:  # modules refer to each other in circles
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
        """Record a function's names; those in a method or property of ``kind`` are looked up there too."""
        if isinstance(function, property):
            function = function.fget
        if not isinstance(function, FunctionType) or (function, kind) in self._seen:
            return
        self._seen.add((function, kind))
        self._attribute(function, "__code__")
        if _is_left(function) and (kind is None or function.__module__.startswith("lowtide")):
            return
        names = names_of(function.__code__)
        for content in _closed_over(function):
            if isinstance(content, FunctionType | MethodType | functools.partial):
                self._follow(content, names)
        for name in sorted(names):
            self._follow(self._global(function, name), names)
            if hasattr(torch.Tensor, name):
                self._attribute(torch.Tensor, name)
            if kind is not None and hasattr(kind, name):
                for value in self._definitions(kind, name):
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
    own = vars(value)
    return tuple((name, _frozen(own[name], names)) for name in names if name in own and name != "training")


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
    """Return whether a function is compared but not followed: PyTorch's and our own."""
    return (function.__module__ or "").partition(".")[0] in ("torch", "lowtide")


def _closed_over(function: FunctionType) -> list[Any]:
    """Return the values that a function closes over, without cells that are still empty."""
    return [cell.cell_contents for cell in function.__closure__ or () if cell != CellType()]


def code_and_words(fn: Callable[..., Any]) -> Any:
    """Return a key that differs between functions that do different things: code, and the strings it closes over.

    Not the function itself: one that is recreated for each step has the same key, and must not be kept alive.
    """
    if isinstance(fn, functools.partial):
        return code_and_words(fn.func), tuple(map(_word, fn.args)), tuple((k, _word(v)) for k, v in fn.keywords.items())
    if isinstance(fn, MethodType):
        return code_and_words(fn.__func__), type(fn.__self__)
    if isinstance(fn, FunctionType):
        return fn.__code__, tuple(map(_word, fn.__defaults__ or ())), tuple(map(_word, _closed_over(fn)))
    return type(fn)


def _word(value: object) -> Any:
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, FunctionType):
        return value.__code__  # not its closure: a function may close over itself
    return type(value)
