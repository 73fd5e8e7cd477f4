"""Rows measured in child processes: each is a line of JSON in a file, which the parent reads while they run."""

from __future__ import annotations

import json
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from lowtide.bench.harness import Row
from lowtide.measure.child import ChildResult

_LOOK_SECONDS = 0.5  # between looks for new rows
T = TypeVar("T")


def append(row: Row, file: Path) -> None:
    """Add a row to the file of a child's rows."""
    with file.open("a") as out:
        out.write(json.dumps(row) + "\n")


def add_rows(run: Callable[[Path], T], add: Callable[[Row], object]) -> T:
    """Return ``run(file)``, which runs children to their end; each row that they append goes to ``add`` at once.

    The rows that were known are added, too, where ``run`` raises, as it does on Ctrl-C.
    """
    over = threading.Event()

    def follow() -> None:
        known, last = 0, False
        while not last:
            last = over.wait(_LOOK_SECONDS)
            text = file.read_text() if file.exists() else ""
            rows = text[: text.rfind("\n") + 1].splitlines()  # whole lines alone
            for row in rows[known:]:
                add(json.loads(row))
            known = len(rows)

    with tempfile.TemporaryDirectory(prefix="lowtide-rows-") as folder, ThreadPoolExecutor(1) as beside:
        file = Path(folder) / "rows.jsonl"
        following = beside.submit(follow)
        try:
            return run(file)
        finally:
            over.set()
            following.result()


def why_ended(child: ChildResult) -> str:
    """Return how a child ended that has left no value: its status, and the last line of its errors."""
    lines = child.stderr.strip().splitlines()
    return f"the process ended with status {child.returncode}" + "".join(f": {line[:200]}" for line in lines[-1:])
