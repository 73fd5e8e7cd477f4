"""Result files of the benchmarks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def result(folder: Path, pattern: str = "*.json") -> dict[str, Any]:
    """Return the one result that was written."""
    (file,) = folder.glob(pattern)
    found: dict[str, Any] = json.loads(file.read_text())
    return found
