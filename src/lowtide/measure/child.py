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
from pathlib import Path
from typing import Any

_ALLOCATOR_NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # the second is the older one, read second


def allocator_setting() -> str:
    """Return the CUDA allocator's configuration in this process's environment; empty: none."""
    return next((os.environ[name] for name in _ALLOCATOR_NAMES if name in os.environ), "")


def allocator() -> dict[str, str]:
    """Return a configuration for children, where fragmentation would decide what fits, unless this process has one."""
    return {} if allocator_setting() else {_ALLOCATOR_NAMES[-1]: "expandable_segments:True"}


def run_child(function: Callable[..., Any], *args: Any, env: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Call a module's function in a fresh interpreter and return its dict, or as ``failed`` how the process ended.

    Arguments and result are passed as JSON; ``env`` is set on top of this process's variables.
    """
    with tempfile.TemporaryDirectory(prefix="lowtide-child-") as folder:
        answer = Path(folder) / "answer.json"
        call = json.dumps([function.__module__, function.__qualname__, args, sys.path, str(answer)])
        command = [sys.executable, "-c", "from lowtide.measure.child import _call_here; _call_here()"]
        environment = {**os.environ, **(env or {}), "LOWTIDE_CHILD": call}
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, errors="replace", check=False)
        if ended.returncode == 0:
            return dict(json.loads(answer.read_text()))
    last = (ended.stderr.strip().splitlines() or [""])[-1][:200]
    killed = ", as the system kills one that takes too much host memory" if ended.returncode == -9 else ""
    return {"failed": f"the process ended with status {ended.returncode}{killed}: {last}".removesuffix(": ")}


def _call_here() -> None:
    """The child's side of `run_child`."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C reaches the whole group: end without a traceback
    module, name, args, path, answer = json.loads(os.environ.pop("LOWTIDE_CHILD"))
    sys.path[:] = path
    Path(answer).write_text(json.dumps(getattr(importlib.import_module(module), name)(*args)))
