"""Triton's interpreter, in which kernels run without a GPU, in two thirds of its time.

Before each call of a kernel, and of each function in it, it goes through all names of `triton.language` and replaces
the builtins among them. Within one kernel the second time changes nothing.
"""

from __future__ import annotations

import importlib.util
from typing import Any


def replace_once() -> None:
    """Let the interpreter replace builtins once a kernel, for each module whose functions the kernel calls."""
    if importlib.util.find_spec("triton") is None:
        return
    from triton.runtime import interpreter

    replaced = set[int]()
    replace, run = interpreter._patch_lang, interpreter.GridExecutor.__call__

    def replace_in(function: Any) -> Any:
        module = id(function.__globals__)
        if module in replaced:
            return None
        replaced.add(module)
        return replace(function)

    def run_kernel(self: Any, *args: Any, **kwargs: Any) -> None:
        replaced.clear()
        try:
            run(self, *args, **kwargs)
        finally:
            replaced.clear()

    vars(interpreter)["_patch_lang"] = replace_in
    interpreter.GridExecutor.__call__ = run_kernel
