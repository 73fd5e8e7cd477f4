"""Run a function in its own process, where its peak memory is its own too."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lowtide.errors import ArgumentValueError, message

_ALLOCATOR_NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # the second is the older one, read second


def allocator_setting() -> str:
    """Return the CUDA allocator's configuration in this process's environment; empty: none."""
    return next((os.environ[name] for name in _ALLOCATOR_NAMES if name in os.environ), "")


def allocator() -> dict[str, str]:
    """Return a configuration for children, where fragmentation would decide what fits, unless this process has one."""
    return {} if allocator_setting() else {_ALLOCATOR_NAMES[-1]: "expandable_segments:True"}


@dataclass(frozen=True, kw_only=True)
class ChildResult:
    """How a child process ended."""

    returncode: int  # negative: the signal that killed it
    value: Any = None  # what the function returned
    stderr: str = ""  # empty if it was not captured

    @property
    def failure(self) -> str:
        """How a process that returned nothing ended, in a line."""
        last = (self.stderr.strip().splitlines() or [""])[-1][:200]
        killed = ", as the system kills one that takes too much host memory" if self.returncode == -9 else ""
        return f"the process ended with status {self.returncode}{killed}: {last}".removesuffix(": ")


def run_child(
    function: Callable[..., Any], *args: Any, capture: bool = True, env: Mapping[str, str] | None = None
) -> ChildResult:
    """Call a function in a fresh interpreter and return its value; arguments and value are passed as JSON.

    ``env`` is set on top of this process's variables. Without ``capture`` it writes to this process's terminal.

    Raises:
        ArgumentValueError: The function cannot be imported by its module and name: a lambda, a local function, one of
            ``__main__``.
    """
    module, name = function.__module__, function.__qualname__
    if module == "__main__" or "<" in name:
        raise ArgumentValueError(message("function", "a function that can be imported", f"{module}.{name}"))
    with tempfile.TemporaryDirectory(prefix="lowtide-child-") as folder:
        answer = Path(folder) / "answer.json"
        call = json.dumps({"module": module, "name": name, "path": sys.path, "answer": str(answer), "args": args})
        command = [sys.executable, "-c", "from lowtide.measure.child import _call_here; _call_here()"]
        environment = {**os.environ, **(env or {}), "LOWTIDE_CHILD": call}
        ended = subprocess.run(command, env=environment, capture_output=capture, text=True, errors="replace")
        value = json.loads(answer.read_text()) if ended.returncode == 0 and answer.exists() else None
        return ChildResult(returncode=ended.returncode, value=value, stderr=ended.stderr or "")


def _call_here() -> None:
    """The child's side of `run_child`."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C reaches the whole group: end without a traceback
    call = json.loads(os.environ.pop("LOWTIDE_CHILD"))
    sys.path[:] = call["path"]
    value = getattr(importlib.import_module(call["module"]), call["name"])(*call["args"])
    Path(call["answer"]).write_text(json.dumps(value))
