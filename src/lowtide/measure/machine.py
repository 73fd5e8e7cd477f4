"""The hardware and the versions that a figure was taken on; no figure is worth much without them."""

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

PACKAGES = ("torch", "triton", "transformers", "lowtide")


def describe_machine(packages: Sequence[str] = ()) -> dict[str, Any]:
    """Return processor, threads, GPU, driver, system, Python and versions of what a result depends on, for a json file.

    Args:
        packages: distributions beyond `PACKAGES` whose versions matter; None in the result where one is not installed.
    """
    return {
        "cpu": _processor(),
        "cpu_threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "gpu_memory_mib": torch.cuda.get_device_properties(0).total_memory >> 20 if torch.cuda.is_available() else None,
        "driver": _driver(),
        "cuda": torch.version.cuda,
        "system": platform.platform(),
        "python": platform.python_version(),
        **{package: _version(package) for package in (*PACKAGES, *packages)},
    }


def source_commit() -> str | None:
    """Return the commit of lowtide's source, "-dirty" behind it where files differ; None where no one can tell.

    The environment variable COMMIT says it where the source was copied without its history.
    """
    if told := os.environ.get("COMMIT"):
        return told
    package = Path(__file__).parents[1]
    git = ["git", "-C", str(package)]
    if shutil.which("git") is None or not _answer([*git, "ls-files", "--error-unmatch", "__init__.py"]):
        return None  # an installed copy inside someone else's repository has no commit of its own
    return _answer([*git, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"])


def _driver() -> str | None:
    """Return the version of the NVIDIA driver, which PyTorch does not know."""
    if not torch.cuda.is_available() or shutil.which("nvidia-smi") is None:
        return None
    told = _answer(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
    return told.splitlines()[0].strip() if told else None


def _answer(command: Sequence[str]) -> str | None:
    """Return what a command prints, None where it fails."""
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
