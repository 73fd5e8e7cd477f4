"""Triton's interpreter, in which kernels run without a GPU, in two fifths of its time and with the same bits.

Before each call of a kernel, and of each function in it, it goes through all names of `triton.language` and replaces
the builtins among them: within one kernel, the second time changes nothing. Each operation makes its types anew and
derives from them what follows from a type alone; but types are values, and one object stands for each here. For each
integer it computes whether it overflowed, and reads the answer in debug mode only.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from collections.abc import Callable
from typing import Any


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
    share_types(core)
    once_a_type(interpreter, "_get_np_dtype")
    once_a_type(core.block_type, "with_element_ty")
    once_a_type(core.block_type, "to_ir")
    for kind in (core.dtype, core.pointer_type, core.block_type):
        wrap(kind, "__eq__", lambda equal: lambda self, other: self is other or equal(self, other))
    wrap(core.tensor, "__init__", make_tensor)
    wrap(
        semantic.TritonSemantic,
        "broadcast_impl_value",
        lambda broadcast: lambda self, lhs, rhs: (lhs, rhs) if lhs.type is rhs.type else broadcast(self, lhs, rhs),
    )
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


def replace_once(interpreter: Any, languages: tuple[Any, ...]) -> None:
    """Let the interpreter replace builtins once a kernel, for each language whose names its functions see."""
    seen = dict[int, set[int]]()
    replaced = set[int]()
    replace, run = interpreter._patch_lang, interpreter.GridExecutor.__call__

    def replace_in(function: Any) -> Any:
        module = function.__globals__
        if id(module) not in seen:
            seen[id(module)] = {id(value) for value in module.values() if any(value is one for one in languages)}
        if seen[id(module)] and seen[id(module)] <= replaced:
            return None
        replaced.update(seen[id(module)])
        return replace(function)

    def run_kernel(self: Any, *args: Any, **kwargs: Any) -> None:
        replaced.clear()
        try:
            run(self, *args, **kwargs)
        finally:
            replaced.clear()

    vars(interpreter)["_patch_lang"] = replace_in
    interpreter.GridExecutor.__call__ = run_kernel
