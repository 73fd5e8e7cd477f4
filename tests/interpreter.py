"""Triton's interpreter, in which kernels run without a GPU, in a fraction of its time and with the same bits.

Before each call of a kernel, and of each function in it, it goes through all names of `triton.language` and replaces
the builtins among them, and puts them back afterwards: here they are replaced once a process. Each operation makes its
types anew and derives from them what follows from a type alone; but types are values, and one object stands for each
here, by which operands of one type, and numbers beside them, are recognised. For each integer it computes whether it
overflowed, and reads the answer in debug mode only.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock


def speed_up() -> None:
    """Spare the interpreter what it need not do again. What another version of Triton lacks is left alone.

    Nothing is changed where kernels are compiled, in which types belong to a builder.
    """
    if importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1":
        return
    import triton
    from triton.language import core, semantic
    from triton.runtime import interpreter

    replace_once(interpreter, (triton.language, core))
    wrap(interpreter, "_patch_attr", lambda patch: functools.partial(call_directly, interpreter, core))
    wrap(interpreter.TensorHandle, "__post_init__", lambda check: lambda self: None)
    share_types(core)
    once_a_type(interpreter, "_get_np_dtype")
    once_a_type(core.block_type, "with_element_ty")
    once_a_type(core.block_type, "to_ir")
    for kind in (core.dtype, core.pointer_type, core.block_type):
        wrap(kind, "__eq__", lambda equal: lambda self, other: self is other or equal(self, other))
    wrap(core.tensor, "__init__", make_tensor)
    wrap(semantic.TritonSemantic, "broadcast_impl_value", functools.partial(broadcast_in_numpy, core, interpreter))
    wrap(semantic.TritonSemantic, "computation_type_impl", functools.cache)
    wrap(semantic.TritonSemantic, "binary_op_type_checking_impl", functools.partial(recognise_operands, core))
    builder = interpreter.interpreter_builder
    options = getattr(builder, "options", None)
    if hasattr(options, "sanitize_overflow") and hasattr(options, "debug"):
        builder.options = dataclasses.replace(options, sanitize_overflow=options.debug)


def wrap(owner: Any, name: str, around: Callable[[Any], Any]) -> None:
    """Replace a function of a module or class by another around it, if it has one of that name of its own."""
    if name in vars(owner):
        setattr(owner, name, around(vars(owner)[name]))


def once_a_type(owner: Any, name: str) -> None:
    """Keep what a function of a type and of other lasting objects returns, with the type."""

    def around(function: Any) -> Any:
        def kept(of: Any, *args: Any) -> Any:
            known = vars(of).setdefault("_kept", {})
            key = (name, *map(id, args))
            if key not in known:
                known[key] = function(of, *args), args  # while they live, no other has their id
            return known[key][0]

        return kept

    wrap(owner, name, around)


def make_tensor(make: Any) -> Any:
    """All attributes of a tensor but its handle follow from its type, with which they are kept."""

    def make_from_type(self: Any, handle: Any, type: Any) -> None:
        attributes = vars(type).get("_of_tensor")
        if attributes is None:
            make(self, handle, type)
            vars(type)["_of_tensor"] = {name: value for name, value in vars(self).items() if name != "handle"}
        else:
            vars(self).update(attributes, handle=handle)

    return make_from_type


def share_types(core: Any) -> None:
    """One object for each type of blocks of numbers."""
    block_type, initialize = core.block_type, core.block_type.__init__
    known = dict[Any, Any]()

    def new(cls: Any, element_ty: Any = None, shape: Any = None) -> Any:
        made = object.__new__(cls)
        if type(element_ty) is core.dtype and isinstance(shape, (list, tuple, core.tuple)):
            return known.setdefault((element_ty.name, *shape), made)
        return made

    def initialize_once(self: Any, element_ty: Any, shape: Any) -> None:
        if not vars(self):
            initialize(self, element_ty, shape)

    block_type.__new__, block_type.__init__ = new, initialize_once


def broadcast_in_numpy(core: Any, interpreter: Any, broadcast: Any) -> Any:
    """Broadcast operands to the shape and the types that came of the first two of their types."""
    known = dict[Any, Any]()

    def broadcasted(self: Any, lhs: Any, rhs: Any) -> Any:
        if lhs.type is rhs.type:
            return lhs, rhs
        key = id(lhs.type), id(rhs.type)
        if key not in known:
            both = broadcast(self, lhs, rhs)
            if all(type(side.dtype) is core.dtype for side in both):
                known[key] = both[0].handle.data.shape, [side.type for side in both], (lhs.type, rhs.type)
            return both
        shape, types, _ = known[key]
        return tuple(
            side
            if side.type is of
            else core.tensor(
                interpreter.TensorHandle(interpreter.np.broadcast_to(side.handle.data, shape), side.handle.dtype), of
            )
            for side, of in zip((lhs, rhs), types, strict=True)
        )

    return broadcasted


def recognise_operands(core: Any, check: Any) -> Any:
    """Leave operands of one type as they are; a number beside a tensor becomes one constant for each type."""
    plain = {core.float32, core.int32, core.int64}
    known = dict[Any, Any]()

    def checked(self: Any, lhs: Any, rhs: Any, *args: Any, **kwargs: Any) -> Any:
        if type(lhs) is not core.tensor or type(lhs.dtype) is not core.dtype:
            return check(self, lhs, rhs, *args, **kwargs)
        if type(rhs) is core.tensor:
            same = lhs.type is rhs.type and lhs.dtype in plain
            return (lhs, rhs) if same else check(self, lhs, rhs, *args, **kwargs)
        if type(rhs) not in (int, float):
            return check(self, lhs, rhs, *args, **kwargs)
        number = rhs.hex() if type(rhs) is float else rhs  # which tells -0.0 from 0.0
        key = (id(lhs.type), number, args, *kwargs.items())
        if key not in known:
            cast, constant = check(self, lhs, rhs, *args, **kwargs)
            if cast is not lhs:
                return cast, constant
            known[key] = constant, lhs.type  # while it lives, no other has its id
        return lhs, known[key][0]

    return checked


def call_directly(interpreter: Any, core: Any, obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    """Replace a builtin by its function with the interpreter's argument, without a call for each of its decorators."""
    function, semantic = member, interpreter.interpreter_semantic
    while core.is_builtin(function) and hasattr(function, "__wrapped__"):
        function = function.__wrapped__

    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = semantic
        return function(*args, **kwargs)

    scope.set_attr(obj, name, call)


def replace_once(interpreter: Any, languages: tuple[Any, ...]) -> None:
    """Let the interpreter replace builtins once, for each language whose names its functions see."""
    seen = dict[int, set[int]]()
    replaced = set[int]()
    replace = interpreter._patch_lang

    class Kept:
        def restore(self) -> None: ...

    def replace_in(function: Any) -> Any:
        module = function.__globals__
        if id(module) not in seen:
            seen[id(module)] = {id(value) for value in module.values() if any(value is one for one in languages)}
        if not (seen[id(module)] and seen[id(module)] <= replaced):
            replaced.update(seen[id(module)])
            replace(function)
        return Kept()

    vars(interpreter)["_patch_lang"] = replace_in


@contextmanager
def uncompiled() -> Iterator[None]:
    """Leave what packages hand to torch.compile at import as it is: it would bring all of inductor, which takes 3 s."""
    import torch

    def compile(function: Any = None, **_: Any) -> Any:
        return (lambda function: function) if function is None else function

    with mock.patch.object(torch, "compile", compile):
        yield


def import_bitsandbytes() -> None:
    """Import it, where it is installed, before peft does, and without what it says of packages that are not."""
    if importlib.util.find_spec("bitsandbytes") is not None:
        logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
        with uncompiled():
            importlib.import_module("bitsandbytes")
