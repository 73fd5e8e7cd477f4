"""Run a function or a command in its own process, where its peak memory is its own too."""

from __future__ import annotations

import contextlib
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


def _for_children() -> dict[str, str]:
    """Return the configuration for children; none if this process has its own."""
    return {} if allocator_setting() else {_ALLOCATOR_NAMES[-1]: "expandable_segments:True"}


ALLOCATOR = _for_children()  # where fragmentation would decide what fits
# The child imports the function by name and writes its value and its own peak: os.wait4 would do for the peak alone,
# but reports the parent's size where the child's is smaller (the high-water mark survives fork on Linux before exec).
_CALL = "from lowtide.measure.child import _call_here; _call_here()"


@dataclass(frozen=True, kw_only=True)
class ChildResult:
    """How a child process ended."""

    returncode: int  # negative: the signal that killed it
    seconds: float  # the interpreter's start included
    peak_bytes: int  # resident; 0 if the system does not report it
    value: Any = None  # what the function returned; None for a command
    stdout: str = ""  # empty if it was not captured
    stderr: str = ""


def run_command(command: Sequence[str], *, env: Mapping[str, str] | None = None, capture: bool = True) -> ChildResult:
    """Run a command, without a shell, to its end and return its exit status, seconds and peak resident memory.

    ``env`` is set on top of this process's variables. Without ``capture`` it writes to this process's terminal.
    """
    start = time.perf_counter()
    with contextlib.ExitStack() as stack:  # temporary files: pipes could fill up
        files = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(2)] if capture else []
        out, err = files or (None, None)
        child = subprocess.Popen(command, env={**os.environ, **(env or {})}, stdout=out, stderr=err)
        try:
            peak = _wait(child)
        except BaseException:  # Ctrl-C reaches the child too: let it end before its files are deleted
            child.terminate()
            child.wait()
            raise
        seconds = time.perf_counter() - start
        for file in files:
            file.seek(0)
        stdout, stderr = [file.read().decode(errors="replace") for file in files] or ("", "")
    return ChildResult(returncode=child.returncode, seconds=seconds, peak_bytes=peak, stdout=stdout, stderr=stderr)


def run_child(
    function: Callable[..., Any], *args: Any, capture: bool = True, env: Mapping[str, str] | None = None, **kwargs: Any
) -> ChildResult:
    """Call a function in a fresh interpreter and return its value, seconds and peak resident memory.

    Its arguments and its value are passed as JSON; ``capture`` and ``env`` are as for `run_command`.

    Raises:
        ArgumentValueError: The function cannot be imported by its module and name: a lambda, a local function, one of
            ``__main__``.
    """
    if function.__module__ == "__main__" or "<" in function.__qualname__:
        where = f"{function.__module__}.{function.__qualname__}"
        raise ArgumentValueError(message("function", "a function that can be imported", where))
    with tempfile.TemporaryDirectory(prefix="lowtide-child-") as folder:
        answer = Path(folder) / "answer.json"
        call = {"module": function.__module__, "name": function.__qualname__, "path": sys.path, "answer": str(answer)}
        request = {"LOWTIDE_CHILD": json.dumps({**call, "args": args, "kwargs": kwargs})}
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


def _wait(child: subprocess.Popen[bytes]) -> int:
    """Wait for a child and return its peak resident memory in bytes, 0 where wait4 does not exist."""
    if not hasattr(os, "wait4"):
        child.wait()
        return 0
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    return usage.ru_maxrss if sys.platform == "darwin" else usage.ru_maxrss * 1024
