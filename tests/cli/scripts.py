"""The scripts of benchmarks/, run as ``python benchmarks/NAME.py`` would run them, but in this process."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


def run_script(name: str, *arguments: object) -> int:
    """Return a script's exit status."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [f"{name}.py", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    code = ended.value.code
    assert isinstance(code, int)
    return code


def result(folder: Path, pattern: str = "*.json") -> dict[str, Any]:
    """Return the one result that was written."""
    (file,) = folder.glob(pattern)
    found: dict[str, Any] = json.loads(file.read_text())
    return found
