"""The hardware and the versions that a result was measured on."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch.utils import collect_env

PACKAGES = ("torch", "triton", "transformers", "lowtide")


def describe_machine(packages: Sequence[str] = ()) -> dict[str, Any]:
    """Return processor, threads, GPU, driver, system, Python and package versions (None: not installed), for json."""
    environment: Any = collect_env
    return {
        "cpu": _processor(),
        "cpu_threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "gpu_memory_mib": torch.cuda.get_device_properties(0).total_memory >> 20 if torch.cuda.is_available() else None,
        "driver": environment.get_nvidia_driver_version(environment.run) if torch.cuda.is_available() else None,
        "cuda": torch.version.cuda,
        "system": platform.platform(),
        "python": platform.python_version(),
        **{package: _version(package) for package in (*PACKAGES, *packages)},
    }


def source_commit() -> str | None:
    """Return the commit of lowtide's source, with "-dirty" appended if files differ; None if it is unknown.

    The environment variable COMMIT sets it for a source that was copied without its history.
    """
    if commit := os.environ.get("COMMIT"):
        return commit
    package = Path(__file__).parents[1]
    git = ["git", "-C", str(package)]
    if shutil.which("git") is None or not _answer([*git, "ls-files", "--error-unmatch", "__init__.py"]):
        return None  # an installed copy may be inside someone else's repository
    return _answer([*git, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"])


def _answer(command: Sequence[str]) -> str | None:
    """Return a command's output, None if it fails."""
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    return ended.stdout.strip() or None if ended.returncode == 0 else None


def _processor() -> str:
    listing = Path("/proc/cpuinfo")
    if listing.exists():
        for line in listing.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
