"""Run a function or a command in its own process, where its peak memory is its own too."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lowtide.errors import ArgumentValueError, message
from lowtide.measure.resident import peak_resident_bytes

_ALLOCATOR_NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # the second is the older one, read second


def allocator_setting() -> str:
    """Return the CUDA allocator's configuration in this process's environment; empty: none."""
    return next((os.environ[name] for name in _ALLOCATOR_NAMES if name in os.environ), "")


def allocator_of_children() -> dict[str, str]:
    """Return the configuration for children, where fragmentation would decide what fits; none if this process has its
    own.
    """
    return {} if allocator_setting() else {_ALLOCATOR_NAMES[-1]: "expandable_segments:True"}


ALLOCATOR = allocator_of_children()
_CALL = "from lowtide.measure.child import _call_here; _call_here()"


@dataclass(frozen=True, kw_only=True)
class ChildResult:
    """How a child process ended."""

    returncode: int  # negative: the signal that killed it
    seconds: float  # the interpreter's start included
    peak_bytes: int = 0  # resident; 0 of a command
    value: Any = None  # what the function returned; None for a command
    stdout: str = ""  # empty if it was not captured
    stderr: str = ""

    @property
    def failure(self) -> str:
        """How a process that returned nothing ended, in a line."""
        last = (self.stderr.strip().splitlines() or [""])[-1][:200]
        killed = ", as the system kills one that takes too much host memory" if self.returncode == -9 else ""
        return f"the process ended with status {self.returncode}{killed}: {last}".removesuffix(": ")


def run_command(command: Sequence[str], *, env: Mapping[str, str] | None = None, capture: bool = True) -> ChildResult:
    """Run a command, without a shell, to its end and return its exit status, seconds and output.

    ``env`` is set on top of this process's variables. Without ``capture`` it writes to this process's terminal.
    """
    start, environment = time.perf_counter(), {**os.environ, **(env or {})}
    ended = subprocess.run(command, env=environment, capture_output=capture, text=True, errors="replace", check=False)
    seconds = time.perf_counter() - start
    return ChildResult(
        returncode=ended.returncode, seconds=seconds, stdout=ended.stdout or "", stderr=ended.stderr or ""
    )


def run_child(
    function: Callable[..., Any], *args: Any, capture: bool = True, env: Mapping[str, str] | None = None, **kwargs: Any
) -> ChildResult:
    """Call a function in a fresh interpreter and return its value, seconds and peak resident memory.

    Its arguments and its value are passed as JSON; ``capture`` and ``env`` are as for `run_command`.

    Raises:
        ArgumentValueError: The function cannot be imported by its module and name: a lambda, a local function, one of
            ``__main__``.
    """
    module, name = function.__module__, function.__qualname__
    if module == "__main__" or "<" in name:
        raise ArgumentValueError(message("function", "a function that can be imported", f"{module}.{name}"))
    with tempfile.TemporaryDirectory(prefix="lowtide-child-") as folder:
        answer = Path(folder) / "answer.json"
        call = {"module": module, "name": name, "path": sys.path, "answer": str(answer), "args": args, "kwargs": kwargs}
        request = {"LOWTIDE_CHILD": json.dumps(call)}
        ended = run_command([sys.executable, "-c", _CALL], env={**(env or {}), **request}, capture=capture)
        if ended.returncode != 0 or not answer.exists():
            return ended
        return replace(ended, **json.loads(answer.read_text()))


def _call_here() -> None:
    """The child's side of `run_child`."""
    import importlib
    import signal

    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C reaches the whole group: end without a traceback
    call = json.loads(os.environ.pop("LOWTIDE_CHILD"))
    sys.path[:] = call["path"]
    target: Any = importlib.import_module(call["module"])
    for part in call["name"].split("."):
        target = getattr(target, part)
    value = target(*call["args"], **call["kwargs"])
    Path(call["answer"]).write_text(json.dumps({"value": value, "peak_bytes": peak_resident_bytes()}))
